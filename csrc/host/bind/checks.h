// Checks of values from outside: nothing reaches beyond a space, and no size overflows. An unsound value throws an
// `Error` with EINVAL, or gives false.

#pragma once

#include "gpu/gpu.h"
#include "moves/executor.h"
#include "moves/pages.h"

namespace gdscache {

constexpr int64_t kMost = int64_t{1} << 31;        // pages of a way, slots of a space
constexpr int64_t kMostLayers = int64_t{1} << 20;  // also blocks of a page, and planes of a layer
constexpr int64_t kMostBytes = int64_t{1} << 60;   // of a space, and in flight; twice this is still an int64

void check(const Limits& limits);

// A space. `on_gpu`: foreign spaces are a GPU's.
void check(const Place& space, int64_t extent_bytes, bool on_gpu);

// Planes for pages with these layers: of the host's pool, or of a GPU's.
void check(const Place& planes, const HostPlanes* pool, const Limits& limits);
void check(const Place& planes, const GpuPlanes& gpu, const Limits& limits);

// Whether ways fit these spaces, and each other: loads are not mixed with stores or writes.
bool sound(const std::vector<Way>& ways, const Executor& executor, bool on_gpu);

// Whether all ways are of loads or prefetches.
bool loads(const std::vector<Way>& ways, const Executor& executor);

// Whether groups have every layer once, in order, and their reads lie in an extent and cover their bytes.
bool sound(const std::vector<Group>& groups, const Limits& limits);

// The planes of a GPU: runs that do not fill their plane, or planes that do not fill their layer, are refused.
void check(const GpuPlanes& planes, const PageKernels& kernels, const ChunkSizes& sizes, int64_t staging);

void check(const PageCopies& copies, const GpuPlanes& planes);

}  // namespace gdscache
