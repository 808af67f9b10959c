// XXH3-64 of the layers of an extent.
#pragma once

#include "hash/xxh3.h"
#include "moves/pages.h"

namespace gdscache {

// Of layers [first, last); layer `first` begins at `part`.
inline void digest(const HostPlanes& pool, int64_t first, int64_t last, const uint8_t* part, uint64_t* sums) {
    for (int64_t layer = first; layer < last; layer++) {
        const int64_t nbytes = layer_bytes(pool, layer);
        *sums++ = xxh3(part, static_cast<size_t>(nbytes));
        part += nbytes;
    }
}

}  // namespace gdscache
