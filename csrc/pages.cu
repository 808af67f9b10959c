// Gather (planes -> extents) and scatter (extents -> planes) of pages, and the checksum of each layer in the same pass.
// A gather to a null address takes the checksums of the planes' bytes only.
//
// A warp moves spans of 2 KiB of one layer of one page's extent, 16 bytes a lane and step: two tiles, each a block of
// XXH3. All loads of a span are in flight before the first store; adjacent spans make the bus's reads long. VECTOR is
// the widest access, in bytes, that every row, stride and offset of a call allows. Addresses are of device memory or of
// page-locked host memory.

#include "pages.cuh"

#ifndef VECTOR
#define VECTOR 16
#endif

#define TILE XXH_BLOCK
#define TILES 2  // tiles of a span: 2 KiB in flight a warp, adjacent in the extent
#define SPAN (TILES * TILE)
#define CHUNK 16
#define STEPS (SPAN / (32 * CHUNK))  // chunks of a span a lane
#define PARTS (CHUNK / VECTOR)
#define ROUND 2  // spans that a warp moves between two folds of checksums

#if VECTOR == 16
typedef uint4 Word;
#elif VECTOR == 8
typedef unsigned long long Word;
#elif VECTOR == 4
typedef unsigned int Word;
#elif VECTOR == 2
typedef unsigned short Word;
#else
typedef unsigned char Word;
#endif

union Chunk {
    Word words[PARTS];
    u64 halves[2];
};

#if VECTOR == 16
__device__ __forceinline__ Word load(const char* p) {
    Word w;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(p));
    return w;
}
// Volatile too, so that the compiler keeps all loads of a span before its first store.
__device__ __forceinline__ void store(char* p, Word w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                 : "memory");
}
#else
__device__ __forceinline__ Word load(const char* p) { return __ldg((const Word*)p); }
__device__ __forceinline__ void store(char* p, Word w) { *(Word*)p = w; }
#endif

// The place of a lane's chunk of a step in a span. With checksums half a warp has a tile, so that fewer lanes add up.
template <bool SUMS>
__device__ __forceinline__ u32 chunk_at(u32 step, u32 lane) {
    return SUMS ? (lane >> 4) * TILE + step * 256 + (lane & 15) * CHUNK : step * 512 + lane * CHUNK;
}

// Move one span, from byte `begin` of a layer to `end` at most. `data` gets the moved bytes, and zeros for skipped
// ones.
template <bool GATHER, bool SUMS>
__device__ __forceinline__ void move_span(const Call& c, const Layer& layer, u32 page, char* extent, bool there,
                                          u32 begin, u32 end, u32 lane, Chunk* data) {
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s) data[s].halves[0] = data[s].halves[1] = 0;
#if VECTOR == 16
    char* address[STEPS];
    u32 start;
    const Plane* plane = plane_of(c, layer, begin, start);
    const u32 run = (begin - start) / (u32)plane->run_bytes, offset = begin - start - run * (u32)plane->run_bytes;
    if (end <= (u32)plane->end && offset + (end - begin) <= (u32)plane->run_bytes) {
        char* const base = there ? plane_address(c, plane, page, run, offset) : nullptr;
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
            const u32 at = chunk_at<SUMS>(s, lane);
            address[s] = base && begin + at < end ? base + at : nullptr;
        }
    } else {
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
            const u32 at = begin + chunk_at<SUMS>(s, lane);
            address[s] = there && at < end ? byte_address(c, layer, page, at) : nullptr;
        }
    }
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s) {
        const char* source = GATHER ? address[s] : extent + begin + chunk_at<SUMS>(s, lane);
        if (address[s]) data[s].words[0] = load(source);
    }
    if (GATHER && SUMS && !extent) return;
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s) {
        char* target = GATHER ? extent + begin + chunk_at<SUMS>(s, lane) : address[s];
        if (address[s]) store(target, data[s].words[0]);
    }
#else
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s) {
#pragma unroll 1  // unrolled, single bytes take NVRTC ten times as long
        for (u32 p = 0; p < PARTS; ++p) {
            const u32 at = begin + chunk_at<SUMS>(s, lane) + p * VECTOR;
            char* address = there && at < end ? byte_address(c, layer, page, at) : nullptr;
            if (!address) continue;
            data[s].words[p] = load(GATHER ? address : extent + at);
            if (!(GATHER && SUMS && !extent)) store(GATHER ? extent + at : address, data[s].words[p]);
        }
    }
#endif
}

template <bool GATHER>
__device__ __forceinline__ void move(Call c) {
    __shared__ long long table[TABLE_WORDS];
    fetch_table(c, table);
    const u32 lane = threadIdx.x & 31;
    const u32 warps = (gridDim.x * blockDim.x) >> 5, warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    const u32 per_layer = (c.tiles + TILES - 1) / TILES, per_page = c.n_layers * per_layer, total = c.pages * per_page;
    for (u32 item = warp; item < total; item += warps) {
        const u32 page = item / per_page, rest = item - page * per_page, number = rest / per_layer;
        const long long row = c.rows ? index_at(c.rows, page, c.wide) : (long long)page;
        const Layer layer = c.layers[number];
        const u32 begin = (rest - number * per_layer) * SPAN, bytes = (u32)layer.bytes;
        if (rest == 0 && c.skipped) count_skipped(c, page, row, lane);
        if (begin >= bytes) continue;
        const bool there = row >= 0 && row < c.slots;
        char* const extent = c.extents + row * c.stride + (layer.start - c.origin);
        Chunk data[STEPS];
        move_span<GATHER, false>(c, layer, page, extent, there, begin, min(begin + SPAN, bytes), lane, data);
    }
}

// Sum a warp's part of a span: eight sums a tile, and eight for the last stripe of the layer, in shared memory. `keys`
// are this lane's words of the secret in shared memory.
__device__ __forceinline__ void sum_span(const Chunk* data, u32 begin, u32 bytes, u32 lane, const u64* keys, u64* tiles,
                                         u64* last) {
    const u32 whole = (bytes - 1) / XXH_STRIPE * XXH_STRIPE;  // the last 64 bytes are a stripe of their own
    u64 even = 0, odd = 0;
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s) {
        const u32 at = begin + chunk_at<true>(s, lane);
        const u64 a = data[s].halves[0], b = data[s].halves[1];
        if (at < whole) xxh_add(a, b, keys[s * 4], keys[s * 4 + 1], even, odd);
        if ((bytes & 15) == 0 && at < bytes && at + XXH_STRIPE >= bytes) {
            const u32 q = (at - (bytes - XXH_STRIPE)) >> 4;
            u64 e = 0, o = 0;
            xxh_add(a, b, xxh_secret_at(121 + 16 * q), xxh_secret_at(129 + 16 * q), e, o);
            last[2 * q] = e;
            last[2 * q + 1] = o;
        }
    }
#pragma unroll
    for (u32 step = 4; step < 16; step *= 2) {
        even += __shfl_xor_sync(0xffffffffu, even, step);
        odd += __shfl_xor_sync(0xffffffffu, odd, step);
    }
    if ((lane & 15) < 4) {
        u64* const out = tiles + (lane >> 4) * 8 + 2 * (lane & 3);
        out[0] = even;
        out[1] = odd;
    }
}

__device__ __forceinline__ u64 word_of_bytes(const volatile char* p) {
    u64 word = 0;
    for (u32 i = 0; i < 8; ++i) word |= (u64)(unsigned char)p[i] << (8 * i);
    return word;
}

// The end of the scan over a layer: lane `l` has accumulator `l & 7`. All lanes of the warp call this and get the
// result.
__device__ __forceinline__ u64 finish(u64 value, const u64* last, u32 bytes, const char* extent, u32 lane) {
    const u32 i = lane & 7;
    if ((bytes & 15) == 0) {
        value += last[i];
    } else if (extent) {
        const char* end = extent + bytes - XXH_STRIPE;
        const u64 own = word_of_bytes(end + 8 * i), other = word_of_bytes(end + 8 * (i ^ 1));
        const u64 mixed = own ^ xxh_secret_at(121 + 8 * i);
        value += other + (mixed & 0xffffffffULL) * (mixed >> 32);
    }
    const u64 mine = value ^ xxh_secret_at(11 + 8 * i), neighbour = __shfl_xor_sync(0xffffffffu, mine, 1);
    u64 folded = (i & 1) ? 0 : xxh_fold(mine, neighbour);
#pragma unroll
    for (u32 step = 2; step < 8; step *= 2) folded += __shfl_xor_sync(0xffffffffu, folded, step);
    return xxh_finish(__shfl_sync(0xffffffffu, folded, 0) + bytes * XXH_PRIME64_1);
}

// Add the block sums of tiles `from` to `to` of a layer to its accumulators; after its last tile, write its digest.
__device__ __forceinline__ void fold(const u64* tiles, const u64* last, u32 from, u32 to, u32 bytes, const char* extent,
                                     u32 lane, u64 key, u64& value, u64* digest) {
    const u32 full = (bytes - 1) / TILE, end = min(to, full + 1);
    if (from > full) return;
#pragma unroll 4
    for (u32 t = from; t < end; ++t) {
        value += tiles[(t - from) * 8 + (lane & 7)];
        if (t < full) value = xxh_scramble(value, key);
    }
    if (end <= full) return;
    const u64 found = finish(value, last, bytes, extent, lane);
    if (lane == 0) *digest = found;
}

// A team of `team` warps of one block has one layer of one page at a time. The warp of a team of one moves ROUND spans,
// folds their sums, and repeats. In a larger team the first warp only folds the sums of the round before, in one half
// of shared memory, while the others fill the other half. Loops are of equal length for all teams of a block.
template <bool GATHER>
__device__ __forceinline__ void move_and_sum(Call c, u32 team, u64* digests) {
    __shared__ long long table[TABLE_WORDS];
    __shared__ u64 tile_sums[2 * 32 * ROUND * TILES * 8], last_sums[32 * 8];
    fetch_table(c, table);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, number = warp / team, member = warp - number * team;
    const u32 teams = (blockDim.x >> 5) / team, pieces = c.pages * c.n_layers;
    const u32 movers = team > 1 ? team - 1 : 1, mover = team > 1 ? member - 1 : 0, step = movers * ROUND * TILES;
    const bool moves = team == 1 || member > 0, folds = member == 0;
    u64* const tiles = tile_sums + number * 2 * step * 8;
    u64* const last = last_sums + number * 8;
    __shared__ u64 secret[24];
    if (threadIdx.x < 24) secret[threadIdx.x] = xxh_secret[threadIdx.x];
    __syncthreads();
    const u64* const keys = secret + ((lane & 15) >> 2) + 2 * (lane & 3);
    const u64 key = secret[16 + (lane & 7)];
    for (u32 first = blockIdx.x * teams; first < pieces; first += gridDim.x * teams) {
        const u32 piece = first + number, page = piece / c.n_layers, which = piece - page * c.n_layers;
        const bool active = piece < pieces;
        long long row = -1;
        u32 bytes = 0;
        char* extent = nullptr;
        Layer layer;
        if (active) {
            row = c.rows ? index_at(c.rows, page, c.wide) : (long long)page;
            layer = c.layers[which];
            bytes = (u32)layer.bytes;
            if (c.extents) extent = c.extents + row * c.stride + (layer.start - c.origin);
            if (which == 0 && member == 0 && c.skipped) count_skipped(c, page, row, lane);
        }
        const bool there = row >= 0 && row < c.slots;
        u64 value = xxh_start[lane & 7];
        u32 half = 0;
        for (u32 tile = 0;; tile += step, half ^= 1) {
            if (moves) {
#pragma unroll 1
                for (u32 r = 0; r < ROUND; ++r) {
                    const u32 span = r * movers + mover, begin = tile * TILE + span * SPAN;
                    if (begin >= bytes) break;
                    Chunk data[STEPS];
                    move_span<GATHER, true>(c, layer, page, extent, there, begin, min(begin + SPAN, bytes), lane, data);
                    sum_span(data, begin, bytes, lane, keys, tiles + (half * step + span * TILES) * 8, last);
                }
            }
            if (team == 1) {
                __syncwarp();
                if (active) {
                    fold(tiles + half * step * 8, last, tile, tile + step, bytes, there ? extent : nullptr, lane, key,
                         value, digests + piece);
                }
                if (tile + step >= c.tiles) break;
            } else {
                if (folds && active && tile > 0) {
                    fold(tiles + (half ^ 1) * step * 8, last, tile - step, tile, bytes, there ? extent : nullptr, lane,
                         key, value, digests + piece);
                }
                if (tile >= c.tiles) break;
                __syncthreads();
            }
        }
        if (team == 1) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(1024) gather(ARGUMENTS) {
    const Call call = CALL;
    move<true>(call);
}

extern "C" __global__ void __launch_bounds__(1024) scatter(ARGUMENTS) {
    const Call call = CALL;
    move<false>(call);
}

extern "C" __global__ void __launch_bounds__(1024) gather_sums(ARGUMENTS, u32 team, u64* digests) {
    const Call call = CALL;
    move_and_sum<true>(call, team, digests);
}

extern "C" __global__ void __launch_bounds__(1024) scatter_sums(ARGUMENTS, u32 team, u64* digests) {
    const Call call = CALL;
    move_and_sum<false>(call, team, digests);
}
