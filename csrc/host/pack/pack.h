// Bfloat16 values in 12 bits each, without loss (docs/format.md). Pure, without allocations, safe on any bytes.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gdscache {

// Values are packed in tiles. The last one of a part is filled up with zeros to a multiple of `kRound` values.
constexpr size_t kTile = 2048, kTileBytes = kTile / 2 * 3, kRound = 256;
constexpr size_t kMostValues = size_t{1} << 24;  // of a part: an exception has 24 bits for its place

constexpr size_t tiles_bytes(size_t values) { return (values + kRound - 1) / kRound * kRound / 2 * 3; }
constexpr size_t list_bytes(size_t values) { return std::max<size_t>(1, (values + 8191) / 8192) * 128; }
constexpr size_t packed_bytes(size_t values) { return tiles_bytes(values) + list_bytes(values); }

constexpr uint8_t kWindow = 14;  // exponents that have codes of their own: 1 to 14, of base + 1 to base + 14
constexpr uint8_t kOther = 15;

// Values to a tile, and a tile to values, by one set of vector instructions. `values`: a multiple of `kRound`, at most
// `kTile`. `others`: a bit for each value, of those that are exceptions.
struct TileCoder {
    const char* name;  // "plain", "avx512"
    void (*encode)(const uint8_t* in, size_t values, uint8_t base, uint8_t* out, uint64_t* others);
    void (*decode)(const uint8_t* in, size_t values, uint8_t base, uint8_t* out);
    // The same past the processor's caches; `out` is a multiple of 64.
    void (*decode_stream)(const uint8_t* in, size_t values, uint8_t base, uint8_t* out);
};

// The coders that this processor has, the fastest first.
std::vector<const TileCoder*> coders();

// A histogram of exponents, and the best base.
class Exponents {
public:
    // Counts every `step`-th eight values of a part, the first ones included.
    explicit Exponents(size_t step) : step_(step) {}

    void count(const uint8_t* values, size_t bytes);

    // The base of the window of 14 exponents with the most counted values; the lowest of equal ones.
    uint8_t base() const;

private:
    size_t step_;
    size_t seen_ = 0, next_ = 0;  // values of the part: those that were given, and the next to count
    uint32_t times_[4][256]{};  // four histograms: a counter waits for its last store, and neighbours are alike
};

// Writes the list at the end of a part: its base, and the values with exponents outside the window.
class Exceptions {
public:
    // `list`: `list_bytes(values)` bytes.
    Exceptions(uint8_t* list, size_t values) : list_(list), room_(list_bytes(values) / 4 - 1) {}

    // Add the exceptions of a tile encoded from `in`; `first`: the place of its first value. False: the list is full.
    bool add(const uint8_t* in, const uint64_t* others, size_t values, size_t first);

    // Write the first word, and zeros after the last exception.
    void end(uint8_t base);

private:
    uint8_t* list_;
    size_t room_, count_ = 0;
};

// The base of a list, and its number of exceptions, bounded by the list's length.
uint8_t base_of(const uint8_t* list);
size_t exceptions_of(const uint8_t* list, size_t values);

// Call `put(place, exponent)` for each of `count` words of a list whose place is below `values`.
template <typename Put>
void each_exception(const uint8_t* words, size_t count, size_t values, Put put) {
    for (; count--; words += 4) {
        const size_t place = words[1] | words[2] << 8 | words[3] << 16;
        if (place < values) put(place, words[0]);
    }
}

// Give a value another exponent.
inline void set_exponent(uint8_t* value, uint8_t exponent) {
    value[0] = static_cast<uint8_t>((value[0] & 0x7F) | exponent << 7);
    value[1] = static_cast<uint8_t>((value[1] & 0x80) | exponent >> 1);
}

}  // namespace gdscache
