#include "gpu/gpu_lane.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace gdscache {
namespace {

constexpr size_t kAlignment = 4096;
constexpr size_t kLoadStreams = 2, kStoreStreams = 3;  // of kernels
constexpr size_t kSegments = 8;
constexpr size_t kChunks = 4;  // of the largest size in the ring: more than kernels may wait in streams
constexpr size_t kSmallest = 4096;  // bytes of a host buffer

constexpr size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// --- points

int64_t Points::record(std::span<const CudaStream> streams, int64_t turn) {
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

void Points::look() {
    while (!marks_.empty() && marks_.front().waiting == 0 && cuda_.happened(marks_.front().event)) {
        free_.push_back(marks_.front().event);
        marks_.pop_front();
    }
    reached_ = marks_.empty() ? last_ : marks_.front().number - 1;
}

std::vector<Points::Mark*> Points::pending(int64_t point) {
    std::vector<Mark*> found;
    for (Mark& mark : marks_) {
        if (mark.number > point) break;
        const auto same = std::ranges::find(found, mark.stream, &Mark::stream);
        if (same == found.end()) found.push_back(&mark);
        else *same = &mark;
    }
    return found;
}

bool Points::reached(int64_t point) {
    const std::lock_guard held(lock_);
    const std::vector<Mark*> marks = pending(point);
    if (marks.empty()) return true;
    const Cuda::Entered entered(cuda_);
    return std::ranges::all_of(marks, [&](const Mark* mark) { return cuda_.happened(mark->event); });
}

void Points::await(int64_t point) {
    std::unique_lock held(lock_);
    const std::vector<Mark*> marks = pending(point);
    if (marks.empty()) return;
    const Cuda::Entered entered(cuda_);
    for (Mark* const mark : marks) ++mark->waiting;  // keeps the event; a deque's ends leave the other marks in place
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

void Points::follow(CudaStream stream, int64_t point) {
    const std::lock_guard held(lock_);
    const std::vector<Mark*> marks = pending(point);
    if (marks.empty()) return;
    const Cuda::Entered entered(cuda_);
    for (const Mark* const mark : marks) cuda_.follow(stream, mark->event);
}

// --- host memory

HostBuffers::Buffer HostBuffers::take(size_t bytes) {
    const size_t size = std::bit_ceil(std::max(bytes, kSmallest));
    const auto power = static_cast<size_t>(std::countr_zero(size));
    {
        const std::lock_guard held(lock_);
        if (free_.size() <= power) free_.resize(power + 1);
        if (!free_[power].empty()) {
            void* const memory = free_[power].back();
            free_[power].pop_back();
            return {memory, size};
        }
    }
    OwnHostMemory memory(cuda_.allocate_host(size), {&cuda_});
    const std::lock_guard held(lock_);
    all_.push_back(std::move(memory));
    return {all_.back().get(), size};
}

void HostBuffers::give(Buffer buffer) {
    if (buffer.memory == nullptr) return;
    const std::lock_guard held(lock_);
    free_[static_cast<size_t>(std::countr_zero(buffer.bytes))].push_back(buffer.memory);
}

// --- lanes

Lane::Lane(const Cuda& cuda, const LaneSizes& sizes, bool for_loads)
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

void Lane::drain() const {
    for (const OwnStream& stream : streams_) {
        try {
            cuda_.synchronize(stream.get());
        } catch (const CudaError&) {  // its context is broken: nothing runs there any more
        }
    }
}

CudaEvent Lane::event() {
    events_.push_back(own_event(cuda_, EventUse::kOrder));
    return events_.back().get();
}

void Lane::begin_turn() {
    if (streams_.empty()) {
        std::vector<OwnStream> opened;
        for (size_t n = 0; n < 2; ++n) opened.push_back(own_stream(cuda_, false));
        for (size_t n = 0; n < (loads ? kLoadStreams : kStoreStreams); ++n) opened.push_back(own_stream(cuda_, loads));
        streams_ = std::move(opened);
        copies = streams_[0].get(), resting_ = streams_[1].get(), kernels = streams_[2].get();
    }
    ++turn;
    used_.clear();
}

Segment& Lane::take(size_t bytes) {
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

void Lane::make_way(size_t bytes) {
    if (gone_ > 0 && gone_ + bytes > unbroken) {
        cuda_.record(turned_, copies);
        cuda_.follow(resting_, turned_);
        std::swap(copies, resting_);
        gone_ = 0;
    }
    gone_ += bytes;
}

void Lane::next_kernels(std::span<const uint64_t> after) {
    kernels = streams_[2 + kernels_at_++ % (streams_.size() - 2)].get();
    if (std::ranges::find(used_, kernels) != used_.end()) return;
    used_.push_back(kernels);
    for (const uint64_t event : after) cuda_.follow(kernels, reinterpret_cast<CudaEvent>(event));
}

int64_t Lane::join(bool by_kernels, bool by_copies) {
    std::vector<CudaStream> last;
    if (by_kernels) last = used_;
    if (by_copies) last.push_back(copies);
    return done.record(last, turn);
}

}  // namespace gdscache
