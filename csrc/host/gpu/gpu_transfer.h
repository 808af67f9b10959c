// One call of `Gpu::queue`: its chunks, their copies and their kernels. For gpu.cc alone.

#pragma once

#include <cstring>
#include <numeric>
#include <ranges>

#include "gpu/gpu.h"

namespace gdscache {

class Gpu::Transfer {
public:
    Transfer(Gpu& gpu, Lane& lane, const PageCopies& asked, QueuedCopies& queued)
        : cuda_(gpu.cuda_),
          planes_(gpu.planes_),
          kernels_(gpu.kernels_),
          sizes_(gpu.sizes_),
          buffers_(gpu.buffers_),
          lane_(lane),
          queued_(queued),
          copies_(routed(asked, gpu.kernels_.gather != nullptr)),
          alone_(copies_.route == Route::kCopyEngine),
          origin_(planes_.bounds[copies_.first]),
          span_(planes_.bounds[copies_.last] - origin_),
          stride_(up(span_, 16) * 16),
          wide_(std::max(planes_.blocks, copies_.extents.slots) > INT32_MAX),
          on_gpu_((copies_.sums && kernels_.gather != nullptr && kernels_.sums && (!alone_ || kernels_.looks)) ||
                  planes_.packed),
          most_slots_(kMostStep / copies_.extents.stride) {
        const auto strides = planes_.planes | std::views::transform(&PlaneRuns::block_stride);
        const auto [least, largest] = std::ranges::minmax(strides);
        if (least > 0) most_blocks_ = kMostStep / largest;
    }

    // Whether the copy engine, and kernels, have a part in it.
    bool copied() const { return copies_.load || alone_ || copies_.route == Route::kStaged; }
    bool launched() const { return !alone_ || on_gpu_; }
    bool alone() const { return alone_; }

    // Take the buffers of checksums, and have the first streams wait for the events that the caller named.
    void begin() {
        const size_t layers = static_cast<size_t>(copies_.last - copies_.first);
        const size_t pages = static_cast<size_t>(copies_.pages), unfit = planes_.packed ? pages * 4 : 0;
        if (on_gpu_) queued_.digests = buffers_.take(pages * layers * 8 + unfit);
        if (unfit) std::memset(static_cast<uint8_t*>(queued_.digests.memory) + pages * layers * 8, 0, unfit);
        if (launched()) lane_.next_kernels(copies_.after);
        for (const uint64_t event : copies_.after) {
            if (alone_) cuda_.follow(lane_.copies, reinterpret_cast<CudaEvent>(event));
        }
        if (!copies_.sums || on_gpu_) return;
        for (int64_t page = 0; page < copies_.pages; ++page) queued_.parts.push_back(part(page));
    }

    void run() {
        if (!launched()) return copy_pieces(0, copies_.pages);
        for (Chunk chunk; cut(&chunk);) {
            if (chunk.first > 0) lane_.next_kernels(copies_.after);
            copies_.load ? load(chunk) : store(chunk);
        }
    }

private:
    static constexpr int64_t kMostStep = INT32_MAX;  // bytes between rows of one copy that every GPU takes

    // as in csrc/pages.cu
    static constexpr int64_t kTile = 1024;
    static constexpr int64_t kListedBytes = 3520;  // of block indices that fit among a kernel's arguments
    static constexpr int64_t kLaunchTiles = 1 << 30;
    static constexpr int64_t kLayerWords = 4;  // of the table

    // The first chunk of a store that finds no other under way is smaller by this factor: its copies wait for its kernel.
    static constexpr int64_t kFirstStore = 4;

    static constexpr int32_t kStagedThreads = 256;
    static constexpr int32_t kZeroCopyThreads = 1024;
    static constexpr int64_t kZeroCopyBlocks = 6;
    static constexpr int32_t kProcessorThreads = 512;
    // least threads of a launch: fewer do not keep memory busy, and larger blocks find no place beside a model
    static constexpr int64_t kSumsLeast = 64 << 10;
    static constexpr uint32_t kPackedThreads = 256;
    static constexpr int64_t kPackedBlocks = 4;  // a processor

    static constexpr size_t kBatch = 256;  // copies of one call: it starts when all are submitted, at some 0.4 us each
    static constexpr size_t kFirstPieces = 128;  // of the first list: they are on the bus while the next are computed
    static constexpr int64_t kLeastRows = 6;  // of one copy: queueing it takes as long as this many of a list

    // The arguments of the kernels in pages.cu; the last two only for checksums.
    struct KernelArguments {
        uint64_t layers, planes, blocks, rows, extents;
        int64_t stride, origin, slots, pool_blocks;
        uint32_t pages, n_layers, first_plane, n_planes, tiles, page_blocks, wide;
        uint64_t skipped;
        uint8_t listed[kListedBytes];
        uint32_t team;
        uint64_t digests;
        uint64_t unfit;  // of csrc/packed.cu alone
    };

    // Pages [first, first + pages) in one segment. `table`: their block indices, then their slots, in page-locked memory;
    // null if the block indices go with the launch.
    struct Chunk {
        int64_t first = 0, pages = 0;
        Segment* segment = nullptr;
        const void* table = nullptr;
        int64_t table_bytes = 0;
        uint64_t rows = 0;  // the slots' address on the GPU
    };

    // Pages with equal steps between slots, and between blocks: one copy for all of them, a row each.
    struct Stretch {
        const int64_t* pages;
        int64_t count;
        int64_t slots, blocks;  // steps from a page to the next
    };

    static int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

    static PageCopies routed(PageCopies copies, bool kernels) {
        if (copies.extents.device) copies.route = Route::kDevice;
        else if (!copies.extents.pinned) copies.route = Route::kStaged;
        if (!kernels) copies.route = Route::kCopyEngine;
        return copies;
    }

    int64_t item() const { return wide_ ? 8 : 4; }
    uint64_t part(int64_t page) const {
        const ExtentSlots& extents = copies_.extents;
        return extents.address + static_cast<uint64_t>(copies_.slots[page] * extents.stride + origin_ - extents.origin);
    }
    // Whether two pages lie in two registrations of host memory.
    bool fenced(int64_t page, int64_t other) const {
        const int64_t fence = copies_.extents.fence;
        return fence != 0 && copies_.slots[page] / fence != copies_.slots[other] / fence;
    }
    void write(void* to, int64_t first, int64_t pages, bool with_slots) const {
        wide_ ? write_as(static_cast<int64_t*>(to), first, pages, with_slots)
              : write_as(static_cast<int32_t*>(to), first, pages, with_slots);
    }
    template <typename Index>
    void write_as(Index* to, int64_t first, int64_t pages, bool with_slots) const {
        const int64_t count = pages * planes_.page_blocks;
        std::copy_n(copies_.blocks + first * planes_.page_blocks, count, to);
        if (with_slots) std::copy_n(copies_.slots + first, pages, to + count);
    }

    // --- chunks

    // Cut the next pages off, with a segment of their own; false behind the last.
    bool cut(Chunk* chunk) {
        const int64_t left = copies_.pages - at_;
        if (left == 0) return false;
        const bool staged = copies_.route == Route::kStaged;
        const int64_t row = planes_.page_blocks + 1;
        const int64_t bytes = staged ? static_cast<int64_t>(lane_.most) : alone_ ? sizes_.looked : sizes_.moved;
        int64_t most = std::clamp<int64_t>(bytes / stride_, 1, static_cast<int64_t>(lane_.table_bytes) / (8 * row));
        const int64_t listed = kListedBytes / (planes_.page_blocks * item());
        const bool listable = (staged || alone_) && listed > 0;
        if (listable && listed >= std::min(copies_.pages, most / 2)) most = std::min(most, listed);
        const int64_t even = up(left, up(left, most));  // the rest of the transfer in equal chunks
        const bool first = at_ == 0 && !copies_.load && lane_.done.reached(lane_.done.last());
        int64_t pages = first ? std::min(left, up(most, kFirstStore)) : even;
        const int64_t last = std::max<int64_t>(1, sizes_.looked_last / stride_);
        if (alone_ && last < pages && pages == left) pages -= last;
        const int64_t data = staged ? pages * stride_ : 0;
        *chunk = {at_, pages, &lane_.take(static_cast<size_t>(data)), nullptr, 0, 0};
        if (!listable || pages > listed) {
            chunk->table_bytes = pages * row * item();
            const HostBuffers::Buffer table = buffers_.take(static_cast<size_t>(chunk->table_bytes));
            queued_.tables.push_back(table);
            write(table.memory, at_, pages, true);
            chunk->table = table.memory;
            chunk->rows = chunk->segment->table + static_cast<uint64_t>(pages * planes_.page_blocks * item());
        }
        at_ += pages;
        return true;
    }

    // If the copy engine alone moves the bytes, a kernel takes the planes' checksums: behind a load's copies, beside a store's.
    void load(const Chunk& chunk) const {
        const Segment& segment = *chunk.segment;
        for (const CudaEvent event : segment.after) cuda_.follow(lane_.copies, event);
        if (copies_.route == Route::kStaged) stage(chunk);
        else bring_table(chunk, lane_.copies);
        if (alone_) copy_pieces(chunk.first, chunk.first + chunk.pages);
        cuda_.record(segment.copied, lane_.copies);
        cuda_.follow(lane_.kernels, segment.copied);
        launch(chunk);
        cuda_.record(segment.done, lane_.kernels);
    }

    void store(const Chunk& chunk) const {
        const Segment& segment = *chunk.segment;
        for (const CudaEvent event : segment.after) cuda_.follow(lane_.kernels, event);
        bring_table(chunk, lane_.kernels);
        launch(chunk);
        cuda_.record(segment.done, lane_.kernels);
        if (alone_) copy_pieces(chunk.first, chunk.first + chunk.pages);
        if (copies_.route == Route::kStaged) {
            cuda_.follow(lane_.copies, segment.done);
            stage(chunk);
        }
        cuda_.record(segment.copied, lane_.copies);
    }

    // --- copies

    void add_table(const Chunk& chunk, CopyList* list) const {
        if (chunk.table == nullptr) return;
        const auto bytes = static_cast<size_t>(chunk.table_bytes);
        list->add(chunk.segment->table, reinterpret_cast<uint64_t>(chunk.table), bytes, true);
    }

    void bring_table(const Chunk& chunk, CudaStream stream) const {
        CopyList list;
        add_table(chunk, &list);
        cuda_.copy(list, 0, list.size(), stream, true);
    }

    // Copy a chunk's pages between extents and ring, neighbours joined. A load's table goes along: alone it takes as long.
    void stage(const Chunk& chunk) const {
        CopyList list;
        list.most = lane_.unbroken;
        if (copies_.load) add_table(chunk, &list);
        for (int64_t page = 0; page < chunk.pages; ++page) {
            const uint64_t ring = chunk.segment->data + static_cast<uint64_t>(page * stride_);
            const uint64_t host = part(chunk.first + page);
            const bool apart = page == 0 || fenced(chunk.first + page, chunk.first + page - 1);
            list.add(copies_.load ? ring : host, copies_.load ? host : ring, static_cast<size_t>(span_), apart);
        }
        submit(list);
    }

    void submit(const CopyList& list) const {
        const bool pinned = copies_.extents.pinned || copies_.extents.device;
        for (size_t first = 0, last = 0; first < list.size(); first = last) {
            size_t bytes = 0;
            const size_t end = std::min(list.size(), first + kBatch);
            while (last < end && (last == first || list.bytes[last] <= list.most - bytes)) bytes += list.bytes[last++];
            lane_.make_way(bytes);
            cuda_.copy(list, first, last, lane_.copies, pinned);
        }
    }

    template <typename Function>
    void for_planes(const Function& function) const {
        for (int32_t layer = copies_.first; layer < copies_.last; ++layer) {
            for (int32_t n = planes_.first_plane[layer]; n < planes_.first_plane[layer + 1]; ++n) {
                function(layer, planes_.planes[n]);
            }
        }
    }

    // Copy straight between extents and planes. Pages with equal steps go by one call a piece, a row a page: a short call,
    // which matters because threads that launch a model's kernels wait for the same lock. Other pages go in lists.
    void copy_pieces(int64_t first, int64_t end) const {
        const int64_t count = end - first;
        std::vector<int64_t> pages(static_cast<size_t>(count));
        std::iota(pages.begin(), pages.end(), first);
        std::ranges::sort(pages, {}, [&](int64_t page) { return copies_.slots[page]; });
        CopyList list;
        list.most = lane_.unbroken;
        size_t most = kFirstPieces;
        const auto hand_over = [&] {
            submit(list);
            list.clear();
            most = kBatch;
        };
        for (int64_t at = 0; at < count;) {
            const Stretch together = stretch(&pages[static_cast<size_t>(at)], std::min(count - at, sizes_.rows));
            at += together.count;
            if (together.count >= kLeastRows) {
                copy_rows(together);
                continue;
            }
            for (int64_t n = 0; n < together.count; ++n) {
                for_planes(
                    [&](int32_t layer, const PlaneRuns& plane) { add_pieces(&list, together.pages[n], layer, plane); });
                if (list.size() >= most) hand_over();
            }
        }
        hand_over();
    }

    void copy_rows(const Stretch& together) const {
        const auto in_extents = static_cast<size_t>(together.slots * copies_.extents.stride);
        CopyList list;
        for_planes([&](int32_t layer, const PlaneRuns& plane) {
            const auto in_planes = static_cast<size_t>(together.blocks * plane.block_stride);
            list.clear();
            add_pieces(&list, together.pages[0], layer, plane);
            for (size_t n = 0; n < list.size(); ++n) {
                const CopyRows rows(list.to[n], list.from[n], list.bytes[n], copies_.load ? in_planes : in_extents,
                                    copies_.load ? in_extents : in_planes, static_cast<size_t>(together.count));
                lane_.make_way(rows.bytes * rows.rows);
                cuda_.copy(rows, lane_.copies);
            }
        });
    }

    // The first pages, of `count` in slot order, that one copy can take.
    Stretch stretch(const int64_t* pages, int64_t count) const {
        Stretch found{pages, 1, 0, 0};
        if (!copies_.extents.pinned && !copies_.extents.device) return found;
        const int64_t page_blocks = planes_.page_blocks;
        for (; found.count < count; ++found.count) {
            const int64_t page = pages[found.count], before = pages[found.count - 1];
            const int64_t* const blocks = copies_.blocks + page * page_blocks;
            const int64_t* const those = copies_.blocks + before * page_blocks;
            const int64_t slots_on = copies_.slots[page] - copies_.slots[before], blocks_on = blocks[0] - those[0];
            if (found.count == 1) found.slots = slots_on, found.blocks = blocks_on;
            if (slots_on != found.slots || blocks_on != found.blocks || fenced(page, before)) break;
            if (std::min(slots_on, blocks_on) < 1 || slots_on > most_slots_ || blocks_on > most_blocks_) break;
            const auto as_far = [&](int64_t block, int64_t that) { return block - that == found.blocks; };
            if (!std::equal(blocks, blocks + page_blocks, those, as_far)) break;
        }
        return found;
    }

    // Add a page's pieces in a plane. Neighbours are joined, except across two planes, which may be two adjacent
    // allocations, and across two pages, which may lie in two registrations of host memory.
    void add_pieces(CopyList* list, int64_t page, int32_t layer, const PlaneRuns& plane) const {
        const int64_t* const blocks = copies_.blocks + page * planes_.page_blocks;
        const uint64_t layer_at = part(page) + static_cast<uint64_t>(planes_.bounds[layer] - origin_);
        const int64_t runs = (plane.end - plane.start) / plane.run_bytes;
        for (int64_t run = 0; run < runs; ++run) {
            const int64_t block = blocks[run / plane.runs_per_block];
            const auto in_planes = static_cast<uint64_t>(plane.base + block * plane.block_stride +
                                                         run % plane.runs_per_block * plane.run_stride);
            const uint64_t in_extent = layer_at + static_cast<uint64_t>(plane.start + run * plane.run_bytes);
            const auto size = static_cast<size_t>(plane.run_bytes);
            list->add(copies_.load ? in_planes : in_extent, copies_.load ? in_extent : in_planes, size, run == 0);
        }
    }

    // --- kernels

    void launch(const Chunk& chunk) const {
        const bool staged = copies_.route == Route::kStaged;
        const int32_t layers = copies_.last - copies_.first;
        int64_t widest = 0, filled = 0;
        for (int32_t layer = copies_.first; layer < copies_.last; ++layer) {
            const int64_t bytes = planes_.bounds[layer + 1] - planes_.bounds[layer];
            widest = std::max(widest, bytes);
            filled += std::min(bytes, 2 * kTile);
        }
        const int64_t tiles = up(widest, kTile), pieces = chunk.pages * layers, work = pieces * tiles;
        if (work >= kLaunchTiles) throw CudaError(std::to_string(chunk.pages) + " pages are too many for one launch");
        KernelArguments arguments;
        arguments.layers = kernels_.table + static_cast<uint64_t>(copies_.first) * kLayerWords * 8;
        arguments.planes = kernels_.table + static_cast<uint64_t>(planes_.layers) * kLayerWords * 8;
        arguments.blocks = chunk.table == nullptr ? 0 : chunk.segment->table;
        arguments.rows = staged || alone_ ? 0 : chunk.rows;
        arguments.extents = alone_ ? 0 : staged ? chunk.segment->data : copies_.extents.address;
        arguments.stride = alone_ ? 0 : staged ? stride_ : copies_.extents.stride;
        arguments.origin = alone_ ? 0 : staged ? origin_ : copies_.extents.origin;
        arguments.slots = staged || alone_ ? chunk.pages : copies_.extents.slots;
        if (!alone_) {
            const int64_t steps[] = {static_cast<int64_t>(arguments.extents % 16), arguments.stride,
                                     origin_ - arguments.origin};
            for (const int64_t step : steps) {
                if (step % kernels_.vector != 0) throw CudaError("extents that the kernels' accesses do not fit");
            }
        }
        arguments.pool_blocks = planes_.blocks;
        arguments.pages = static_cast<uint32_t>(chunk.pages);
        arguments.n_layers = static_cast<uint32_t>(layers);
        arguments.first_plane = static_cast<uint32_t>(planes_.first_plane[copies_.first]);
        arguments.n_planes = static_cast<uint32_t>(planes_.first_plane[copies_.last]) - arguments.first_plane;
        arguments.tiles = static_cast<uint32_t>(tiles);
        arguments.page_blocks = static_cast<uint32_t>(planes_.page_blocks);
        arguments.wide = wide_;
        arguments.skipped = 0;  // every index was checked before
        if (chunk.table == nullptr) write(arguments.listed, chunk.first, chunk.pages, false);
        // Few processors for a kernel that waits for the bus; more if small layers leave part of each warp idle.
        const double share = static_cast<double>(filled) / static_cast<double>(2 * kTile * layers);
        const auto wanted =
            static_cast<int64_t>(static_cast<double>(kZeroCopyBlocks) / std::max(share, 0.25) + 0.999999);
        const int64_t blocks = copies_.route == Route::kZeroCopy ? std::min(4 * kZeroCopyBlocks, wanted) : 0;
        const auto start = [&](CudaFunction kernel, int64_t most, int64_t grid, uint32_t threads, size_t size) {
            cuda_.launch(kernel, static_cast<uint32_t>(std::min(most, grid)), threads, &arguments, size, lane_.kernels);
        };
        if (!on_gpu_) {
            const int32_t threads = blocks ? kZeroCopyThreads : kStagedThreads;
            const int64_t most = blocks ? blocks : int64_t{kernels_.processors} * (kProcessorThreads / threads);
            return start(copies_.load ? kernels_.scatter : kernels_.gather, most, up(work * 16, threads),
                         static_cast<uint32_t>(threads), offsetof(KernelArguments, team));
        }
        const auto results = reinterpret_cast<uint64_t>(queued_.digests.memory);
        arguments.digests = results + static_cast<uint64_t>(chunk.first * layers) * 8;
        const CudaFunction kernel = copies_.load && !alone_ ? kernels_.scatter_sums : kernels_.gather_sums;
        if (planes_.packed) {
            arguments.team = 1;
            arguments.unfit = results + static_cast<uint64_t>(copies_.pages * layers * 8 + chunk.first * 4);
            const int64_t most = blocks ? 4 * blocks : kernels_.processors * kPackedBlocks;
            return start(kernel, most, pieces, kPackedThreads, sizeof arguments);
        }
        // A page's layer gets a team of warps, four spans a warp, or a block's warps. Of two warps one would only fold.
        int32_t threads = 256;
        while (threads < 1024 && pieces * threads < kSumsLeast) threads *= 2;
        const auto spans = static_cast<uint64_t>(up(tiles, 8));
        const int64_t sharing = std::min<int64_t>(threads / 32, int64_t{1} << std::bit_width(spans - 1));
        arguments.team = sharing < 4 ? 1 : static_cast<uint32_t>(sharing);
        const int64_t most = (blocks ? 2 * blocks : kernels_.processors) * (1024 / threads);
        start(kernel, most, up(pieces * arguments.team * 32, threads), static_cast<uint32_t>(threads),
              offsetof(KernelArguments, unfit));
    }

    const Cuda& cuda_;
    const GpuPlanes& planes_;
    const PageKernels& kernels_;
    const ChunkSizes& sizes_;
    HostBuffers& buffers_;
    Lane& lane_;
    QueuedCopies& queued_;
    const PageCopies copies_;
    const bool alone_;  // the copy engine moves all bytes
    const int64_t origin_, span_, stride_;  // of the layers in an extent, and of a page in the ring
    const bool wide_, on_gpu_;  // indices of 64 bits; checksums by a kernel
    const int64_t most_slots_;  // from a row of one copy to the next
    int64_t most_blocks_ = 0;
    int64_t at_ = 0;  // the next page
};

}  // namespace gdscache
