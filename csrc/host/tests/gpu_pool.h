// Pools of any shape in the memory of the fake driver's GPU.

#pragma once

#include <numeric>

#include "gpu/gpu.h"
#include "moves/pages.h"
#include "tests/gpu_rig.h"

namespace gdscache::test {

// A pool in GPU memory, and the same planes in a mirror, into which a test copies by pages.h.
struct GpuPool {
    GpuPool(const Driver& driver, Random& random) {
        constexpr int64_t kTokenCounts[] = {1, 2, 3, 16}, kRowBytes[] = {1, 2, 3, 9, 24, 64, 100};
        constexpr int32_t kVectors[] = {1, 2, 4, 8, 16};
        vector = random.pick(kVectors);
        int64_t tokens = random.pick(kTokenCounts), page_blocks = between(random, 1, 4);
        const bool wide_pages = random.below(8) == 0;  // their indices do not fit into a launch
        if (wide_pages) tokens = 1, page_blocks = between(random, 400, 1000);
        pages = between(random, 6, wide_pages ? 12 : 24);
        const int64_t blocks = page_blocks * pages + between(random, 0, 3);
        const int64_t layers = between(random, 1, 4);
        const bool forwards = random.below(2) == 0;  // every block of every plane lies behind the one before
        planes.bounds = {0};
        planes.first_plane = {0};
        std::vector<int64_t> words, plane_words;
        for (int64_t layer = 0; layer < layers; layer++) {
            int64_t at = 0;
            const int64_t begin = static_cast<int64_t>(planes.planes.size());
            for (uint64_t n = 1 + random.below(3); n-- > 0;) {
                const int64_t row = (wide_pages ? 1 : random.pick(kRowBytes)) * vector;
                const int64_t gap = random.below(2) ? 0 : vector * between(random, 0, 3);
                const bool swapped = random.below(3) == 0, backwards = !forwards && random.below(4) == 0;
                const int64_t token = (row + gap) * (swapped ? blocks : 1);
                int64_t block = (row + gap) * (swapped ? 1 : tokens), first = 0;
                if (backwards) first = (blocks - 1) * block, block = -block;
                const int64_t offset = vector * between(random, 0, 3);
                memory.push_back(std::make_unique<Bytes>(static_cast<size_t>((row + gap) * blocks * tokens + offset)));
                const std::vector<uint8_t> content = random.bytes(memory.back()->size());
                std::copy(content.begin(), content.end(), memory.back()->data());
                mirror.push_back(content);
                const uint64_t base = memory.back()->give_to_device(driver) + static_cast<uint64_t>(first + offset);
                const bool together = tokens == 1 || token == row;
                const int64_t end = at + row * tokens * page_blocks;
                planes.planes.push_back({static_cast<int64_t>(base), block, token, together ? row * tokens : row,
                                         together ? 1 : tokens, at, end});
                const PlaneRuns& made = planes.planes.back();
                plane_words.insert(plane_words.end(),
                                   {made.base, block, token, made.run_bytes, made.runs_per_block, end});
                there.push_back({memory.back()->data() + first + offset, block, token, row});
                mirrored.push_back({mirror.back().data() + first + offset, block, token, row});
                at = end;
            }
            planes.first_plane.push_back(static_cast<int32_t>(planes.planes.size()));
            words.insert(words.end(), {begin, planes.first_plane.back() - begin, planes.bounds.back(), at});
            planes.bounds.push_back(planes.bounds.back() + at);
            can_sum = can_sum && at > 240;
            can_look = can_look && at > 240 && at % 16 == 0;
        }
        planes.layers = static_cast<int32_t>(layers);
        planes.page_blocks = static_cast<int32_t>(page_blocks);
        planes.blocks = blocks;
        planes.extent_bytes = planes.bounds.back() + vector * between(random, 0, 9);
        pool = {there, planes.first_plane, blocks, tokens, page_blocks};
        mirror_pool = pool;
        mirror_pool.planes = mirrored;
        check(pool);
        words.insert(words.end(), plane_words.begin(), plane_words.end());
        table = std::make_unique<Bytes>(words.size() * 8);
        std::memcpy(table->data(), words.data(), words.size() * 8);
        table_address = table->give_to_device(driver);
        driver.vector(vector);
    }

    // The wanted kernels, as far as these layers allow.
    PageKernels kernels(const Driver& driver, Kernels wanted, int32_t processors) const {
        if (wanted == Kernels::kNone) return {};
        const auto loaded = [&](int32_t which) { return driver.kernel(which); };
        return {loaded(kGather),
                loaded(kScatter),
                loaded(kGatherSums),
                loaded(kScatterSums),
                table_address,
                vector,
                processors,
                wanted >= Kernels::kSums && can_sum,
                wanted >= Kernels::kLooks && can_look};
    }

    // A size of GPU memory with which a ring is as small as possible, or larger.
    size_t staging(Random& random) const {
        const auto extent = static_cast<size_t>(planes.extent_bytes);
        return 2 * extent + random.below(2) * random.below(8 * extent);
    }

    // Whether the planes equal the mirror.
    bool matches() const {
        for (size_t n = 0; n < memory.size(); n++) {
            if (std::memcmp(memory[n]->data(), mirror[n].data(), mirror[n].size())) return false;
        }
        return true;
    }

    // The numbers of its pages.
    std::vector<int64_t> all() const {
        std::vector<int64_t> numbers(static_cast<size_t>(pages));
        std::iota(numbers.begin(), numbers.end(), 0);
        return numbers;
    }

    int64_t layer_bytes(int32_t first, int32_t last) const { return planes.bounds[last] - planes.bounds[first]; }

    int32_t vector;
    int64_t pages;  // with blocks of their own
    GpuPlanes planes;
    HostPlanes pool, mirror_pool;
    bool can_sum = true, can_look = true;
    std::vector<std::unique_ptr<Bytes>> memory;
    std::vector<std::vector<uint8_t>> mirror;
    std::vector<PlaneMemory> there, mirrored;
    std::unique_ptr<Bytes> table;
    uint64_t table_address = 0;
};

}  // namespace gdscache::test
