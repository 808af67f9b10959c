#include "moves/pages.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "hash/xxh3.h"

namespace gdscache {
namespace {

constexpr int64_t kFetched = 1024;  // bytes of the next run: the processor prefetches a run only after its beginning
constexpr int64_t kMost = int64_t{1} << 47;  // bytes that a process can address, and more than any count here

// Call `visit(plane's bytes, size)` for the runs of a page's plane in token order. Adjacent rows are one run, within a
// block and from block to block. `kFetch`: prefetch the plane, which is read.
template <bool kFetch, typename Visit>
void each_run(const PlaneMemory& plane, const HostPlanes& pool, const int64_t* blocks, Visit visit) {
    const int64_t block_bytes = plane.row_bytes * pool.block_tokens;
    const auto address = [&](int64_t block) { return plane.base + block * plane.block_stride; };
    if (plane.token_stride != plane.row_bytes && pool.block_tokens > 1) {
        for (int64_t n = 0; n < pool.page_blocks; n++) {
            uint8_t* row = address(blocks[n]);
            for (int64_t token = 0; token < pool.block_tokens; token++, row += plane.token_stride) {
                visit(row, static_cast<size_t>(plane.row_bytes));
            }
        }
        return;
    }
    for (int64_t n = 0; n < pool.page_blocks;) {
        uint8_t* const run = address(blocks[n]);
        int64_t nbytes = block_bytes;
        for (n++; n < pool.page_blocks && address(blocks[n]) == run + nbytes; n++) nbytes += block_bytes;
        if (kFetch && n < pool.page_blocks) {
            for (int64_t at = 0; at < std::min<int64_t>(block_bytes, kFetched); at += 64) {
                __builtin_prefetch(address(blocks[n]) + at);
            }
        }
        visit(run, static_cast<size_t>(nbytes));
    }
}

// A layer's bytes on their way out of the planes, or into them. Short runs pass through a buffer in the nearest cache:
// the hash and stores past the caches want long ones.
class Mover {
public:
    Mover(const Arm& arm, bool sums, Store store) : hash_(arm), sums_(sums), stream_(store == Store::kStreamed) {}

    // Append the next run of the planes at `part`. `finish` writes the buffered rest.
    void gather(const uint8_t* run, size_t size, uint8_t*& part) {
        if (size >= kLongRun) {
            finish(part);
            move(part, run, size, stream_);
            part += size;
            return;
        }
        if (held_ + size > kBuffer) finish(part);
        std::memcpy(buffer_ + held_, run, size);
        held_ += size;
    }

    void finish(uint8_t*& part) {
        move(part, buffer_, held_, stream_);
        part += held_;
        held_ = 0;
    }

    // Fill the next run of the planes from `part`. `left`: bytes of the layer that are in no plane yet.
    void scatter(uint8_t* run, size_t size, const uint8_t*& part, size_t left) {
        if (size >= kLongRun && taken_ == held_) {
            move(run, part, size, stream_);
            part += size;
            return;
        }
        while (size) {
            if (taken_ == held_) {
                taken_ = 0;
                held_ = std::min(left, kBuffer);
                move(buffer_, part, held_, false);
                part += held_;
            }
            const size_t some = std::min(size, held_ - taken_);
            std::memcpy(run, buffer_ + taken_, some);
            run += some;
            taken_ += some;
            size -= some;
            left -= some;
        }
    }

    uint64_t digest() const { return hash_.digest(); }

private:
    void move(uint8_t* to, const uint8_t* from, size_t size, bool stream) {
        if (sums_) hash_.update_copy(to, from, size, stream);
        else std::memcpy(to, from, size);
    }

    static constexpr size_t kLongRun = 4096, kBuffer = 8192;

    Xxh3 hash_;
    bool sums_, stream_;
    size_t held_ = 0, taken_ = 0;  // bytes in the buffer, and bytes taken out of it
    alignas(64) uint8_t buffer_[kBuffer];
};

}  // namespace

void check(const HostPlanes& pool) {
    refuse_if(pool.layers() < 1 || pool.layers() > 1 << 20, "no sound number of layers");
    refuse_if(pool.blocks < 1 || pool.blocks > kMost, "no sound number of blocks");
    refuse_if(pool.block_tokens < 1 || pool.block_tokens > 1 << 20, "no sound number of tokens a block");
    refuse_if(pool.page_blocks < 1 || pool.page_blocks > 1 << 20, "no sound number of blocks a page");
    refuse_if(pool.first_plane[0] != 0, "the first layer does not begin with the first plane");
    for (int64_t layer = 0; layer < pool.layers(); layer++) {
        refuse_if(pool.first_plane[layer + 1] <= pool.first_plane[layer], "a layer has no planes");
    }
    const __int128 rows = static_cast<__int128>(pool.block_tokens) * pool.page_blocks;
    __int128 total = 0;
    for (const PlaneMemory& plane : pool.planes) {
        refuse_if(!plane.base, "a plane has no memory");
        refuse_if(plane.row_bytes < 1 || plane.row_bytes > kMost, "no sound size of rows");
        total += rows * plane.row_bytes;
        const __int128 there = reinterpret_cast<uintptr_t>(plane.base);
        const __int128 across = static_cast<__int128>(pool.blocks - 1) * plane.block_stride;
        const __int128 along = static_cast<__int128>(pool.block_tokens - 1) * plane.token_stride;
        const __int128 low = there + std::min<__int128>(across, 0) + std::min<__int128>(along, 0);
        const __int128 high = there + std::max<__int128>(across, 0) + std::max<__int128>(along, 0) + plane.row_bytes;
        refuse_if(low <= 0 || high > static_cast<__int128>(1) << 63, "a plane's strides leave the address space");
    }
    refuse_if(total > kMost, "no sound number of bytes a page");
}

int64_t layer_bytes(const HostPlanes& pool, int64_t layer) {
    int64_t rows = 0;
    for (int32_t n = pool.first_plane[layer]; n < pool.first_plane[layer + 1]; n++) rows += pool.planes[n].row_bytes;
    return rows * pool.block_tokens * pool.page_blocks;
}

void gather(const HostPlanes& pool, const int64_t* blocks, int64_t first, int64_t last, uint8_t* part, uint64_t* sums,
            Store store) {
    const Arm& arm = best_arm();
    for (int64_t layer = first; layer < last; layer++) {
        Mover mover(arm, sums, store);
        for (int32_t n = pool.first_plane[layer]; n < pool.first_plane[layer + 1]; n++) {
            each_run<true>(pool.planes[n], pool, blocks,
                           [&](const uint8_t* run, size_t size) { mover.gather(run, size, part); });
        }
        mover.finish(part);
        if (sums) *sums++ = mover.digest();
    }
}

void scatter(const HostPlanes& pool, const int64_t* blocks, int64_t first, int64_t last, const uint8_t* part,
             uint64_t* sums, Store store) {
    const Arm& arm = best_arm();
    for (int64_t layer = first; layer < last; layer++) {
        Mover mover(arm, sums, store);
        size_t left = static_cast<size_t>(layer_bytes(pool, layer));
        for (int32_t n = pool.first_plane[layer]; n < pool.first_plane[layer + 1]; n++) {
            each_run<false>(pool.planes[n], pool, blocks, [&](uint8_t* run, size_t size) {
                mover.scatter(run, size, part, left);
                left -= size;
            });
        }
        if (sums) *sums++ = mover.digest();
    }
}

}  // namespace gdscache
