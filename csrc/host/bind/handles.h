// Python's objects that an executor uses: cuFile, planes in host memory, disks, and the copies of a GPU.

#pragma once

#include <chrono>
#include <thread>

#include "bind/bind.h"
#include "cuda/cufile.h"
#include "disk/disk.h"
#include "gpu/gpu.h"
#include "moves/pages.h"

namespace gdscache {

// Calls of other threads inside an object that is about to end; `end` waits for them.
class Calls {
public:
    struct Inside {
        explicit Inside(Calls& all) : calls(all) {
            ++calls.count_;
            over = calls.over_;
        }
        ~Inside() { --calls.count_; }
        Inside(Inside&&) = delete;

        Calls& calls;
        bool over;  // `end` was called
    };
    // Let no call begin any more, and wait for those under way.
    void end() {
        over_ = true;
        while (count_) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }

private:
    std::atomic<int> count_ = 0;
    std::atomic<bool> over_ = false;
};

struct OpenCuFiles {
    OpenCuFiles(const char* driver, uint64_t context, const char* library, const Text& log_folder);

    std::shared_ptr<CuFiles> files;  // none after `close`; disks and executors have their own share

    std::shared_ptr<CuFiles> shared() const {
        open(files, "cuFile");
        return files;
    }
};

// Planes in host memory, for the life of its Python object or of an executor.
struct OpenPlanes {
    OpenPlanes(const Int64s& planes, const Array<const int32_t>& first_plane, int64_t blocks, int64_t block_tokens,
               int64_t page_blocks, bool packed);

    std::shared_ptr<const HostPlanes> pool;  // none after `close`
};

// Memory of a GPU, which a transport gets as a `DeviceMemory`.
struct DeviceRange {
    uint64_t address, bytes;
    int device;
};

// A disk by a transport, else by cuFile; else io_uring ("ring"), "threads", or io_uring if available (no kind). Throws
// `Error`. The threads of a transport's take the interpreter's lock: who waits for them, or destroys the disk, has
// released it.
std::unique_ptr<Disk> open_disk_by(const Text& kind, int workers, const OpenCuFiles* cufile,
                                   const nb::object& transport, std::vector<DeviceRange> devices);

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
    Calls calls;
    // Copies of `queue`. Those without checksums are dropped when they are done, the others by `finish`.
    std::mutex lock;
    int64_t tickets = 0;
    std::map<int64_t, QueuedCopies> asked;
    std::deque<QueuedCopies> unasked;
};

struct OpenGpu {
    // `spec`: an object with the fields of `GpuSpec` in kernels/gpu.py.
    OpenGpu(const char* library, const nb::object& spec);

    std::shared_ptr<GpuCopies> copies;  // none after `close`
};

}  // namespace gdscache
