#include "pack/pack.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gdscache {
namespace {

constexpr size_t kWindow = 14;  // exponents that have codes of their own: 1 to 14, of base + 1 to base + 14
constexpr uint8_t kOther = 15;

// Sixteen bytes, which every x86-64 and aarch64 processor takes at once. Wider ones gain nothing: AVX2 packs within
// halves.
using Bytes = uint8_t __attribute__((vector_size(16)));
using Words = uint16_t __attribute__((vector_size(16)));
using Fours = uint32_t __attribute__((vector_size(16)));
constexpr size_t kStep = 2 * sizeof(Bytes);  // values of a step

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

}  // namespace

// A tile has the signs and mantissas of its values, a byte each, then four bytes with the codes of each eight: byte j
// has that of value j in its low half, and of value j + 4 in its high half.
void encode_tile(const uint8_t* in, size_t values, uint8_t base, uint8_t* out) {
    uint8_t* codes = out + values;
    for (size_t n = 0; n < values; n += kStep, codes += sizeof(Bytes)) {
        Fours found[2];
        for (Fours& four : found) {
            const auto low = read<Words>(in), high = read<Words>(in + sizeof(Words));
            const Bytes even = narrow(low & 0xFF, high & 0xFF), odd = narrow(low >> 8, high >> 8);
            const Bytes exponents = (odd + odd) | shifted(even, 7, 0x01);
            const Bytes above = exponents - base;  // 1 to kWindow in the window
            const Bytes code = choose(above - 1 < kWindow, above, Bytes{} + kOther);
            four = reinterpret_cast<Fours>(code & reinterpret_cast<Bytes>(exponents != 0));
            write(out, (odd & 0x80) | (even & 0x7F));
            in += 2 * sizeof(Words), out += sizeof(Bytes);
        }
        write(codes, __builtin_shufflevector(found[0], found[1], 0, 2, 4, 6) |
                         __builtin_shufflevector(found[0], found[1], 1, 3, 5, 7) << 4);
    }
}

void decode_tile(const uint8_t* in, size_t values, uint8_t base, uint8_t* out) {
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

void Exponents::count(const uint8_t* values, size_t bytes) {
    for (const size_t end = seen_ + bytes / 2; next_ < end;) {
        const uint8_t* const from = values + 2 * (next_ - seen_);
        times_[static_cast<uint8_t>(read<uint16_t>(from) >> 7)]++;
        if (++next_ % 8 != 0) continue;
        next_ += 8 * (step_ - 1);
        // The values between are packed next, and no processor sees where these reads go.
        for (size_t at = 64; at < 16 * step_ && next_ < end; at += 64) __builtin_prefetch(from + at);
    }
    seen_ += bytes / 2;
}

uint8_t Exponents::base() const {
    uint32_t inside = 0, most = 0;
    size_t best = 0;
    for (size_t n = 1; n <= kWindow; n++) most = inside += times_[n];
    for (size_t base = 1; base + kWindow < 256; base++) {
        inside += times_[base + kWindow] - times_[base];
        if (inside > most) most = inside, best = base;
    }
    return static_cast<uint8_t>(best);
}

bool Exceptions::add(const uint8_t* in, const uint8_t* tile, size_t values, size_t first) {
    for (size_t n = 0; n < values; n += 16) {
        const uint64_t codes = read<uint64_t>(tile + values + n / 2);
        if (!(codes & codes >> 1 & codes >> 2 & codes >> 3 & 0x1111111111111111u)) continue;
        for (size_t i = n; i < n + 16; i++) {
            const uint8_t pair = tile[values + i / 8 * 4 + i % 4];
            if ((i & 4 ? pair >> 4 : pair & 15) != kOther) continue;
            if (count_ == room_) return false;
            const size_t place = first + i;
            const uint32_t word =
                static_cast<uint32_t>(place << 8) | static_cast<uint8_t>(read<uint16_t>(in + 2 * i) >> 7);
            std::memcpy(list_ + 4 * ++count_, &word, sizeof word);
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
