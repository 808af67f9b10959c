#include "gpu/gpu.h"

#include "gpu/gpu_transfer.h"
#include "hash/xxh3.h"
#include "moves/move.h"

namespace gdscache {
namespace {

constexpr int64_t kAnchorAge = 5'000'000'000;  // ns: at this age events' times are 0.5 us apart, as float milliseconds

LaneSizes lane_sizes(const GpuPlanes& planes, const ChunkSizes& sizes, size_t share) {
    const auto row = 8 * (static_cast<size_t>(planes.page_blocks) + 1);
    return {share, static_cast<size_t>(planes.extent_bytes), std::max<size_t>({64 << 10, share / 3 / 64, row}),
            static_cast<size_t>(sizes.unbroken)};
}

}  // namespace

Gpu::Gpu(const Cuda& cuda, GpuPlanes planes, const PageKernels& kernels, const ChunkSizes& sizes, size_t staging)
    : cuda_(cuda),
      planes_(std::move(planes)),
      kernels_(kernels),
      sizes_(sizes),
      buffers_(cuda),
      loads_(cuda, lane_sizes(planes_, sizes_, staging / 2), true),
      stores_(cuda, lane_sizes(planes_, sizes_, staging / 2), false) {}

void Gpu::leave_captures_alone() const noexcept {
    try {
        const Cuda::Entered entered(cuda_);
        cuda_.leave_captures_alone();
    } catch (const CudaError&) {  // a copy that breaks a graph reports it
    }
}

QueuedCopies Gpu::queue(const PageCopies& asked) {
    QueuedCopies queued;
    queued.pages = asked.pages, queued.first = asked.first, queued.last = asked.last;
    queued.load = asked.load, queued.sums = asked.sums, queued.device = asked.extents.device;
    if (asked.pages == 0 || asked.first == asked.last) return queued;
    const Cuda::Entered entered(cuda_);
    Lane& lane = asked.load ? loads_ : stores_;
    Transfer transfer(*this, lane, asked, queued);
    if (transfer.alone() && planes_.packed) throw CudaError("packed pages need kernels");
    const std::lock_guard held(lane.lock);
    const bool traced = traced_;
    lane.begin_turn();
    try {
        transfer.begin();
        if (traced) mark(transfer, lane, queued, 0);
        transfer.run();
        if (traced) mark(transfer, lane, queued, 1);
        if (!transfer.alone()) queued.read = lane.read.record(lane.used(), lane.turn);
        queued.point = lane.join(transfer.launched(), transfer.copied());
        if (transfer.alone()) queued.read = queued.point;
    } catch (...) {
        lane.drain();
        give_back(queued);
        throw;
    }
    return queued;
}

void Gpu::give_back(QueuedCopies& queued) {
    for (const HostBuffers::Buffer& table : std::exchange(queued.tables, {})) buffers_.give(table);
    buffers_.give(std::exchange(queued.digests, {}));
    const std::lock_guard held(times_lock_);
    for (std::vector<CudaEvent>& events : queued.times) {
        timed_.insert(timed_.end(), events.begin(), events.end());
        events.clear();
    }
}

StreamTimes Gpu::finish(QueuedCopies& queued, uint64_t* sums, uint8_t* unfit) {
    StreamTimes times;
    if (queued.point == 0) return times;
    std::optional<Cuda::Entered> entered;
    try {
        await(queued.point);
        entered.emplace(cuda_);
    } catch (...) {  // whose blocks and slots are free again when this is reported
        (queued.load ? loads_ : stores_).drain();
        give_back(queued);
        throw;
    }
    const size_t layers = static_cast<size_t>(queued.last - queued.first);
    if (sums != nullptr && queued.digests.memory != nullptr) {
        std::memcpy(sums, queued.digests.memory, static_cast<size_t>(queued.pages) * layers * 8);
    }
    if (unfit != nullptr && planes_.packed) {
        const auto pages = static_cast<size_t>(queued.pages);
        const auto* const words = static_cast<const uint64_t*>(queued.digests.memory) + pages * layers;
        const auto* const found = reinterpret_cast<const uint32_t*>(words);
        std::transform(found, found + pages, unfit, [](uint32_t one) { return one != 0; });
    }
    try {
        times = times_of(queued);
    } catch (...) {
        give_back(queued);
        throw;
    }
    give_back(queued);
    if (sums == nullptr) return times;
    const int64_t origin = planes_.bounds[queued.first], span = planes_.bounds[queued.last] - origin;
    std::vector<uint8_t> fetched(queued.device && !queued.parts.empty() ? static_cast<size_t>(span) : 0);
    for (size_t page = 0; page < queued.parts.size(); ++page) {
        const auto* part = reinterpret_cast<const uint8_t*>(queued.parts[page]);
        if (queued.device) {
            cuda_.copy_to_host(fetched.data(), queued.parts[page], fetched.size());
            part = fetched.data();
        }
        for (int32_t layer = queued.first; layer < queued.last; ++layer) {
            const int64_t at = planes_.bounds[layer];
            const auto size = static_cast<size_t>(planes_.bounds[layer + 1] - at);
            sums[page * layers + static_cast<size_t>(layer - queued.first)] = xxh3(part + (at - origin), size);
        }
    }
    return times;
}

CudaEvent Gpu::timed_event() {
    const std::lock_guard held(times_lock_);
    if (timed_.empty()) {
        all_timed_.push_back(own_event(cuda_, EventUse::kTime));
        return all_timed_.back().get();
    }
    const CudaEvent event = timed_.back();
    timed_.pop_back();
    return event;
}

// Record events before (`which` 0) and behind (1) a transfer's work, on each of its streams: kernels end in several.
void Gpu::mark(const Transfer& transfer, const Lane& lane, QueuedCopies& queued, int which) {
    const auto record = [&](int kind, CudaStream stream) {
        std::vector<CudaEvent>& events = queued.times[2 * kind + which];
        events.push_back(timed_event());
        cuda_.record(events.back(), stream);
    };
    if (transfer.copied()) record(0, lane.copies);
    for (const CudaStream stream : lane.used()) record(1, stream);
}

StreamTimes Gpu::times_of(const QueuedCopies& queued) {
    StreamTimes times;
    if (queued.times[1].empty() && queued.times[3].empty()) return times;
    const std::lock_guard held(times_lock_);
    if (anchored_ == 0 || now() - anchored_ > kAnchorAge) {
        if (!anchor_) anchor_ = own_event(cuda_, EventUse::kTime);
        if (!anchors_) anchors_ = own_stream(cuda_, true);
        const Nanoseconds before = now();
        cuda_.record(anchor_.get(), anchors_.get());
        cuda_.await(anchor_.get());
        anchored_ = (before + now()) / 2;
    }
    for (const size_t stream : {0u, 1u}) {
        if (queued.times[2 * stream].empty()) continue;
        const auto at = [&](CudaEvent event) {
            return anchored_ + static_cast<int64_t>(cuda_.seconds(anchor_.get(), event) * 1e9);
        };
        const int64_t begin = at(queued.times[2 * stream].front());
        times[stream] = {begin, begin};
        for (const CudaEvent event : queued.times[2 * stream + 1]) {
            times[stream].end = std::max(times[stream].end, at(event));
        }
    }
    return times;
}

Points& Gpu::points_of(int64_t point) {
    Points* const all[] = {&loads_.done, &stores_.done, &loads_.read, &stores_.read};
    return *all[point % Points::kStep];
}

}  // namespace gdscache
