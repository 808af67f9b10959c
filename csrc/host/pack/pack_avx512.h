// The coding of tiles by AVX-512BW, compiled for its instructions, independent of the build's target: 64 values a step.
// For pack.cc alone.

#pragma once

#include "base/processor.h"
#include "pack/pack.h"

#if defined(__x86_64__)

#define AVX512 __attribute__((target("avx512bw")))

namespace gdscache::avx512 {

// Words are packed and unpacked within lanes of 16 bytes. These orders of their halves put the bytes in order: behind
// packs, and before unpacks.
AVX512 inline __m512i after_packs() { return _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7); }
AVX512 inline __m512i before_unpacks() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }

// Bits of one where `kept` has ones, else of the other.
AVX512 inline __m512i choose(__m512i kept, __m512i one, __m512i other) {
    return _mm512_ternarylogic_epi64(kept, one, other, 0xCA);
}

AVX512 inline void encode(const uint8_t* in, size_t values, uint8_t base, uint8_t* out, uint64_t* others) {
    const __m512i low = _mm512_set1_epi16(0xFF), one = _mm512_set1_epi8(1), order = after_packs();
    const __m512i first = _mm512_set1_epi8(static_cast<char>(base + 1)), most = _mm512_set1_epi8(kWindow);
    for (size_t n = 0; n < values; n += 64) {
        const __m512i a = _mm512_loadu_si512(in + 2 * n), b = _mm512_loadu_si512(in + 2 * n + 64);
        const __m512i evens = _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
        const __m512i odds = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
        const __m512i even = _mm512_permutexvar_epi64(order, evens), odd = _mm512_permutexvar_epi64(order, odds);
        const __m512i exponents = choose(one, _mm512_srli_epi16(even, 7), _mm512_add_epi8(odd, odd));
        const __m512i code = _mm512_min_epu8(_mm512_sub_epi8(exponents, first), most);
        const __m512i codes = _mm512_maskz_add_epi8(_mm512_test_epi8_mask(exponents, exponents), code, one);
        const __m512i pairs = _mm512_or_si512(codes, _mm512_srli_epi64(codes, 28));
        _mm512_storeu_si512(out + n, choose(_mm512_set1_epi8(0x7F), even, odd));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + values + n / 2), _mm512_cvtepi64_epi32(pairs));
        others[n / 64] = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(kOther));
    }
}

template <bool kStream>
AVX512 void decode(const uint8_t* in, size_t values, uint8_t base, uint8_t* out) {
    const __m512i order = before_unpacks(), bases = _mm512_set1_epi8(static_cast<char>(base));
    for (size_t n = 0; n < values; n += 64) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + values + n / 2));
        const __m512i pairs = _mm512_maskz_permutexvar_epi32(0x5555, order, _mm512_castsi256_si512(both));
        const __m512i codes =
            _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28)), _mm512_set1_epi8(0x0F));
        const __m512i exponents = _mm512_maskz_add_epi8(_mm512_test_epi8_mask(codes, codes), codes, bases);
        const __m512i marks = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(in + n));
        const __m512i even = choose(_mm512_set1_epi8(0x7F), marks, _mm512_slli_epi16(exponents, 7));
        const __m512i odd = choose(_mm512_set1_epi8(0x7F), _mm512_srli_epi16(exponents, 1), marks);
        const __m512i first = _mm512_unpacklo_epi8(even, odd), last = _mm512_unpackhi_epi8(even, odd);
        auto* const to = reinterpret_cast<__m512i*>(out + 2 * n);
        if constexpr (kStream) _mm512_stream_si512(to, first), _mm512_stream_si512(to + 1, last);
        else _mm512_storeu_si512(to, first), _mm512_storeu_si512(to + 1, last);
    }
}

inline constexpr TileCoder kCoder{"avx512", encode, decode<false>, decode<true>};

}  // namespace gdscache::avx512

#endif
