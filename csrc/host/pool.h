// Planes in host memory that Python's side has opened, for as long as it or an executor has them.

#pragma once

#include <memory>
#include <vector>

#include "pages.h"

namespace gdscache {

struct OpenPool {
    std::vector<PlaneMemory> planes;
    std::vector<int32_t> first_plane;
    Pool pool;
};

struct HostPool {
    std::shared_ptr<OpenPool> pool;  // none behind `close`
};

}  // namespace gdscache
