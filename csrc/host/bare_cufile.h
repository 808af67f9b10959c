// The bare loop of cuFile's calls: what it gives to whoever only reads into GPU memory, or writes from there.
// `gdscache bench` compares with it.

#pragma once

#include <cstdint>

#include "cufile_files.h"
#include "disk.h"

namespace gdscache {

struct CuFileLoop {
    const CuFiles* files;
    int fd;
    Op op;
    int64_t bytes;        // from the beginning of the file on
    int64_t piece_bytes;  // of one call
    int threads;
    uint64_t memory;  // `bytes` of a GPU, of which `files` knows
};

// Every piece once, by whichever thread is free. Seconds from the first call to the last into `seconds`. 0, or a
// negative error: -ENODATA where a call moved too little, -EINVAL where the file or the memory is not known.
int run(const CuFileLoop& loop, double& seconds);

}  // namespace gdscache
