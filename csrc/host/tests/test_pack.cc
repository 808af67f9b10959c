// Packed values against a second coding of docs/format.md, value by value: all values, any statistics, and any bytes.

#include <cstring>
#include <string>

#include "pack/pack.h"
#include "tests/check.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

using Bytes = std::vector<uint8_t>;
using Values = std::vector<uint16_t>;

Bytes bytes_of(const Values& values) {
    Bytes made(2 * values.size());
    std::memcpy(made.data(), values.data(), made.size());
    return made;
}

size_t filled(size_t values) { return (values + kRound - 1) / kRound * kRound; }

const TileCoder* coder;  // of the processor's, one after the other

// A part of values, packed with a base; empty where it does not fit. Each tile lies in memory of its own.
Bytes packed(const Values& values, uint8_t base) {
    Bytes in = bytes_of(values), all, list(list_bytes(values.size()));
    in.resize(2 * filled(values.size()));
    Exceptions exceptions(list.data(), values.size());
    for (size_t first = 0; first < in.size() / 2; first += kTile) {
        const size_t some = std::min(kTile, in.size() / 2 - first);
        const Bytes one(in.data() + 2 * first, in.data() + 2 * (first + some));
        Bytes tile(tiles_bytes(some));
        std::vector<uint64_t> others(some / 64);
        coder->encode(one.data(), some, base, tile.data(), others.data());
        if (!exceptions.add(one.data(), others.data(), some, first)) return {};
        all.insert(all.end(), tile.begin(), tile.end());
    }
    exceptions.end(base);
    all.insert(all.end(), list.begin(), list.end());
    REQUIRE(all.size() == packed_bytes(values.size()));
    return all;
}

Values unpacked(const Bytes& part, size_t values) {
    Bytes all;
    const uint8_t* const list = part.data() + tiles_bytes(values);
    for (size_t first = 0; first < filled(values); first += kTile) {
        const size_t some = std::min(kTile, filled(values) - first);
        const Bytes tile(part.data() + tiles_bytes(first), part.data() + tiles_bytes(first + some));
        Bytes out(2 * some);
        coder->decode(tile.data(), some, base_of(list), out.data());
        auto* const room = static_cast<uint8_t*>(std::aligned_alloc(64, 2 * some));
        coder->decode_stream(tile.data(), some, base_of(list), room);
        REQUIRE(!std::memcmp(room, out.data(), out.size()));
        std::free(room);
        all.insert(all.end(), out.begin(), out.end());
    }
    each_exception(list + 4, exceptions_of(list, values), values,
                   [&](size_t place, uint8_t exponent) { set_exponent(&all[2 * place], exponent); });
    Values found(values);
    std::memcpy(found.data(), all.data(), 2 * values);
    return found;
}

uint8_t best_base(const Values& values, size_t step, Random& random) {
    Exponents exponents(step);
    const Bytes in = bytes_of(values);
    for (size_t at = 0; at < in.size();) {  // in runs of any length
        const size_t some = std::min<size_t>(in.size() - at, 2 * (1 + random.below(300)));
        exponents.count(Bytes(in.data() + at, in.data() + at + some).data(), some);
        at += some;
    }
    size_t most = 0, best = 0;
    for (size_t base = 0; base <= 241; base++) {
        size_t inside = 0;
        for (size_t n = 0; n < values.size(); n++) {
            if (n / 8 % step != 0) continue;
            const size_t exponent = values[n] >> 7 & 0xFF;
            inside += exponent > base && exponent <= base + 14;
        }
        if (inside > most) most = inside, best = base;
    }
    REQUIRE(exponents.base() == best);
    return exponents.base();
}

// All that a tile has, by the page of the format.
void check_tile(const Values& values, const Bytes& part, uint8_t base) {
    for (size_t n = 0; n < values.size(); n++) {
        const size_t tile = n / kTile * kTile, some = std::min(kTile, filled(values.size()) - tile), at = n - tile;
        const uint8_t* const begin = part.data() + tiles_bytes(tile);
        const int exponent = values[n] >> 7 & 0xFF, code = exponent - base;
        const uint8_t pair = begin[some + at / 8 * 4 + at % 4];
        REQUIRE(begin[at] == ((values[n] >> 8 & 0x80) | (values[n] & 0x7F)));
        REQUIRE((at % 8 < 4 ? pair & 15 : pair >> 4) == (exponent == 0 ? 0 : code >= 1 && code <= 14 ? code : 15));
    }
}

void check_every_value() {
    for (uint32_t high = 0; high < 256; high++) {  // all of one sign and exponent but its last bit
        Values values(256);
        for (uint32_t n = 0; n < 256; n++) values[n] = static_cast<uint16_t>(high << 8 | n);
        for (uint32_t base : {0u, 1u, (high << 1) & 0xFF, 127u, 240u, 241u}) {
            Values few(values.begin(), values.begin() + 31);  // as many exceptions as a list of 128 bytes has
            const Bytes part = packed(few, static_cast<uint8_t>(base));
            REQUIRE(unpacked(part, few.size()) == few);
            check_tile(few, part, static_cast<uint8_t>(base));
        }
        Random random(high);
        const Bytes part = packed(values, best_base(values, 1, random));
        REQUIRE(unpacked(part, values.size()) == values);
    }
}

void check_statistics(Random& random) {
    constexpr size_t kSizes[] = {1, 7, 255, 256, 257, 2047, 2048, 2049, 8192, 8193, 12288, 30000};
    const size_t size = random.pick(kSizes), kind = random.below(5), wide = 1 + random.below(16);
    Values values(size);
    for (size_t n = 0; n < size; n++) {
        const uint64_t drawn = random.next();
        size_t exponent = 120 + drawn % wide;
        if (kind == 1 && n % 128 == 5) exponent += 40;           // an outlier channel: 1 in 128 is too many
        if (kind == 2) exponent = drawn % 256;                   // random bytes
        if (kind == 3) exponent = 255;                           // NaNs with payloads, infinities
        if (kind == 4) exponent = drawn % 300 ? 0 : 1 + drawn % 9;  // zeros, subnormals
        values[n] = static_cast<uint16_t>((drawn >> 32 & 0x807F) | exponent << 7);
    }
    const uint8_t base = best_base(values, 1, random);
    best_base(values, 17, random);
    size_t others = 0;
    for (const uint16_t value : values) {
        const size_t exponent = value >> 7 & 0xFF;
        others += exponent != 0 && (exponent <= base || exponent > base + size_t{14});
    }
    const Bytes part = packed(values, base);
    REQUIRE(part.empty() == (others > list_bytes(size) / 4 - 1));
    if (part.empty()) return;
    REQUIRE(unpacked(part, size) == values);
    REQUIRE(exceptions_of(part.data() + tiles_bytes(size), size) == others);
    check_tile(values, part, base);
}

// Any bytes decode to some values. A byte read or written beyond them would be an error of the sanitizer.
Bytes check_any_bytes(Random& random) {
    const size_t size = 1 + random.below(5000);
    Bytes part = random.bytes(packed_bytes(size));
    if (random.below(2)) std::memset(part.data() + tiles_bytes(size), 0xFF, list_bytes(size));
    return bytes_of(unpacked(part, size));
}

}  // namespace

TEST_CASE("packed values by each coder") {
    std::vector<Bytes> found;  // of any bytes, by the first coder
    for (const TileCoder* const one : coders()) {
        coder = one;
        INFO(std::string(coder->name));
        Random random(60);
        check_every_value();
        for (uint64_t n = 0; n < setting("ROUNDS", 200); n++) {
            check_statistics(random);
            const Bytes values = check_any_bytes(random);
            if (found.size() == n) found.push_back(values);
            REQUIRE(values == found[n]);
        }
        std::printf(" %s", coder->name);
    }
}
