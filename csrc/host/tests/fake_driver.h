// The fake driver's memory of the GPU, page-locked memory of the host, streams, events and kernels.

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

#include "hash/xxh3.h"
#include "moves/pages.h"
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

// --- the kernels of csrc/pages.cu

// The arguments of a launch; the last two only if the kernel takes checksums.
struct Arguments {
    uint64_t layers, planes, blocks, rows, extents;
    int64_t stride, origin, slots, pool_blocks;
    uint32_t pages, n_layers, first_plane, n_planes, tiles, page_blocks, wide;
    uint64_t skipped;
    uint8_t listed[3520];
    uint32_t team;
    uint64_t digests;
    uint64_t unfit;  // of packed pages alone
};

struct LayerWords {
    int64_t first_plane, planes, start, bytes;
};
struct PlaneWords {
    int64_t base, block_stride, run_stride, run_bytes, runs_per_block, end;
};

class KernelRun {
public:
    KernelRun(int32_t which, const Arguments& arguments, uint32_t threads, int64_t vector)
        : a_(arguments),
          gather_(which % 2 == kGather),
          packed_(which >= kGatherPacked),
          sums_(which >= kGatherSums),
          vector_(vector) {
        assert(a_.pages > 0 && a_.n_layers > 0 && a_.skipped == 0);
        assert(threads % 32 == 0 && threads >= 32 && threads <= 1024);
        if (sums_) assert(a_.team >= 1 && threads / 32 % a_.team == 0);
        if (sums_) digests_ = within<uint64_t>(a_.digests, int64_t{a_.pages} * a_.n_layers);
        assert(a_.extents != 0 || (gather_ && sums_ && !packed_));
        if (packed_) unfit_ = within<uint32_t>(a_.unfit, a_.pages);
        layers_ = within<LayerWords>(a_.layers, a_.n_layers);
        planes_ = within<PlaneWords>(a_.planes, a_.first_plane + a_.n_planes);
    }

    void run() {
        for (uint32_t page = 0; page < a_.pages; ++page) {
            for (uint32_t n = 0; n < a_.n_layers; ++n) packed_ ? move_packed(page, n) : move(page, n);
        }
    }

private:
    template <typename T>
    static T* within(uint64_t address, int64_t count) {
        assert(address % alignof(T) == 0);
        return reinterpret_cast<T*>(memory().mapped(address, static_cast<size_t>(count) * sizeof(T)));
    }

    int64_t index(const void* table, int64_t at) const {
        return a_.wide ? static_cast<const int64_t*>(table)[at] : static_cast<const int32_t*>(table)[at];
    }

    // Index `at` of a table in GPU memory.
    int64_t looked_up(uint64_t table, int64_t at) const {
        const int64_t item = a_.wide ? 8 : 4;
        return index(within<uint8_t>(table + static_cast<uint64_t>(at * item), item), 0);
    }

    int64_t block(int64_t at) const {
        if (a_.blocks) return looked_up(a_.blocks, at);
        assert((at + 1) * (a_.wide ? 8 : 4) <= static_cast<int64_t>(sizeof a_.listed));
        return index(a_.listed, at);
    }

    // A page's run of a plane.
    uint8_t* in_planes(const PlaneWords& plane, uint32_t page, int64_t run) const {
        const int64_t number = block(int64_t{page} * a_.page_blocks + run / plane.runs_per_block);
        assert(number >= 0 && number < a_.pool_blocks);
        const auto address = static_cast<uint64_t>(plane.base + number * plane.block_stride +
                                                   run % plane.runs_per_block * plane.run_stride);
        assert((address & kDeviceBit) && (packed_ || address % static_cast<uint64_t>(vector_) == 0));
        return memory().mapped(address, static_cast<size_t>(plane.run_bytes));
    }

    void move(uint32_t page, uint32_t number) {
        const LayerWords& layer = layers_[number];
        const int64_t row = a_.rows ? looked_up(a_.rows, page) : page;
        assert(row >= 0 && row < a_.slots && int64_t{a_.tiles} * 1024 >= layer.bytes);
        assert(layer.first_plane >= a_.first_plane);
        assert(layer.first_plane + layer.planes <= int64_t{a_.first_plane} + a_.n_planes);
        if (sums_) assert(layer.bytes > 240);
        if (!a_.extents) assert(layer.bytes % 16 == 0);
        const uint64_t extent = a_.extents + static_cast<uint64_t>(row * a_.stride + layer.start - a_.origin);
        uint8_t* const there = a_.extents ? memory().mapped(extent, static_cast<size_t>(layer.bytes)) : nullptr;
        passed_.resize(static_cast<size_t>(layer.bytes));
        int64_t at = 0;
        for (int64_t n = layer.first_plane; n < layer.first_plane + layer.planes; ++n) {
            const PlaneWords& plane = planes_[n];
            for (int64_t run = 0; at < plane.end; ++run, at += plane.run_bytes) {
                const auto size = static_cast<size_t>(plane.run_bytes);
                const uint64_t in_extent = a_.extents ? extent + static_cast<uint64_t>(at) : 0;
                assert(in_extent % static_cast<uint64_t>(vector_) == 0 && size % static_cast<size_t>(vector_) == 0);
                uint8_t* const ours = in_planes(plane, page, run);
                std::memcpy(passed_.data() + at, gather_ ? ours : there + at, size);
                if (!gather_) std::memcpy(ours, passed_.data() + at, size);
            }
            assert(at == plane.end);
        }
        assert(at == layer.bytes);
        if (gather_ && there) std::memcpy(there, passed_.data(), passed_.size());
        if (sums_) digests_[int64_t{page} * a_.n_layers + number] = xxh3(passed_.data(), passed_.size());
    }

    // By the library's own codec, a plane at a time, as one run of values.
    void move_packed(uint32_t page, uint32_t number) {
        const LayerWords& layer = layers_[number];
        const int64_t row = a_.rows ? looked_up(a_.rows, page) : page;
        assert(row >= 0 && row < a_.slots && layer.bytes > 240);
        const uint64_t extent = a_.extents + static_cast<uint64_t>(row * a_.stride + layer.start - a_.origin);
        assert(extent % 8 == 0);
        uint8_t* const there = memory().mapped(extent, static_cast<size_t>(layer.bytes));
        uint8_t* part = there;
        for (int64_t n = layer.first_plane; n < layer.first_plane + layer.planes; ++n) {
            const PlaneWords& plane = planes_[n];
            const int64_t runs = plane.runs_per_block * a_.page_blocks;
            passed_.resize(static_cast<size_t>(runs * plane.run_bytes));
            HostPlanes pool{{{passed_.data(), 0, 0, runs * plane.run_bytes}}, {0, 1}, 1, 1, 1, true};
            check(pool);
            const int64_t none = 0;
            if (!gather_) scatter(pool, &none, 0, 1, part, nullptr, Store::kCached);
            for (int64_t run = 0; run < runs; ++run) {
                uint8_t* const planes = in_planes(plane, page, run);
                uint8_t* const ours = passed_.data() + run * plane.run_bytes;
                std::memcpy(gather_ ? ours : planes, gather_ ? planes : ours, static_cast<size_t>(plane.run_bytes));
            }
            if (gather_ && !gather(pool, &none, 0, 1, part, nullptr, Store::kCached)) unfit_[page] = 1;
            part += layer_bytes(pool, 0);
            assert(part - there == plane.end);
        }
        assert(part - there == layer.bytes);
        digests_[int64_t{page} * a_.n_layers + number] = xxh3(there, static_cast<size_t>(layer.bytes));
    }

    const Arguments& a_;
    const bool gather_, packed_, sums_;
    const int64_t vector_;
    uint64_t* digests_ = nullptr;
    uint32_t* unfit_ = nullptr;
    const LayerWords* layers_;
    const PlaneWords* planes_;
    std::vector<uint8_t> passed_;
};

}  // namespace gdscache::test
