// The copies of a transfer: see gpu.h.

#include <cstddef>
#include <numeric>

#include "gpu/gpu_chunks.h"

namespace gdscache {
namespace {

constexpr size_t kBatch = 256;  // copies of one call: it starts when all are submitted, at some 0.4 us each
constexpr size_t kFirstPieces = 128;  // of the first list: the first pieces are on the bus while the next are computed
constexpr int64_t kLeastRows = 6;  // of one copy: queueing it takes as long as this many of a list

template <typename Function>
void for_planes(const GpuPlanes& planes, const PageCopies& copies, const Function& function) {
    for (int32_t layer = copies.first; layer < copies.last; ++layer) {
        for (int32_t n = planes.first_plane[layer]; n < planes.first_plane[layer + 1]; ++n) {
            function(layer, planes.planes[n]);
        }
    }
}

}  // namespace

void Gpu::add_table(const Chunk& chunk, CopyList* list) const {
    if (chunk.table == nullptr) return;
    const auto bytes = static_cast<size_t>(chunk.table_bytes);
    list->add(chunk.segment->table, reinterpret_cast<uint64_t>(chunk.table), bytes, true);
}

void Gpu::bring_table(const Chunk& chunk, CudaStream stream) const {
    CopyList list;
    add_table(chunk, &list);
    cuda_.copy(list, 0, list.size(), stream, true);
}

// Copy a chunk's pages between extents and ring, neighbours joined. A load's table goes with the first copy: alone it
// would take as long as a large one.
void Gpu::stage(Lane& lane, const Transfer& transfer, const Chunk& chunk) const {
    const bool load = transfer.copies.load;
    CopyList list;
    list.most = lane.unbroken;
    if (load) add_table(chunk, &list);
    for (int64_t page = 0; page < chunk.pages; ++page) {
        const uint64_t ring = chunk.segment->data + static_cast<uint64_t>(page * transfer.stride);
        const uint64_t host = transfer.part(chunk.first + page);
        const bool apart = page == 0 || transfer.fenced(chunk.first + page, chunk.first + page - 1);
        list.add(load ? ring : host, load ? host : ring, static_cast<size_t>(transfer.span), apart);
    }
    submit(lane, transfer, list);
}

void Gpu::submit(Lane& lane, const Transfer& transfer, const CopyList& list) const {
    const bool pinned = transfer.copies.extents.pinned || transfer.copies.extents.device;
    for (size_t first = 0, last = 0; first < list.size(); first = last) {
        size_t bytes = 0;
        const size_t end = std::min(list.size(), first + kBatch);
        while (last < end && (last == first || list.bytes[last] <= list.most - bytes)) bytes += list.bytes[last++];
        lane.make_way(bytes);
        cuda_.copy(list, first, last, lane.copies, pinned);
    }
}

// Copy straight between extents and planes. Pages with equal steps go by one call a piece, a row a page: a short call,
// which matters because threads that launch a model's kernels wait for the same lock. Other pages go one by one, in
// lists.
void Gpu::copy_pieces(Lane& lane, const Transfer& transfer, int64_t first, int64_t end) const {
    const PageCopies& copies = transfer.copies;
    const int64_t count = end - first;
    std::vector<int64_t> pages(static_cast<size_t>(count));
    std::iota(pages.begin(), pages.end(), first);
    std::ranges::sort(pages, {}, [&](int64_t page) { return copies.slots[page]; });
    CopyList list;
    list.most = lane.unbroken;
    size_t most = kFirstPieces;
    const auto hand_over = [&] {
        submit(lane, transfer, list);
        list.clear();
        most = kBatch;
    };
    for (int64_t at = 0; at < count;) {
        const int64_t together = std::min(count - at, sizes_.rows);
        const Stretch stretch = transfer.stretch(&pages[static_cast<size_t>(at)], together, planes_.page_blocks);
        at += stretch.count;
        if (stretch.count >= kLeastRows) {
            copy_rows(lane, transfer, stretch);
            continue;
        }
        for (int64_t n = 0; n < stretch.count; ++n) {
            for_planes(planes_, copies, [&](int32_t layer, const PlaneRuns& plane) {
                add_pieces(&list, transfer, stretch.pages[n], layer, plane);
            });
            if (list.size() >= most) hand_over();
        }
    }
    hand_over();
}

void Gpu::copy_rows(Lane& lane, const Transfer& transfer, const Stretch& stretch) const {
    const PageCopies& copies = transfer.copies;
    const auto in_extents = static_cast<size_t>(stretch.slots * copies.extents.stride);
    CopyList list;
    for_planes(planes_, copies, [&](int32_t layer, const PlaneRuns& plane) {
        const auto in_planes = static_cast<size_t>(stretch.blocks * plane.block_stride);
        list.clear();
        add_pieces(&list, transfer, stretch.pages[0], layer, plane);
        for (size_t n = 0; n < list.size(); ++n) {
            const CopyRows rows(list.to[n], list.from[n], list.bytes[n], copies.load ? in_planes : in_extents,
                                copies.load ? in_extents : in_planes, static_cast<size_t>(stretch.count));
            lane.make_way(rows.bytes * rows.rows);
            cuda_.copy(rows, lane.copies);
        }
    });
}

Gpu::Stretch Gpu::Transfer::stretch(const int64_t* pages, int64_t count, int64_t page_blocks) const {
    Stretch found{pages, 1, 0, 0};
    if (!copies.extents.pinned && !copies.extents.device) return found;
    for (; found.count < count; ++found.count) {
        const int64_t page = pages[found.count], before = pages[found.count - 1];
        const int64_t* const blocks = copies.blocks + page * page_blocks;
        const int64_t* const those = copies.blocks + before * page_blocks;
        const int64_t slots_on = copies.slots[page] - copies.slots[before], blocks_on = blocks[0] - those[0];
        if (found.count == 1) found.slots = slots_on, found.blocks = blocks_on;
        if (slots_on != found.slots || blocks_on != found.blocks || fenced(page, before)) break;
        if (std::min(slots_on, blocks_on) < 1 || slots_on > most_slots || blocks_on > most_blocks) break;
        const auto as_far = [&](int64_t block, int64_t that) { return block - that == found.blocks; };
        if (!std::equal(blocks, blocks + page_blocks, those, as_far)) break;
    }
    return found;
}

// Add a page's pieces in a plane. Neighbours are joined, except across two planes, which may be two adjacent
// allocations, and across two pages, which may lie in two registrations of host memory.
void Gpu::add_pieces(CopyList* list, const Transfer& transfer, int64_t page, int32_t layer,
                     const PlaneRuns& plane) const {
    const PageCopies& copies = transfer.copies;
    const int64_t* const blocks = copies.blocks + page * planes_.page_blocks;
    const uint64_t layer_at = transfer.part(page) + static_cast<uint64_t>(planes_.bounds[layer] - transfer.origin);
    const int64_t runs = (plane.end - plane.start) / plane.run_bytes;
    for (int64_t run = 0; run < runs; ++run) {
        const int64_t block = blocks[run / plane.runs_per_block];
        const auto in_planes = static_cast<uint64_t>(plane.base + block * plane.block_stride +
                                                     run % plane.runs_per_block * plane.run_stride);
        const uint64_t in_extent = layer_at + static_cast<uint64_t>(plane.start + run * plane.run_bytes);
        const auto size = static_cast<size_t>(plane.run_bytes);
        list->add(copies.load ? in_planes : in_extent, copies.load ? in_extent : in_planes, size, run == 0);
    }
}

}  // namespace gdscache
