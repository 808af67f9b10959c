// What of the values that come from outside is sound: nothing reaches beyond a space, and no size overflows. What is
// not throws an `Error` with EINVAL, or answers false.

#pragma once

#include <cstdint>
#include <vector>

#include "gpu/gpu.h"
#include "moves/executor.h"
#include "moves/pages.h"

namespace gdscache {

constexpr int64_t kMost = int64_t{1} << 31;        // pages of a way, slots of anything
constexpr int64_t kMostLayers = int64_t{1} << 20;  // and blocks of a page: as many as a pool has
constexpr int64_t kMostBytes = int64_t{1} << 60;   // of a space, and in flight: twice as many are still a number

void check(const Limits& limits);

// A space. `on_gpu`: what is foreign is a GPU's.
void check(const Place& space, int64_t extent_bytes, bool on_gpu);

// Planes, for pages with these layers: of the host's pool, or of a GPU's.
void check(const Place& planes, const Pool* pool, const Limits& limits);
void check(const Place& planes, const GpuPlanes& gpu, const Limits& limits);

// Whether ways make sense for these spaces, and together: a store is a store as a whole.
bool sound(const std::vector<Way>& ways, const Executor& executor, bool on_gpu);

// Whether ways are of a load, or a prefetch.
bool loads(const std::vector<Way>& ways, const Executor& executor);

// Whether groups have every layer once, in order, and what is read of them lies in an extent and has their bytes.
bool sound(const std::vector<Group>& groups, const Limits& limits);

// The planes of a GPU: layers without planes, runs that do not fill theirs, and what leaves its layer are refused.
void check(const GpuPlanes& planes, const PageKernels& kernels, const ChunkSizes& sizes, int64_t staging);

void check(const PageCopies& copies, const GpuPlanes& planes);

}  // namespace gdscache
