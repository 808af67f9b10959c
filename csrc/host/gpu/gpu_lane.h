// One direction of a GPU's copies: its streams, its share of the staging ring, points in its queue, host buffers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

#include "cuda/cuda.h"

namespace gdscache {

// Points behind the work of some streams, numbered by turns in steps of `kStep`. A point needs no release, and stays
// reached. Thread-safe; a recording thread has entered.
class Points {
public:
    // Several `Points` have different `which`, below kStep, and so different numbers.
    static constexpr int64_t kStep = 4;

    Points(const Cuda& cuda, int which) : cuda_(cuda), which_(which) {}
    Points(Points&&) = delete;

    // A point behind all work of the streams so far and all points before, in a turn after theirs. Later work has
    // greater points, in all `Points` that count the same turns.
    int64_t record(std::span<const CudaStream> streams, int64_t turn);
    // The last point; 0: none.
    int64_t last() const {
        const std::lock_guard held(lock_);
        return last_;
    }
    bool reached(int64_t point);
    // The same without asking the driver: false if unknown.
    bool past(int64_t point) const {
        const std::lock_guard held(lock_);
        return point <= reached_;
    }
    void await(int64_t point);
    // Later work of `stream` comes after a point.
    void follow(CudaStream stream, int64_t point);

private:
    struct Mark {
        int64_t number;
        CudaStream stream;
        CudaEvent event;
        int waiting;  // threads
    };
    // With the lock held. `pending`: the last mark of each stream up to a point that is not known to be reached.
    void look();
    std::vector<Mark*> pending(int64_t point);

    const Cuda& cuda_;
    const int which_;
    mutable std::mutex lock_;
    std::vector<OwnEvent> events_;
    std::deque<Mark> marks_;  // not known to be passed, or behind such a one
    std::vector<CudaEvent> free_;
    int64_t last_ = 0, reached_ = 0;
};

// Page-locked memory, kept for reuse. Thread-safe; the caller has entered.
class HostBuffers {
public:
    struct Buffer {
        void* memory = nullptr;
        size_t bytes = 0;
    };

    explicit HostBuffers(const Cuda& cuda) : cuda_(cuda) {}
    HostBuffers(HostBuffers&&) = delete;

    Buffer take(size_t bytes);
    void give(Buffer buffer);

private:
    const Cuda& cuda_;
    std::mutex lock_;
    std::vector<OwnHostMemory> all_;        // buffers in use included
    std::vector<std::vector<void*>> free_;  // by the power of two of their size
};

// The place of one chunk of a transfer at a time: bytes of the ring, and a table. Addresses are of the GPU's. `copied` is
// behind the lane's copies up to this chunk's, `done` behind its kernel. `after`: the events behind which the place is
// free. Older chunks with some of its bytes need no event of their own: a load's copies have waited for their kernels,
// each when its segment was taken again, and a store waits for all copies up to those of the chunk in its segment.
struct Segment {
    uint64_t data = 0, table = 0;
    CudaEvent copied = nullptr, done = nullptr;
    std::vector<CudaEvent> after;
    size_t begin = 0, end = 0;  // in the ring
};

// In bytes: of the ring; of a page; of a chunk's table; of copies before others' may pass.
struct LaneSizes {
    size_t share, page, table, unbroken;
};

// `copies` runs the copy engine, `kernels` the kernels; events order them, segment by segment.
//
// A model's matrix products hold every processor until they end. Then each stream has one kernel begin, and the next one
// waits for another product: so the kernels of chunks take several streams in turns, and no stream of kernels waits for
// another. Each stream costs a little where the GPU has no other work: two are enough for loads, whose kernels are short,
// and stores, which may pack, take three. Many more streams in a process share queues of the GPU's front end with the
// model's, and wait for its whole work.
//
// The copy engine finishes the queue of one stream before it turns to another. So a model that copies the tokens of a
// step to the host would wait for every queued store: 77 ms behind 4 GiB. `make_way` lets it pass: two streams copy in
// turns, each behind the other's queue, and the engine looks at every stream when one of them has to wait. An event
// between two streams of which one has no copies is no help: the driver sees through it.
//
// `share` bytes of GPU memory are the ring. A chunk takes no more of it than its bytes, so that many small chunks can be
// under way. Tables of `table` bytes a segment come on top. The kernels of loads go before the model's. A queueing thread
// holds `lock`, and has entered.
class Lane {
public:
    Lane(const Cuda& cuda, const LaneSizes& sizes, bool loads);
    ~Lane() { drain(); }
    Lane(Lane&&) = delete;

    // The next segment, with this many bytes of the ring. Work in it waits for `after`, and sets the other two events.
    Segment& take(size_t bytes);
    // Before `bytes` of copies: let others' copies pass if more than `unbroken` bytes would go since they last could.
    void make_way(size_t bytes);
    // The first turn opens the streams, so that a direction, or a kind of pages, that nothing uses has none.
    void begin_turn();
    // Kernels of this turn are in other streams now, which follow these events.
    void next_kernels(std::span<const uint64_t> after);
    // The streams that had kernels in this turn.
    std::span<const CudaStream> used() const { return used_; }
    // A point behind this turn's work in the streams of kernels, of copies, or in both. A load without kernels ends on the
    // copies' stream alone: beside matrix products, which hold every processor, the other one passes a point 1 ms later.
    int64_t join(bool by_kernels, bool by_copies);
    // Wait for all work.
    void drain() const;

    const bool loads;
    const size_t unbroken;
    std::mutex lock;
    CudaStream copies = nullptr, kernels = nullptr;  // of a turn: `make_way` and `next_kernels` change them
    const size_t most, table_bytes;  // of a chunk
    int64_t turn = 0;  // of the queueing thread
    Points done;  // of the whole lane
    Points read;  // of its kernels: behind a store's last read of its source

private:
    CudaEvent event();

    const Cuda& cuda_;
    std::vector<OwnStream> streams_;  // two of copies, and those of kernels
    CudaStream resting_ = nullptr;  // the next `copies`
    std::vector<OwnEvent> events_;
    const CudaEvent turned_;
    size_t gone_ = 0;  // bytes of copies since others could pass
    const size_t share_;
    size_t at_ = 0;  // the end of the last chunk in the ring
    std::vector<Segment> segments_;
    int64_t chunks_ = 0;
    std::vector<CudaStream> used_;
    size_t kernels_at_ = 0;
    OwnMemory memory_;
};

}  // namespace gdscache
