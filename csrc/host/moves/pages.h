// Copies of pages between planes and extents in host memory, with checksums of the layers taken on the way.
//
// Words as in gdscache/pages/layout.py: a plane has rows of `row_bytes`, one a token, in blocks of `block_tokens`. An
// extent is a page's bytes in one run, ordered layer, plane, token. Pure functions without allocations.

#pragma once

#include <cstdint>
#include <vector>

namespace gdscache {

// One plane of one layer.
struct PlaneMemory {
    uint8_t* base;         // row of token 0 of block 0
    int64_t block_stride;  // bytes from a block to the next; may be negative
    int64_t token_stride;  // bytes from a token to the next in its block
    int64_t row_bytes;
};

// The planes of a pool, owned by the caller.
struct HostPlanes {
    std::vector<PlaneMemory> planes;   // layer after layer
    std::vector<int32_t> first_plane;  // of each layer, and behind them the number of planes
    int64_t blocks = 0;
    int64_t block_tokens = 0;
    int64_t page_blocks = 0;  // blocks of a page
    bool packed = false;      // extents are packed: all rows are of bfloat16 values

    int64_t layers() const { return static_cast<int64_t>(first_plane.size()) - 1; }
};

// Check counts, sizes and addresses that could overflow. Throws `Error`.
void check(const HostPlanes& pool);

// Bytes of a layer in an extent.
int64_t layer_bytes(const HostPlanes& pool, int64_t layer);

// Writes go through the caches, or past them (`kStreamed`): better if a move has more bytes than the last cache. The
// caller then calls `stream_fence` once a move.
enum class Store { kCached, kStreamed };

// Copy layers [first, last) of one page out of the planes. `blocks`: its `page_blocks` block indices. `part`: the
// target of layer `first`; the other layers follow without a gap. `sums`: XXH3-64 of each layer as written to `part`,
// or null. False: the page does not fit into a packed extent, and the bytes in `part` are void.
bool gather(const HostPlanes& pool, const int64_t* blocks, int64_t first, int64_t last, uint8_t* part, uint64_t* sums,
            Store store);

// The inverse: out of `part` into the planes. `sums` are of the bytes written to the planes.
void scatter(const HostPlanes& pool, const int64_t* blocks, int64_t first, int64_t last, const uint8_t* part,
             uint64_t* sums, Store store);

}  // namespace gdscache
