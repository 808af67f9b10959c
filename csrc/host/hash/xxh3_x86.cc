// The arms of XXH3 for x86-64: AVX-512F and AVX2, compiled for their instructions, independent of the build's target.
//
// A stripe adds to the sums a product of each word with the secret, and the word itself to the neighbouring sum. Words
// are added up in place and swapped once a block: two chains of additions, and no shuffle a stripe.

#include "base/processor.h"
#include "hash/xxh3_arms.h"

#if defined(__x86_64__)

// Each function names its instructions itself; a lambda or a template without them could not be inlined.
#define AVX512 __attribute__((target("avx512f")))
#define AVX2 __attribute__((target("avx2")))
#define INLINE __attribute__((always_inline)) inline

namespace gdscache::xxh3_detail {
namespace {

constexpr int kSwap = 0x4E;  // swaps the two words of each 16 bytes
constexpr uintptr_t kAhead = 1024;

// Prefetch. It helps beside a second stream, of writes, and hurts without one: the processor then predicts well enough.
template <Out kOut>
INLINE void fetch(const uint8_t* in) {
    if constexpr (kOut != Out::kNone) {
        _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(in) + kAhead), _MM_HINT_T0);
    }
}

// --- AVX-512F: a stripe is a register

struct Wide {
    __m512i products, words;
};

template <Out kOut>
AVX512 INLINE void add_stripe(Wide& sums, const uint8_t* in, const uint8_t* key, uint8_t* out) {
    const __m512i data = _mm512_loadu_si512(in);
    if constexpr (kOut == Out::kCopy) _mm512_storeu_si512(out, data);
    if constexpr (kOut == Out::kStream) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), data);
    const __m512i mixed = _mm512_xor_si512(data, _mm512_loadu_si512(key));
    sums.products = _mm512_add_epi64(sums.products, _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32)));
    sums.words = _mm512_add_epi64(sums.words, data);
}

AVX512 INLINE __m512i joined(const Wide& sums) {
    const __m512i words = _mm512_shuffle_epi32(sums.words, static_cast<_MM_PERM_ENUM>(kSwap));
    return _mm512_add_epi64(sums.products, words);
}

AVX512 INLINE __m512i scrambled(__m512i value) {
    const __m512i prime = _mm512_set1_epi64(static_cast<long long>(kPrime32_1));
    const __m512i key = _mm512_loadu_si512(secret() + kScrambleSecret);
    value = _mm512_xor_si512(_mm512_xor_si512(value, _mm512_srli_epi64(value, 47)), key);
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(value, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(value, prime), _mm512_slli_epi64(high, 32));
}

template <Out kOut>
AVX512 void walk_wide(Lanes& lanes, const uint8_t* in, size_t stripes, uint8_t* out) {
    const uint8_t* const keys = secret();
    Wide sums{_mm512_load_si512(lanes.sum), _mm512_setzero_si512()};
    size_t at = lanes.stripes;
    while (stripes) {
        if (at == 0 && stripes >= kBlockStripes) {
#pragma GCC unroll 16
            for (size_t n = 0; n < kBlockStripes; n++) {
                fetch<kOut>(in + n * kStripe);
                add_stripe<kOut>(sums, in + n * kStripe, keys + 8 * n, out + n * kStripe);
            }
            at = kBlockStripes;
            stripes -= kBlockStripes;
            in += kBlockStripes * kStripe;
            if constexpr (kOut != Out::kNone) out += kBlockStripes * kStripe;
        } else {
            add_stripe<kOut>(sums, in, keys + 8 * at, out);
            at++;
            stripes--;
            in += kStripe;
            if constexpr (kOut != Out::kNone) out += kStripe;
        }
        if (at == kBlockStripes) {
            sums = {scrambled(joined(sums)), _mm512_setzero_si512()};
            at = 0;
        }
    }
    _mm512_store_si512(lanes.sum, joined(sums));
    lanes.stripes = static_cast<uint32_t>(at);
}

// --- AVX2: a stripe is two registers

struct Half {
    __m256i products, words;
};

template <Out kOut>
AVX2 INLINE void add_half(Half& sums, const uint8_t* in, const uint8_t* key, uint8_t* out) {
    const __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
    if constexpr (kOut == Out::kCopy) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), data);
    if constexpr (kOut == Out::kStream) _mm256_stream_si256(reinterpret_cast<__m256i*>(out), data);
    const __m256i mixed = _mm256_xor_si256(data, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key)));
    sums.products = _mm256_add_epi64(sums.products, _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32)));
    sums.words = _mm256_add_epi64(sums.words, data);
}

AVX2 INLINE __m256i joined(const Half& sums) {
    return _mm256_add_epi64(sums.products, _mm256_shuffle_epi32(sums.words, kSwap));
}

AVX2 INLINE __m256i scrambled(__m256i value, const uint8_t* key) {
    const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(kPrime32_1));
    value = _mm256_xor_si256(value, _mm256_srli_epi64(value, 47));
    value = _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key)));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(value, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(value, prime), _mm256_slli_epi64(high, 32));
}

template <Out kOut>
AVX2 void walk_halves(Lanes& lanes, const uint8_t* in, size_t stripes, uint8_t* out) {
    const uint8_t* const keys = secret();
    __m256i* const kept = reinterpret_cast<__m256i*>(lanes.sum);
    Half low{_mm256_load_si256(kept), _mm256_setzero_si256()};
    Half high{_mm256_load_si256(kept + 1), _mm256_setzero_si256()};
    size_t at = lanes.stripes;
    while (stripes) {
        const size_t some = stripes < kBlockStripes - at ? stripes : kBlockStripes - at;
#pragma GCC unroll 4
        for (size_t n = 0; n < some; n++) {
            fetch<kOut>(in + n * kStripe);
            const uint8_t* const key = keys + 8 * (at + n);
            add_half<kOut>(low, in + n * kStripe, key, out + n * kStripe);
            add_half<kOut>(high, in + n * kStripe + 32, key + 32, out + n * kStripe + 32);
        }
        at += some;
        stripes -= some;
        in += some * kStripe;
        if constexpr (kOut != Out::kNone) out += some * kStripe;
        if (at == kBlockStripes) {
            low = {scrambled(joined(low), keys + kScrambleSecret), _mm256_setzero_si256()};
            high = {scrambled(joined(high), keys + kScrambleSecret + 32), _mm256_setzero_si256()};
            at = 0;
        }
    }
    _mm256_store_si256(kept, joined(low));
    _mm256_store_si256(kept + 1, joined(high));
    lanes.stripes = static_cast<uint32_t>(at);
}

constexpr Arm kAvx512{"avx512", walk_wide<Out::kNone>, walk_wide<Out::kCopy>, walk_wide<Out::kStream>};
constexpr Arm kAvx2{"avx2", walk_halves<Out::kNone>, walk_halves<Out::kCopy>, walk_halves<Out::kStream>};

}  // namespace

const Arm* avx512_arm() { return has_avx512() ? &kAvx512 : nullptr; }
const Arm* avx2_arm() { return has_avx2() ? &kAvx2 : nullptr; }
const Arm* neon_arm() { return nullptr; }

}  // namespace gdscache::xxh3_detail

#endif
