#include "gpu/gpu_lane.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace gdscache {
namespace {

constexpr size_t kAlignment = 4096;
constexpr size_t kSegments = 8;
constexpr size_t kChunks = 3;  // of the largest size in the ring
constexpr size_t kSmallest = 4096;  // bytes of a host buffer

constexpr size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// --- points

int64_t Points::record(CudaStream stream, int64_t turn) {
    const std::lock_guard held(lock_);
    look();
    if (free_.empty()) {
        events_.push_back(own_event(cuda_, EventUse::kSleep));
        free_.push_back(events_.back().get());
    }
    cuda_.record(free_.back(), stream);
    last_ = turn * kStep + which_;
    marks_.push_back({last_, free_.back(), 0});
    free_.pop_back();
    return last_;
}

void Points::look() {
    while (!marks_.empty() && marks_.front().waiting == 0 && cuda_.happened(marks_.front().event)) {
        reached_ = marks_.front().number;
        free_.push_back(marks_.front().event);
        marks_.pop_front();
    }
}

Points::Mark* Points::find(int64_t point) {
    const auto mark = std::ranges::lower_bound(marks_, point, {}, &Mark::number);
    return point <= reached_ || mark == marks_.end() ? nullptr : &*mark;
}

bool Points::reached(int64_t point) {
    const std::lock_guard held(lock_);
    const Mark* const mark = find(point);
    if (!mark) return true;
    const Cuda::Entered entered(cuda_);
    return cuda_.happened(mark->event);
}

void Points::await(int64_t point) {
    std::unique_lock held(lock_);
    Mark* const mark = find(point);
    if (!mark) return;
    const Cuda::Entered entered(cuda_);
    ++mark->waiting;  // keeps the event; changes at a deque's ends leave the other marks in place
    held.unlock();
    try {
        cuda_.await(mark->event);
    } catch (...) {
        held.lock();
        --mark->waiting;
        throw;
    }
    held.lock();
    --mark->waiting;
    look();
}

void Points::follow(CudaStream stream, int64_t point) {
    const std::lock_guard held(lock_);
    const Mark* const mark = find(point);
    if (!mark) return;
    const Cuda::Entered entered(cuda_);
    cuda_.follow(stream, mark->event);
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
      streams_{own_stream(cuda, false), own_stream(cuda, false), own_stream(cuda, for_loads)},
      resting_(streams_[1].get()),
      joint_(event()),
      turned_(event()),
      share_(std::max(most, sizes.share / kAlignment * kAlignment)) {
    copies = streams_[0].get(), kernels = streams_[2].get();
    memory_ = OwnMemory(cuda.allocate(share_ + kSegments * table_bytes), {&cuda});
    segments_.resize(kSegments);
    for (size_t n = 0; n < kSegments; ++n) {
        segments_[n].table = memory_.get() + share_ + n * table_bytes;
        segments_[n].copied = event(), segments_[n].done = event();
    }
}

Lane::~Lane() {
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

Segment& Lane::take(size_t bytes) {
    Segment& next = segments_[static_cast<size_t>(++chunks_) % kSegments];
    next = {next.data, next.table, next.copied, next.done, nullptr, 0, 0, chunks_};
    if (bytes == 0) return next;
    const size_t size = aligned(bytes);
    next.begin = at_ + size <= share_ ? at_ : 0;
    next.end = at_ = next.begin + size;
    next.data = memory_.get() + next.begin;
    for (const Segment& one : segments_) {
        const bool shared = &one != &next && one.begin < next.end && next.begin < one.end;
        if (shared && (!next.before || one.number > next.before->number)) next.before = &one;
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

int64_t Lane::join(bool launched) {
    kernels_behind_ |= launched;
    const bool by_kernels = loads && launched;
    const CudaStream last = by_kernels ? kernels : copies, other = by_kernels ? copies : kernels;
    if (by_kernels || std::exchange(kernels_behind_, false)) {
        cuda_.record(joint_, other);
        cuda_.follow(last, joint_);
    }
    return done.record(last, turn);
}

}  // namespace gdscache
