// The bare loop: what the device gives to whoever only reads or writes. `gdscache bench io` compares against it.

#pragma once

#include <cstdint>

#include "disk.h"

namespace gdscache {

struct Bare {
    double seconds;     // from the first submit to the last answer
    int64_t moved;      // bytes
    const char* disk;   // "ring" or "threads"
};

// Read or write bytes [offset, offset + bytes) of a file in pieces of `piece_bytes`, `depth` of them under way, into or
// out of `depth` buffers of its own: no checksum, and no copy. `workers`: threads of the kernel, or of ours where there
// is no io_uring. `copied`: as of a `Piece`. 0, or a negative errno.
int bare(int fd, Op op, int64_t offset, int64_t bytes, int64_t piece_bytes, int depth, int workers, bool copied,
         Bare& result);

}  // namespace gdscache
