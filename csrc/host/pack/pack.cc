#include "pack/pack.h"

#include <cstring>

namespace gdscache {
namespace {

constexpr size_t kWindow = 14;  // exponents that have codes of their own: 1 to 14, of base + 1 to base + 14
constexpr uint8_t kOther = 15;
constexpr size_t kStep = 32;  // values of a loop of fixed length: compilers make vectors of such loops

template <typename T>
T read(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

}  // namespace

// A tile has the signs and mantissas of its values, a byte each, then four bytes with the codes of each eight: byte j
// has that of value j in its low half, and of value j + 4 in its high half.
void encode_tile(const uint8_t* in, size_t values, uint8_t base, uint8_t* out) {
    uint8_t* codes = out + values;
    const uint8_t first = static_cast<uint8_t>(base + 1);
    for (size_t n = 0; n < values; n += kStep, in += 2 * kStep, out += kStep, codes += kStep / 2) {
        uint16_t value[kStep];
        uint8_t code[kStep];
        std::memcpy(value, in, sizeof value);
        for (size_t i = 0; i < kStep; i++) {
            const uint8_t exponent = static_cast<uint8_t>(value[i] >> 7);
            const uint8_t above = static_cast<uint8_t>(exponent - first);
            const uint8_t found = above < kWindow ? static_cast<uint8_t>(above + 1) : kOther;
            code[i] = exponent ? found : 0;
            out[i] = static_cast<uint8_t>((value[i] >> 8 & 0x80) | (value[i] & 0x7F));
        }
        uint64_t eight[kStep / 8];
        uint32_t packed[kStep / 8];
        std::memcpy(eight, code, sizeof eight);
        for (size_t i = 0; i < kStep / 8; i++) packed[i] = static_cast<uint32_t>(eight[i] | eight[i] >> 28);
        std::memcpy(codes, packed, sizeof packed);
    }
}

void decode_tile(const uint8_t* in, size_t values, uint8_t base, uint8_t* out) {
    const uint8_t* codes = in + values;
    for (size_t n = 0; n < values; n += kStep, in += kStep, out += 2 * kStep, codes += kStep / 2) {
        uint32_t packed[kStep / 8];
        uint64_t eight[kStep / 8];
        uint8_t code[kStep];
        std::memcpy(packed, codes, sizeof packed);
        for (size_t i = 0; i < kStep / 8; i++) {
            eight[i] = (packed[i] & 0x0F0F0F0Fu) | (uint64_t{packed[i]} << 28 & 0x0F0F0F0F00000000u);
        }
        std::memcpy(code, eight, sizeof code);
        uint16_t value[kStep];
        for (size_t i = 0; i < kStep; i++) {
            const uint8_t exponent = code[i] ? static_cast<uint8_t>(code[i] + base) : uint8_t{0};
            value[i] = static_cast<uint16_t>((in[i] & 0x80) << 8 | exponent << 7 | (in[i] & 0x7F));
        }
        std::memcpy(out, value, sizeof value);
    }
}

void Exponents::count(const uint8_t* values, size_t bytes) {
    size_t at = skip_;
    for (; at < bytes / 2; at += step_) times_[static_cast<uint8_t>(read<uint16_t>(values + 2 * at) >> 7)]++;
    skip_ = at - bytes / 2;
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
