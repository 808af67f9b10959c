// Copies to and from a GPU in the plain C interface. See gpu.h.

#pragma once

#include "api.h"

struct gdscache_gpu;

// What is copied on one GPU. Addresses: `bounds`, int64 (layers + 1); `first_plane`, int32 (layers + 1); `planes`, int64
// (planes, 7): base, block stride, run stride, bytes of a run, runs of a block, start and end in the layer. `context`:
// the device's CUcontext. The kernels are CUfunctions, or 0; `table` is theirs, in GPU memory.
struct gdscache_gpu_spec {
    uint64_t context, bounds, first_plane, planes;
    uint64_t gather, scatter, gather_sums, scatter_sums, table;
    int64_t blocks, extent_bytes, staging;
    int64_t chunk_bytes, look_bytes, last_look_bytes, unbroken_bytes;  // see gpu.h
    int32_t layers, page_blocks, vector, processors, sums, looks;
};

// Layers [first, last) of `pages` pages. `slots`: int64 (pages); `blocks`: int64 (pages, page_blocks); `after`: CUevents.
// `route`: 0 staged, 1 zero copy, 2 the copy engine alone; memory of the device has one of its own.
struct gdscache_gpu_copies {
    int32_t load, route, sums, first, last, device, pinned, reserved;
    uint64_t address;
    int64_t stride, origin, extents, fence, pages;
    uint64_t slots, blocks, after;
    int64_t n_after;
};

// Why the last of these calls that this thread made was refused.
GDSCACHE_API const char* gdscache_gpu_why();

// `library`: the driver's name. What the driver refuses is -EIO.
GDSCACHE_API int32_t gdscache_gpu_open(const char* library, const struct gdscache_gpu_spec* spec,
                                       struct gdscache_gpu** gpu);
// Waits for what is queued. No executor has it any more.
GDSCACHE_API void gdscache_gpu_close(struct gdscache_gpu* gpu);
// How lists of copies are handed to the driver.
GDSCACHE_API const char* gdscache_gpu_api(const struct gdscache_gpu* gpu);

// `points`: behind the copies, and behind the last look at their source. `ticket`: for `finish`, which has to be called
// where there are sums.
GDSCACHE_API int32_t gdscache_gpu_queue(struct gdscache_gpu* gpu, const struct gdscache_gpu_copies* copies,
                                        int64_t points[2], int64_t* ticket);
// Waits for the copies. `sums`: uint64 (pages, last - first), or null.
GDSCACHE_API int32_t gdscache_gpu_finish(struct gdscache_gpu* gpu, int64_t ticket, uint64_t* sums);

// The last point of loads (1) or stores (0); whether one was reached (1, 0); the same, at the latest at `until` (ns of
// CLOCK_MONOTONIC); to have a CUstream wait for one.
GDSCACHE_API int64_t gdscache_gpu_last(struct gdscache_gpu* gpu, int32_t loads);
GDSCACHE_API int32_t gdscache_gpu_reached(struct gdscache_gpu* gpu, int64_t point);
GDSCACHE_API int32_t gdscache_gpu_await(struct gdscache_gpu* gpu, int64_t point, int64_t until);
GDSCACHE_API int32_t gdscache_gpu_follow(struct gdscache_gpu* gpu, uint64_t stream, int64_t point);
