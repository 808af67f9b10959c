// Bare loops: the rate of a device, or of cuFile, for plain reads or writes, with optional copies and checksums.
// `gdscache bench` compares with them.

#pragma once

#include <cstdint>

#include "cuda/cufile.h"
#include "disk/disk.h"

namespace gdscache {

struct LoopShape {
    int fd;
    Op op;
    int64_t bytes;        // from the file's first byte
    int64_t piece_bytes;  // of one call
    int threads;
};

struct BareLoop : LoopShape {
    uint8_t* memory;       // the target of reads and the source of writes
    int64_t memory_bytes;  // `bytes`, or fewer: each thread then uses its share again and again
    uint8_t* planes;       // `bytes` that reads are copied to and writes come from, or null
    int64_t sum_bytes;     // take XXH3 of reads and writes in parts of this size; 0: none
    const Cuda* cuda = nullptr;  // copies reads on to GPU memory, a stream a thread; or null
    uint64_t device = 0;         // the target in GPU memory, of `bytes`; `memory` is then page-locked
};

struct CuFileLoop : LoopShape {
    const CuFiles* files;
    uint64_t memory;  // `bytes` of a GPU that `files` knows
};

// Move every piece once, by any free thread. Returns the seconds from the first call to the end of the last, copies
// included. Throws `Error`, with ENODATA after a short call, and CudaError.
double run(const BareLoop& loop);
double run(const CuFileLoop& loop);

}  // namespace gdscache
