// One direction of a GPU's copies: its streams, its share of the staging ring, points in its queue, host buffers.

#pragma once

#include <bit>
#include <deque>
#include <map>
#include <mutex>
#include <span>

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
    int64_t record(std::span<const CudaStream> streams, int64_t turn) {
        const std::lock_guard held(lock_);
        look();
        last_ = turn * kStep + which_;
        for (const CudaStream stream : streams) {
            if (free_.empty()) {
                events_.push_back(own_event(cuda_, EventUse::kSleep));
                free_.push_back(events_.back().get());
            }
            cuda_.record(free_.back(), stream);
            marks_.push_back({last_, stream, free_.back(), 0});
            free_.pop_back();
        }
        return last_;
    }
    // The last point; 0: none.
    int64_t last() const {
        const std::lock_guard held(lock_);
        return last_;
    }
    bool reached(int64_t point) {
        const std::lock_guard held(lock_);
        const std::vector<Mark*> marks = pending(point);
        if (marks.empty()) return true;
        const Cuda::Entered entered(cuda_);
        return std::ranges::all_of(marks, [&](const Mark* mark) { return cuda_.happened(mark->event); });
    }
    // The same without asking the driver: false if unknown.
    bool past(int64_t point) const {
        const std::lock_guard held(lock_);
        return point <= reached_;
    }
    void await(int64_t point) {
        std::unique_lock held(lock_);
        const std::vector<Mark*> marks = pending(point);
        if (marks.empty()) return;
        const Cuda::Entered entered(cuda_);
        // It keeps the event, and a deque's ends leave the other marks in place.
        for (Mark* const mark : marks) ++mark->waiting;
        held.unlock();
        const auto give_back = [&] {
            held.lock();
            for (Mark* const mark : marks) --mark->waiting;
        };
        try {
            for (const Mark* const mark : marks) cuda_.await(mark->event);
        } catch (...) {
            give_back();
            throw;
        }
        give_back();
        look();
    }
    // Later work of `stream` comes after a point.
    void follow(CudaStream stream, int64_t point) {
        const std::lock_guard held(lock_);
        const std::vector<Mark*> marks = pending(point);
        if (marks.empty()) return;
        const Cuda::Entered entered(cuda_);
        for (const Mark* const mark : marks) cuda_.follow(stream, mark->event);
    }

private:
    struct Mark {
        int64_t number;
        CudaStream stream;
        CudaEvent event;
        int waiting;  // threads
    };
    // With the lock held. `pending`: the last mark of each stream up to a point that is not known to be reached.
    void look() {
        while (!marks_.empty() && marks_.front().waiting == 0 && cuda_.happened(marks_.front().event)) {
            free_.push_back(marks_.front().event);
            marks_.pop_front();
        }
        reached_ = marks_.empty() ? last_ : marks_.front().number - 1;
    }
    std::vector<Mark*> pending(int64_t point) {
        std::vector<Mark*> found;
        for (Mark& mark : marks_) {
            if (mark.number > point) break;
            const auto same = std::ranges::find(found, mark.stream, &Mark::stream);
            if (same == found.end()) found.push_back(&mark);
            else *same = &mark;
        }
        return found;
    }

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

    Buffer take(size_t bytes) {
        const size_t size = std::bit_ceil(std::max(bytes, kSmallest));
        {
            const std::lock_guard held(lock_);
            if (const auto free = free_.extract(size)) return {free.mapped(), size};
        }
        OwnHostMemory memory(cuda_.allocate_host(size), {&cuda_});
        const std::lock_guard held(lock_);
        all_.push_back(std::move(memory));
        return {all_.back().get(), size};
    }
    void give(Buffer buffer) {
        if (buffer.memory == nullptr) return;
        const std::lock_guard held(lock_);
        free_.emplace(buffer.bytes, buffer.memory);
    }

private:
    static constexpr size_t kSmallest = 4096;

    const Cuda& cuda_;
    std::mutex lock_;
    std::vector<OwnHostMemory> all_;  // buffers in use included
    std::multimap<size_t, void*> free_;  // by size
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

// `copies` runs the copy engine, `kernels` the kernels; events order them, segment by segment. docs/design/copies.md has the
// measurements: the kernels of chunks take several streams in turns, none of which waits for another, since beside matrix
// products each stream gets one kernel in; and two streams copy in turns, each behind the other's queue, so that a model's
// small copies pass (`make_way`). Two streams of which one has no copies are no help: the driver sees through their events.
//
// `share` bytes of GPU memory are the ring. A chunk takes no more of it than its bytes, so that many small chunks can be
// under way. Tables of `table` bytes a segment come on top. Loads' kernels go before the model's.
class Lane {
public:
    Lane(const Cuda& cuda, const LaneSizes& sizes, bool for_loads)
        : loads(for_loads),
          unbroken(sizes.unbroken),
          most(aligned(std::max(sizes.page, sizes.share / kChunks))),
          table_bytes(aligned(sizes.table)),
          done(cuda, for_loads ? 0 : 1),
          read(cuda, for_loads ? 2 : 3),
          cuda_(cuda),
          turned_(event()),
          share_(std::max(most, sizes.share / kAlignment * kAlignment)) {
        memory_ = OwnMemory(cuda.allocate(share_ + kSegments * table_bytes), {&cuda});
        segments_.resize(kSegments);
        for (size_t n = 0; n < kSegments; ++n) {
            segments_[n].table = memory_.get() + share_ + n * table_bytes;
            segments_[n].copied = event(), segments_[n].done = event();
        }
    }
    ~Lane() { drain(); }
    Lane(Lane&&) = delete;

    // The next segment, with this many bytes of the ring. Work in it waits for `after`, and sets the other two events.
    Segment& take(size_t bytes) {
        Segment& next = segments_[static_cast<size_t>(++chunks_) % kSegments];
        const bool copied = next.begin < next.end;
        next.after = {loads ? next.done : next.copied};
        if (!loads && !copied) next.after.push_back(next.done);  // else its copies were behind its kernel
        next.begin = next.end = 0;
        if (bytes == 0) return next;
        const size_t size = aligned(bytes);
        next.begin = at_ + size <= share_ ? at_ : 0;
        next.end = at_ = next.begin + size;
        next.data = memory_.get() + next.begin;
        for (const Segment& one : segments_) {
            const bool shares = &one != &next && one.begin < next.end && next.begin < one.end;
            if (shares) next.after.push_back(loads ? one.done : one.copied);
        }
        return next;
    }
    // Before `bytes` of copies: let others' copies pass if more than `unbroken` bytes would go since they last could.
    void make_way(size_t bytes) {
        if (gone_ > 0 && gone_ + bytes > unbroken) {
            cuda_.record(turned_, copies);
            cuda_.follow(resting_, turned_);
            std::swap(copies, resting_);
            gone_ = 0;
        }
        gone_ += bytes;
    }
    // The first turn opens the streams, so that a direction, or a kind of pages, that nothing uses has none.
    void begin_turn() {
        if (streams_.empty()) {
            std::vector<OwnStream> opened;
            for (size_t n = 0; n < 2; ++n) opened.push_back(own_stream(cuda_, false));
            for (size_t n = 0; n < (loads ? kLoadStreams : kStoreStreams); ++n)
                opened.push_back(own_stream(cuda_, loads));
            streams_ = std::move(opened);
            copies = streams_[0].get(), resting_ = streams_[1].get(), kernels = streams_[2].get();
        }
        ++turn;
        used_.clear();
    }
    // Kernels of this turn are in other streams now, which follow these events.
    void next_kernels(std::span<const uint64_t> after) {
        kernels = streams_[2 + kernels_at_++ % (streams_.size() - 2)].get();
        if (std::ranges::find(used_, kernels) != used_.end()) return;
        used_.push_back(kernels);
        for (const uint64_t event : after) cuda_.follow(kernels, reinterpret_cast<CudaEvent>(event));
    }
    // The streams that had kernels in this turn.
    std::span<const CudaStream> used() const { return used_; }
    // A point behind this turn's work in the streams of kernels, of copies, or in both. A load without kernels ends on the
    // copies' stream alone: beside matrix products, which hold every processor, the other one passes a point 1 ms later.
    int64_t join(bool by_kernels, bool by_copies) {
        std::vector<CudaStream> last;
        if (by_kernels) last = used_;
        if (by_copies) last.push_back(copies);
        return done.record(last, turn);
    }
    // Wait for all work, also of a thread that the driver has not let in.
    void drain() const {
        try {
            const Cuda::Entered entered(cuda_);
            for (const OwnStream& stream : streams_) {
                try {
                    cuda_.synchronize(stream.get());
                } catch (const CudaError&) {  // its context is broken: nothing runs there any more
                }
            }
        } catch (const CudaError&) {  // refused again: the context has ended, and its work with it
        }
    }

    const bool loads;
    const size_t unbroken;
    std::mutex lock;  // of queueing threads, which have entered
    CudaStream copies = nullptr, kernels = nullptr;  // of a turn: `make_way` and `next_kernels` change them
    const size_t most, table_bytes;  // of a chunk
    int64_t turn = 0;  // of the queueing thread
    Points done;  // of the whole lane
    Points read;  // of its kernels: behind a store's last read of its source

private:
    static constexpr size_t kAlignment = 4096;
    static constexpr size_t kLoadStreams = 2, kStoreStreams = 3;  // of kernels
    static constexpr size_t kSegments = 8;
    static constexpr size_t kChunks = 4;  // of the largest size in the ring: more than kernels may wait in streams

    static constexpr size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

    CudaEvent event() {
        events_.push_back(own_event(cuda_, EventUse::kOrder));
        return events_.back().get();
    }

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
