// One direction of a GPU's copies: its streams, its share of the staging ring, points in what is queued, host buffers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "cuda/cuda.h"

namespace gdscache {

// Points in what a stream is given to do, numbered by turns in steps of `kStep`. A point that was reached stays so, and
// nobody has to give it back. Thread-safe; who records has entered.
class Points {
public:
    // Numbers of several `Points` are apart by `which`, which is below kStep.
    static constexpr int64_t kStep = 4;

    Points(const Cuda& cuda, int which) : cuda_(cuda), which_(which) {}
    Points(Points&&) = delete;

    // A point behind everything that the stream was given so far, of a turn that comes after those before it: what was
    // queued later has the greater point, in all `Points` that count the same turns.
    int64_t record(CudaStream stream, int64_t turn);
    // The last one; 0 where there is none.
    int64_t last() const {
        const std::lock_guard held(lock_);
        return last_;
    }
    bool reached(int64_t point);
    // The same as far as it is known, without asking the driver.
    bool past(int64_t point) const {
        const std::lock_guard held(lock_);
        return point <= reached_;
    }
    void await(int64_t point);
    // What `stream` is given from now on comes after a point.
    void follow(CudaStream stream, int64_t point);

private:
    struct Mark {
        int64_t number;
        CudaEvent event;
        int waiting;  // threads
    };
    // With the lock held. `find`: of a point that may not be reached yet, else null.
    void look();
    Mark* find(int64_t point);

    const Cuda& cuda_;
    const int which_;
    mutable std::mutex lock_;
    std::vector<OwnEvent> events_;
    std::deque<Mark> marks_;  // that may not be reached yet
    std::vector<CudaEvent> free_;
    int64_t last_ = 0, reached_ = 0;
};

// Page-locked memory that comes and goes, kept for the next who asks. Thread-safe; the caller has entered.
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
    std::vector<OwnHostMemory> all_;        // those that nobody gave back, too
    std::vector<std::vector<void*>> free_;  // by the power of two of their size
};

// A part of the ring that one chunk of a transfer has at a time, and the events behind its last use. `data` and `table`
// are addresses of the GPU's. `copied` is behind the last copies, `done` behind the last kernel.
struct Segment {
    uint64_t data, table;
    CudaEvent copied, done;
};

// In bytes: of the ring, of a segment's data at least, of its table, and what is copied before others' copies pass.
struct LaneSizes {
    size_t share, least, table, unbroken;
};

// `copies` runs the copy engine, `kernels` the kernels; events keep them in step, segment by segment.
//
// The copy engine works off what one stream has for it before it turns to another, however much that is. So a model
// that copies the tokens of a step to the host would wait for every store that is queued: 77 ms behind 4 GiB.
// `make_way` lets it pass: two streams copy in turns, each behind all that the other has, and the engine looks at every
// stream when one of them has to wait. An event between two streams of which one has no copies does not do: the driver
// sees through it.
//
// `share` bytes of GPU memory are the segments' data, of which each has at least `least`, up to whole 4 KiB: the ring
// is cut into as many as fit, 3 at most (beside large products, 4 smaller ones left checksums at 0.85 of the speed
// without, 3 at 0.97). Tables of `table` bytes a segment come on top. A transfer takes segments in turn: what is queued
// first goes first. The kernels of loads go before the model's. Whoever queues holds `lock`, and has entered.
class Lane {
public:
    Lane(const Cuda& cuda, const LaneSizes& sizes, bool loads);
    ~Lane();
    Lane(Lane&&) = delete;

    // The next segment. Work in it waits for the segment's events, and sets them.
    Segment& take();
    // Before `bytes` of copies: others' copies pass first, where `unbroken` bytes went since they last could.
    void make_way(size_t bytes);
    // A point behind everything that was queued in this turn, and before.
    int64_t join();

    const bool loads;
    const size_t unbroken;
    std::mutex lock;
    CudaStream copies = nullptr, kernels = nullptr;  // `copies` is another one when it has made way
    size_t segment_bytes = 0, table_bytes = 0;
    int64_t turn = 0;  // of who queues
    Points done;  // of the whole lane
    Points read;  // of its kernels: behind the last look at what a store takes

private:
    CudaEvent event();

    const Cuda& cuda_;
    const OwnStream streams_[3];
    CudaStream resting_;  // copies next
    std::vector<OwnEvent> events_;
    const CudaEvent joint_, turned_;
    size_t gone_ = 0;  // bytes of copies since others could pass
    std::vector<Segment> segments_;
    size_t next_ = 0;
    OwnMemory memory_;
};

}  // namespace gdscache
