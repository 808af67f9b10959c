// What Python's side has opened and an executor uses: cuFile, planes in host memory, and the copies of a GPU.

#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "../cufile_disk.h"
#include "../gpu.h"
#include "../pages.h"
#include "bind.h"

namespace gdscache {

struct OpenCuFiles {
    std::shared_ptr<CuFiles> files;  // none behind `close`; disks and executors have their own share
    int64_t batched = kBatchedBytes;

    std::shared_ptr<CuFiles> shared() const {
        open(files, "cuFile");
        return files;
    }
};

// Planes in host memory, for as long as Python or an executor has them.
struct OpenPool {
    std::vector<PlaneMemory> planes;
    std::vector<int32_t> first_plane;
    Pool pool;
};

struct HostPool {
    std::shared_ptr<OpenPool> pool;  // none behind `close`
};

struct GpuCopies {
    GpuCopies(const char* library, void* context) : cuda(library, context) {}
    ~GpuCopies() {
        try {
            const Cuda::Entered entered(cuda);
            gpu.reset();
        } catch (const CudaError&) {  // the driver is gone: the process ends
        }
    }

    Cuda cuda;
    std::optional<Gpu> gpu;
    std::atomic<int> asking = 0;  // threads
    // Of `queue`: what nobody asks for again goes when it is done, the rest with `finish`.
    std::mutex lock;
    int64_t tickets = 0;
    std::map<int64_t, QueuedCopies> asked;
    std::deque<QueuedCopies> unasked;
};

struct OpenGpu {
    std::shared_ptr<GpuCopies> copies;  // none behind `close`
};

}  // namespace gdscache
