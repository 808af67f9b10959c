// What `gdscache_pool_open` gives out.

#pragma once

#include <vector>

#include "pages.h"

struct gdscache_pool {
    std::vector<gdscache::PlaneMemory> planes;
    std::vector<int32_t> first_plane;
    gdscache::Pool pool;
};
