// What `gdscache_gpu_open` gives out.

#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "gpu.h"

struct gdscache_gpu {
    gdscache_gpu(const char* library, void* context) : cuda(library, context) {}
    ~gdscache_gpu() {
        try {
            const gdscache::Cuda::Entered entered(cuda);
            gpu.reset();
        } catch (const gdscache::CudaError&) {  // the driver is gone: the process ends
        }
    }

    gdscache::Cuda cuda;
    std::optional<gdscache::Gpu> gpu;
    // Of `gdscache_gpu_queue`: what nobody asks for again goes when it is done, the rest with `finish`.
    std::mutex lock;
    int64_t tickets = 0;
    std::map<int64_t, gdscache::QueuedCopies> asked;
    std::deque<gdscache::QueuedCopies> unasked;
};
