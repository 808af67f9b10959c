// What of the values that come through the C interface is sound: nothing reaches beyond a space, and no size overflows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <vector>

#include "api_executor.h"
#include "executor.h"
#include "gpu.h"
#include "pool.h"

namespace gdscache {

using Kind = Space::Kind;

constexpr int64_t kMost = int64_t{1} << 31;        // pages of a way, slots of anything
constexpr int64_t kMostLayers = int64_t{1} << 20;  // and blocks of a page: as many as a pool has
constexpr int64_t kMostBytes = int64_t{1} << 60;   // of a space, and in flight: twice as many are still a number

template <typename T>
const T* at(uint64_t address) {
    return reinterpret_cast<const T*>(address);
}

// Whether there is something at an address that may be looked at as numbers of a kind.
template <typename T>
bool points(uint64_t address) {
    return address != 0 && address % alignof(T) == 0;
}

inline bool sound(const gdscache_limits& limits) {
    const int64_t bytes[] = {limits.flying_bytes, limits.io_bytes, limits.copy_bytes, limits.foreign_io_bytes,
                             limits.foreign_copy_bytes};
    const auto some = [](int64_t count, int64_t most) { return count > 0 && count <= most; };
    return points<int64_t>(limits.bounds) && some(limits.extent_bytes, (int64_t{1} << 48) - 1) &&
           some(limits.layers, kMostLayers) && some(limits.page_blocks, kMostLayers) &&
           std::all_of(std::begin(bytes), std::end(bytes), [&](int64_t one) { return some(one, kMostBytes); });
}

inline const char* unsound(const gdscache_space& space, int64_t extent_bytes) {
    if (space.kind < 0 || space.kind > 2) return "a space of no kind";
    if (space.slots < 0 || space.slots >= kMost) return "a space of no sound number of slots";
    if (space.kind != 0 && space.slots > kMostBytes / extent_bytes) return "a space of too many bytes";
    if (space.sums && !points<uint64_t>(space.sums)) return "sums at no sound address";
    if (space.foreign) return nullptr;
    if (space.kind == 1 && !space.memory) return "a memory without an address";
    if (space.kind == 1 && space.memory > UINT64_MAX - static_cast<uint64_t>(space.slots * extent_bytes)) {
        return "a memory that leaves the address space";
    }
    if (space.kind == 2 && (space.n_files < 1 || !points<int32_t>(space.files) || space.stretch < 1)) {
        return "a space without files";
    }
    return nullptr;
}

// Why planes cannot be those of a pool, whose pages have these layers; or null.
inline const char* unsound(const gdscache_space& planes, const gdscache_pool* made, const Limits& limits) {
    if (!made) return "planes without a pool";
    const Pool& pool = made->pool;
    if (planes.slots > pool.blocks) return "more blocks than the pool has";
    bool same = pool.n_layers == limits.layers && pool.page_blocks == limits.page_blocks;
    for (int32_t layer = 0; same && layer < limits.layers; ++layer) {
        same = layer_bytes(pool, layer) == limits.bounds[layer + 1] - limits.bounds[layer];
    }
    return same ? nullptr : "a pool of other pages";
}

// Why planes or a memory cannot be those of a GPU whose pages have these layers; or null.
inline const char* unsound(const gdscache_space& space, const GpuPlanes& planes, const Limits& limits) {
    if (space.kind == 1) return space.memory ? nullptr : "a memory without an address";
    if (space.kind == 2) return nullptr;
    if (space.slots > planes.blocks) return "more blocks than the pool has";
    const bool same = planes.page_blocks == limits.page_blocks && planes.bounds == limits.bounds;
    return same ? nullptr : "a pool of other pages";
}

inline bool within(const int64_t* values, int64_t count, int64_t limit) {
    for (int64_t n = 0; n < count; ++n) {
        if (values[n] < 0 || values[n] >= limit) return false;
    }
    return true;
}

// Whether a way makes sense for these spaces: nothing of it reaches beyond them.
inline bool sound(const gdscache_way& way, const Executor& executor) {
    const auto& spaces = executor.spaces();
    const auto known = [&](int32_t space) { return space >= 0 && space < static_cast<int32_t>(spaces.size()); };
    if (!known(way.source) || !known(way.target) || way.pages < 0 || way.pages >= kMost) return false;
    if (way.pages && (!points<int64_t>(way.sources) || !points<int64_t>(way.targets))) return false;
    if (way.sums && !points<uint64_t>(way.sums)) return false;
    const Kind source = spaces[way.source].kind, target = spaces[way.target].kind;
    const bool copies = (source == Kind::kPlanes) != (target == Kind::kPlanes);
    const bool files = (source == Kind::kFiles) != (target == Kind::kFiles);
    if (!(copies || files) || (source == Kind::kPlanes && target != Kind::kMemory)) return false;
    if (source == Kind::kPlanes && executor.spaces()[way.target].sums == nullptr) return false;
    const auto fits = [&](int32_t space, uint64_t slots) {
        const bool planes = spaces[space].kind == Kind::kPlanes;
        const int64_t count = way.pages * (planes ? executor.limits().page_blocks : 1);
        return within(at<int64_t>(slots), count, executor.places()[space].slots);
    };
    if (!fits(way.source, way.sources) || !fits(way.target, way.targets)) return false;
    if (way.places) {  // of what is read on its way into planes, and of nothing else
        if (source != Kind::kFiles || target != Kind::kPlanes || !points<int64_t>(way.places)) return false;
        if (!known(way.through) || spaces[way.through].kind != Kind::kMemory) return false;
        if (!fits(way.through, way.places)) return false;
    }
    if (!files) return true;
    const bool passes = target == Kind::kPlanes && !way.places && way.pages != 0;
    const int32_t memory = target == Kind::kFiles    ? way.source
                           : target != Kind::kPlanes ? way.target
                           : way.places              ? way.through
                                                     : executor.reserve_space();
    if (memory < 0) return !passes;
    return spaces[target == Kind::kFiles ? way.target : way.source].foreign || executor.places()[memory].reached;
}

// Whether groups have every layer once, in order, and what is read of them lies in an extent and has their bytes.
inline bool sound(const gdscache_group* groups, int64_t count, const Limits& limits) {
    int32_t layer = 0;
    int64_t stop = 0;
    for (int64_t n = 0; n < count; ++n) {
        const gdscache_group& group = groups[n];
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

// Whether each layer has bytes, and all lie in an extent.
inline bool ascending(const std::vector<int64_t>& bounds, int64_t most) {
    const bool each = std::adjacent_find(bounds.begin(), bounds.end(), std::greater_equal<>()) == bounds.end();
    return bounds.front() >= 0 && bounds.back() <= most && each;
}

}  // namespace gdscache
