// Bare loops: what a device, or cuFile, gives to whoever only reads or writes, and perhaps copies and sums. `gdscache
// bench` compares with them.

#pragma once

#include <cstdint>

#include "cuda/cufile.h"
#include "disk/disk.h"

namespace gdscache {

struct LoopShape {
    int fd;
    Op op;
    int64_t bytes;        // from the beginning of the file on
    int64_t piece_bytes;  // of one call
    int threads;
};

struct BareLoop : LoopShape {
    uint8_t* memory;       // that the file is read into, or written from
    int64_t memory_bytes;  // `bytes`, or less: then each thread uses its share of it again and again
    uint8_t* planes;       // of `bytes`: what was read is copied there, what is written comes from there. Or null
    int64_t sum_bytes;     // XXH3 of so many at a time is taken of what was read, or will be written; 0: of nothing
    const Cuda* cuda = nullptr;  // what was read goes on to GPU memory, by a stream a thread. Or null
    uint64_t device = 0;         // of `bytes`, where it goes; `memory` is page-locked then
};

struct CuFileLoop : LoopShape {
    const CuFiles* files;
    uint64_t memory;  // `bytes` of a GPU, of which `files` knows
};

// Every piece once, by whichever thread is free: seconds from the first call to the end of the last, copies too. Throws
// `Error`, with ENODATA where a call moved too little, and CudaError.
double run(const BareLoop& loop);
double run(const CuFileLoop& loop);

}  // namespace gdscache
