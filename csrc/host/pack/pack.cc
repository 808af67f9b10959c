#include "pack/pack.h"

#include <bit>
#include <cstring>

#include "base/processor.h"

namespace gdscache {
namespace {

// Sixteen bytes, which every x86-64 and aarch64 processor takes at once. AVX2 gains nothing: it packs within halves.
using Bytes = uint8_t __attribute__((vector_size(16)));
using Words = uint16_t __attribute__((vector_size(16)));
using Longs = uint64_t __attribute__((vector_size(16)));
using Fours = uint32_t __attribute__((vector_size(16)));
constexpr size_t kStep = 2 * sizeof(Bytes);  // values of a step
constexpr size_t kAhead = 1024;              // bytes from a counted value to those that are fetched

template <typename T>
T read(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <typename T>
void write(uint8_t* at, T value) {
    std::memcpy(at, &value, sizeof value);
}

// Each byte moved down; no processor here moves bytes but in wider words.
Bytes shifted(Bytes bytes, int down, uint8_t kept) {
    return reinterpret_cast<Bytes>(reinterpret_cast<Words>(bytes) >> down) & kept;
}

Bytes narrow(Words first, Words second) {
#if defined(__SSE2__)
    return reinterpret_cast<Bytes>(
        _mm_packus_epi16(reinterpret_cast<__m128i>(first), reinterpret_cast<__m128i>(second)));
#else
    return __builtin_shufflevector(reinterpret_cast<Bytes>(first), reinterpret_cast<Bytes>(second), 0, 2, 4, 6, 8, 10,
                                   12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#endif
}

template <typename Mask>
Bytes choose(Mask which, Bytes one, Bytes other) {
    const auto mask = reinterpret_cast<Bytes>(which);
    return (one & mask) | (other & ~mask);
}

// A bit for each byte of a mask, as two bytes.
uint16_t bits_of(Bytes mask) {
#if defined(__SSE2__)
    return static_cast<uint16_t>(_mm_movemask_epi8(reinterpret_cast<__m128i>(mask)));
#else
    constexpr Bytes kBits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const auto halves = reinterpret_cast<Longs>(mask & kBits) * 0x0101010101010101u >> 56;
    return static_cast<uint16_t>(halves[0] | halves[1] << 8);
#endif
}

// A tile has the signs and mantissas of its values, a byte each, then four bytes with the codes of each eight: byte j
// has that of value j in its low half, and of value j + 4 in its high half.
void encode(const uint8_t* in, size_t values, uint8_t base, uint8_t* out, uint64_t* others) {
    auto* bits = reinterpret_cast<uint8_t*>(others);
    uint8_t* codes = out + values;
    for (size_t n = 0; n < values; n += kStep, codes += sizeof(Bytes)) {
        Fours found[2];
        for (Fours& four : found) {
            const auto low = read<Words>(in), high = read<Words>(in + sizeof(Words));
            const Bytes even = narrow(low & 0xFF, high & 0xFF), odd = narrow(low >> 8, high >> 8);
            const Bytes exponents = (odd + odd) | shifted(even, 7, 0x01);
            const Bytes above = exponents - base;  // 1 to kWindow in the window
            const Bytes code = choose(above - 1 < kWindow, above, Bytes{} + kOther);
            const Bytes kept = code & reinterpret_cast<Bytes>(exponents != 0);
            four = reinterpret_cast<Fours>(kept);
            write(bits, bits_of(reinterpret_cast<Bytes>(kept == kOther)));
            bits += 2;
            write(out, (odd & 0x80) | (even & 0x7F));
            in += 2 * sizeof(Words), out += sizeof(Bytes);
        }
        write(codes, __builtin_shufflevector(found[0], found[1], 0, 2, 4, 6) |
                         __builtin_shufflevector(found[0], found[1], 1, 3, 5, 7) << 4);
    }
}

void decode(const uint8_t* in, size_t values, uint8_t base, uint8_t* out) {
    const uint8_t* codes = in + values;
    for (size_t n = 0; n < values; n += kStep, codes += sizeof(Bytes)) {
        const auto both = read<Bytes>(codes);
        const auto low = reinterpret_cast<Fours>(both & 0x0F), high = reinterpret_cast<Fours>(shifted(both, 4, 0x0F));
        for (const Fours four :
             {__builtin_shufflevector(low, high, 0, 4, 1, 5), __builtin_shufflevector(low, high, 2, 6, 3, 7)}) {
            const auto code = reinterpret_cast<Bytes>(four);
            const Bytes exponents = (code + base) & reinterpret_cast<Bytes>(code != 0), marks = read<Bytes>(in);
            const Bytes even = (marks & 0x7F) | (exponents << 7), odd = (marks & 0x80) | shifted(exponents, 1, 0x7F);
            write(out, __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
            write(out + sizeof(Bytes),
                  __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
            in += sizeof(Bytes), out += 2 * sizeof(Bytes);
        }
    }
}

constexpr TileCoder kPlain{"plain", encode, decode, decode};

#if defined(__x86_64__)

// By AVX-512BW, compiled for its instructions, independent of the build's target: 64 values a step.
#define AVX512 __attribute__((target("avx512bw")))

namespace avx512 {

// Words are packed and unpacked within lanes of 16 bytes. Orders of their halves behind packs, and before unpacks:
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

constexpr TileCoder kCoder{"avx512", encode, decode<false>, decode<true>};

}  // namespace avx512

#endif

}  // namespace

std::vector<const TileCoder*> coders() {
#if defined(__x86_64__)
    if (has_avx512()) return {&avx512::kCoder, &kPlain};
#endif
    return {&kPlain};
}

void Exponents::count(const uint8_t* values, size_t bytes) {
    for (const size_t end = seen_ + bytes / 2; next_ < end;) {
        const uint8_t* const from = values + 2 * (next_ - seen_);
        const size_t some = std::min(8 - next_ % 8, end - next_);
        for (size_t n = 0; n < some; n++) times_[n % 4][static_cast<uint8_t>(read<uint16_t>(from + 2 * n) >> 7)]++;
        next_ += some;
        if (next_ % 8 != 0) break;
        next_ += 8 * (step_ - 1);
        // All values are packed next, and no processor sees where these reads go.
        const uint8_t* const ahead = std::min(from + kAhead + 16 * step_, values + bytes);
        for (const uint8_t* at = from + kAhead; at < ahead; at += 64) __builtin_prefetch(at);
    }
    seen_ += bytes / 2;
}

uint8_t Exponents::base() const {
    uint32_t times[256];
    for (size_t n = 0; n < 256; n++) times[n] = times_[0][n] + times_[1][n] + times_[2][n] + times_[3][n];
    uint32_t inside = 0, most = 0;
    size_t best = 0;
    for (size_t n = 1; n <= kWindow; n++) most = inside += times[n];
    for (size_t base = 1; base + kWindow < 256; base++) {
        inside += times[base + kWindow] - times[base];
        if (inside > most) most = inside, best = base;
    }
    return static_cast<uint8_t>(best);
}

bool Exceptions::add(const uint8_t* in, const uint64_t* others, size_t values, size_t first) {
    for (size_t n = 0; n < values; n += 64) {
        for (uint64_t left = others[n / 64]; left; left &= left - 1) {
            if (count_ == room_) return false;
            const size_t at = n + static_cast<size_t>(std::countr_zero(left));
            const auto exponent = static_cast<uint8_t>(read<uint16_t>(in + 2 * at) >> 7);
            write(list_ + 4 * ++count_, static_cast<uint32_t>((first + at) << 8 | exponent));
        }
    }
    return true;
}

void Exceptions::end(uint8_t base) {
    const uint32_t word = static_cast<uint32_t>(count_ << 8) | base;
    std::memcpy(list_, &word, sizeof word);
    std::memset(list_ + 4 * (count_ + 1), 0, 4 * (room_ - count_));
}

uint8_t base_of(const uint8_t* list) { return list[0]; }

size_t exceptions_of(const uint8_t* list, size_t values) {
    return std::min<size_t>(read<uint32_t>(list) >> 8, list_bytes(values) / 4 - 1);
}

}  // namespace gdscache
