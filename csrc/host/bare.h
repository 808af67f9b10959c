// The bare loop: what the device gives to whoever only reads or writes, and perhaps copies and sums. `gdscache bench`
// compares with it.

#pragma once

#include <cstdint>

#include "disk.h"

namespace gdscache {

class Cuda;

struct BareLoop {
    int fd;
    Op op;
    int64_t bytes;        // from the beginning of the file on
    int64_t piece_bytes;  // of one system call
    int threads;
    uint8_t* memory;       // that the file is read into, or written from
    int64_t memory_bytes;  // `bytes`, or less: then each thread uses its share of it again and again
    uint8_t* planes;       // of `bytes`: what was read is copied there, what is written comes from there. Or null
    int64_t sum_bytes;     // XXH3 of so many at a time is taken of what was read, or will be written; 0: of nothing
    const Cuda* cuda = nullptr;  // what was read goes on to GPU memory, by a stream a thread. Or null
    uint64_t device = 0;         // of `bytes`, where it goes; `memory` is page-locked then
};

// Every piece once, by whichever thread is free. Seconds from the first call to the end of the last, copies too, into
// `seconds`. 0, or a negative errno: -ENODATA where a call moved too little. Throws CudaError where the driver refuses.
int run(const BareLoop& loop, double& seconds);

}  // namespace gdscache
