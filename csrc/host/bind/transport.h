// A transport of Python's as what a disk of threads moves bytes by.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../disk.h"
#include "bind.h"

namespace gdscache {

// Memory of a GPU, which a transport gets as a `DeviceMemory`.
struct DeviceRange {
    uint64_t address, bytes;
    int device;
};

// `threads` threads of ours, which take the interpreter's lock for `transport` (gdscache/storage/base.py). Whoever waits
// for them, or ends the disk, has given it up.
std::unique_ptr<Disk> open_transport_disk(int threads, const nb::object& transport, std::vector<DeviceRange> devices);

}  // namespace gdscache
