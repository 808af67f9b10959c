// The plain C interface: checks, and calls of what it stands for. See api.h.

#include "api.h"

#include <cerrno>
#include <cstdio>
#include <memory>
#include <new>
#include <vector>

#include "pages.h"
#include "pool.h"
#include "xxh3.h"

using namespace gdscache;

namespace {

const Arm* arm_of(const char* name) { return name ? find_arm(name) : &best_arm(); }

int32_t refused(const char* cause, char* why, int64_t why_size) {
    if (why && why_size > 0) std::snprintf(why, static_cast<size_t>(why_size), "%s", cause);
    return -EINVAL;
}

// Whether the arguments that the calls on pages share make sense.
bool sound(const gdscache_pool* pool, int64_t pages, int64_t first, int64_t last, const uint64_t* parts) {
    if (!pool || pages < 0 || (pages && !parts)) return false;
    if (first < 0 || last < first || last > pool->pool.n_layers) return false;
    for (int64_t n = 0; n < pages; n++) {
        if (!parts[n]) return false;
    }
    return true;
}

template <typename Move>
int32_t each_page(const gdscache_pool* pool, const int64_t* blocks, int64_t pages, int64_t first, int64_t last,
                  const uint64_t* parts, uint64_t* sums, int32_t stream, Move move) {
    if (!sound(pool, pages, first, last, parts) || (pages && !blocks)) return -EINVAL;
    const int64_t page_blocks = pool->pool.page_blocks;
    for (int64_t n = 0; n < pages; n++) {
        if (!knows(pool->pool, blocks + n * page_blocks)) return -EINVAL;
    }
    for (int64_t n = 0; n < pages; n++) {
        uint64_t* const of_page = sums ? sums + n * (last - first) : nullptr;
        move(pool->pool, blocks + n * page_blocks, first, last, reinterpret_cast<uint8_t*>(parts[n]), of_page,
             stream ? Store::kStreamed : Store::kCached);
    }
    if (stream) stream_fence();
    return 0;
}

}  // namespace

int32_t gdscache_abi() { return GDSCACHE_ABI; }

const char* gdscache_best_arm() { return best_arm().name; }

int32_t gdscache_has_arm(const char* arm) { return arm && find_arm(arm) ? 1 : 0; }

int32_t gdscache_xxh3(const char* arm, const void* data, int64_t size, uint64_t* sum) {
    const Arm* const found = arm_of(arm);
    if (!found || !sum || size < 0 || (size && !data)) return -EINVAL;
    *sum = xxh3(data, static_cast<size_t>(size), *found);
    return 0;
}

int32_t gdscache_xxh3_chunks(const char* arm, const void* data, const int64_t* sizes, int64_t count, void* out,
                             int32_t stream, uint64_t* sum) {
    const Arm* const found = arm_of(arm);
    if (!found || !sum || count < 0 || (count && !sizes)) return -EINVAL;
    for (int64_t n = 0; n < count; n++) {
        if (sizes[n] < 0 || (sizes[n] && !data)) return -EINVAL;
    }
    Xxh3 hash(*found);
    const uint8_t* in = static_cast<const uint8_t*>(data);
    uint8_t* to = static_cast<uint8_t*>(out);
    for (int64_t n = 0; n < count; n++) {
        const size_t size = static_cast<size_t>(sizes[n]);
        if (size == 0) continue;
        if (to) {
            hash.update_copy(to, in, size, stream != 0);
            to += size;
        } else {
            hash.update(in, size);
        }
        in += size;
    }
    if (to && stream) stream_fence();
    *sum = hash.digest();
    return 0;
}

int32_t gdscache_layer_sums(const uint64_t* extents, int64_t pages, const int64_t* bounds, int64_t layers,
                            uint64_t* sums) {
    if (pages < 0 || layers < 0 || (pages && layers && !(extents && bounds && sums))) return -EINVAL;
    for (int64_t layer = 0; layer < layers; layer++) {
        if (bounds[2 * layer] < 0 || bounds[2 * layer + 1] < bounds[2 * layer]) return -EINVAL;
    }
    for (int64_t page = 0; page < pages; page++) {
        if (!extents[page]) return -EINVAL;
        const uint8_t* const extent = reinterpret_cast<const uint8_t*>(extents[page]);
        for (int64_t layer = 0; layer < layers; layer++) {
            const int64_t begin = bounds[2 * layer], end = bounds[2 * layer + 1];
            *sums++ = xxh3(extent + begin, static_cast<size_t>(end - begin));
        }
    }
    return 0;
}

int32_t gdscache_pool_open(const int64_t* planes, int64_t n_planes, const int32_t* first_plane, int64_t n_layers,
                           int64_t blocks, int64_t block_tokens, int64_t page_blocks, struct gdscache_pool** pool,
                           char* why, int64_t why_size) {
    if (!planes || !first_plane || !pool) return refused("an address is null", why, why_size);
    if (n_planes < 1 || n_planes > 1 << 24) return refused("no sound number of planes", why, why_size);
    if (n_layers < 1 || n_layers > n_planes) return refused("no sound number of layers", why, why_size);
    if (first_plane[n_layers] != n_planes) return refused("the layers have other planes in all", why, why_size);
    try {
        auto made = std::make_unique<gdscache_pool>();
        for (int64_t n = 0; n < n_planes; n++) {
            const int64_t* const row = planes + 4 * n;
            made->planes.push_back({reinterpret_cast<uint8_t*>(row[0]), row[1], row[2], row[3]});
        }
        made->first_plane.assign(first_plane, first_plane + n_layers + 1);
        made->pool = {made->planes.data(), made->first_plane.data(), n_layers, blocks, block_tokens, page_blocks};
        if (const char* cause = refusal(made->pool)) return refused(cause, why, why_size);
        *pool = made.release();
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

void gdscache_pool_close(struct gdscache_pool* pool) { delete pool; }

int32_t gdscache_gather(const struct gdscache_pool* pool, const int64_t* blocks, int64_t pages, int64_t first,
                        int64_t last, const uint64_t* parts, uint64_t* sums, int32_t stream) {
    return each_page(pool, blocks, pages, first, last, parts, sums, stream, gather);
}

int32_t gdscache_scatter(const struct gdscache_pool* pool, const int64_t* blocks, int64_t pages, int64_t first,
                         int64_t last, const uint64_t* parts, uint64_t* sums, int32_t stream) {
    return each_page(pool, blocks, pages, first, last, parts, sums, stream, scatter);
}
