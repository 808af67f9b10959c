// Pieces that are read and looked at by one thread, in strides where that is faster.

#pragma once

#include <cstddef>
#include <cstdint>

#include "threads_disk.h"

namespace gdscache {

// A core's own cache is 1 to 2 MiB, and has a stride when its checksums are taken. Behind pieces of 4 MiB instead, sixteen
// threads read a RAM disk with 33 GB/s and not with 40 (an H100 machine; 42 without checksums).
constexpr size_t kStride = 512 << 10;

// Reads all of a piece, and takes each look when its bytes are there. What the kernel copies comes in strides; a disk that
// does not copy by a processor has more to do at once by one large call. Answers as one call would: the bytes from its
// beginning on, fewer than it has where a call brought fewer or failed, and the error where that was the first call.
// Unless all bytes came, some looks were not taken.
int64_t read_and_look(Caller& caller, const Piece& piece);

}  // namespace gdscache
