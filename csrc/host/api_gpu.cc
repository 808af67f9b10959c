// Calls about copies to and from a GPU, behind checks of what comes from outside. See api_gpu.h.

#include "api_gpu.h"

#include <cerrno>
#include <chrono>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "api_checks.h"
#include "gpu_handle.h"
#include "memory.h"

using namespace gdscache;

namespace {

thread_local std::string why;

int32_t refused(const char* cause, int32_t error) {
    const MustNotFail reserve;  // also called where memory has run out
    why = cause;
    return -error;
}

// What `work` answers, or the errno of what it throws.
template <typename Work>
int32_t guarded(Work work) {
    try {
        return work();
    } catch (const CudaError& error) {
        return refused(error.what(), EIO);
    } catch (const std::bad_alloc&) {
        return refused("no memory", ENOMEM);
    } catch (const std::length_error&) {
        return refused("no memory", ENOMEM);
    }
}

const char* unsound(const gdscache_gpu_spec& spec) {
    const auto some = [](int64_t count, int64_t most) { return count > 0 && count <= most; };
    if (!some(spec.layers, kMostLayers) || !some(spec.page_blocks, kMostLayers) || !some(spec.blocks, kMost)) {
        return "no sound number of layers or blocks";
    }
    if (!some(spec.extent_bytes, (int64_t{1} << 48) - 1) || !some(spec.staging, kMostBytes)) return "no sound sizes";
    for (const int64_t bytes : {spec.chunk_bytes, spec.look_bytes, spec.last_look_bytes, spec.unbroken_bytes}) {
        if (!some(bytes, kMostBytes)) return "no sound sizes of chunks";
    }
    if (spec.staging / 2 < spec.extent_bytes) return "half of the ring holds no page";
    if (!points<int64_t>(spec.bounds) || !points<int32_t>(spec.first_plane) || !points<int64_t>(spec.planes)) {
        return "a table at no sound address";
    }
    const bool all = spec.gather && spec.scatter && spec.gather_sums && spec.scatter_sums && spec.table;
    if (spec.gather && (!all || spec.vector < 1 || spec.vector > 16 || spec.processors < 1)) return "half a set of kernels";
    return nullptr;
}

// The planes of a spec; layers without planes, runs that do not fill theirs, and what leaves its layer are refused.
const char* read(const gdscache_gpu_spec& spec, GpuPlanes* planes) {
    planes->layers = spec.layers;
    planes->page_blocks = spec.page_blocks;
    planes->blocks = spec.blocks;
    planes->extent_bytes = spec.extent_bytes;
    planes->bounds.assign(at<int64_t>(spec.bounds), at<int64_t>(spec.bounds) + spec.layers + 1);
    planes->first_plane.assign(at<int32_t>(spec.first_plane), at<int32_t>(spec.first_plane) + spec.layers + 1);
    if (!ascending(planes->bounds, spec.extent_bytes)) return "no sound layers";
    if (planes->first_plane[0] != 0) return "planes of no layer";
    for (int32_t layer = 0; layer < spec.layers; ++layer) {
        const int32_t first = planes->first_plane[layer], last = planes->first_plane[layer + 1];
        if (last <= first || last > 1 << 24) return "a layer without planes";
        int64_t end = 0;
        for (int32_t n = first; n < last; ++n) {
            const int64_t* const row = at<int64_t>(spec.planes) + 7 * n;
            const PlaneRuns plane{row[0], row[1], row[2], row[3], row[4], row[5], row[6]};
            const bool part = plane.start == end && plane.end > end && plane.end <= spec.extent_bytes &&
                              plane.run_bytes > 0;
            const int64_t runs = part ? (plane.end - plane.start) / plane.run_bytes : 0;
            const bool whole = part && runs > 0 && runs * plane.run_bytes == plane.end - plane.start &&
                               runs % spec.page_blocks == 0 && runs / spec.page_blocks == plane.runs_per_block;
            if (!whole) return "a plane that does not fill its part of a layer";
            const auto far = [](int64_t stride, int64_t count) {
                return stride > kMostBytes / count || stride < -kMostBytes / count;
            };
            if (plane.base < 1 || plane.base > kMostBytes || far(plane.block_stride, spec.blocks) ||
                (plane.runs_per_block > 1 && far(plane.run_stride, plane.runs_per_block))) {
                return "a plane that leaves the address space";
            }
            end = plane.end;
            planes->planes.push_back(plane);
        }
        if (end != planes->bounds[layer + 1] - planes->bounds[layer]) return "planes that do not fill their layer";
    }
    return nullptr;
}

const char* unsound(const gdscache_gpu_copies& copies, const GpuPlanes& planes) {
    if (copies.route < 0 || copies.route > static_cast<int32_t>(Route::kCopyEngine)) return "no such route";
    if (copies.first < 0 || copies.last < copies.first || copies.last > planes.layers) return "no such layers";
    if (copies.pages < 0 || copies.pages >= kMost || copies.extents < 0 || copies.extents >= kMost) return "no sound counts";
    if (copies.pages && (!points<int64_t>(copies.slots) || !points<int64_t>(copies.blocks))) return "no indices";
    if (!copies.address || copies.stride < 1 || copies.fence < 0) return "no sound extents";
    if (copies.stride > kMostBytes / std::max<int64_t>(copies.extents, 1) || copies.origin < -kMostBytes ||
        copies.address > UINT64_MAX - static_cast<uint64_t>(copies.extents * copies.stride)) {
        return "extents that leave the address space";
    }
    if (copies.origin > planes.bounds[copies.first] || copies.stride < planes.bounds[copies.last] - copies.origin) {
        return "layers that leave their slot";
    }
    if (!within(at<int64_t>(copies.slots), copies.pages, copies.extents)) return "a slot that is not there";
    if (!within(at<int64_t>(copies.blocks), copies.pages * planes.page_blocks, planes.blocks)) return "a block that is not there";
    if (copies.n_after < 0 || copies.n_after > 1 << 20 || (copies.n_after && !points<uint64_t>(copies.after))) {
        return "no sound events";
    }
    return nullptr;
}

}  // namespace

const char* gdscache_gpu_why() { return why.c_str(); }

int32_t gdscache_gpu_open(const char* library, const struct gdscache_gpu_spec* spec, struct gdscache_gpu** gpu) {
    if (!library || !spec || !gpu) return refused("an address is null", EINVAL);
    return guarded([&] {
        if (const char* cause = unsound(*spec)) return refused(cause, EINVAL);
        GpuPlanes planes;
        if (const char* cause = read(*spec, &planes)) return refused(cause, EINVAL);
        const auto function = [](uint64_t address) { return reinterpret_cast<CudaFunction>(address); };
        const PageKernels kernels{function(spec->gather),      function(spec->scatter), function(spec->gather_sums),
                                  function(spec->scatter_sums), spec->table,            spec->vector,
                                  spec->processors,             spec->sums != 0,        spec->looks != 0};
        auto made = std::make_unique<gdscache_gpu>(library, reinterpret_cast<void*>(spec->context));
        const Cuda::Entered entered(made->cuda);
        const ChunkSizes sizes{spec->chunk_bytes, spec->look_bytes, spec->last_look_bytes, spec->unbroken_bytes};
        made->gpu.emplace(made->cuda, std::move(planes), kernels, sizes, static_cast<size_t>(spec->staging));
        *gpu = made.release();
        return 0;
    });
}

void gdscache_gpu_close(struct gdscache_gpu* gpu) { delete gpu; }

const char* gdscache_gpu_api(const struct gdscache_gpu* gpu) { return gpu ? gpu->cuda.api() : ""; }

int32_t gdscache_gpu_queue(struct gdscache_gpu* gpu, const struct gdscache_gpu_copies* copies, int64_t points[2],
                           int64_t* ticket) {
    if (!gpu || !copies || !points || !ticket) return refused("an address is null", EINVAL);
    return guarded([&] {
        if (const char* cause = unsound(*copies, gpu->gpu->planes())) return refused(cause, EINVAL);
        {  // before anything is queued: what this throws is not about it
            const std::lock_guard held(gpu->lock);
            StreamTime times[2];
            while (!gpu->unasked.empty() && gpu->gpu->reached(gpu->unasked.front().point)) {
                gpu->gpu->finish(gpu->unasked.front(), nullptr, times);
                gpu->unasked.pop_front();
            }
        }
        const ExtentSlots extents{copies->address, copies->stride, copies->origin, copies->extents,
                                  copies->device != 0, copies->pinned != 0, copies->fence};
        QueuedCopies queued = gpu->gpu->queue({copies->load != 0, static_cast<Route>(copies->route), copies->sums != 0,
                                               copies->first, copies->last, copies->pages, extents,
                                               at<int64_t>(copies->slots), at<int64_t>(copies->blocks),
                                               at<uint64_t>(copies->after), static_cast<size_t>(copies->n_after)});
        points[0] = queued.point;
        points[1] = queued.read;
        const std::lock_guard held(gpu->lock);
        *ticket = ++gpu->tickets;
        if (copies->sums) gpu->asked.emplace(*ticket, std::move(queued));
        else gpu->unasked.push_back(std::move(queued));
        return 0;
    });
}

int32_t gdscache_gpu_finish(struct gdscache_gpu* gpu, int64_t ticket, uint64_t* sums) {
    if (!gpu) return refused("an address is null", EINVAL);
    return guarded([&] {
        QueuedCopies queued;
        {
            const std::lock_guard held(gpu->lock);
            auto node = gpu->asked.extract(ticket);
            if (node.empty()) return refused("no such copies", ENOENT);
            queued = std::move(node.mapped());
        }
        StreamTime times[2];
        gpu->gpu->finish(queued, sums, times);
        return 0;
    });
}

int64_t gdscache_gpu_last(struct gdscache_gpu* gpu, int32_t loads) { return gpu ? gpu->gpu->last(loads != 0) : 0; }

int32_t gdscache_gpu_reached(struct gdscache_gpu* gpu, int64_t point) {
    if (!gpu || point < 0) return refused("no point", EINVAL);
    return guarded([&] { return static_cast<int32_t>(gpu->gpu->reached(point)); });
}

int32_t gdscache_gpu_await(struct gdscache_gpu* gpu, int64_t point, int64_t until) {
    if (!gpu || point < 0) return refused("no point", EINVAL);
    return guarded([&] {
        // The driver knows no wait with an end. Most are over soon; the others cost a look in 50 us.
        for (int32_t looks = 0; !gpu->gpu->reached(point); ++looks) {
            if (now() >= until) return 0;
            if (looks < 64) std::this_thread::yield();
            else std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        return 1;
    });
}

int32_t gdscache_gpu_follow(struct gdscache_gpu* gpu, uint64_t stream, int64_t point) {
    if (!gpu || point < 0) return refused("no point", EINVAL);
    return guarded([&] {
        gpu->gpu->follow(reinterpret_cast<CudaStream>(stream), point);
        return 0;
    });
}
