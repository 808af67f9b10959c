// Pools of any shape in the memory of the fake driver's GPU. And one transfer of a test: its pages, extents of any kind,
// their bytes, and the expected result by pages.h.

#pragma once

#include <numeric>
#include <optional>

#include "moves/pages.h"
#include "tests/gpu_rig.h"

namespace gdscache::test {

// A pool in GPU memory, and the same planes in a mirror, into which a test copies by pages.h.
struct GpuPool {
    GpuPool(const Driver& driver, Random& random) {
        constexpr int64_t kTokenCounts[] = {1, 2, 3, 16}, kRowBytes[] = {1, 2, 3, 9, 24, 64, 100};
        constexpr int32_t kVectors[] = {1, 2, 4, 8, 16};
        vector = random.pick(kVectors);
        int64_t tokens = random.pick(kTokenCounts), page_blocks = random.between(1, 4);
        const bool wide_pages = random.below(8) == 0;  // their indices do not fit into a launch
        if (wide_pages) tokens = 1, page_blocks = random.between(400, 1000);
        pages = random.between(6, wide_pages ? 12 : 24);
        const int64_t blocks = page_blocks * pages + random.between(0, 3);
        const int64_t layers = random.between(1, 4);
        const bool forwards = random.below(2) == 0;  // every block of every plane lies behind the one before
        planes.bounds = {0};
        planes.first_plane = {0};
        for (int64_t layer = 0; layer < layers; layer++) {
            int64_t at = 0;
            for (uint64_t n = 1 + random.below(3); n-- > 0;) {
                const int64_t row = (wide_pages ? 1 : random.pick(kRowBytes)) * vector;
                const int64_t gap = random.below(2) ? 0 : vector * random.between(0, 3);
                const bool swapped = random.below(3) == 0, backwards = !forwards && random.below(4) == 0;
                const int64_t token = (row + gap) * (swapped ? blocks : 1);
                int64_t block = (row + gap) * (swapped ? 1 : tokens), first = 0;
                if (backwards) first = (blocks - 1) * block, block = -block;
                const int64_t offset = vector * random.between(0, 3);
                memory.push_back(std::make_unique<Bytes>(static_cast<size_t>((row + gap) * blocks * tokens + offset)));
                const std::vector<uint8_t> content = random.bytes(memory.back()->size());
                std::copy(content.begin(), content.end(), memory.back()->data());
                mirror.push_back(content);
                const uint64_t base = memory.back()->give_to_device(driver) + static_cast<uint64_t>(first + offset);
                const bool together = tokens == 1 || token == row;
                const int64_t end = at + row * tokens * page_blocks;
                planes.planes.push_back({static_cast<int64_t>(base), block, token, together ? row * tokens : row,
                                         together ? 1 : tokens, at, end});
                there.push_back({memory.back()->data() + first + offset, block, token, row});
                mirrored.push_back({mirror.back().data() + first + offset, block, token, row});
                at = end;
            }
            planes.first_plane.push_back(static_cast<int32_t>(planes.planes.size()));
            planes.bounds.push_back(planes.bounds.back() + at);
            can_sum = can_sum && at > 240;
            can_look = can_look && at > 240 && at % 16 == 0;
        }
        planes.layers = static_cast<int32_t>(layers);
        planes.page_blocks = static_cast<int32_t>(page_blocks);
        planes.blocks = blocks;
        planes.extent_bytes = planes.bounds.back() + vector * random.between(0, 9);
        pool = {there, planes.first_plane, blocks, tokens, page_blocks};
        mirror_pool = pool;
        mirror_pool.planes = mirrored;
        check(pool);
        loaded.emplace(driver, planes, vector);
    }

    // The wanted kernels, as far as these layers allow.
    PageKernels kernels(Kernels wanted, int32_t processors) const {
        return loaded->get(wanted, processors, can_sum, can_look);
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
    std::optional<LoadedKernels> loaded;
};

enum class Extents { kPinned, kPageable, kDevice };

class OneTransfer {
public:
    // `pages`: the caller's pages of the pool, by number: page i has blocks [i * page_blocks, ...).
    OneTransfer(const Driver& driver, GpuPool& of, Random& random, const std::vector<int64_t>& pages, bool wide)
        : pool_(of), random_(random) {
        const GpuPlanes& planes = pool_.planes;
        load = random_.below(2) == 0;
        sums = random_.below(2) == 0;
        route = static_cast<Route>(random_.below(3));
        first = static_cast<int32_t>(random_.below(static_cast<uint64_t>(planes.layers)));
        last = static_cast<int32_t>(random_.between(first + 1, planes.layers));
        if (random_.below(30) == 0) last = first;
        std::vector<int64_t> chosen = pages;
        const bool tidy = random_.below(3) == 0;  // neighbours, as before anything was given back
        if (!tidy) random_.shuffle(chosen);
        if (random_.below(3) == 0) std::sort(chosen.begin(), chosen.end());
        const bool few = !tidy && random_.below(2) == 0;
        chosen.resize(static_cast<size_t>(
            random_.between(random_.below(30) ? 1 : 0, few ? 1 : static_cast<int64_t>(chosen.size()))));
        for (const int64_t page : chosen) {
            std::vector<int64_t> some(static_cast<size_t>(planes.page_blocks));
            std::iota(some.begin(), some.end(), page * planes.page_blocks);
            if (!tidy && random_.below(2)) random_.shuffle(some);
            blocks.insert(blocks.end(), some.begin(), some.end());
        }
        count = static_cast<int64_t>(chosen.size());
        const auto step = [&](int64_t most) { return random_.below(2) ? 0 : pool_.vector * random_.between(0, most); };
        const bool window = random_.below(2) == 0;
        origin = window ? planes.bounds[first] - step(5) : 0;
        stride = window ? planes.bounds[last] - origin + step(5) : planes.extent_bytes;
        if (stride < pool_.vector) stride = pool_.vector;
        const int64_t n_slots = std::max<int64_t>(1, count + random_.between(0, 3));
        slots.resize(static_cast<size_t>(n_slots));
        std::iota(slots.begin(), slots.end(), 0);
        if (!tidy && random_.below(2)) random_.shuffle(slots);
        slots.resize(static_cast<size_t>(count));
        kind = static_cast<Extents>(random_.below(3));
        const int64_t offset = step(3);
        memory_ = std::make_unique<Bytes>(static_cast<size_t>(offset + n_slots * stride + step(3)));
        const std::vector<uint8_t> content = random_.bytes(memory_->size());
        std::copy(content.begin(), content.end(), memory_->data());
        expected_ = content;
        base_ = offset;
        if (kind == Extents::kPinned && random_.below(2)) fence = random_.between(1, 5);
        if (kind == Extents::kPinned) {
            memory_->pin(driver, static_cast<size_t>(offset), static_cast<size_t>(fence * stride));
        }
        address = reinterpret_cast<uint64_t>(memory_->data()) + static_cast<uint64_t>(offset);
        if (kind == Extents::kDevice) address = memory_->give_to_device(driver) + static_cast<uint64_t>(offset);
        pages_content_ = random_.bytes(static_cast<size_t>(count * planes.bounds.back()));
        told_slots = wide ? int64_t{1} << 33 : n_slots;
    }

    PageCopies copies() const {
        const ExtentSlots extents{
            address, stride, origin, told_slots, kind == Extents::kDevice, kind == Extents::kPinned, fence};
        return {load, route, sums, first, last, count, extents, slots.data(), blocks.data(), after};
    }

    // Fill the planes with this transfer's own bytes where other transfers do not look: on the GPU's side, and in the
    // mirror.
    void fill_planes() const { scatter_all(pool_.pool, 0); }
    void fill_mirror() const { scatter_all(pool_.mirror_pool, 0); }
    // Overwrite the planes when their bytes are not needed any more.
    void spoil() const {
        scatter_all(pool_.pool, 0x5A);
        scatter_all(pool_.mirror_pool, 0x5A);
    }

    // Compute the transfer's result, in the mirror and in the extents. Called when the planes are filled, before
    // `spoil`.
    void foresee() {
        sums_.resize(static_cast<size_t>(count * (last - first)));
        for (int64_t page = 0; page < count; page++) {
            uint8_t* const part = expected_.data() + base_ + slots[page] * stride + pool_.planes.bounds[first] - origin;
            uint64_t* const to = sums_.data() + page * (last - first);
            if (first == last) continue;
            if (load) scatter(pool_.mirror_pool, of_page(page), first, last, part, to, Store::kCached);
            else gather(pool_.mirror_pool, of_page(page), first, last, part, to, Store::kCached);
        }
    }

    void check_extents() const { CHECK(!std::memcmp(memory_->data(), expected_.data(), expected_.size())); }
    void check_sums(const std::vector<uint64_t>& found) const { CHECK(found == sums_); }

    // Check that its pages in the planes equal the mirror's.
    void check_planes() const {
        const auto bytes = static_cast<size_t>(pool_.planes.bounds.back());
        std::vector<uint8_t> is(bytes), should(bytes);
        for (int64_t page = 0; page < count; page++) {
            gather(pool_.pool, of_page(page), 0, pool_.planes.layers, is.data(), nullptr, Store::kCached);
            gather(pool_.mirror_pool, of_page(page), 0, pool_.planes.layers, should.data(), nullptr, Store::kCached);
            CHECK(is == should);
        }
    }

    size_t n_sums() const { return static_cast<size_t>(count * (last - first)); }

    bool load, sums;
    Route route;
    Extents kind;
    int32_t first, last;
    int64_t count, origin, stride, fence = 0, told_slots;
    uint64_t address;
    std::vector<int64_t> slots, blocks;
    std::vector<uint64_t> after;

private:
    const int64_t* of_page(int64_t page) const { return blocks.data() + page * pool_.planes.page_blocks; }

    void scatter_all(const HostPlanes& pool, uint8_t change) const {
        const int64_t bytes = pool_.planes.bounds.back();
        std::vector<uint8_t> content(static_cast<size_t>(bytes));
        for (int64_t page = 0; page < count; page++) {
            const auto begin = pages_content_.begin() + page * bytes;
            std::transform(begin, begin + bytes, content.begin(), [&](uint8_t b) { return b ^ change; });
            scatter(pool, of_page(page), 0, pool_.planes.layers, content.data(), nullptr, Store::kCached);
        }
    }

    GpuPool& pool_;
    Random& random_;
    std::unique_ptr<Bytes> memory_;
    int64_t base_;
    std::vector<uint8_t> expected_, pages_content_;
    std::vector<uint64_t> sums_;
};

}  // namespace gdscache::test
