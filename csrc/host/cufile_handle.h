// What `gdscache_cufile_open` gives out.

#pragma once

#include <memory>

#include "cufile_disk.h"

struct gdscache_cufile {
    std::shared_ptr<gdscache::CuFiles> files;
    int64_t batched;
};
