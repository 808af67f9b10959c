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
#define BLOCKS 4  // a processor: their registers have room
#define WARPS (THREADS / 32)
#define TILE_VALUES 2048u
#define TILE_BYTES (TILE_VALUES / 2 * 3)
#define STEP_VALUES 256  // of a warp, and what parts are filled up to
#define STEPS (TILE_VALUES / STEP_VALUES)
#define HALF_STEPS (STEPS / 2)
#define SAMPLED 17  // of so many eights of values, one is counted for the base
#define WINDOW 14
#define RING (8 * WARPS)  // blocks of XXH3 whose sums are in shared memory: more than two rounds of all warps have

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

// Four bytes at a time.

constexpr u32 EACH = 0x01010101u, TOPS = 0x80808080u, RESTS = 0x7F7F7F7Fu;

// 0xFF for each byte of `x` that has its top bit, else 0.
__device__ __forceinline__ u32 bytes_with_top(u32 x) {
    u32 mask;
    asm("prmt.b32 %0, %1, 0, 0xBA98;" : "=r"(mask) : "r"(x));
    return mask;
}

// Top bits of the bytes that are not 0.
__device__ __forceinline__ u32 filled(u32 x) { return ((x & RESTS) + RESTS) | x; }

// Differences and sums modulo 256.
__device__ __forceinline__ u32 minus(u32 x, u32 y) { return ((x | TOPS) - (y & RESTS)) ^ ((x ^ ~y) & TOPS); }
__device__ __forceinline__ u32 plus(u32 x, u32 y) { return ((x & RESTS) + (y & RESTS)) ^ ((x ^ y) & TOPS); }

// Signs and mantissas of eight values, and their codes, four bits each: those of values 0, 4, 1, 5, 2, 6, 3, 7.
__device__ __forceinline__ void encode_eight(const Eight& values, u32 base, u64& marks, u32& codes) {
    u32 mark[2], code[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 low = __byte_perm(values.pairs[2 * half], values.pairs[2 * half + 1], 0x6420);
        const u32 high = __byte_perm(values.pairs[2 * half], values.pairs[2 * half + 1], 0x7531);
        mark[half] = (high & TOPS) | (low & RESTS);
        const u32 exponents = ((high << 1) & ~EACH) | ((low >> 7) & EACH);
        const u32 above = minus(exponents, base * EACH);  // 1 to WINDOW in the window
        const u32 outside = ((above & RESTS) + (0x7F - WINDOW) * EACH) | above;
        const u32 inside = bytes_with_top(filled(above) & ~outside);
        code[half] = ((above & inside) | (15 * EACH & ~inside)) & bytes_with_top(filled(exponents));
    }
    marks = (u64)mark[1] << 32 | mark[0];
    codes = code[1] << 4 | code[0];
}

__device__ __forceinline__ Eight decode_eight(u64 marks, u32 codes, u32 base) {
    Eight values;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 code = (codes >> 4 * half) & 15 * EACH, mark = (u32)(marks >> 32 * half);
        const u32 exponents = plus(code, base * EACH) & bytes_with_top(code + RESTS);
        const u32 low = (mark & RESTS) | ((exponents << 7) & TOPS), high = (mark & TOPS) | ((exponents >> 1) & RESTS);
        values.pairs[2 * half] = __byte_perm(low, high, 0x5140);
        values.pairs[2 * half + 1] = __byte_perm(low, high, 0x7362);
    }
    return values;
}

// The lowest bit of each code that is an exception's.
__device__ __forceinline__ u32 exceptions_of(u32 codes) {
    const u32 pairs = codes & (codes >> 1);
    return pairs & (pairs >> 2) & 0x11111111u;
}

// --- checksums

// What the threads of a block share of one layer's sum.
struct Shared {
    u64 ring[RING * 8];  // the sums of XXH3's blocks, by their numbers modulo RING; 0 where nothing was added
    u64 last[8];  // what the layer's last stripe adds
    u64 secret[24];
    u64 saved[8];
    u32 times[256];
    // Aligned: a vector load of one row would otherwise take in a word of the other, which a warp may be writing.
    alignas(16) u32 counts[2][WARPS];
    u32 best;
};

// What a lane adds to the sums of two neighbouring blocks: words at one position of their stripes.
struct Adds {
    u64 products[2], plain[2];
    u32 block, stripe, position;

    // `begin`: of the bytes in the layer, a multiple of 128; the lane's words are `at` bytes behind it, and further.
    __device__ __forceinline__ Adds(u32 begin, u32 at)
        : products{0, 0},
          plain{0, 0},
          block(begin / XXH_BLOCK),
          stripe(begin / XXH_STRIPE % 16 + at / XXH_STRIPE),
          position(at / 8 % 8) {}

    // The word so many stripes further.
    __device__ __forceinline__ void add(u64 word, u32 further, const u64* secret) {
        const u32 place = stripe + further;
        const u64 mixed = word ^ secret[place % 16 + position], product = (mixed & 0xffffffffULL) * (mixed >> 32);
        if (place < 16) products[0] += product, plain[0] += word;
        else products[1] += product, plain[1] += word;
    }

    // All lanes of a warp: to the ring. `WIDTH` neighbouring lanes have words of the same position.
    template <u32 WIDTH>
    __device__ __forceinline__ void to_ring(u32 begin, u64* ring, u32 lane) const {
#pragma unroll
        for (u32 n = 0; n < 2; ++n) {
            if (n == 1 && begin % XXH_BLOCK == 0) break;  // the bytes are one block's
            u64 sum = products[n] + __shfl_xor_sync(0xffffffffu, plain[n], WIDTH);
            if (WIDTH == 2) sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            if (WIDTH == 1) sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            if (lane / WIDTH < 8 && lane % WIDTH == 0 && sum) {
                atomicAdd((unsigned long long*)ring + (block + n) % RING * 8 + position, sum);
            }
        }
    }
};

// A tile's signs and mantissas, 1,024 bytes at most: `marks[s]` of step `s`. `begin`: of the first in the layer.
__device__ __forceinline__ void sum_marks(const u64* marks, u32 steps, u32 begin, u32 lane, Shared& shared) {
    Adds adds(begin, lane * 8);
#pragma unroll
    for (u32 s = 0; s < HALF_STEPS; ++s) {
        if (s < steps) adds.add(marks[s], s * 4, shared.secret);
    }
    adds.to_ring<1>(begin, shared.ring, lane);
}

// Codes of two steps: an even lane adds a word of the first one, an odd one of the second. `number`: of the first step.
__device__ __forceinline__ void add_codes(Adds& adds, u32 first, u32 second, u32 number, u32 steps, u32 lane,
                                          const Shared& shared) {
    const u32 mine = lane & 1 ? first : second, other = __shfl_xor_sync(0xffffffffu, mine, 1);
    const u64 word = lane & 1 ? (u64)second << 32 | other : (u64)other << 32 | first;
    if (number + (lane & 1) < steps) adds.add(word, number * 2, shared.secret);
}

// The list of a part, by all warps. The last stripe of a layer, which is added apart, lies in its last list.
__device__ __forceinline__ void sum_list(const char* extent, const Part& part, u32 bytes, u32 warp, u32 lane,
                                         Shared& shared) {
    for (u32 at = part.list() + warp * 256; at < part.end(); at += WARPS * 256) {
        Adds adds(at, lane * 8);
        const u32 mine = at + lane * 8;
        if (mine < part.end()) {
            const u64 word = *(const u64*)(extent + mine);
            if (mine < bytes - XXH_STRIPE) {
                adds.add(word, 0, shared.secret);
            } else {
                const u64 mixed = word ^ xxh_secret_at(121 + 8 * adds.position);
                atomicAdd((unsigned long long*)shared.last + adds.position, (mixed & 0xffffffffULL) * (mixed >> 32));
                atomicAdd((unsigned long long*)shared.last + (adds.position ^ 1), word);
            }
        }
        adds.to_ring<1>(at, shared.ring, lane);
    }
}

// The first warp: fold the blocks [from, to), and leave their places empty. Lane `l` has accumulator `l & 7`, and fetches
// that of every fourth block.
__device__ __forceinline__ void fold(u32 from, u32 to, Shared& shared, u32 lane, u64& value) {
    const u64 key = shared.secret[16 + (lane & 7)];
    for (u32 block = from; block < to; block += 4) {
        u64 sum = 0;
        if (block + lane / 8 < to) {
            u64* const place = shared.ring + (block + lane / 8) % RING * 8 + (lane & 7);
            sum = *place;
            *place = 0;
        }
#pragma unroll
        for (u32 n = 0; n < 4; ++n) {
            const u64 one = __shfl_sync(0xffffffffu, sum, n * 8 + (lane & 7));
            if (block + n < to) value = xxh_scramble(value + one, key);
        }
    }
    __syncwarp();
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
            const u32 steps = min(TILE_VALUES, part.filled - first) / STEP_VALUES, split = steps * STEP_VALUES;
            const char* const tile = piece.extent + begin;
            const Places places(piece.c, part, piece.page, first);
            Adds of_codes(begin + split, (lane & 1) * 128 + lane / 2 * 8);
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                u64 marks[HALF_STEPS];
                u32 codes[HALF_STEPS];
#pragma unroll
                for (u32 n = 0; n < HALF_STEPS; ++n) {
                    const u32 s = half * HALF_STEPS + n;
                    marks[n] = s < steps ? *(const u64*)(tile + s * STEP_VALUES + lane * 8) : 0;
                    codes[n] = s < steps ? *(const u32*)(tile + split + s * (STEP_VALUES / 2) + lane * 4) : 0;
                }
#pragma unroll
                for (u32 n = 0; n < HALF_STEPS; ++n) {
                    const u32 s = half * HALF_STEPS + n;
                    if (s < steps) {
                        store_eight(places, first + s * STEP_VALUES + lane * 8, decode_eight(marks[n], codes[n], base));
                    }
                }
                if (half * HALF_STEPS >= steps) break;
                sum_marks(marks, steps - half * HALF_STEPS, begin + half * 1024, lane, piece.shared);
#pragma unroll
                for (u32 n = 0; n < HALF_STEPS; n += 2) {
                    add_codes(of_codes, codes[n], codes[n + 1], half * HALF_STEPS + n, steps, lane, piece.shared);
                }
            }
            of_codes.to_ring<2>(begin + split, piece.shared.ring, lane);
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
    const u32 eights = (part.values + 7) / 8;
    for (u32 n = threadIdx.x * step; n < eights; n += THREADS * step) {
        const Places places(piece.c, part, piece.page, n * 8);
        const Eight found = load_eight(places, n * 8);
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            if (n * 8 + i < part.values)
                atomicAdd(shared.times + exponent_of(found.pairs[i / 2] >> (16 * (i & 1))), 1u);
        }
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
__device__ __forceinline__ void list_exceptions(const Places& places, const u32* codes, u32 at, const Part& part,
                                                char* list, u32 lane) {
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s) {
        const u32 found = exceptions_of(codes[s]), mine = __popc(found);
        if (!__any_sync(0xffffffffu, mine)) continue;
        u32 before = mine;  // of the lanes up to this one
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        u32 number = at + before - mine;
        at += __shfl_sync(0xffffffffu, before, 31);
        for (u32 i = 0; i < 8 && mine; ++i) {
            if (!(found >> (8 * (i & 3) + (i & 4)) & 1)) continue;
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
        const u32 split = steps * STEP_VALUES, parity = round / WARPS & 1;
        char* const tile = piece.extent + begin;
        u32 codes[STEPS] = {}, exceptions = 0;
        Adds of_codes(begin + split, (lane & 1) * 128 + lane / 2 * 8);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            Eight values[HALF_STEPS];
            u64 marks[HALF_STEPS];
#pragma unroll
            for (u32 n = 0; n < HALF_STEPS; ++n) {
                const u32 s = half * HALF_STEPS + n;
                values[n] = {{0, 0, 0, 0}};
                if (s < steps) values[n] = load_eight(places, first + s * STEP_VALUES + lane * 8);
            }
#pragma unroll
            for (u32 n = 0; n < HALF_STEPS; ++n) {
                const u32 s = half * HALF_STEPS + n;
                encode_eight(values[n], base, marks[n], codes[s]);
                exceptions += __popc(exceptions_of(codes[s]));
                if (s >= steps) continue;
                *(u64*)(tile + s * STEP_VALUES + lane * 8) = marks[n];
                *(u32*)(tile + split + s * (STEP_VALUES / 2) + lane * 4) = codes[s];
            }
            if (half * HALF_STEPS >= steps) break;
            sum_marks(marks, steps - half * HALF_STEPS, begin + half * 1024, lane, shared);
#pragma unroll
            for (u32 n = 0; n < HALF_STEPS; n += 2) {
                const u32 s = half * HALF_STEPS + n;
                add_codes(of_codes, codes[s], codes[s + 1], s, steps, lane, shared);
            }
        }
        if (steps) of_codes.to_ring<2>(begin + split, shared.ring, lane);
#pragma unroll
        for (u32 n = 16; n; n /= 2) exceptions += __shfl_xor_sync(0xffffffffu, exceptions, n);
        if (lane == 0) shared.counts[parity][piece.warp] = exceptions;
        __syncthreads();
        u32 at = count;
        for (u32 w = 0; w < WARPS; ++w) {
            at += w < piece.warp ? shared.counts[parity][w] : 0;
            count += shared.counts[parity][w];
        }
        if (exceptions && at + 1 < part.words) list_exceptions(places, codes, at, part, list, lane);
        piece.passed(min(part.list(), part.begin + (round + WARPS) * TILE_BYTES));
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
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gather_packed(ARGUMENTS, u32, u64* digests, u32* unfit) {
    const Call call = CALL;
    move_packed<true>(call, digests, unfit);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) scatter_packed(ARGUMENTS, u32, u64* digests, u32* unfit) {
    const Call call = CALL;
    move_packed<false>(call, digests, unfit);
}
