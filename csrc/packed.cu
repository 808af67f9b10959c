// Gather and scatter of packed pages: bfloat16 values between planes and the parts of docs/format.md, with the checksum
// of each layer's packed bytes in the same pass.
//
// A block of threads has one layer of one page at a time. Each of its warps packs or unpacks a tile of 2,048 values at a
// time, eight values a lane and step: 16 bytes of a plane, 8 of signs and mantissas, 4 of codes, each beside those of the
// next lane. What a warp holds of the packed bytes is added to the eight sums of their blocks of XXH3, which need not
// begin where a tile does; the first warp folds them while the others are at the next tiles.
// VECTOR is 16 where all rows and strides of the planes are multiples of 16 bytes, else 2.

#include "pages.cuh"

#ifndef VECTOR
#define VECTOR 16
#endif

#define THREADS 256
#define WARPS (THREADS / 32)
#define TILE_VALUES 2048u
#define TILE_BYTES (TILE_VALUES / 2 * 3)
#define STEP_VALUES 256  // of a warp, and what parts are filled up to
#define STEPS (TILE_VALUES / STEP_VALUES)
#define SAMPLED 17  // of so many values, one is counted for the base
#define WINDOW 14
#define RING 64  // blocks of XXH3 whose sums are in shared memory: more than two rounds of all warps have

// A plane's part of a page, by the numbers of its layer.
struct Part {
    const Plane* plane;
    u32 begin, values, filled, words;  // in the layer; of the list

    __device__ u32 list() const { return begin + filled / 2 * 3; }
    __device__ u32 end() const { return list() + words * 4; }
};

__device__ __forceinline__ Part part_of(const Call& c, const Layer& layer, u32 number) {
    Part part;
    part.plane = c.planes + layer.first_plane + number;
    part.begin = number ? (u32)part.plane[-1].end : 0;
    part.values = (u32)part.plane->run_bytes / 2 * (u32)part.plane->runs_per_block * c.blocks_per_page;
    part.filled = (part.values + STEP_VALUES - 1) / STEP_VALUES * STEP_VALUES;
    part.words = max(1u, (part.values + 8191) / 8192) * 32;
    return part;
}

// Of a value of a page's plane; null for a block that the pool does not have.
__device__ __forceinline__ char* value_address(const Call& c, const Plane* plane, u32 page, u32 place) {
    const u32 byte = place * 2, run = byte / (u32)plane->run_bytes;
    return plane_address(c, plane, page, run, byte - run * (u32)plane->run_bytes);
}

// Where a warp's eight values of each step lie. A tile in one run is looked up once.
struct Places {
    char* run;  // of the tile, where it lies in one
    const Part& part;
    const Call& c;
    u32 page, first;

    __device__ Places(const Call& call, const Part& of, u32 which, u32 place)
        : run(nullptr), part(of), c(call), page(which), first(place) {
        const u32 byte = place * 2, begin = byte / (u32)of.plane->run_bytes * (u32)of.plane->run_bytes;
        if (byte + min(TILE_VALUES, of.values - place) * 2 <= begin + (u32)of.plane->run_bytes) {
            run = value_address(call, of.plane, which, place);
        }
    }
    __device__ __forceinline__ char* of(u32 place) const {
        if (place >= part.values) return nullptr;
        return run ? run + (place - first) * 2 : value_address(c, part.plane, page, place);
    }
};

struct Eight {
    u32 pairs[4];  // two values each, the first in the low half
};

__device__ __forceinline__ Eight load_eight(const Places& places, u32 place) {
    Eight found = {{0, 0, 0, 0}};
#if VECTOR == 16
    if (const char* p = places.of(place)) {
        const uint4 w = *(const uint4*)p;
        found.pairs[0] = w.x, found.pairs[1] = w.y, found.pairs[2] = w.z, found.pairs[3] = w.w;
    }
#else
    for (u32 i = 0; i < 8; ++i) {
        const char* p = places.of(place + i);
        if (p) found.pairs[i / 2] |= (u32) * (const unsigned short*)p << (16 * (i & 1));
    }
#endif
    return found;
}

__device__ __forceinline__ void store_eight(const Places& places, u32 place, const Eight& values) {
#if VECTOR == 16
    if (char* p = places.of(place)) {
        *(uint4*)p = make_uint4(values.pairs[0], values.pairs[1], values.pairs[2], values.pairs[3]);
    }
#else
    for (u32 i = 0; i < 8; ++i) {
        char* p = places.of(place + i);
        if (p) *(unsigned short*)p = (unsigned short)(values.pairs[i / 2] >> (16 * (i & 1)));
    }
#endif
}

__device__ __forceinline__ u32 exponent_of(u32 value) { return (value >> 7) & 0xFF; }

// Signs and mantissas of eight values, and their codes; how many of them are exceptions.
__device__ __forceinline__ u32 encode_eight(const Eight& values, u32 base, u64& marks, u32& codes) {
    u32 others = 0;
    marks = 0, codes = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 value = (values.pairs[i / 2] >> (16 * (i & 1))) & 0xFFFF, exponent = exponent_of(value);
        const u32 above = exponent - base;  // 1 to WINDOW in the window
        const u32 code = exponent == 0 ? 0 : above - 1 < WINDOW ? above : 15;
        others += code == 15;
        marks |= (u64)((value >> 8 & 0x80) | (value & 0x7F)) << (8 * i);
        codes |= code << (8 * (i & 3) + (i & 4));
    }
    return others;
}

__device__ __forceinline__ Eight decode_eight(u64 marks, u32 codes, u32 base) {
    Eight values = {{0, 0, 0, 0}};
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 code = (codes >> (8 * (i & 3) + (i & 4))) & 15, mark = (u32)(marks >> (8 * i)) & 0xFF;
        const u32 exponent = code ? (code + base) & 0xFF : 0;
        values.pairs[i / 2] |= ((mark & 0x80) << 8 | exponent << 7 | (mark & 0x7F)) << (16 * (i & 1));
    }
    return values;
}

// --- checksums

// What the threads of a block share of one layer's sum.
struct Shared {
    u64 ring[RING * 8];  // the sums of XXH3's blocks, by their numbers modulo RING; 0 where nothing was added
    u64 last[8];  // what the layer's last stripe adds
    u64 secret[24];
    u64 saved[8], value[8];
    u32 times[256];
    u32 best, count, fits, counts[WARPS];
};

// What a lane adds to the sums of two neighbouring blocks: words that lie as far from the begin of a stripe in each step.
struct Adds {
    u64 products[2], plain[2];
    u32 block;

    __device__ explicit Adds(u32 begin) : products{0, 0}, plain{0, 0}, block(begin / XXH_BLOCK) {}

    // The word at byte `at` of a layer of `bytes`.
    __device__ __forceinline__ void add(u64 word, u32 at, u32 bytes, const u64* secret, u64* last) {
        const u32 position = (at >> 3) & 7;
        if (at >= bytes - XXH_STRIPE) {  // a stripe of its own
            const u64 mixed = word ^ xxh_secret_at(121 + 8 * position);
            atomicAdd((unsigned long long*)last + position, (mixed & 0xffffffffULL) * (mixed >> 32));
            atomicAdd((unsigned long long*)last + (position ^ 1), word);
            return;
        }
        const u64 mixed = word ^ secret[((at >> 6) & 15) + position];
        const u64 product = (mixed & 0xffffffffULL) * (mixed >> 32);
        const bool second = at / XXH_BLOCK != block;
        products[0] += second ? 0 : product, plain[0] += second ? 0 : word;
        products[1] += second ? product : 0, plain[1] += second ? word : 0;
    }

    // All lanes of a warp: to the ring. `WIDTH` neighbouring lanes have words of the same position.
    template <u32 WIDTH>
    __device__ __forceinline__ void to_ring(u32 begin, u64* ring, u32 lane) const {
        for (u32 n = 0; n < (begin % XXH_BLOCK ? 2 : 1); ++n) {
            u64 sum = products[n] + __shfl_xor_sync(0xffffffffu, plain[n], WIDTH);
            if (WIDTH == 2) sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            if (WIDTH == 1) sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            const u32 position = lane / WIDTH & 7;
            if (lane / WIDTH < 8 && lane % WIDTH == 0 && sum) {
                atomicAdd((unsigned long long*)ring + (block + n) % RING * 8 + position, sum);
            }
        }
    }
};

// A tile's bytes in a warp's lanes: `marks[s]` and `codes[s]` of step `s`. `begin`: of the tile in the layer.
__device__ __forceinline__ void sum_tile(const u64* marks, const u32* codes, u32 steps, u32 begin, u32 bytes, u32 lane,
                                         Shared& shared) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {  // of the signs and mantissas: 1,024 bytes each
        const u32 at = begin + half * 1024;
        Adds adds(at);
#pragma unroll
        for (u32 s = 0; s < 4; ++s) {
            if (4 * half + s < steps) {
                adds.add(marks[4 * half + s], at + s * 256 + lane * 8, bytes, shared.secret, shared.last);
            }
        }
        if (4 * half < steps) adds.to_ring<1>(at, shared.ring, lane);
    }
    const u32 at = begin + steps * STEP_VALUES;
    Adds adds(at);
#pragma unroll
    for (u32 s = 0; s < STEPS; s += 2) {  // an even lane has a word of this step, an odd one of the next
        const u32 mine = lane & 1 ? codes[s] : codes[s + 1], other = __shfl_xor_sync(0xffffffffu, mine, 1);
        const u64 word = lane & 1 ? (u64)codes[s + 1] << 32 | other : (u64)other << 32 | codes[s];
        if (s + (lane & 1) < steps) {
            adds.add(word, at + (s + (lane & 1)) * 128 + lane / 2 * 8, bytes, shared.secret, shared.last);
        }
    }
    adds.to_ring<2>(at, shared.ring, lane);
}

// The list of a part, by all warps.
__device__ __forceinline__ void sum_list(const char* extent, const Part& part, u32 bytes, u32 warp, u32 lane,
                                         Shared& shared) {
    for (u32 at = part.list() + warp * 256; at < part.end(); at += WARPS * 256) {
        Adds adds(at);
        const u32 mine = at + lane * 8;
        if (mine < part.end()) adds.add(*(const u64*)(extent + mine), mine, bytes, shared.secret, shared.last);
        adds.to_ring<1>(at, shared.ring, lane);
    }
}

// The first warp: fold the blocks [from, to), and leave their places empty. Lane `l` has accumulator `l & 7`.
__device__ __forceinline__ void fold(u32 from, u32 to, Shared& shared, u32 lane, u64& value) {
    const u64 key = shared.secret[16 + (lane & 7)];
    for (u32 block = from; block < to; ++block) {
        u64* const place = shared.ring + block % RING * 8 + (lane & 7);
        const u64 sum = *place;
        __syncwarp();
        if (lane < 8) *place = 0;
        value = xxh_scramble(value + sum, key);
    }
}

// The first warp: the digest of a layer whose whole blocks were folded.
__device__ __forceinline__ u64 finish(u32 bytes, Shared& shared, u32 lane, u64 value) {
    const u32 i = lane & 7;
    value += shared.ring[(bytes - 1) / XXH_BLOCK % RING * 8 + i] + shared.last[i];
    const u64 mine = value ^ xxh_secret_at(11 + 8 * i), neighbour = __shfl_xor_sync(0xffffffffu, mine, 1);
    u64 folded = (i & 1) ? 0 : xxh_fold(mine, neighbour);
#pragma unroll
    for (u32 step = 2; step < 8; step *= 2) folded += __shfl_xor_sync(0xffffffffu, folded, step);
    return xxh_finish(folded + bytes * XXH_PRIME64_1);
}

// What a block has of its piece, a layer of a page.
struct Piece {
    const Call& c;
    Shared& shared;
    Layer layer;
    char* extent;
    u32 page, bytes, warp, lane, folded;
    u64 value;  // of the first warp's lanes

    __device__ void clear() {
        for (u32 i = threadIdx.x; i < RING * 8; i += THREADS) shared.ring[i] = 0;
        if (threadIdx.x < 8) shared.last[threadIdx.x] = 0;
        folded = 0;
        value = xxh_start[lane & 7];
        __syncthreads();
    }
    // Behind `__syncthreads`: all that lies before `end` was added. The others go on.
    __device__ __forceinline__ void passed(u32 end) {
        const u32 to = min(end, bytes - 1) / XXH_BLOCK;
        if (warp == 0) fold(folded, to, shared, lane, value);
        folded = to;
    }
};

// --- unpacking

__device__ __forceinline__ void scatter_part(Piece& piece, const Part& part) {
    const u32 lane = piece.lane;
    const char* const list = piece.extent + part.list();
    const u32 base = *(const u32*)list & 0xFF, tiles = (part.filled + TILE_VALUES - 1) / TILE_VALUES;
    for (u32 round = 0; round < tiles; round += WARPS) {
        const u32 first = (round + piece.warp) * TILE_VALUES, begin = part.begin + (round + piece.warp) * TILE_BYTES;
        if (first < part.filled) {
            const u32 steps = min(TILE_VALUES, part.filled - first) / STEP_VALUES;
            u64 marks[STEPS];
            u32 codes[STEPS];
            const char* const tile = piece.extent + begin;
#pragma unroll
            for (u32 s = 0; s < STEPS; ++s) {
                marks[s] = s < steps ? *(const u64*)(tile + s * 256 + lane * 8) : 0;
                codes[s] = s < steps ? *(const u32*)(tile + steps * STEP_VALUES + s * 128 + lane * 4) : 0;
            }
            const Places places(piece.c, part, piece.page, first);
#pragma unroll
            for (u32 s = 0; s < STEPS; ++s) {
                if (s >= steps) break;
                store_eight(places, first + s * STEP_VALUES + lane * 8, decode_eight(marks[s], codes[s], base));
            }
            sum_tile(marks, codes, steps, begin, piece.bytes, lane, piece.shared);
        }
        __syncthreads();
        piece.passed(min(part.list(), part.begin + (round + WARPS) * TILE_BYTES));
    }
    sum_list(piece.extent, part, piece.bytes, piece.warp, lane, piece.shared);
    // Whatever the first word says, and wherever the others lead: no place that the part does not have.
    const u32 count = min(*(const u32*)list >> 8, part.words - 1);
    for (u32 n = threadIdx.x; n < count; n += THREADS) {
        const u32 word = *(const u32*)(list + 4 * (n + 1)), place = word >> 8;
        if (place >= part.values) continue;
        if (char* const p = value_address(piece.c, part.plane, piece.page, place)) {
            *(unsigned short*)p = (unsigned short)((*(unsigned short*)p & 0x807F) | (word & 0xFF) << 7);
        }
    }
    __syncthreads();
    piece.passed(part.end());
}

// --- packing

// Which base has the most of every `step`-th value in its window.
__device__ __forceinline__ u32 best_base(Piece& piece, const Part& part, u32 step) {
    Shared& shared = piece.shared;
    for (u32 i = threadIdx.x; i < 256; i += THREADS) shared.times[i] = 0;
    if (threadIdx.x == 0) shared.best = 0;
    __syncthreads();
    for (u32 place = threadIdx.x * step; place < part.values; place += THREADS * step) {
        const char* const p = value_address(piece.c, part.plane, piece.page, place);
        if (p) atomicAdd(shared.times + exponent_of(*(const unsigned short*)p), 1u);
    }
    __syncthreads();
    if (threadIdx.x + WINDOW < 256) {
        u32 inside = 0;
        for (u32 n = 1; n <= WINDOW; ++n) inside += shared.times[threadIdx.x + n];
        // The lowest of those that are equal. A part has at most 2^24 values.
        if (inside) atomicMax(&shared.best, min(inside, 0xFFFFFFu) << 8 | (255 - threadIdx.x));
    }
    __syncthreads();
    return shared.best ? 255 - (shared.best & 0xFF) : 0;
}

// Put the exceptions of a warp's tile into the list, in the order of their places, from number `at` on.
__device__ __forceinline__ void list_others(const Places& places, const u32* codes, u32 steps, u32 at, const Part& part,
                                            char* list, u32 lane) {
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s) {
        if (s >= steps) break;
        u32 mine = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) mine += ((codes[s] >> (4 * i)) & 15) == 15;
        if (!__any_sync(0xffffffffu, mine)) continue;
        u32 before = mine;  // of the lanes up to this one
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        u32 number = at + before - mine;
        at += __shfl_sync(0xffffffffu, before, 31);
        for (u32 i = 0; i < 8 && mine; ++i) {
            if (((codes[s] >> (8 * (i & 3) + (i & 4))) & 15) != 15) continue;
            const u32 place = places.first + s * STEP_VALUES + lane * 8 + i;
            const char* const p = places.of(place);
            if (++number < part.words && p) {
                *(u32*)(list + 4 * number) = place << 8 | exponent_of(*(const unsigned short*)p);
            }
        }
    }
}

// With the base that every `step`-th value asks for. Whether it fits: all threads know.
__device__ __forceinline__ bool gather_part(Piece& piece, const Part& part, u32 step) {
    Shared& shared = piece.shared;
    const u32 lane = piece.lane, base = best_base(piece, part, step);
    const u32 tiles = (part.filled + TILE_VALUES - 1) / TILE_VALUES;
    char* const list = piece.extent + part.list();
    u32 count = 0;  // of the exceptions of the rounds before
    for (u32 round = 0; round < tiles; round += WARPS) {
        const u32 first = (round + piece.warp) * TILE_VALUES, begin = part.begin + (round + piece.warp) * TILE_BYTES;
        const u32 steps = first < part.filled ? min(TILE_VALUES, part.filled - first) / STEP_VALUES : 0;
        const Places places(piece.c, part, piece.page, min(first, part.values - 1));
        u64 marks[STEPS];
        u32 codes[STEPS], others = 0;
        Eight values[STEPS];
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
            values[s] = {{0, 0, 0, 0}};
            if (s < steps) values[s] = load_eight(places, first + s * STEP_VALUES + lane * 8);
        }
#pragma unroll
        for (u32 s = 0; s < STEPS; ++s) {
            others += encode_eight(values[s], base, marks[s], codes[s]);
            if (s >= steps) continue;
            *(u64*)(piece.extent + begin + s * 256 + lane * 8) = marks[s];
            *(u32*)(piece.extent + begin + steps * STEP_VALUES + s * 128 + lane * 4) = codes[s];
        }
        if (steps) sum_tile(marks, codes, steps, begin, piece.bytes, lane, shared);
#pragma unroll
        for (u32 n = 16; n; n /= 2) others += __shfl_xor_sync(0xffffffffu, others, n);
        if (lane == 0) shared.counts[piece.warp] = others;
        __syncthreads();
        u32 at = count;
        for (u32 w = 0; w < WARPS; ++w) {
            at += w < piece.warp ? shared.counts[w] : 0;
            count += shared.counts[w];
        }
        if (others && at + 1 < part.words) list_others(places, codes, steps, at, part, list, lane);
        piece.passed(min(part.list(), part.begin + (round + WARPS) * TILE_BYTES));
        __syncthreads();  // the counts are taken
    }
    if (count >= part.words) return false;
    if (threadIdx.x == 0) *(u32*)list = count << 8 | base;
    for (u32 n = count + 1 + threadIdx.x; n < part.words; n += THREADS) *(u32*)(list + 4 * n) = 0;
    __syncthreads();
    sum_list(piece.extent, part, piece.bytes, piece.warp, lane, shared);
    __syncthreads();
    piece.passed(part.end());
    return true;
}

// The sums of a layer as they are before a part, so that it can be packed again.
__device__ __forceinline__ bool gather_best(Piece& piece, const Part& part) {
    Shared& shared = piece.shared;
    const u32 block = part.begin / XXH_BLOCK % RING * 8, folded = piece.folded;
    const u64 value = piece.value;
    __syncthreads();
    if (threadIdx.x < 8) shared.saved[threadIdx.x] = shared.ring[block + threadIdx.x];
    __syncthreads();
    if (gather_part(piece, part, SAMPLED)) return true;
    __syncthreads();
    for (u32 i = threadIdx.x; i < RING * 8; i += THREADS) {
        shared.ring[i] = i >= block && i < block + 8 ? shared.saved[i - block] : 0;
    }
    if (threadIdx.x < 8) shared.last[threadIdx.x] = 0;
    piece.folded = folded;
    piece.value = value;
    __syncthreads();
    return gather_part(piece, part, 1);
}

template <bool GATHER>
__device__ __forceinline__ void move_packed(Call c, u64* digests, u32* unfit) {
    __shared__ long long table[TABLE_WORDS];
    __shared__ Shared shared;
    fetch_table(c, table);
    if (threadIdx.x < 24) shared.secret[threadIdx.x] = xxh_secret[threadIdx.x];
    const u32 pieces = c.pages * c.n_layers;
    for (u32 number = blockIdx.x; number < pieces; number += gridDim.x) {
        const u32 page = number / c.n_layers, which = number - page * c.n_layers;
        const long long row = c.rows ? index_at(c.rows, page, c.wide) : (long long)page;
        const Layer layer = c.layers[which];
        char* const extent = c.extents + row * c.stride + (layer.start - c.origin);
        const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        Piece piece = {c, shared, layer, extent, page, (u32)layer.bytes, warp, lane, 0, 0};
        if (which == 0 && warp == 0 && c.skipped) count_skipped(c, page, row, lane);
        if (row < 0 || row >= c.slots) continue;
        piece.clear();
        bool fits = true;
        for (u32 n = 0; fits && n < (u32)layer.planes; ++n) {
            const Part part = part_of(c, layer, n);
            if (GATHER) fits = gather_best(piece, part);
            else scatter_part(piece, part);
        }
        if (!fits && threadIdx.x == 0) atomicExch(unfit + page, 1u);
        if (warp == 0) {
            const u64 found = finish(piece.bytes, shared, lane, piece.value);
            if (lane == 0) digests[number] = found;
        }
        __syncthreads();
    }
}

// The unnamed argument is the team of the kernels of pages.cu. `unfit`: uint32 (pages,), zeros; 1 for each page that does
// not fit.
extern "C" __global__ void __launch_bounds__(THREADS) gather_packed(ARGUMENTS, u32, u64* digests, u32* unfit) {
    const Call call = CALL;
    move_packed<true>(call, digests, unfit);
}

extern "C" __global__ void __launch_bounds__(THREADS) scatter_packed(ARGUMENTS, u32, u64* digests, u32* unfit) {
    const Call call = CALL;
    move_packed<false>(call, digests, unfit);
}
