// The copiers of a `Rig`'s foreign copies (executor_rig.h): threads of the test, in place of a GPU.

#pragma once

#include <limits>
#include <set>

#include "moves/executor.h"
#include "tests/check.h"

namespace gdscache::test {

constexpr Nanoseconds kForever = std::numeric_limits<Nanoseconds>::max();

class Rig;

class Copier {
public:
    virtual ~Copier() = default;
    // Set the fields that places of foreign spaces need.
    virtual void prepare(Rig&, std::vector<Place>&) {}
    virtual void begin(Rig& rig) = 0;
    // Wait until all copies up to a point are done.
    virtual void await(int64_t point) = 0;
    // The executor was stopped.
    virtual void end() = 0;
    // Whether it takes looks at foreign memory, and copies between that and planes of ours.
    virtual bool all() const { return true; }
};

// One thread a direction. It reports a copy as queued before it begins.
class CopyingThreads : public Copier {
public:
    void begin(Rig& rig) override;
    void await(int64_t point) override {
        std::unique_lock lock(lock_);
        CHECK(ended_.wait_for(lock, std::chrono::seconds(60),
                              [&] { return under_way_.empty() || *under_way_.begin() > point; }));
    }
    void end() override {
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

private:
    void copy(Rig& rig, Hands hands);

    std::mutex lock_;
    std::condition_variable ended_;
    int64_t last_ = 0;
    std::set<int64_t> under_way_;  // points
    std::vector<std::thread> threads_;
};

}  // namespace gdscache::test
