// What an executor's own threads share: its lock, and jobs on their way through the disk. For executor*.cc alone.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "executor.h"
#include "memory.h"

namespace gdscache {

// The lock. Those that wait for what its holder has brought about are woken when it is let go, and not before: a thread
// that is woken while another holds the lock that it needs only costs both a turn.
class Executor::Held {
public:
    // `disk`: of the thread of that one, which nobody has to wake.
    explicit Held(Executor& executor, int32_t disk = -1)
        : executor_(executor), own_(disk < 0 ? 0 : uint64_t{1} << disk), lock_(executor.lock_) {}
    ~Held() {
        if (lock_.owns_lock()) let_go();
    }
    Moves* operator->() const { return &executor_.moves_; }
    void let_go();
    void take_again() { lock_.lock(); }
    // Whether somebody had to be woken; then what is waited for may have come meanwhile.
    bool woke();
    void wait(std::condition_variable& condition, Nanoseconds time) {
        condition.wait_for(lock_, std::chrono::nanoseconds(time));
    }
    void wake_all() { all_ = true; }

private:
    struct Call {
        News news;       // `copies`: threads
        uint64_t disks;  // a bit each
    };
    Call call();
    void wake(const Call& call);

    const MustNotFail reserve_;  // else what changes halfway stays so
    Executor& executor_;
    const uint64_t own_;
    std::unique_lock<std::mutex> lock_;
    bool all_ = false;
};

// A part of each page of a job: bytes of the extent, and the layers that lie wholly in it.
struct Executor::Share {
    int64_t start, stop;
    int32_t first, last;
};

// A job of ours on its way through the disk.
struct Executor::Flight {
    IoJob job;
    std::vector<Share> shares;
    Runs runs;                     // requests are numbered page by page, and by share
    std::vector<uint32_t> left;    // fragments of each page that have not ended
    std::vector<int32_t> errors;   // of each page
    std::vector<Look> looks;       // in the order of fragments
    std::vector<size_t> looks_at;  // of each run, and their number at the end
    std::vector<uint64_t> sums;    // (pages, layers)
    std::vector<int32_t> summed;   // of each page: layers
    uint32_t open = 0;             // pages that have not ended
    Nanoseconds begin = 0;

    uint32_t page_of(uint32_t fragment) const {
        return runs.requests[fragment] / static_cast<uint32_t>(shares.size());
    }
    const Share& share_of(uint32_t fragment) const { return shares[runs.requests[fragment] % shares.size()]; }
};

}  // namespace gdscache
