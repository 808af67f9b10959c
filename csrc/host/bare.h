// The bare loop: what the device gives to whoever only reads or writes, and perhaps copies and sums. `gdscache bench`
// compares with it.

#pragma once

#include <cstdint>

#include "disk.h"

namespace gdscache {

struct BareLoop {
    int fd;
    Op op;
    int64_t bytes;        // from the beginning of the file on
    int64_t piece_bytes;  // of one system call
    int threads;
    uint8_t* memory;       // that the file is read into, or written from
    int64_t memory_bytes;  // `bytes`, or less: then each thread uses a piece of it again and again
    uint8_t* planes;       // of `bytes`: what was read is copied there, what is written comes from there. Or null
    int64_t sum_bytes;     // XXH3 of so many at a time is taken of what was read, or will be written; 0: of nothing
};

// Every piece once, by whichever thread is free. Seconds from the first call to the last into `seconds`. 0, or a
// negative errno: -ENODATA where a call moved too little.
int run(const BareLoop& loop, double& seconds);

}  // namespace gdscache
