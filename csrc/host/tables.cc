#include "tables.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace gdscache {

namespace {

constexpr int64_t kKeyBytes = 32;
constexpr uint64_t kFactors[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63};
constexpr uint64_t kStep = 0x9E3779B97F4A7C15;
constexpr int64_t kSpread = 64;  // numbers that lie further apart than so many for each are sorted

// The bytes as a number, the first the least.
uint64_t little_endian(const uint8_t* bytes) {
    uint64_t value = 0;
    for (int at = 7; at >= 0; --at) value = value << 8 | bytes[at];
    return value;
}

bool within(const int64_t* numbers, int64_t count, int64_t limit) {
    return std::all_of(numbers, numbers + count, [&](int64_t one) { return one >= 0 && one < limit; });
}

}  // namespace

Fault fault(const int64_t* blocks, int64_t count, int64_t limit) {
    if (!within(blocks, count, limit)) return Fault::kOutside;
    if (count < 2) return Fault::kNone;
    const auto [low, high] = std::minmax_element(blocks, blocks + count);
    const int64_t first = *low, span = *high - first + 1;
    if (span < count) return Fault::kTwice;
    if (span <= kSpread * count) {
        std::vector<bool> seen(static_cast<size_t>(span));
        for (int64_t n = 0; n < count; ++n) {
            const size_t at = static_cast<size_t>(blocks[n] - first);
            if (seen[at]) return Fault::kTwice;
            seen[at] = true;
        }
        return Fault::kNone;
    }
    std::vector<int64_t> sorted(blocks, blocks + count);
    std::sort(sorted.begin(), sorted.end());
    return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end() ? Fault::kNone : Fault::kTwice;
}

bool narrow(const int64_t* tokens, int64_t count, uint32_t* out) {
    uint64_t high = 0;
    for (int64_t n = 0; n < count; ++n) {
        high |= static_cast<uint64_t>(tokens[n]) >> 32;
        out[n] = static_cast<uint32_t>(tokens[n]);
    }
    return high == 0;
}

bool take_rows(const uint8_t* table, int64_t table_rows, int64_t row_bytes, const int64_t* rows, int64_t count,
               uint8_t* out) {
    if (!within(rows, count, table_rows)) return false;
    if (row_bytes == 0) return true;  // and perhaps no memory
    for (int64_t n = 0; n < count; ++n) {
        std::memcpy(out + n * row_bytes, table + rows[n] * row_bytes, static_cast<size_t>(row_bytes));
    }
    return true;
}

bool put_rows(uint8_t* table, int64_t table_rows, int64_t row_bytes, const int64_t* rows, int64_t count,
              const uint8_t* in) {
    if (!within(rows, count, table_rows)) return false;
    if (row_bytes == 0) return true;  // and perhaps no memory
    for (int64_t n = 0; n < count; ++n) {
        std::memcpy(table + rows[n] * row_bytes, in + n * row_bytes, static_cast<size_t>(row_bytes));
    }
    return true;
}

bool take_unbound(const uint64_t* table, int64_t table_rows, int64_t sums, const int64_t* rows, int64_t count,
                  const uint8_t* keys, uint64_t* out) {
    if (!within(rows, count, table_rows)) return false;
    for (int64_t n = 0; n < count; ++n, keys += kKeyBytes) {
        uint64_t binding = 0;
        for (int word = 0; word < 4; ++word) binding += little_endian(keys + 8 * word) * kFactors[word];
        for (const uint64_t *stored = table + rows[n] * sums, *end = stored + sums; stored != end; binding += kStep) {
            *out++ = *stored++ - binding;
        }
    }
    return true;
}

}  // namespace gdscache
