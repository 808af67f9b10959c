// The work of a transfer, chunk by chunk: see gpu.h.

#include "gpu/gpu_chunks.h"

#include <bit>
#include <cstddef>
#include <string>

namespace gdscache {
namespace {

// as in csrc/pages.cu
constexpr int64_t kTile = 1024;
constexpr int64_t kListedBytes = 3520;  // of block indices that fit among a kernel's arguments
constexpr int64_t kLaunchTiles = 1 << 30;
constexpr int64_t kLayerWords = 4;  // of the table

// The first chunk of a store that finds no other under way is smaller by this factor: its copies wait for its kernel.
constexpr int64_t kFirstStore = 4;

constexpr int32_t kStagedThreads = 256;
constexpr int32_t kZeroCopyThreads = 1024;
constexpr int64_t kZeroCopyBlocks = 6;
constexpr int32_t kProcessorThreads = 512;
// least threads of a launch: fewer do not keep memory busy, and larger blocks find no place beside a model
constexpr int64_t kSumsLeast = 64 << 10;

constexpr uint32_t kPackedThreads = 256;
constexpr int64_t kPackedBlocks = 4;  // a processor

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

}  // namespace

// --- chunks

void Gpu::run(Lane& lane, Transfer& transfer) {
    const bool alone = transfer.copies.route == Route::kCopyEngine;
    if (alone && !transfer.on_gpu) {
        copy_pieces(lane, transfer, 0, transfer.copies.pages);
        return;
    }
    for (Chunk chunk; cut(lane, transfer, &chunk);) {
        if (chunk.first > 0) lane.next_kernels(transfer.copies.after);
        transfer.copies.load ? load_chunk(lane, transfer, chunk) : store_chunk(lane, transfer, chunk);
    }
}

// Cut the next pages off a transfer, with a segment of their own; false behind the last.
bool Gpu::cut(Lane& lane, Transfer& transfer, Chunk* chunk) {
    const PageCopies& copies = transfer.copies;
    const int64_t left = copies.pages - transfer.at;
    if (left == 0) return false;
    const bool staged = copies.route == Route::kStaged, alone = copies.route == Route::kCopyEngine;
    const int64_t row = planes_.page_blocks + 1;
    const int64_t bytes = staged ? static_cast<int64_t>(lane.most) : alone ? sizes_.looked : sizes_.moved;
    int64_t most = std::clamp<int64_t>(bytes / transfer.stride, 1, static_cast<int64_t>(lane.table_bytes) / (8 * row));
    const int64_t listed = kListedBytes / (planes_.page_blocks * transfer.item());
    const bool listable = (staged || alone) && listed > 0;
    if (listable && listed >= std::min(copies.pages, most / 2)) most = std::min(most, listed);
    const int64_t even = up(left, up(left, most));  // the rest of the transfer in equal chunks
    const bool first = transfer.at == 0 && !copies.load && lane.done.reached(lane.done.last());
    int64_t pages = first ? std::min(left, up(most, kFirstStore)) : even;
    const int64_t last = std::max<int64_t>(1, sizes_.looked_last / transfer.stride);
    if (alone && last < pages && pages == left) pages -= last;
    const int64_t data = staged ? pages * transfer.stride : 0;
    *chunk = {transfer.at, pages, &lane.take(static_cast<size_t>(data)), nullptr, 0, 0};
    if (!listable || pages > listed) {
        chunk->table_bytes = pages * row * transfer.item();
        const HostBuffers::Buffer table = buffers_.take(static_cast<size_t>(chunk->table_bytes));
        transfer.queued.tables.push_back(table);
        transfer.write(table.memory, transfer.at, pages, planes_.page_blocks, true);
        chunk->table = table.memory;
        chunk->rows = chunk->segment->table + static_cast<uint64_t>(pages * planes_.page_blocks * transfer.item());
    }
    transfer.at += pages;
    return true;
}

// If the copy engine alone moves the bytes, a kernel takes checksums of the planes: after a load's copies, and during a
// store's.
void Gpu::load_chunk(Lane& lane, const Transfer& transfer, const Chunk& chunk) const {
    const Route route = transfer.copies.route;
    const Segment& segment = *chunk.segment;
    for (const CudaEvent event : segment.after) cuda_.follow(lane.copies, event);
    if (route == Route::kStaged) stage(lane, transfer, chunk);
    else bring_table(chunk, lane.copies);
    if (route == Route::kCopyEngine) copy_pieces(lane, transfer, chunk.first, chunk.first + chunk.pages);
    cuda_.record(segment.copied, lane.copies);
    cuda_.follow(lane.kernels, segment.copied);
    launch(lane, transfer, chunk);
    cuda_.record(segment.done, lane.kernels);
}

void Gpu::store_chunk(Lane& lane, const Transfer& transfer, const Chunk& chunk) const {
    const Route route = transfer.copies.route;
    const Segment& segment = *chunk.segment;
    for (const CudaEvent event : segment.after) cuda_.follow(lane.kernels, event);
    bring_table(chunk, lane.kernels);
    launch(lane, transfer, chunk);
    cuda_.record(segment.done, lane.kernels);
    if (route == Route::kCopyEngine) copy_pieces(lane, transfer, chunk.first, chunk.first + chunk.pages);
    if (route == Route::kStaged) {
        cuda_.follow(lane.copies, segment.done);
        stage(lane, transfer, chunk);
    }
    cuda_.record(segment.copied, lane.copies);
}

// --- kernels

void Gpu::launch(Lane& lane, const Transfer& transfer, const Chunk& chunk) const {
    const PageCopies& copies = transfer.copies;
    const bool staged = copies.route == Route::kStaged, look = copies.route == Route::kCopyEngine;
    const int32_t layers = copies.last - copies.first;
    int64_t widest = 0, filled = 0;
    for (int32_t layer = copies.first; layer < copies.last; ++layer) {
        const int64_t bytes = planes_.bounds[layer + 1] - planes_.bounds[layer];
        widest = std::max(widest, bytes);
        filled += std::min(bytes, 2 * kTile);
    }
    const int64_t tiles = up(widest, kTile), work = chunk.pages * layers * tiles;
    if (work >= kLaunchTiles) throw CudaError(std::to_string(chunk.pages) + " pages are too many for one launch");
    KernelArguments arguments;
    arguments.layers = kernels_.table + static_cast<uint64_t>(copies.first) * kLayerWords * 8;
    arguments.planes = kernels_.table + static_cast<uint64_t>(planes_.layers) * kLayerWords * 8;
    arguments.blocks = chunk.table == nullptr ? 0 : chunk.segment->table;
    arguments.rows = staged || look ? 0 : chunk.rows;
    arguments.extents = look ? 0 : staged ? chunk.segment->data : copies.extents.address;
    arguments.stride = look ? 0 : staged ? transfer.stride : copies.extents.stride;
    arguments.origin = look ? 0 : staged ? transfer.origin : copies.extents.origin;
    arguments.slots = staged || look ? chunk.pages : copies.extents.slots;
    if (!look) {
        const int64_t steps[] = {static_cast<int64_t>(arguments.extents % 16), arguments.stride,
                                 transfer.origin - arguments.origin};
        for (const int64_t step : steps) {
            if (step % kernels_.vector != 0) throw CudaError("extents that the kernels' accesses do not fit");
        }
    }
    arguments.pool_blocks = planes_.blocks;
    arguments.pages = static_cast<uint32_t>(chunk.pages);
    arguments.n_layers = static_cast<uint32_t>(layers);
    arguments.first_plane = static_cast<uint32_t>(planes_.first_plane[copies.first]);
    arguments.n_planes = static_cast<uint32_t>(planes_.first_plane[copies.last]) - arguments.first_plane;
    arguments.tiles = static_cast<uint32_t>(tiles);
    arguments.page_blocks = static_cast<uint32_t>(planes_.page_blocks);
    arguments.wide = transfer.wide;
    arguments.skipped = 0;  // every index was checked before
    void* const listed = arguments.listed;
    if (chunk.table == nullptr) transfer.write(listed, chunk.first, chunk.pages, planes_.page_blocks, false);
    // Few processors for a kernel that waits for the bus; more if small layers leave part of each warp idle.
    const double share = static_cast<double>(filled) / static_cast<double>(2 * kTile * layers);
    const auto wanted = static_cast<int64_t>(static_cast<double>(kZeroCopyBlocks) / std::max(share, 0.25) + 0.999999);
    const int64_t blocks = copies.route == Route::kZeroCopy ? std::min(4 * kZeroCopyBlocks, wanted) : 0;
    if (!transfer.on_gpu) {
        const int32_t threads = blocks ? kZeroCopyThreads : kStagedThreads;
        const int64_t most = blocks ? blocks : int64_t{kernels_.processors} * (kProcessorThreads / threads);
        cuda_.launch(copies.load ? kernels_.scatter : kernels_.gather,
                     static_cast<uint32_t>(std::min(most, up(work * 16, threads))), static_cast<uint32_t>(threads),
                     &arguments, offsetof(KernelArguments, team), lane.kernels);
        return;
    }
    if (planes_.packed) {
        const auto results = reinterpret_cast<uint64_t>(transfer.queued.digests.memory);
        arguments.team = 1;
        arguments.digests = results + static_cast<uint64_t>(chunk.first * layers) * 8;
        arguments.unfit = results + static_cast<uint64_t>(copies.pages * layers * 8 + chunk.first * 4);
        const int64_t most = blocks ? 4 * blocks : kernels_.processors * kPackedBlocks;
        cuda_.launch(copies.load ? kernels_.scatter_sums : kernels_.gather_sums,
                     static_cast<uint32_t>(std::min(most, chunk.pages * layers)), kPackedThreads, &arguments,
                     sizeof arguments, lane.kernels);
        return;
    }
    // Each layer of a page gets a team of warps with four spans a warp, or all warps of a block. A team of two is half
    // idle: one warp only folds.
    const int64_t pieces = chunk.pages * layers;
    int32_t threads = 256;
    while (threads < 1024 && pieces * threads < kSumsLeast) threads *= 2;
    const auto spans = static_cast<uint64_t>(up(tiles, 8));
    const int64_t sharing = std::min<int64_t>(threads / 32, int64_t{1} << std::bit_width(spans - 1));
    arguments.team = sharing < 4 ? 1 : static_cast<uint32_t>(sharing);
    arguments.digests =
        reinterpret_cast<uint64_t>(transfer.queued.digests.memory) + static_cast<uint64_t>(chunk.first * layers) * 8;
    const int64_t most = (blocks ? 2 * blocks : kernels_.processors) * (1024 / threads);
    const bool scatter = copies.load && !look;
    cuda_.launch(scatter ? kernels_.scatter_sums : kernels_.gather_sums,
                 static_cast<uint32_t>(std::min(most, up(pieces * arguments.team * 32, threads))),
                 static_cast<uint32_t>(threads), &arguments, offsetof(KernelArguments, unfit), lane.kernels);
}

}  // namespace gdscache
