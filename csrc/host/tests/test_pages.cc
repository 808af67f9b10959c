// Gather and scatter against a copy byte by byte, for pools of any widths and strides.

#include <algorithm>
#include <numeric>
#include <utility>

#include "hash/xxh3.h"
#include "moves/pages.h"
#include "tests/check.h"
#include "tests/digest.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

struct Made {
    std::vector<std::vector<uint8_t>> memory;
    std::vector<PlaneMemory> planes;
    std::vector<int32_t> first_plane{0};
    HostPlanes pool{};
};

Made made(Random& random, bool packed = false) {
    Made all;
    constexpr int64_t kTokens[] = {1, 2, 3, 16}, kRows[] = {1, 2, 24, 64, 100, 512, 1152, 5000};
    const int64_t tokens = random.pick(kTokens), page_blocks = static_cast<int64_t>(1 + random.below(5));
    const int64_t blocks = page_blocks * static_cast<int64_t>(1 + random.below(3));
    const size_t layers = 1 + random.below(4);
    for (size_t layer = 0; layer < layers; layer++) {
        for (size_t n = 0; n <= random.below(3); n++) {
            const int64_t drawn = random.pick(kRows), row = packed ? drawn + drawn % 2 : drawn;
            const int64_t gap = random.below(2) ? 0 : static_cast<int64_t>(random.below(9));
            const bool swapped = random.below(3) == 0, backwards = random.below(4) == 0;
            int64_t token = (row + gap) * (swapped ? blocks : 1), block = (row + gap) * (swapped ? 1 : tokens);
            all.memory.push_back(random.bytes(static_cast<size_t>((row + gap) * blocks * tokens) + 63));
            uint8_t* base = all.memory.back().data();
            if (random.below(2)) base += -reinterpret_cast<uintptr_t>(base) % 64;
            if (backwards) {
                base += (blocks - 1) * block;
                block = -block;
            }
            all.planes.push_back({base, block, token, row});
        }
        all.first_plane.push_back(static_cast<int32_t>(all.planes.size()));
    }
    all.pool = {all.planes, all.first_plane, blocks, tokens, page_blocks, packed};
    return all;
}

// Calls `visit(byte of a plane)` for the bytes of a layer in their order.
template <typename Visit>
void each_byte(const HostPlanes& pool, const int64_t* blocks, int64_t layer, Visit visit) {
    for (int32_t n = pool.first_plane[layer]; n < pool.first_plane[layer + 1]; n++) {
        const PlaneMemory& plane = pool.planes[n];
        for (int64_t token = 0; token < pool.page_blocks * pool.block_tokens; token++) {
            uint8_t* const row = plane.base + blocks[token / pool.block_tokens] * plane.block_stride +
                                 token % pool.block_tokens * plane.token_stride;
            for (int64_t byte = 0; byte < plane.row_bytes; byte++) visit(row[byte]);
        }
    }
}

void check_page(Random& random) {
    Made all = made(random);
    const HostPlanes& pool = all.pool;
    check(pool);
    std::vector<int64_t> blocks(static_cast<size_t>(pool.blocks));
    std::iota(blocks.begin(), blocks.end(), 0);
    if (random.below(2)) random.shuffle(blocks);
    const int64_t first = static_cast<int64_t>(random.below(static_cast<uint64_t>(pool.layers())));
    const int64_t last = first + 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(pool.layers() - first)));
    const Store store = random.below(2) ? Store::kStreamed : Store::kCached;

    std::vector<uint8_t> expected;
    std::vector<uint64_t> sums, got(static_cast<size_t>(last - first));
    for (int64_t layer = first; layer < last; layer++) {
        const size_t start = expected.size();
        each_byte(pool, blocks.data(), layer, [&](uint8_t& byte) { expected.push_back(byte); });
        REQUIRE(static_cast<int64_t>(expected.size() - start) == layer_bytes(pool, layer));
        sums.push_back(xxh3(expected.data() + start, expected.size() - start));
    }
    std::vector<uint8_t> part(expected.size());
    gather(pool, blocks.data(), first, last, part.data(), random.below(4) ? got.data() : nullptr, store);
    REQUIRE(part == expected);
    gather(pool, blocks.data(), first, last, part.data(), got.data(), store);
    REQUIRE((part == expected && got == sums));
    std::fill(got.begin(), got.end(), 0);
    digest(pool, first, last, part.data(), got.data());
    REQUIRE(got == sums);

    const std::vector<uint8_t> fresh = random.bytes(expected.size());
    auto others = all.memory;  // bytes that must not change
    scatter(pool, blocks.data(), first, last, fresh.data(), got.data(), store);
    stream_fence();
    const uint8_t* at = fresh.data();
    for (int64_t layer = first; layer < last; layer++) {
        const uint8_t* const start = at;
        each_byte(pool, blocks.data(), layer, [&](uint8_t& byte) { REQUIRE_FAST(byte == *at++); });
        REQUIRE(got[static_cast<size_t>(layer - first)] == xxh3(start, static_cast<size_t>(at - start)));
    }
    scatter(pool, blocks.data(), first, last, expected.data(), nullptr, store);
    stream_fence();
    REQUIRE(all.memory == others);
}

// Values of few exponents come back out of packed extents; random bytes do not fit, and touch nothing else where they
// are taken for an extent.
void check_packed_page(Random& random) {
    Made all = made(random, true);
    const HostPlanes& pool = all.pool;
    check(pool);
    std::vector<int64_t> blocks(static_cast<size_t>(pool.page_blocks));
    std::iota(blocks.begin(), blocks.end(), pool.blocks - pool.page_blocks);
    if (random.below(2)) std::reverse(blocks.begin(), blocks.end());
    const int64_t layers = pool.layers(), base = static_cast<int64_t>(random.below(242));
    const bool fits = random.below(5) > 0, sampled = random.below(2);
    for (int64_t layer = 0; layer < layers; layer++) {
        bool low = true;
        size_t values = 0;
        each_byte(pool, blocks.data(), layer, [&](uint8_t& byte) {
            const uint64_t drawn = random.next();
            byte = static_cast<uint8_t>(drawn);
            low = !low;
            if (!low || !fits) return;
            // The high byte of a value, whose low one has the last bit of the exponent. Each 17th eight, of which the base
            // is first made, has the lowest ones.
            const bool lowest = values++ / 8 % 17 == 0 && sampled;
            const int64_t half = (base + 2) / 2 + (lowest ? 0 : static_cast<int64_t>(drawn >> 8 & 0xFF) % 6);
            byte = static_cast<uint8_t>((drawn & 0x80) | static_cast<uint64_t>(half));
        });
    }
    int64_t bytes = 0;
    for (int64_t layer = 0; layer < layers; layer++) bytes += layer_bytes(pool, layer);
    const Store store = random.below(2) ? Store::kStreamed : Store::kCached;
    std::vector<uint8_t> part(static_cast<size_t>(bytes)), again = part;
    std::vector<uint64_t> sums(static_cast<size_t>(layers)), got = sums;
    const bool packed = gather(pool, blocks.data(), 0, layers, part.data(), sums.data(), store);
    stream_fence();
    const auto before = all.memory;
    if (packed) {
        digest(pool, 0, layers, part.data(), got.data());
        REQUIRE((got == sums && gather(pool, blocks.data(), 0, layers, again.data(), nullptr, store) && part == again));
        for (auto& memory : all.memory) std::fill(memory.begin(), memory.end(), uint8_t{7});
        for (int64_t layer = 0; layer < layers; layer++) {  // the pool's own, back in place by the page alone
            const uint8_t* at = part.data();
            for (int64_t n = 0; n < layer; n++) at += layer_bytes(pool, n);
            scatter(pool, blocks.data(), layer, layer + 1, at, got.data(), store);
            REQUIRE(got[0] == sums[static_cast<size_t>(layer)]);
        }
        stream_fence();
        auto found = all.memory;
        std::vector<uint8_t> ours;
        for (int64_t layer = 0; layer < layers; layer++) {
            each_byte(pool, blocks.data(), layer,
                      [&](uint8_t& byte) { ours.push_back(std::exchange(byte, uint8_t{7})); });
        }
        for (auto& memory : all.memory) REQUIRE(std::ranges::all_of(memory, [](uint8_t byte) { return byte == 7; }));
        for (size_t n = 0; n < before.size(); n++) std::ranges::copy(before[n], all.memory[n].begin());
        const uint8_t* at = ours.data();
        for (int64_t layer = 0; layer < layers; layer++) {
            each_byte(pool, blocks.data(), layer, [&](uint8_t& byte) { REQUIRE_FAST(byte == *at++); });
        }
    }
    REQUIRE((packed || !fits));
    const std::vector<uint8_t> fresh = random.bytes(part.size());
    for (auto& memory : all.memory) std::fill(memory.begin(), memory.end(), uint8_t{7});
    scatter(pool, blocks.data(), 0, layers, fresh.data(), got.data(), store);
    stream_fence();
    digest(pool, 0, layers, fresh.data(), sums.data());
    REQUIRE(got == sums);
    for (int64_t layer = 0; layer < layers; layer++) {
        each_byte(pool, blocks.data(), layer, [&](uint8_t& byte) { byte = 7; });
    }
    for (auto& memory : all.memory) REQUIRE(std::ranges::all_of(memory, [](uint8_t byte) { return byte == 7; }));
}

}  // namespace

TEST_CASE("gather and scatter against a copy byte by byte") {
    Random random(17);
    for (uint64_t n = setting("ROUNDS", 400); n-- > 0;) {
        check_page(random);
        check_packed_page(random);
    }
}
