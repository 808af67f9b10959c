// Checks of values from outside: nothing reaches beyond a space, and no size overflows. An unsound value throws an
// `Error` with EINVAL, or gives false.

#pragma once

#include <algorithm>
#include <functional>

#include "gpu/gpu.h"
#include "moves/executor.h"
#include "pack/pack.h"

namespace gdscache {

constexpr int64_t kMost = int64_t{1} << 31;        // pages of a way, slots of a space
constexpr int64_t kMostLayers = int64_t{1} << 20;  // also blocks of a page, and planes of a layer
constexpr int64_t kMostBytes = int64_t{1} << 60;   // of a space, and in flight; twice this is still an int64

constexpr int64_t kMostExtent = (int64_t{1} << 48) - 1;

inline bool some(int64_t count, int64_t most) { return count > 0 && count <= most; }

// Whether each layer has bytes, and all lie in an extent.
inline bool ascending(const std::vector<int64_t>& bounds, int64_t most) {
    const bool each = std::ranges::adjacent_find(bounds, std::greater_equal<>()) == bounds.end();
    return each && bounds.front() >= 0 && bounds.back() <= most;
}

// Whether a way stays within its spaces.
inline bool sound(const Way& way, const Executor& executor) {
    const std::vector<Place>& spaces = executor.places();
    const Limits& limits = executor.limits();
    const auto known = [&](int32_t space) { return space >= 0 && space < static_cast<int32_t>(spaces.size()); };
    if (!known(way.source) || !known(way.target) || way.pages < 0 || way.pages >= kMost) return false;
    const Space::Kind source = spaces[way.source].kind, target = spaces[way.target].kind;
    const bool copies = (source == Space::Kind::kPlanes) != (target == Space::Kind::kPlanes);
    const bool files = (source == Space::Kind::kFiles) != (target == Space::Kind::kFiles);
    if (!(copies || files) || (source == Space::Kind::kPlanes && target != Space::Kind::kMemory)) return false;
    if (source == Space::Kind::kPlanes && spaces[way.target].sums == nullptr) return false;
    const auto fits = [&](int32_t space, const std::vector<int64_t>& slots) {
        const int64_t each = spaces[space].kind == Space::Kind::kPlanes ? limits.page_blocks : 1;
        const auto count = static_cast<int64_t>(slots.size());
        return count == way.pages * each && within(slots.data(), count, spaces[space].slots);
    };
    if (!fits(way.source, way.sources) || !fits(way.target, way.targets)) return false;
    if (!way.sums.empty() && static_cast<int64_t>(way.sums.size()) != way.pages * limits.layers) return false;
    if (!way.places.empty()) {  // only for reads on their way into planes
        if (source != Space::Kind::kFiles || target != Space::Kind::kPlanes || !known(way.through)) return false;
        if (spaces[way.through].kind != Space::Kind::kMemory || !fits(way.through, way.places)) return false;
    }
    if (!files) return true;
    const int32_t memory = memory_of(way, source, target, executor.reserve_space());
    if (memory < 0) return way.pages == 0;  // there is no reserve to pass through
    const bool stays = !way.places.empty() || target == Space::Kind::kMemory;
    if (stays && way.sums.empty() && spaces[way.source].sums && !spaces[memory].sums) return false;  // they come along
    const int32_t disk = spaces[target == Space::Kind::kFiles ? way.target : way.source].disk;
    return (spaces[memory].reached >> disk & 1) != 0;
}

// Whether a way's copies are between a GPU's memory and host planes.
inline bool crosses(const Way& way, const Executor& executor) {
    const std::vector<Place>& spaces = executor.places();
    const Space &source = spaces[way.source], &target = spaces[way.target];
    if (source.kind != Space::Kind::kPlanes && target.kind != Space::Kind::kPlanes) return false;
    if ((source.kind == Space::Kind::kPlanes ? source : target).foreign) return false;
    const int32_t memory = memory_of(way, source.kind, target.kind, executor.reserve_space());
    return memory >= 0 && spaces[memory].foreign;
}

inline bool is_load(const Way& way, const Executor& executor) {
    const std::vector<Place>& spaces = executor.places();
    return spaces[way.target].kind != Space::Kind::kFiles && spaces[way.source].kind != Space::Kind::kPlanes;
}

inline void check(const PlaneRuns& plane, const GpuPlanes& planes, int64_t end) {
    const bool part = plane.start == end && plane.end > end && plane.end <= planes.extent_bytes && plane.run_bytes > 0;
    const int64_t bytes = part ? plane.end - plane.start : 0;
    const int64_t most = kMostBytes / planes.page_blocks / std::max<int64_t>(1, plane.runs_per_block);
    const bool sound = part && plane.runs_per_block > 0 && plane.run_bytes <= most;
    const int64_t rows = sound ? plane.run_bytes * plane.runs_per_block * planes.page_blocks : 0;
    const auto packed = static_cast<int64_t>(packed_bytes(static_cast<size_t>(rows) / 2));
    const bool whole = sound && (planes.packed ? plane.run_bytes % 2 == 0 && packed == bytes : rows == bytes);
    refuse_if(!whole, "a plane that does not fill its part of a layer");
    const auto far = [](int64_t stride, int64_t count) {
        return stride > kMostBytes / count || stride < -kMostBytes / count;
    };
    const bool outside = plane.base < 1 || plane.base > kMostBytes || far(plane.block_stride, planes.blocks) ||
                         (plane.runs_per_block > 1 && far(plane.run_stride, plane.runs_per_block));
    refuse_if(outside, "a plane that leaves the address space");
}

inline void check(const Limits& limits) {
    const int64_t bytes[] = {limits.flying_bytes, limits.io_bytes, limits.copy_bytes, limits.foreign_copy_bytes};
    const bool each = std::ranges::all_of(bytes, [](int64_t one) { return some(one, kMostBytes); });
    const bool pages = some(limits.extent_bytes, kMostExtent) && some(limits.page_blocks, kMostLayers);
    refuse_if(!each || !pages, "no sound sizes");
    refuse_if(!some(limits.layers, kMostLayers) || !ascending(limits.bounds, limits.extent_bytes), "no sound layers");
}

// A space. `on_gpu`: foreign spaces are a GPU's.
inline void check(const Place& space, int64_t extent_bytes, bool on_gpu) {
    const auto memory = reinterpret_cast<uint64_t>(space.memory);
    refuse_if(space.slots < 0 || space.slots >= kMost, "a space of no sound number of slots");
    refuse_if(space.kind != Space::Kind::kPlanes && space.slots > kMostBytes / extent_bytes,
              "a space of too many bytes");
    refuse_if(space.fence < 0, "a fence of no sound number of slots");
    const auto bytes = static_cast<uint64_t>(space.slots * extent_bytes);
    const bool here = space.kind == Space::Kind::kMemory && (!space.foreign || on_gpu);
    refuse_if(here && !memory, "a memory without an address");
    refuse_if(here && memory > UINT64_MAX - bytes, "a memory that leaves the address space");
    refuse_if(space.kind == Space::Kind::kFiles && space.stretch < 1, "files of no stretch");
}

// Planes for pages with these layers: of the host's pool, or of a GPU's.
inline void check(const Place& planes, const HostPlanes* pool, const Limits& limits) {
    refuse_if(!pool, "planes without a pool");
    refuse_if(planes.slots > pool->blocks, "more blocks than the pool has");
    bool same = pool->layers() == limits.layers && pool->page_blocks == limits.page_blocks;
    for (int32_t layer = 0; same && layer < limits.layers; ++layer) {
        same = layer_bytes(*pool, layer) == limits.bounds[layer + 1] - limits.bounds[layer];
    }
    refuse_if(!same, "a pool of other pages");
}

inline void check(const Place& planes, const GpuPlanes& gpu, const Limits& limits) {
    refuse_if(planes.slots > gpu.blocks, "more blocks than the pool has");
    refuse_if(gpu.page_blocks != limits.page_blocks || gpu.bounds != limits.bounds, "a pool of other pages");
}

// Whether all ways are of loads or prefetches.
inline bool loads(const std::vector<Way>& ways, const Executor& executor) {
    return std::ranges::all_of(ways, [&](const Way& way) { return is_load(way, executor); });
}

// Whether ways fit these spaces, and each other: loads are not mixed with stores or writes.
inline bool sound(const std::vector<Way>& ways, const Executor& executor, bool on_gpu) {
    if (ways.size() > 1 << 10) return false;
    const std::vector<Place>& spaces = executor.places();
    int64_t rows = 0;
    for (const Way& way : ways) {
        if (!sound(way, executor) || (on_gpu && crosses(way, executor))) return false;
        const bool alike = spaces[way.source].kind == spaces[ways[0].source].kind &&
                           spaces[way.target].kind == spaces[ways[0].target].kind;
        if (!alike && !(is_load(ways[0], executor) && is_load(way, executor))) return false;
        rows += way.pages;
    }
    return rows < kMost;
}

// Whether groups have every layer once, in order, and their reads lie in an extent and cover their bytes.
inline bool sound(const std::vector<Group>& groups, const Limits& limits) {
    int32_t layer = 0;
    int64_t stop = 0;
    for (const Group& group : groups) {
        if (group.first != layer || group.last <= group.first || group.last > limits.layers) return false;
        if (group.begin != limits.bounds[group.first] || group.end != limits.bounds[group.last]) return false;
        if (group.start != stop || group.stop < group.start || group.stop < group.end) return false;
        if (group.stop > limits.extent_bytes || group.alone_stop > limits.extent_bytes) return false;
        if (group.route < 0 || group.route > 2 || group.summed_route < 0 || group.summed_route > 2) return false;
        if (group.alone_start < 0 || group.alone_start > group.begin || group.alone_stop < group.end) return false;
        layer = group.last;
        stop = group.stop;
    }
    return layer == limits.layers;
}

// The planes of a GPU: runs that do not fill their plane, or planes that do not fill their layer, are refused.
inline void check(const GpuPlanes& planes, const PageKernels& kernels, const ChunkSizes& sizes, int64_t staging) {
    const bool blocks = some(planes.page_blocks, kMostLayers) && some(planes.blocks, kMost);
    refuse_if(!some(planes.layers, kMostLayers) || !blocks, "no sound number of layers or blocks");
    refuse_if(!some(planes.extent_bytes, kMostExtent) || !some(staging, kMostBytes), "no sound sizes");
    for (const int64_t bytes : {sizes.moved, sizes.looked, sizes.looked_last, sizes.unbroken}) {
        refuse_if(!some(bytes, kMostBytes), "no sound sizes of chunks");
    }
    refuse_if(staging / 2 < planes.extent_bytes, "half of the ring holds no page");
    const bool all = kernels.gather && kernels.scatter && kernels.gather_sums && kernels.scatter_sums && kernels.table;
    const bool whole = all && kernels.vector >= 1 && kernels.vector <= 16 && kernels.processors >= 1;
    refuse_if(kernels.gather && !whole, "half a set of kernels");
    refuse_if(!ascending(planes.bounds, planes.extent_bytes), "no sound layers");
    const auto count = static_cast<int64_t>(planes.planes.size());
    refuse_if(planes.first_plane.size() != planes.bounds.size() || planes.first_plane[0] != 0, "planes of no layer");
    refuse_if(planes.first_plane.back() != count || count > 1 << 24, "a layer without planes");
    for (int32_t layer = 0; layer < planes.layers; ++layer) {
        const int32_t first = planes.first_plane[layer], last = planes.first_plane[layer + 1];
        refuse_if(last <= first || last > count, "a layer without planes");
        int64_t end = 0;
        for (int32_t n = first; n < last; ++n) {
            check(planes.planes[n], planes, end);
            end = planes.planes[n].end;
        }
        refuse_if(end != planes.bounds[layer + 1] - planes.bounds[layer], "planes that do not fill their layer");
    }
}

inline void check(const PageCopies& copies, const GpuPlanes& planes) {
    const ExtentSlots& extents = copies.extents;
    const auto route = static_cast<int32_t>(copies.route);
    refuse_if(route < 0 || route > static_cast<int32_t>(Route::kCopyEngine), "no such route");
    refuse_if(copies.first < 0 || copies.last < copies.first || copies.last > planes.layers, "no such layers");
    refuse_if(copies.pages >= kMost || extents.slots < 0 || extents.slots >= kMost, "no sound counts");
    refuse_if(!extents.address || extents.stride < 1 || extents.fence < 0, "no sound extents");
    const int64_t slots = std::max<int64_t>(extents.slots, 1);
    const bool large = extents.stride > kMostBytes / slots || extents.origin < -kMostBytes;
    const bool outside = large || extents.address > UINT64_MAX - static_cast<uint64_t>(extents.slots * extents.stride);
    refuse_if(outside, "extents that leave the address space");
    const int64_t first = planes.bounds[copies.first], last = planes.bounds[copies.last];
    refuse_if(extents.origin > first || extents.stride < last - extents.origin, "layers that leave their slot");
    refuse_if(!within(copies.slots, copies.pages, extents.slots), "a slot that is not there");
    refuse_if(!within(copies.blocks, copies.pages * planes.page_blocks, planes.blocks), "a block that is not there");
    refuse_if(copies.after.size() > 1 << 20, "no sound events");
}

}  // namespace gdscache
