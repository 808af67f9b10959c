// Copies of pages between extents and a GPU's planes: by the copy engine to a ring in GPU memory and kernels between
// ring and planes; by one kernel that accesses host memory itself; or by the copy engine alone.

#pragma once

#include <array>
#include <atomic>

#include "cuda/cuda.h"
#include "gpu/gpu_lane.h"

namespace gdscache {

// `kDevice`: the extents are in GPU memory, and a kernel reads or writes them there.
enum class Route : int32_t { kStaged, kZeroCopy, kCopyEngine, kDevice };

// The place of a plane's pages, in bytes. A block's tokens are one run, or one run a token if they are apart. `start`,
// `end`: the plane's bytes in its layer of an extent.
struct PlaneRuns {
    int64_t base, block_stride, run_stride, run_bytes, runs_per_block, start, end;
};

// csrc/pages.cu, compiled and loaded; null without kernels.
struct PageKernels {
    CudaFunction gather, scatter, gather_sums, scatter_sums;
    uint64_t table = 0;       // of layers and planes, in GPU memory
    int32_t vector = 0;       // bytes of the kernels' widest access
    int32_t processors = 0;   // of the GPU
    bool sums = false;        // they can take checksums of these layers
    bool looks = false;       // they can take checksums of the planes alone
};

// Sizes in bytes. `moved`: of one kernel over the bus (each start and end costs some 30 us of bus time). `looked`: of a
// kernel that takes checksums behind copies (each wait for them costs some 15 us). `looked_last`: of the last such
// kernel of a load, when the copies are over. `unbroken`: of copies before others' may pass (some 2 us a pass).
struct ChunkSizes {
    int64_t moved = 512 << 20, looked = 256 << 20, looked_last = 32 << 20, unbroken = 32 << 20;
    int64_t rows = 16;  // pages of one copy, a row each: 32 and more slow matrix products down
};

// The planes of a pool, and its pages' sizes.
struct GpuPlanes {
    int32_t layers = 0, page_blocks = 0;
    int64_t blocks = 0;
    int64_t extent_bytes = 0;
    std::vector<int64_t> bounds;       // the first byte of each layer in an extent, and the end of the last
    std::vector<int32_t> first_plane;  // of each layer, and behind them the number of planes
    std::vector<PlaneRuns> planes;
    bool packed = false;  // extents are: the kernels are those of csrc/packed.cu
};

// Memory with extents in slots: slot i begins at `address + i * stride` with byte `origin` of its extent.
struct ExtentSlots {
    uint64_t address;
    int64_t stride, origin, slots;
    bool device, pinned;
    int64_t fence;  // slots of each page-locked registration, which no copy leaves; 0: one
};

// Layers [first, last) of some pages. `blocks`: (pages, page_blocks) of the planes.
struct PageCopies {
    bool load;
    Route route;
    bool sums;
    int32_t first, last;
    int64_t pages;
    ExtentSlots extents;
    const int64_t* slots;
    const int64_t* blocks;
    std::span<const uint64_t> after;  // events
};

// Queued copies. `point`: behind all of them. `read`: behind the last read of their source.
struct QueuedCopies {
    int64_t point = 0, read = 0;
    int64_t pages = 0;
    int32_t first = 0, last = 0;
    bool load = false, sums = false, device = false;
    HostBuffers::Buffer digests;  // uint64 (pages, layers), if kernels take checksums; then uint32 (pages) if packed
    std::vector<HostBuffers::Buffer> tables;
    std::vector<uint64_t> parts;  // the first byte of each page's layers, if the host takes checksums
    std::vector<CudaEvent> times[4];  // traced: the begin and end of the copies, then of the kernels, in each stream
};

// The time of a stream's work on some copies, in nanoseconds of the host's monotonic clock; 0: none.
struct StreamTime {
    int64_t begin = 0, end = 0;
};
using StreamTimes = std::array<StreamTime, 2>;  // of the copies, and of the kernels

// Copies of one pool's pages, both ways at once, one transfer a way at a time. Thread-safe.
class Gpu {
public:
    // `staging`: bytes of the ring, half for loads. Its opening and closing threads have entered. Throws CudaError.
    Gpu(const Cuda& cuda, GpuPlanes planes, const PageKernels& kernels, const ChunkSizes& sizes, size_t staging);

    const Cuda& cuda() const { return cuda_; }
    // Of the calling thread, for good: see cuda.h. Ignores a driver that refuses.
    void leave_captures_alone() const noexcept;

    const GpuPlanes& planes() const { return planes_; }

    // Queue copies. If it throws, the part that was queued has ended.
    QueuedCopies queue(const PageCopies& asked);
    // Wait for the end of copies, and release their buffers, also if it throws. `sums`: uint64 (pages, layers), filled if
    // the copies asked for checksums; null: unwanted. Returns the times of copies and kernels, if traced.
    // `unfit`: by page, 1 for a page that does not fit into a packed extent, or null.
    StreamTimes finish(QueuedCopies& queued, uint64_t* sums, uint8_t* unfit = nullptr);
    // Keep the times of copies queued from now on.
    void trace() { traced_ = true; }

    // The last point of loads, or of stores; 0: none.
    int64_t last(bool loads) const { return (loads ? loads_ : stores_).done.last(); }
    // Whether the GPU has passed a point of `queue` or `last`. Point 0 is always passed.
    bool reached(int64_t point) { return points_of(point).reached(point); }
    // The same without asking the driver: false if unknown.
    bool past(int64_t point) { return points_of(point).past(point); }
    void await(int64_t point) { points_of(point).await(point); }
    void follow(CudaStream stream, int64_t point) { points_of(point).follow(stream, point); }

private:
    class Transfer;

    Points& points_of(int64_t point);
    void give_back(QueuedCopies& queued);
    CudaEvent timed_event();
    void mark(const Transfer& transfer, const Lane& lane, QueuedCopies& queued, int which);
    StreamTimes times_of(const QueuedCopies& queued);

    const Cuda& cuda_;
    const GpuPlanes planes_;
    const PageKernels kernels_;
    const ChunkSizes sizes_;
    HostBuffers buffers_;
    Lane loads_, stores_;
    std::atomic<bool> traced_ = false;
    std::mutex times_lock_;
    std::vector<OwnEvent> all_timed_;
    std::vector<CudaEvent> timed_;  // unused ones of `all_timed_`
    OwnStream anchors_;             // on which the clocks are compared
    OwnEvent anchor_;
    int64_t anchored_ = 0;  // the time of `anchor_`
};

}  // namespace gdscache
