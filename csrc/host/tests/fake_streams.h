// Streams and events of the fake driver.

#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

#include "tests/fake_memory.h"

namespace gdscache::test {

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
    CHECK(stream && stream->magic == kMagic);
    return stream;
}

inline Event* event_at(void* handle) {
    auto* const event = static_cast<Event*>(handle);
    CHECK(event && event->magic == kMagic);
    return event;
}

}  // namespace gdscache::test
