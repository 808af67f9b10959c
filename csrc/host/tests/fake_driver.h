// What the fake driver has: memory of the GPU, page-locked memory of the host, streams and events.

#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "tests/fake_cuda.h"

namespace gdscache::test {

// Streams read it without a lock, which would hide missing order from ThreadSanitizer.
class Memory {
public:
    // `address`: of the GPU's or the host's; `own`: the driver's own allocation, with a margin at both ends.
    void add(uint64_t address, size_t bytes, uint8_t* own) {
        const std::lock_guard held(lock_);
        auto next = std::make_unique<std::vector<Region>>(now());
        for (const Region& region : *next) {
            assert(address + bytes <= region.begin || region.end <= address);
        }
        next->push_back({address, address + bytes, own});
        publish(std::move(next));
    }

    // Its margin; null if nothing of the driver's lies there.
    bool remove(uint64_t address, uint8_t** own) {
        const std::lock_guard held(lock_);
        auto next = std::make_unique<std::vector<Region>>(now());
        const auto found =
            std::find_if(next->begin(), next->end(), [&](const Region& r) { return r.begin == address; });
        if (found == next->end()) return false;
        *own = found->own;
        if (found->own) check_margins(*found);
        next->erase(found);
        publish(std::move(next));
        return true;
    }

    // The host address of bytes that the GPU reaches; they lie in one allocation or registration.
    uint8_t* mapped(uint64_t address, size_t bytes) const {
        assert(one(address, bytes));
        return real(address);
    }

    // The same, also for plain host memory.
    uint8_t* any(uint64_t address, size_t bytes) const {
        const std::vector<Region>& all = now();
        const bool touched = std::any_of(all.begin(), all.end(),
                                         [&](const Region& r) { return address < r.end && r.begin < address + bytes; });
        assert(touched || !(address & kDeviceBit));
        assert(!touched || one(address, bytes));
        return real(address);
    }

    static uint8_t* real(uint64_t address) { return reinterpret_cast<uint8_t*>(address & ~kDeviceBit); }

    // Memory with a margin of kMargin bytes at both ends.
    static constexpr size_t kMargin = 256;
    static uint8_t* allocate(size_t bytes) {
        auto* const own = static_cast<uint8_t*>(std::aligned_alloc(4096, (bytes + 2 * 4096 + 4095) / 4096 * 4096));
        assert(own != nullptr);
        std::memset(own, 0xA5, bytes + 4096 + kMargin);
        return own;
    }

private:
    struct Region {
        uint64_t begin, end;
        uint8_t* own;
    };

    const std::vector<Region>& now() const {
        static const std::vector<Region> none;
        const std::vector<Region>* const all = now_.load(std::memory_order_acquire);
        return all ? *all : none;
    }

    bool one(uint64_t address, size_t bytes) const {
        const std::vector<Region>& all = now();
        return std::any_of(all.begin(), all.end(),
                           [&](const Region& r) { return r.begin <= address && address + bytes <= r.end; });
    }

    void publish(std::unique_ptr<std::vector<Region>> next) {
        now_.store(next.get(), std::memory_order_release);
        all_.push_back(std::move(next));  // streams may still read the others
    }

    static void check_margins(const Region& region) {
        const uint8_t* const begin = real(region.begin);
        const uint8_t* const end = real(region.end);
        for (size_t n = 0; n < kMargin; ++n) assert(begin[-1 - static_cast<ptrdiff_t>(n)] == 0xA5 && end[n] == 0xA5);
    }

    std::mutex lock_;
    std::atomic<const std::vector<Region>*> now_ = nullptr;
    std::vector<std::unique_ptr<std::vector<Region>>> all_;
};

inline Memory& memory() {
    static Memory* const made = new Memory;  // streams may outlive static objects
    return *made;
}

// --- streams and events

constexpr int kMagic = 0x67647363;

inline std::atomic<int64_t> delay_us = 0;
inline std::atomic<bool> held_all = false;

using Clock = std::chrono::steady_clock;

// One record of an event: its waiters wait for this one, even if the event is recorded again meanwhile.
struct Mark {
    std::mutex lock;
    std::condition_variable changed;
    bool done = false;
    Clock::time_point time;

    void set() {
        const std::lock_guard held(lock);
        done = true;
        time = Clock::now();
        changed.notify_all();
    }
    void wait() {
        std::unique_lock held(lock);
        changed.wait(held, [&] { return done; });
    }
    bool is_done() {
        const std::lock_guard held(lock);
        return done;
    }
};

struct Event {
    int magic = kMagic;
    bool timed;
    std::mutex lock;
    std::shared_ptr<Mark> mark;

    explicit Event(bool keeps_time) : timed(keeps_time) {}
    std::shared_ptr<Mark> now() {
        const std::lock_guard held(lock);
        return mark;
    }
};

struct Stream {
    int magic = kMagic;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    bool over = false;
    uint64_t random;
    std::thread thread;

    explicit Stream(uint64_t seed) : random(seed * 2 + 1), thread([this] { run(); }) {}
    ~Stream() {
        {
            const std::lock_guard held(lock);
            over = true;
            changed.notify_all();
        }
        thread.join();
    }

    void push(std::function<void()> work) {
        const std::lock_guard held(lock);
        queue.push_back(std::move(work));
        changed.notify_all();
    }

    void run() {
        while (true) {
            std::function<void()> work;
            {
                std::unique_lock held(lock);
                changed.wait(held, [&] { return over || !queue.empty(); });
                if (queue.empty()) return;
                work = std::move(queue.front());
                queue.pop_front();
            }
            while (held_all.load(std::memory_order_relaxed)) std::this_thread::sleep_for(std::chrono::microseconds(50));
            if (const int64_t most = delay_us.load(std::memory_order_relaxed)) {
                random = random * 6364136223846793005u + 1442695040888963407u;
                std::this_thread::sleep_for(std::chrono::microseconds((random >> 33) % static_cast<uint64_t>(most)));
            }
            work();
        }
    }
};

inline Stream* stream_at(void* handle) {
    auto* const stream = static_cast<Stream*>(handle);
    assert(stream && stream->magic == kMagic);
    return stream;
}

inline Event* event_at(void* handle) {
    auto* const event = static_cast<Event*>(handle);
    assert(event && event->magic == kMagic);
    return event;
}

}  // namespace gdscache::test
