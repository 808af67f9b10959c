// Copies of KV rows between pools in three layouts (layer-first, page-first, page-head), one token's rows an item.
//
// On each side, a token's bytes are at an address: in layer l, the piece of head h begins at
//   base + t * token_stride + t / page * page_gap + l * layer_step + h * head_step
// with a table of bases, one a layer, in place of `base + l * layer_step` if layers are tensors of their own. A layout
// without heads takes them as parts of its row. Unused steps are 0.
//
// A warp takes consecutive items, and their words one after another, over all pieces of an item: its lanes are equally
// busy with rows of 24 bytes and of 24 KiB. Addresses are of device memory or of page-locked host memory. Source and
// destination do not overlap.

typedef unsigned int u32;
typedef unsigned long long u64;

#define AT_ONCE 4  // independent loads in flight a lane

struct Side {
    u64 k, v;  // bases, or addresses of the tables
    u32 token_stride, page_gap, layer_step, head_step;
    u32 reciprocal, shift;  // t / page is t * reciprocal >> shift for every t below 2^31
    u32 tokens;             // at most 2^31; greater indices are out of range
    u32 table;
};

struct Call {
    Side src, dst;
    const void *src_indices, *dst_indices;
    u32 items, per_warp, piece_bytes, layers, heads, parts;  // parts: 2 for K and V, 1 for K alone
    u64* skipped;
};

// The place of a word in digits, the fastest first: neighbours in page-first and page-head memory are taken in order.
struct Place {
    u32 word, layer, head, part, item;
};

struct Radix {
    u32 words, layers, heads, parts;
};

__device__ __forceinline__ Place digits(u32 number, const Radix& radix) {
    Place place;
    place.word = number % radix.words;
    number /= radix.words;
    place.layer = number % radix.layers;
    number /= radix.layers;
    place.head = number % radix.heads;
    number /= radix.heads;
    place.part = number % radix.parts;
    place.item = number / radix.parts;
    return place;
}

__device__ __forceinline__ u32 add(u32& digit, u32 step, u32 radix) {
    digit += step;
    const u32 carry = digit >= radix;
    if (carry) digit -= radix;
    return carry;
}

__device__ __forceinline__ void advance(Place& place, const Place& step, const Radix& radix) {
    u32 carry = add(place.word, step.word, radix.words);
    carry = add(place.layer, step.layer + carry, radix.layers);
    carry = add(place.head, step.head + carry, radix.heads);
    carry = add(place.part, step.part + carry, radix.parts);
    place.item += step.item + carry;
}

// The low bits of all parts of a side's addresses. All lanes of the warp call this and get the same.
__device__ __forceinline__ u32 alignment(const Side& side, u32 layers, u32 parts) {
    u32 bits = side.token_stride | side.page_gap | side.layer_step | side.head_step;
    if (!side.table) return bits | (u32)side.k | (u32)side.v;
#pragma unroll 1
    for (u32 i = threadIdx.x & 31; i < layers; i += 32) {
        bits |= (u32)((const u64*)side.k)[i];
        if (parts > 1) bits |= (u32)((const u64*)side.v)[i];
    }
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) bits |= __shfl_xor_sync(0xffffffffu, bits, step);
    return bits;
}

// The address of a piece of token 0.
__device__ __forceinline__ u64 piece(const Side& side, const Place& place) {
    const u64 base = place.part ? side.v : side.k;
    const u64 layer = side.table ? __ldg((const u64*)base + place.layer) : base;
    return layer + (u64)place.layer * side.layer_step + (u64)place.head * side.head_step;
}

__device__ __forceinline__ u64 offset(const Side& side, u32 token) {
    const u32 page = (u32)((u64)token * side.reciprocal >> side.shift);
    return (u64)token * side.token_stride + (u64)page * side.page_gap;
}

// Negative indices become too large.
__device__ __forceinline__ bool known(const Side& side, int token) { return (u32)token < side.tokens; }
__device__ __forceinline__ bool known(const Side& side, long long token) { return (u64)token < side.tokens; }

template <typename Index>
__device__ __forceinline__ void count_skipped(const Call& c, const Index* src, const Index* dst, u32 items) {
    u32 bad = 0;
    for (u32 i = threadIdx.x & 31; i < items; i += 32) {
        bad += !known(c.src, __ldg(src + i));
        bad += !known(c.dst, __ldg(dst + i));
    }
    if (bad) atomicAdd(c.skipped, (u64)bad);
}

template <typename Word>
__device__ __forceinline__ Word load(const Word* p) {
    return __ldg(p);
}

template <>
__device__ __forceinline__ uint4 load(const uint4* p) {
    uint4 w;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(p));
    return w;
}

template <>
__device__ __forceinline__ u64 load(const u64* p) {
    u64 w;
    asm volatile("ld.global.nc.L1::no_allocate.u64 %0, [%1];" : "=l"(w) : "l"(p));
    return w;
}

template <typename Word, typename Index>
__device__ __forceinline__ void move(const Call& c, const Index* src, const Index* dst, u32 items) {
    const Radix radix = {c.piece_bytes / (u32)sizeof(Word), c.layers, c.heads, c.parts};
    const Place step = digits(32, radix);
    Place place = digits(threadIdx.x & 31, radix);
    while (__any_sync(0xffffffffu, place.item < items)) {
        u64 source[AT_ONCE], target[AT_ONCE];
        bool there[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            there[i] = place.item < items;
            const u32 item = there[i] ? place.item : items - 1;
            const Index from = __ldg(src + item), to = __ldg(dst + item);
            there[i] = there[i] && known(c.src, from) && known(c.dst, to);
            const u64 byte = (u64)place.word * sizeof(Word);
            source[i] = piece(c.src, place) + offset(c.src, (u32)from) + byte;
            target[i] = piece(c.dst, place) + offset(c.dst, (u32)to) + byte;
            advance(place, step, radix);
        }
        Word data[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            if (there[i]) data[i] = load((const Word*)source[i]);
        }
        __syncwarp();  // otherwise stores, which wait for their loads, come between the loads
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            if (there[i]) __stcg((Word*)target[i], data[i]);
        }
    }
}

// Move by the widest access that all addresses and the length allow.
template <typename Index>
__device__ __forceinline__ void transfer(const Call& c) {
    const u64 warp = ((u64)blockIdx.x * blockDim.x + threadIdx.x) >> 5, first = warp * c.per_warp;
    if (first >= c.items) return;
    const u32 items = c.per_warp < c.items - first ? c.per_warp : (u32)(c.items - first);
    const Index *src = (const Index*)c.src_indices + first, *dst = (const Index*)c.dst_indices + first;
    count_skipped(c, src, dst, items);
    const u32 bits = c.piece_bytes | alignment(c.src, c.layers, c.parts) | alignment(c.dst, c.layers, c.parts);
    if (!(bits & 15)) {
        move<uint4>(c, src, dst, items);
    } else if (!(bits & 7)) {
        move<u64>(c, src, dst, items);
    } else if (!(bits & 3)) {
        move<u32>(c, src, dst, items);
    } else if (!(bits & 1)) {
        move<unsigned short>(c, src, dst, items);
    } else {
        move<unsigned char>(c, src, dst, items);
    }
}

#define SIDE(s)                                                                                                        \
    u64 s##_k, u64 s##_v, u32 s##_token_stride, u32 s##_page_gap, u32 s##_layer_step, u32 s##_head_step,               \
        u32 s##_reciprocal, u32 s##_shift, u32 s##_tokens, u32 s##_table
#define SIDE_OF(s)                                                                                                     \
    {s##_k,         s##_v,          s##_token_stride, s##_page_gap, s##_layer_step,                                    \
     s##_head_step, s##_reciprocal, s##_shift,        s##_tokens,   s##_table}
#define KERNEL(name, Index)                                                                                            \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        name(SIDE(src), SIDE(dst), const void* src_indices, const void* dst_indices, u32 items, u32 per_warp,          \
             u32 piece_bytes, u32 layers, u32 heads, u32 parts, u64* skipped) {                                        \
        const Call call = {SIDE_OF(src), SIDE_OF(dst), src_indices, dst_indices, items,  per_warp,                     \
                           piece_bytes,  layers,       heads,       parts,       skipped};                             \
        transfer<Index>(call);                                                                                         \
    }

KERNEL(transfer_int32, int)
KERNEL(transfer_int64, long long)
