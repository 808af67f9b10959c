// The disk by cuFile. See disk.h.

#pragma once

#include <memory>

#include "cufile.h"
#include "disk.h"

namespace gdscache {

// Pieces of up to so many bytes go through batches, larger ones by a call each: a batch spares small ones most of what
// a call costs, and is one thread's for as long as its slowest entry takes.
constexpr int64_t kBatchedBytes = 64 << 10;

// `threads` threads of ours: fragments in memory that `files` has go by cuFile, those of the host by preadv and
// pwritev. Those that follow each other in memory, too, are one call. `batched`: bytes of a piece that may go through a
// batch; 0: none does.
std::unique_ptr<Disk> open_cufile_disk(int threads, std::shared_ptr<const CuFiles> files, int64_t batched);

// The bytes of a call, as one of its threads moves them.
int64_t move_once(std::shared_ptr<const CuFiles> files, const Piece& piece, const Call& call);

}  // namespace gdscache
