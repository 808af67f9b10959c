// One transfer of a test: its pages, extents of any kind, their bytes, and the expected result by pages.h.

#pragma once

#include "tests/gpu_pool.h"

namespace gdscache::test {

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
        last = static_cast<int32_t>(between(random_, first + 1, planes.layers));
        if (random_.below(30) == 0) last = first;
        std::vector<int64_t> chosen = pages;
        const bool tidy = random_.below(3) == 0;  // neighbours, as before anything was given back
        if (!tidy) shuffle(random_, chosen);
        if (random_.below(3) == 0) std::sort(chosen.begin(), chosen.end());
        const bool few = !tidy && random_.below(2) == 0;
        chosen.resize(static_cast<size_t>(
            between(random_, random_.below(30) ? 1 : 0, few ? 1 : static_cast<int64_t>(chosen.size()))));
        for (const int64_t page : chosen) {
            std::vector<int64_t> some(static_cast<size_t>(planes.page_blocks));
            std::iota(some.begin(), some.end(), page * planes.page_blocks);
            if (!tidy && random_.below(2)) shuffle(random_, some);
            blocks.insert(blocks.end(), some.begin(), some.end());
        }
        count = static_cast<int64_t>(chosen.size());
        const auto step = [&](int64_t most) { return random_.below(2) ? 0 : pool_.vector * between(random_, 0, most); };
        const bool window = random_.below(2) == 0;
        origin = window ? planes.bounds[first] - step(5) : 0;
        stride = window ? planes.bounds[last] - origin + step(5) : planes.extent_bytes;
        if (stride < pool_.vector) stride = pool_.vector;
        const int64_t n_slots = std::max<int64_t>(1, count + between(random_, 0, 3));
        slots.resize(static_cast<size_t>(n_slots));
        std::iota(slots.begin(), slots.end(), 0);
        if (!tidy && random_.below(2)) shuffle(random_, slots);
        slots.resize(static_cast<size_t>(count));
        kind = static_cast<Extents>(random_.below(3));
        const int64_t offset = step(3);
        memory_ = std::make_unique<Bytes>(static_cast<size_t>(offset + n_slots * stride + step(3)));
        const std::vector<uint8_t> content = random_.bytes(memory_->size());
        std::copy(content.begin(), content.end(), memory_->data());
        expected_ = content;
        base_ = offset;
        if (kind == Extents::kPinned && random_.below(2)) fence = between(random_, 1, 5);
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
