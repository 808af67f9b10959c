// XXH3-64 (Yann Collet's xxHash, seed 0, default secret) of inputs of more than 240 bytes, cut up for many threads.
//
// The long form walks over blocks of 1,024 bytes. Within a block, each of 16 stripes of 64 bytes adds to eight 64-bit
// accumulators in any order; after a block the accumulators are scrambled; the last 64 bytes of the input are a stripe
// of their own. So a block's eight sums are taken when its bytes pass, and a short scan over the blocks ends it.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define XXH_BLOCK 1024
#define XXH_STRIPE 64

#define XXH_PRIME32_1 0x9E3779B1ULL
#define XXH_PRIME32_2 0x85EBCA77ULL
#define XXH_PRIME32_3 0xC2B2AE3DULL
#define XXH_PRIME64_1 0x9E3779B185EBCA87ULL
#define XXH_PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define XXH_PRIME64_3 0x165667B19E3779F9ULL
#define XXH_PRIME64_4 0x85EBCA77C2B2AE63ULL
#define XXH_PRIME64_5 0x27D4EB2F165667C5ULL
#define XXH_AVALANCHE 0x165667919E3779F9ULL

// The default secret, 192 bytes as little-endian words.
__constant__ u64 xxh_secret[24] = {
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL, 0x78e5c0cc4ee679cbULL,
    0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL, 0xcb00c391bb52283cULL, 0xa32e531b8b65d088ULL,
    0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL, 0x3f349ce33f76faa8ULL, 0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL,
    0x647378d9c97e9fc8ULL, 0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL, 0x49daf0b751dd0d17ULL, 0x9e68d429265516d3ULL,
    0xfca1477d58be162bULL, 0xce31d07ad1b8f88fULL, 0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL};

// A word of the secret at any byte.
__device__ __forceinline__ u64 xxh_secret_at(u32 byte) {
    u32 word = byte >> 3, shift = (byte & 7) * 8;
    u64 low = xxh_secret[word];
    return shift ? (low >> shift) | (xxh_secret[word + 1] << (64 - shift)) : low;
}

// The sums of the words at positions `i` (even) and `i + 1` of a stripe, added to accumulators `i` and `i + 1`.
__device__ __forceinline__ void xxh_add(u64 even, u64 odd, u64 key_even, u64 key_odd, u64& sum_even, u64& sum_odd) {
    u64 a = even ^ key_even, b = odd ^ key_odd;
    sum_even += odd + (a & 0xffffffffULL) * (a >> 32);
    sum_odd += even + (b & 0xffffffffULL) * (b >> 32);
}

__constant__ u64 xxh_start[8] = {XXH_PRIME32_3, XXH_PRIME64_1, XXH_PRIME64_2, XXH_PRIME64_3,
                                 XXH_PRIME64_4, XXH_PRIME32_2, XXH_PRIME64_5, XXH_PRIME32_1};

// The scramble of accumulator `i` at the end of a block.
__device__ __forceinline__ u64 xxh_scramble(u64 value, u64 key) {
    return ((value ^ (value >> 47)) ^ key) * XXH_PRIME32_1;
}

__device__ __forceinline__ u64 xxh_fold(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

__device__ __forceinline__ u64 xxh_finish(u64 value) {
    value = (value ^ (value >> 37)) * XXH_AVALANCHE;
    return value ^ (value >> 32);
}
