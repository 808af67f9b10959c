// The arm of XXH3 by vector instructions: NEON, which every aarch64 processor has, or AVX2, compiled for its instructions,
// independent of the build's target. AVX-512 gains nothing: in the nearest cache both add up 58 GB/s on a core of an
// EPYC, and copies wait for memory.
//
// A stripe adds to the sums a product of each word with the secret, and the word itself to the neighbouring sum. Words
// are added up in place and swapped once a block: two chains of additions, and no shuffle a stripe.
//
// For xxh3.cc alone, with the secret and the primes.

#pragma once

#include "base/processor.h"
#include "hash/xxh3.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace gdscache::xxh3_detail {

constexpr uint64_t kPrime32_1 = 0x9E3779B1u;
constexpr uint64_t kPrime32_2 = 0x85EBCA77u;
constexpr uint64_t kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5u;

// The default secret as little-endian words. Both architectures of the build are little-endian.
alignas(64) inline constexpr uint64_t kSecretWords[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};

inline const uint8_t* secret() { return reinterpret_cast<const uint8_t*>(kSecretWords); }

constexpr size_t kScrambleSecret = 128;  // the secret's last 64 bytes
constexpr size_t kLastSecret = 121;  // for the last stripe

enum class Out { kNone, kCopy, kStream };

#if defined(__x86_64__)

// Each function names its instructions itself; a lambda or a template without them could not be inlined.
#define VECTOR __attribute__((target("avx2")))
#define INLINE VECTOR __attribute__((always_inline)) inline

constexpr const char* kName = "avx2";
constexpr uintptr_t kAhead = 1024;

inline bool is_here() { return has_avx2(); }

using Words = __m256i;

INLINE Words read(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
INLINE void write(void* at, Words words) { _mm256_storeu_si256(static_cast<__m256i*>(at), words); }
INLINE void stream(void* at, Words words) { _mm256_stream_si256(static_cast<__m256i*>(at), words); }
INLINE Words mixed(Words one, Words other) { return _mm256_xor_si256(one, other); }
INLINE Words sum(Words one, Words other) { return _mm256_add_epi64(one, other); }
// The sum and the product of both halves of each word.
INLINE Words sum_of_product(Words with, Words words) {
    return sum(with, _mm256_mul_epu32(words, _mm256_srli_epi64(words, 32)));
}
INLINE Words swapped(Words words) { return _mm256_shuffle_epi32(words, 0x4E); }  // the two words of each 16 bytes
INLINE Words shifted(Words words) { return _mm256_srli_epi64(words, 47); }
INLINE Words times_prime(Words words) {
    const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(kPrime32_1));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(words, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(words, prime), _mm256_slli_epi64(high, 32));
}
INLINE void fetch(const uint8_t* in) {
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(in) + kAhead), _MM_HINT_T0);
}

#else

#define VECTOR
#define INLINE inline

constexpr const char* kName = "neon";

inline bool is_here() { return true; }

using Words = uint64x2_t;

INLINE Words read(const void* at) { return vreinterpretq_u64_u8(vld1q_u8(static_cast<const uint8_t*>(at))); }
INLINE void write(void* at, Words words) { vst1q_u8(static_cast<uint8_t*>(at), vreinterpretq_u8_u64(words)); }
INLINE void stream(void* at, Words words) { write(at, words); }  // compilers offer no store past the caches
INLINE Words mixed(Words one, Words other) { return veorq_u64(one, other); }
INLINE Words sum(Words one, Words other) { return vaddq_u64(one, other); }
INLINE Words sum_of_product(Words with, Words words) {
    return vmlal_u32(with, vmovn_u64(words), vshrn_n_u64(words, 32));
}
INLINE Words swapped(Words words) { return vextq_u64(words, words, 1); }
INLINE Words shifted(Words words) { return vshrq_n_u64(words, 47); }
INLINE Words times_prime(Words words) {
    const uint32x2_t prime = vdup_n_u32(static_cast<uint32_t>(kPrime32_1));
    const uint64x2_t high = vshlq_n_u64(vmull_u32(vshrn_n_u64(words, 32), prime), 32);
    return vmlal_u32(high, vmovn_u64(words), prime);
}
INLINE void fetch(const uint8_t*) {}

#endif

constexpr size_t kWide = sizeof(Words), kParts = kStripe / kWide;

// A part of the eight sums.
struct Part {
    Words products, words;
};

template <Out kOut>
INLINE void add_part(Part& part, const uint8_t* in, const uint8_t* key, uint8_t* out) {
    const Words data = read(in);
    if constexpr (kOut == Out::kCopy) write(out, data);
    if constexpr (kOut == Out::kStream) stream(out, data);
    part.products = sum_of_product(part.products, mixed(data, read(key)));
    part.words = sum(part.words, data);
}

INLINE Words joined(const Part& part) { return sum(part.products, swapped(part.words)); }

template <Out kOut>
VECTOR void walk(Lanes& lanes, const uint8_t* in, size_t stripes, uint8_t* out) {
    const uint8_t* const keys = secret();
    uint8_t* const kept = reinterpret_cast<uint8_t*>(lanes.sum);
    Part parts[kParts];
    for (size_t n = 0; n < kParts; n++) parts[n] = {read(kept + n * kWide), Words{}};
    size_t at = lanes.stripes;
    while (stripes) {
        const size_t some = stripes < kBlockStripes - at ? stripes : kBlockStripes - at;
#pragma GCC unroll 4
        for (size_t n = 0; n < some; n++) {
            // It helps beside a second stream, of writes, and hurts without one: the processor then predicts well enough.
            if constexpr (kOut != Out::kNone) fetch(in + n * kStripe);
#pragma GCC unroll 4
            for (size_t part = 0; part < kParts; part++) {
                const size_t byte = part * kWide;
                add_part<kOut>(parts[part], in + n * kStripe + byte, keys + 8 * (at + n) + byte,
                               out + n * kStripe + byte);
            }
        }
        at += some;
        stripes -= some;
        in += some * kStripe;
        if constexpr (kOut != Out::kNone) out += some * kStripe;
        if (at < kBlockStripes) continue;
        for (size_t n = 0; n < kParts; n++) {
            const Words value = joined(parts[n]), key = read(keys + kScrambleSecret + n * kWide);
            parts[n] = {times_prime(mixed(mixed(value, shifted(value)), key)), Words{}};
        }
        at = 0;
    }
    for (size_t n = 0; n < kParts; n++) write(kept + n * kWide, joined(parts[n]));
    lanes.stripes = static_cast<uint32_t>(at);
}

constexpr Arm kVector{kName, walk<Out::kNone>, walk<Out::kCopy>, walk<Out::kStream>};

// Null if the processor lacks the instructions.
inline const Arm* vector_arm() { return is_here() ? &kVector : nullptr; }

}  // namespace gdscache::xxh3_detail
