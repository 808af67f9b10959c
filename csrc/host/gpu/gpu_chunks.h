// One call of `Gpu::queue`, and its chunks. For gpu.cc and gpu_chunks*.cc.

#pragma once

#include <algorithm>
#include <cstdint>

#include "gpu/gpu.h"

namespace gdscache {

inline int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

// Pages with equal steps between slots, and between blocks: one copy for all of them, a row each.
struct Gpu::Stretch {
    const int64_t* pages;
    int64_t count;
    int64_t slots, blocks;  // steps from a page to the next
};

// One call of `queue`, on the host's side.
struct Gpu::Transfer {
    const PageCopies& copies;
    QueuedCopies& queued;
    int64_t origin, span, stride;     // of the layers in an extent, and of a page in the ring
    bool wide, on_gpu;                // indices of 64 bits; checksums by a kernel
    int64_t most_slots, most_blocks;  // from a row of one copy to the next
    int64_t at = 0;                   // the next page

    // Whether the copy engine, and kernels, have a part in it.
    bool copied() const { return copies.load || copies.route == Route::kCopyEngine || copies.route == Route::kStaged; }
    bool launched() const { return copies.route != Route::kCopyEngine || on_gpu; }
    int64_t item() const { return wide ? 8 : 4; }
    uint64_t part(int64_t page) const {
        const ExtentSlots& extents = copies.extents;
        return extents.address + static_cast<uint64_t>(copies.slots[page] * extents.stride + origin - extents.origin);
    }
    // Whether two pages lie in two registrations of host memory.
    bool fenced(int64_t page, int64_t other) const {
        const int64_t fence = copies.extents.fence;
        return fence != 0 && copies.slots[page] / fence != copies.slots[other] / fence;
    }
    // The first pages, of `count` in slot order, that one copy can take.
    Stretch stretch(const int64_t* pages, int64_t count, int64_t page_blocks) const;
    void write(void* to, int64_t first, int64_t pages, int64_t page_blocks, bool with_slots) const {
        wide ? write(static_cast<int64_t*>(to), first, pages, page_blocks, with_slots)
             : write(static_cast<int32_t*>(to), first, pages, page_blocks, with_slots);
    }
    template <typename Index>
    void write(Index* to, int64_t first, int64_t pages, int64_t page_blocks, bool with_slots) const {
        const int64_t count = pages * page_blocks;
        std::copy_n(copies.blocks + first * page_blocks, count, to);
        if (with_slots) std::copy_n(copies.slots + first, pages, to + count);
    }
};

// Pages [first, first + pages) in one segment. `table`: their block indices, then their slots, in page-locked memory;
// null if the block indices go with the launch.
struct Gpu::Chunk {
    int64_t first = 0, pages = 0;
    Segment* segment = nullptr;
    const void* table = nullptr;
    int64_t table_bytes = 0;
    uint64_t rows = 0;  // the slots' address on the GPU
};

}  // namespace gdscache
