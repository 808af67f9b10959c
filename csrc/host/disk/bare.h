// The bare loop: the rate of a device for plain reads or writes, optionally with a copy of reads to other memory.
// `gdscache bench` compares with it.

#pragma once

#include <cstdint>

#include "cuda/cuda.h"
#include "disk/disk.h"

namespace gdscache {

struct BareLoop {
    int fd;
    Op op;
    int64_t bytes;        // from the file's first byte
    int64_t piece_bytes;  // of one call
    int threads;
    uint8_t* memory;  // `bytes`: the target of reads and the source of writes; page-locked with `cuda`
    uint64_t target;  // `bytes` that reads are copied to, or 0
    const Cuda* cuda = nullptr;  // `target` is on its GPU, and each thread has a stream; null: in host memory
};

// Move every piece once, by any free thread. Returns the seconds from the first call to the end of the last, copies
// included. Throws `Error`, with ENODATA after a short call, and CudaError.
double run(const BareLoop& loop);

}  // namespace gdscache
