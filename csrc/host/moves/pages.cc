#include "moves/pages.h"

#include <cstring>
#include <span>

#include "base/error.h"
#include "hash/xxh3.h"
#include "pack/pack.h"

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

size_t values_of(const HostPlanes& pool, const PlaneMemory& plane) {
    return static_cast<size_t>(plane.row_bytes / 2 * pool.block_tokens * pool.page_blocks);
}

std::span<const PlaneMemory> planes_of(const HostPlanes& pool, int64_t layer) {
    const int32_t first = pool.first_plane[layer], last = pool.first_plane[layer + 1];
    return std::span(pool.planes).subspan(static_cast<size_t>(first), static_cast<size_t>(last - first));
}

// Copies bytes, and takes the checksum of all of them if it is wanted.
class Copier {
public:
    uint64_t digest() const { return hash.digest(); }

protected:
    Copier(bool sums, Store store) : hash(best_arm()), summed(sums), streamed(store == Store::kStreamed) {}

    void move(uint8_t* to, const uint8_t* from, size_t size, bool stream) {
        if (summed) hash.update_copy(to, from, size, stream);
        else std::memcpy(to, from, size);
    }

    Xxh3 hash;
    const bool summed, streamed;
};

// A layer's bytes on their way out of the planes, or into them. Short runs pass through a buffer in the nearest cache:
// the hash and stores past the caches want long ones.
class Mover : public Copier {
public:
    Mover(bool sums, Store store) : Copier(sums, store) {}

    // Append the next run of the planes at `part`. `finish` writes the buffered rest.
    void gather(const uint8_t* run, size_t size, uint8_t*& part) {
        if (size >= kLongRun) {
            finish(part);
            move(part, run, size, streamed);
            part += size;
            return;
        }
        if (held_ + size > kBuffer) finish(part);
        std::memcpy(buffer_ + held_, run, size);
        held_ += size;
    }

    void finish(uint8_t*& part) {
        move(part, buffer_, held_, streamed);
        part += held_;
        held_ = 0;
    }

    // Fill the next run of the planes from `part`. `left`: bytes of the layer that are in no plane yet.
    void scatter(uint8_t* run, size_t size, const uint8_t*& part, size_t left) {
        if (size >= kLongRun && taken_ == held_) {
            move(run, part, size, streamed);
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

private:
    static constexpr size_t kLongRun = 4096, kBuffer = 8192;

    size_t held_ = 0, taken_ = 0;  // bytes in the buffer, and bytes taken out of it
    alignas(64) uint8_t buffer_[kBuffer];
};

const TileCoder& best_coder() {
    static const TileCoder& coder = *coders().front();
    return coder;
}

// Moves a page's values between a plane and its packed part. Sums are of the part's bytes.
class Packer : public Copier {
public:
    Packer(const HostPlanes& pool, const int64_t* blocks, bool sums, Store store)
        : Copier(sums, store), pool_(pool), blocks_(blocks) {}

    // `part`: the begin of the plane's part, then of the next one. False: the plane does not fit.
    bool gather(const PlaneMemory& plane, uint8_t*& part) {
        const Xxh3 before = hash;
        uint8_t* const begin = part;
        if (gather(plane, part, kSampled)) return true;
        hash = before;
        part = begin;
        return gather(plane, part, 1);
    }

    void scatter(const PlaneMemory& plane, const uint8_t*& part) {
        const size_t values = values_of(pool_, plane), row = static_cast<size_t>(plane.row_bytes) / 2;
        const uint8_t base = base_of(part + tiles_bytes(values));
        size_t left = values, held = 0, taken = 0;
        each_run<false>(plane, pool_, blocks_, [&](uint8_t* run, size_t size) {
            while (size) {
                if (taken == held) {
                    const size_t some = std::min(left, kTile), filled = (some + kRound - 1) / kRound * kRound;
                    move(tile_, part, tiles_bytes(some), false);
                    part += tiles_bytes(some);
                    left -= some;
                    taken = held = 0;
                    if (some == kTile && size >= 2 * kTile) {
                        const bool past = streamed && reinterpret_cast<uintptr_t>(run) % 64 == 0;
                        (past ? coder_.decode_stream : coder_.decode)(tile_, kTile, base, run);
                        run += 2 * kTile, size -= 2 * kTile;
                        continue;
                    }
                    coder_.decode(tile_, filled, base, values_);
                    held = 2 * some;
                }
                const size_t some = std::min(size, held - taken);
                std::memcpy(run, values_ + taken, some);
                run += some, taken += some, size -= some;
            }
        });
        const auto put = [&](size_t place, uint8_t exponent) {
            const auto token = static_cast<int64_t>(place / row), in_block = token % pool_.block_tokens;
            uint8_t* const block = plane.base + blocks_[token / pool_.block_tokens] * plane.block_stride;
            set_exponent(block + in_block * plane.token_stride + place % row * 2, exponent);
        };
        size_t count = 0;  // words of the list that are used and were not seen yet
        each_piece(list_bytes(values), [&](size_t at, size_t size) {
            move(tile_, part + at, size, false);
            if (at == 0) count = 1 + exceptions_of(tile_, values);
            const size_t words = std::min(count, size / 4), skipped = at == 0;
            each_exception(tile_ + 4 * skipped, words - skipped, values, put);
            count -= words;
        });
        part += list_bytes(values);
    }

private:
    // With the base that every `step`-th value asks for.
    bool gather(const PlaneMemory& plane, uint8_t*& part, size_t step) {
        const size_t values = values_of(pool_, plane);
        Exponents exponents(step);
        each_run<true>(plane, pool_, blocks_, [&](const uint8_t* run, size_t size) { exponents.count(run, size); });
        const uint8_t base = exponents.base();
        uint8_t* const list = part + tiles_bytes(values);
        Exceptions exceptions(list, values);
        bool fits = true;
        size_t held = 0, first = 0;
        const auto put = [&](const uint8_t* in, size_t some) {
            coder_.encode(in, some, base, tile_, others_);
            fits = fits && exceptions.add(in, others_, some, first);
            move(part, tile_, tiles_bytes(some), streamed);
            part += tiles_bytes(some);
            first += some;
        };
        each_run<false>(plane, pool_, blocks_, [&](const uint8_t* run, size_t size) {
            while (size) {
                const bool whole = held == 0 && size >= 2 * kTile;
                const size_t some = std::min(size, 2 * kTile - held);
                if (whole) put(run, kTile);
                else std::memcpy(values_ + held, run, some), held += some;
                if (held == 2 * kTile) put(values_, kTile), held = 0;
                run += some, size -= some;
            }
        });
        if (held) {
            const size_t filled = (held / 2 + kRound - 1) / kRound * kRound;
            std::memset(values_ + held, 0, 2 * filled - held);
            put(values_, filled);
        }
        exceptions.end(base);
        each_piece(list_bytes(values), [&](size_t at, size_t size) {
            std::memcpy(tile_, list + at, size);
            move(list + at, tile_, size, streamed);
        });
        part += list_bytes(values);
        return fits;
    }

    template <typename Visit>
    static void each_piece(size_t bytes, Visit visit) {
        for (size_t at = 0; at < bytes; at += kTileBytes) visit(at, std::min(kTileBytes, bytes - at));
    }

    static constexpr size_t kSampled = 17;  // prime to the widths of rows: all channels have their turn

    const HostPlanes& pool_;
    const int64_t* blocks_;
    const TileCoder& coder_ = best_coder();
    uint64_t others_[kTile / 64];
    alignas(64) uint8_t tile_[kTileBytes], values_[2 * kTile];
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
        if (pool.packed) {
            refuse_if(plane.row_bytes % 2 != 0, "rows of bfloat16 values have an even number of bytes");
            refuse_if(rows * plane.row_bytes / 2 > kMostValues, "a plane of a page has too many values to be packed");
        }
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
    int64_t bytes = 0;
    const int64_t rows = pool.block_tokens * pool.page_blocks;
    for (const PlaneMemory& plane : planes_of(pool, layer)) {
        bytes += pool.packed ? static_cast<int64_t>(packed_bytes(values_of(pool, plane))) : rows * plane.row_bytes;
    }
    return bytes;
}

bool gather(const HostPlanes& pool, const int64_t* blocks, int64_t first, int64_t last, uint8_t* part, uint64_t* sums,
            Store store) {
    for (int64_t layer = first; layer < last; layer++) {
        if (pool.packed) {
            Packer packer(pool, blocks, sums, store);
            for (const PlaneMemory& plane : planes_of(pool, layer)) {
                if (!packer.gather(plane, part)) return false;
            }
            if (sums) *sums++ = packer.digest();
            continue;
        }
        Mover mover(sums, store);
        for (const PlaneMemory& plane : planes_of(pool, layer)) {
            each_run<true>(plane, pool, blocks,
                           [&](const uint8_t* run, size_t size) { mover.gather(run, size, part); });
        }
        mover.finish(part);
        if (sums) *sums++ = mover.digest();
    }
    return true;
}

void scatter(const HostPlanes& pool, const int64_t* blocks, int64_t first, int64_t last, const uint8_t* part,
             uint64_t* sums, Store store) {
    for (int64_t layer = first; layer < last; layer++) {
        if (pool.packed) {
            Packer packer(pool, blocks, sums, store);
            for (const PlaneMemory& plane : planes_of(pool, layer)) packer.scatter(plane, part);
            if (sums) *sums++ = packer.digest();
            continue;
        }
        Mover mover(sums, store);
        size_t left = static_cast<size_t>(layer_bytes(pool, layer));
        for (const PlaneMemory& plane : planes_of(pool, layer)) {
            each_run<false>(plane, pool, blocks, [&](uint8_t* run, size_t size) {
                mover.scatter(run, size, part, left);
                left -= size;
            });
        }
        if (sums) *sums++ = mover.digest();
    }
}

}  // namespace gdscache
