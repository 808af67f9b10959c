// Gather and scatter against a copy byte by byte, for pools of any widths and strides.

#include <algorithm>
#include <cstring>
#include <numeric>

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

Made made(Random& random) {
    Made all;
    constexpr int64_t kTokens[] = {1, 2, 3, 16}, kRows[] = {1, 2, 24, 64, 100, 512, 1152, 5000};
    const int64_t tokens = random.pick(kTokens), page_blocks = static_cast<int64_t>(1 + random.below(5));
    const int64_t blocks = page_blocks * static_cast<int64_t>(1 + random.below(3));
    const size_t layers = 1 + random.below(4);
    for (size_t layer = 0; layer < layers; layer++) {
        for (size_t n = 0; n <= random.below(3); n++) {
            const int64_t row = random.pick(kRows), gap = random.below(2) ? 0 : static_cast<int64_t>(random.below(9));
            const bool swapped = random.below(3) == 0, backwards = random.below(4) == 0;
            int64_t token = (row + gap) * (swapped ? blocks : 1), block = (row + gap) * (swapped ? 1 : tokens);
            all.memory.push_back(random.bytes(static_cast<size_t>((row + gap) * blocks * tokens)));
            uint8_t* base = all.memory.back().data();
            if (backwards) {
                base += (blocks - 1) * block;
                block = -block;
            }
            all.planes.push_back({base, block, token, row});
        }
        all.first_plane.push_back(static_cast<int32_t>(all.planes.size()));
    }
    all.pool = {all.planes, all.first_plane, blocks, tokens, page_blocks};
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
    if (random.below(2)) {
        for (size_t n = blocks.size() - 1; n > 0; n--) std::swap(blocks[n], blocks[random.below(n + 1)]);
    }
    const int64_t first = static_cast<int64_t>(random.below(static_cast<uint64_t>(pool.layers())));
    const int64_t last = first + 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(pool.layers() - first)));
    const Store store = random.below(2) ? Store::kStreamed : Store::kCached;

    std::vector<uint8_t> expected;
    std::vector<uint64_t> sums, got(static_cast<size_t>(last - first));
    for (int64_t layer = first; layer < last; layer++) {
        const size_t start = expected.size();
        each_byte(pool, blocks.data(), layer, [&](uint8_t& byte) { expected.push_back(byte); });
        CHECK(static_cast<int64_t>(expected.size() - start) == layer_bytes(pool, layer));
        sums.push_back(xxh3(expected.data() + start, expected.size() - start));
    }
    std::vector<uint8_t> part(expected.size());
    gather(pool, blocks.data(), first, last, part.data(), random.below(4) ? got.data() : nullptr, store);
    CHECK(part == expected);
    gather(pool, blocks.data(), first, last, part.data(), got.data(), store);
    CHECK(part == expected && got == sums);
    std::fill(got.begin(), got.end(), 0);
    digest(pool, first, last, part.data(), got.data());
    CHECK(got == sums);

    const std::vector<uint8_t> fresh = random.bytes(expected.size());
    auto others = all.memory;  // bytes that must not change
    scatter(pool, blocks.data(), first, last, fresh.data(), got.data(), store);
    stream_fence();
    const uint8_t* at = fresh.data();
    for (int64_t layer = first; layer < last; layer++) {
        const uint8_t* const start = at;
        each_byte(pool, blocks.data(), layer, [&](uint8_t& byte) { CHECK(byte == *at++); });
        CHECK(got[static_cast<size_t>(layer - first)] == xxh3(start, static_cast<size_t>(at - start)));
    }
    scatter(pool, blocks.data(), first, last, expected.data(), nullptr, store);
    stream_fence();
    CHECK(all.memory == others);
}

}  // namespace

int main(int argc, char** argv) {
    Random random(17);
    for (uint64_t n = rounds(argc, argv, 400); n-- > 0;) check_page(random);
    std::printf(" good\n");
}
