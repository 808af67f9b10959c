// Pages between extents and the planes of a GPU: the copy engine between page-locked extents and a ring in GPU memory,
// kernels between ring and planes; or one kernel that reads and writes host memory itself; or the copy engine alone,
// into and out of the planes.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "cuda/cuda.h"
#include "gpu/gpu_lane.h"

namespace gdscache {

// `kDevice`: the extents are in GPU memory themselves, and a kernel reads or writes them there.
enum class Route : int32_t { kStaged, kZeroCopy, kCopyEngine, kDevice };

// Where a plane's pages lie, in bytes: a block's tokens are one run, or one run a token where these are apart. `start`,
// `end`: of the plane in its layer of an extent.
struct PlaneRuns {
    int64_t base, block_stride, run_stride, run_bytes, runs_per_block, start, end;
};

// csrc/pages.cu, as it was compiled and loaded; null where there are no kernels.
struct PageKernels {
    CudaFunction gather, scatter, gather_sums, scatter_sums;
    uint64_t table = 0;       // of layers and planes, in GPU memory
    int32_t vector = 0;       // bytes of its widest access
    int32_t processors = 0;   // of the GPU
    bool sums = false;        // whether they can take checksums of these layers
    bool looks = false;       // ... from the planes alone
};

// In bytes: what one kernel moves over the bus (each start and end costs some 30 us of it); what one looks at behind
// copies (each wait for them costs some 15 us), and behind a load's last ones, when nothing is copied any more; what
// goes before others' copies may pass (each time costs some 2 us).
struct ChunkSizes {
    int64_t moved = 512 << 20, looked = 256 << 20, looked_last = 32 << 20, unbroken = 32 << 20;
    int64_t rows = 16;  // pages of one copy, a row each: 32 and more disturb matrix products
};

// The planes of a pool, and the pages in them.
struct GpuPlanes {
    int32_t layers = 0, page_blocks = 0;
    int64_t blocks = 0;
    int64_t extent_bytes = 0;
    std::vector<int64_t> bounds;       // where each layer begins in an extent, and where the last one ends
    std::vector<int32_t> first_plane;  // of each layer, and their number at the end
    std::vector<PlaneRuns> planes;
};

// Memory with extents in slots: slot i begins at `address + i * stride` with byte `origin` of its extent.
struct ExtentSlots {
    uint64_t address;
    int64_t stride, origin, slots;
    bool device, pinned;
    int64_t fence;  // slots of each page-locked registration, which no copy may leave; 0: there is one
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

// Copies that are queued. `point`: behind all of them; `read`: behind the last look at what they take.
struct QueuedCopies {
    int64_t point = 0, read = 0;
    int64_t pages = 0;
    int32_t first = 0, last = 0;
    bool sums = false, device = false;
    HostBuffers::Buffer digests;  // uint64 (pages, layers), where kernels take them
    std::vector<HostBuffers::Buffer> tables;
    std::vector<uint64_t> parts;  // where each page's layers begin, where the host takes checksums
    CudaEvent times[4] = {};      // first and last of the copies, and of the kernels, where somebody keeps the time
};

// When a stream worked on some copies, in nanoseconds of the host's monotonic clock; 0 where it did not.
struct StreamTime {
    int64_t begin = 0, end = 0;
};
using StreamTimes = std::array<StreamTime, 2>;  // of its copies, and of its kernels

// Copies of one pool's pages, both ways at once; a transfer a way at a time. Thread-safe.
class Gpu {
public:
    // `staging` bytes of GPU memory are the ring: half for loads, half for stores, and neither borrows. Who opens it
    // and who closes it has entered. Throws CudaError.
    Gpu(const Cuda& cuda, GpuPlanes planes, const PageKernels& kernels, const ChunkSizes& sizes, size_t staging);

    const Cuda& cuda() const { return cuda_; }
    // Of the calling thread, for good: see cuda.h. Nothing is lost where the driver refuses.
    void leave_captures_alone() const noexcept;

    const GpuPlanes& planes() const { return planes_; }

    // Queue copies. What cannot be queued as a whole has ended when this throws.
    QueuedCopies queue(const PageCopies& asked);
    // Wait until they are done, give back what they needed, and leave their checksums in `sums`, uint64 (pages,
    // layers), where they were asked for; null where nobody wants them any more. The times of copies and kernels, where
    // the time is kept.
    StreamTimes finish(QueuedCopies& queued, uint64_t* sums);
    // Keep the time of what is queued from now on.
    void trace() { traced_ = true; }

    // The last point of loads, and of stores; 0: nothing was queued.
    int64_t last(bool loads) const { return (loads ? loads_ : stores_).done.last(); }
    // About a point that `queue` or `last` gave out; the GPU is past 0.
    bool reached(int64_t point) { return points_of(point).reached(point); }
    // The same as far as it is known, without asking the driver.
    bool past(int64_t point) { return points_of(point).past(point); }
    void await(int64_t point) { points_of(point).await(point); }
    void follow(CudaStream stream, int64_t point) { points_of(point).follow(stream, point); }

private:
    struct Transfer;
    struct Chunk;
    struct Stretch;

    Points& points_of(int64_t point);
    void run(Lane& lane, Transfer& transfer);
    bool cut(Lane& lane, Transfer& transfer, Chunk* chunk);
    void load_chunk(Lane& lane, const Transfer& transfer, const Chunk& chunk) const;
    void store_chunk(Lane& lane, const Transfer& transfer, const Chunk& chunk) const;
    void copy_pieces(Lane& lane, const Transfer& transfer, int64_t first, int64_t end) const;
    void copy_rows(Lane& lane, const Transfer& transfer, const Stretch& stretch) const;
    void add_pieces(CopyList* list, const Transfer& transfer, int64_t page, int32_t layer,
                    const PlaneRuns& plane) const;
    void add_table(const Chunk& chunk, CopyList* list) const;
    void bring_table(const Chunk& chunk, CudaStream stream) const;
    void stage(Lane& lane, const Transfer& transfer, const Chunk& chunk) const;
    void submit(Lane& lane, const Transfer& transfer, const CopyList& list) const;
    void launch(Lane& lane, const Transfer& transfer, const Chunk& chunk) const;

    void give_back(QueuedCopies& queued);
    CudaEvent timed_event();
    void mark(const Transfer& transfer, const Lane& lane, int which);
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
    std::vector<CudaEvent> timed_;  // ... that nobody has
    OwnStream anchors_;             // where the clocks are compared
    OwnEvent anchor_;
    int64_t anchored_ = 0;  // when `anchor_` happened
};

}  // namespace gdscache
