// Python's objects: cuFile, planes in host memory, disks, the copies of a GPU, and the executor of all of them.

#pragma once

#include <chrono>
#include <thread>

#include "bind/bind.h"
#include "cuda/cufile.h"
#include "disk/disk.h"
#include "gpu/gpu_server.h"

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
// `Error`. A transport's threads take the interpreter's lock: nobody waits for them, or ends the disk, with it.
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
    // `spec`: an object with the fields of `GpuSpec` in kernels/cuda.py.
    OpenGpu(const char* library, const nb::object& spec);

    std::shared_ptr<GpuCopies> copies;  // none after `close`
};

class OpenExecutor {
public:
    OpenExecutor(const Int64s& bounds, int64_t extent_bytes, int32_t page_blocks, const nb::dict& spaces,
                 const nb::object& limits, const nb::object& reserve, int64_t fence, const OpenPlanes* pool,
                 const OpenGpu* gpu, const nb::sequence& disks, int threads);
    ~OpenExecutor() { close(); }
    OpenExecutor(OpenExecutor&&) = delete;

    Executor& executor() const { return open(closed_ ? nullptr : executor_.get(), "the executor"); }
    bool has_gpu() const { return gpu_ != nullptr; }
    nb::object name_of(int32_t space) const { return names_[space]; }
    const std::string& disk() const {
        executor();
        return disk_;
    }

    void begin(int64_t number, int priority, Nanoseconds until, const nb::sequence& ways, const Int64s& groups,
               const nb::object& routes, const UInt64s& after, bool more);
    void extend(int64_t move, const nb::sequence& ways, bool last);
    void cancel(int64_t move) { executor().cancel(move); }  // an unknown move has ended
    std::optional<int64_t> wait(int64_t move, double seconds, int32_t group);
    nb::tuple outcome(int64_t move);
    void refuse(int status);

    std::vector<std::pair<int64_t, int32_t>> take_late(double seconds, int64_t most);
    int64_t held_slots() const { return closed_ ? 0 : executor_->held_slots(); }
    int64_t free_slots() const { return executor().free_slots(); }

    void trace() {
        executor().trace();
        if (gpu_) gpu_->gpu->trace();
    }
    nb::list take_spans();

    bool closed() const { return closed_; }
    void stop() { executor().stop(); }
    void close() {
        if (std::exchange(closed_, true)) return;
        {
            const Unlocked others;  // a disk's threads and waiting calls may want it
            executor_->stop();
            calls_.end();
            server_.reset();
            executor_.reset();
        }
        gpu_.reset();
        pool_.reset();
        kept_.clear();  // a reference to this object must keep no tier's memory
    }

private:
    int32_t number_of(const nb::object& name) const;
    std::vector<Way> read(const nb::sequence& ways) const;

    std::string disk_;  // the first disk's name
    std::shared_ptr<const HostPlanes> pool_;
    std::shared_ptr<GpuCopies> gpu_;
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<GpuServer> server_;  // ends before the executor
    Calls calls_;                        // slices of waits; signals are handled between them
    bool closed_ = false;
    nb::dict numbers_;  // of spaces, by name
    nb::list names_;
    nb::dict kept_;  // the spaces, which keep the memory behind their addresses alive
};

}  // namespace gdscache
