// Bytes between files and memory, in pieces that are submitted in order and answered in any.
//
// One thread owns a disk: it submits, reaps and destroys, and outlives what is under way (the kernel cancels what a
// thread that ends has submitted). Others may only wake it. Nothing here knows priorities: what is more than the depth
// waits in the order of its submission, so an executor that has priorities keeps `pending()` near `room()`.

#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"

namespace gdscache {

enum class Op : uint8_t { kRead, kWrite };

constexpr int32_t kMostErrno = 4095;       // of Linux: what is greater is an error of somebody's own
constexpr uint32_t kMostFragments = 1024;  // IOV_MAX of Linux
constexpr int64_t kAlignment = 4096;       // what O_DIRECT wants at most, and an extent's own

// Bytes of a piece's memory whose checksum is wanted as soon as they are read, while they lie in the reader's cache.
struct Look {
    const uint8_t* memory;
    size_t bytes;
    uint64_t* sum;
};

// A stretch of a file and where its bytes lie in memory: one system call, if nothing goes wrong.
struct Piece {
    uint64_t tag;            // the caller's, for its answers
    const iovec* fragments;  // in the order of the file; they and their memory stay until all of them have ended
    uint32_t count;
    int32_t fd;
    int64_t offset;  // in bytes. O_DIRECT's alignment, of this and of the fragments, is the caller's
    Op op;
    // The kernel copies the bytes (page cache, RAM disk): one of its threads does that, not the thread that submits.
    bool copied;
    std::span<const Look> looks{};  // of what is read; not every disk takes them, nor any those of a piece in parts
};

// Fragments [first, first + count) of a piece have ended: nothing touches their memory any more.
struct Ended {
    uint64_t tag;
    uint32_t first, count;
    int32_t error;  // 0, an errno, or what is greater than any (moves.h)
    int64_t moved;  // bytes. With error 0, less than the fragments have only at a file's end or on a full one
    bool looked = false;  // the piece's looks were taken; then these are all of its fragments
};

class Disk {
public:
    virtual ~Disk() = default;  // waits for what is under way; what was not begun is never answered

    // Begin pieces, or queue them behind those that are under way. A piece that makes no sense ends with EINVAL.
    virtual void submit(std::span<const Piece> pieces) = 0;

    // Append answers, and wait for the first at most so many seconds (below 0: for ever). How many there were; none
    // after a wake, or when the time is over. A negative errno when the disk is broken: what the kernel has then stays
    // pending, and keeps its memory for good.
    virtual int reap(std::vector<Ended>& ended, double seconds) = 0;

    // End the wait of a `reap`, the running or else the next. Any thread.
    virtual void wake() = 0;

    // Pieces that have not ended, and how many of them may be under way.
    virtual size_t pending() const = 0;
    virtual size_t depth() const = 0;
    // Pending pieces from which on an executor keeps more of them back: enough for what moves bytes never to wait for
    // it.
    virtual size_t room() const = 0;
    // Fragments that a piece should have at most.
    virtual uint32_t most_fragments() const { return kMostFragments; }

    virtual const char* name() const = 0;
};

// io_uring: `workers` threads of the kernel at most, `depth` pieces under way. Throws `Error` where the kernel or a
// container's rules do not allow it (EPERM, ENOSYS, EINVAL), or there is no room (EMFILE, ENOMEM).
std::unique_ptr<Disk> open_ring_disk(int workers, int depth);

// preadv and pwritev by `threads` threads of ours, each with one piece under way. Throws `Error`.
std::unique_ptr<Disk> open_threads_disk(int threads);

// The first of the two that can be had.
std::unique_ptr<Disk> open_disk(int workers, int depth);

class CuFiles;

// Pieces of up to so many bytes go through batches, larger ones by a call each: a batch spares small ones most of what
// a call costs, and is one thread's for as long as its slowest entry takes.
constexpr int64_t kBatchedBytes = 64 << 10;

// `threads` threads of ours: fragments in memory that `files` has go by cuFile, those of the host by preadv and
// pwritev. Those that follow each other in memory, too, are one call. `batched`: bytes of a piece that may go through a
// batch; 0: none does.
std::unique_ptr<Disk> open_cufile_disk(int threads, std::shared_ptr<const CuFiles> files, int64_t batched);

// --- cutting and merging

struct Request {
    int32_t fd;
    int64_t offset;
    uint64_t address;
    int64_t bytes;
};

// Fragments [first, first + count) of `Runs`, which are neighbours in one file.
struct Run {
    int32_t fd;
    int64_t offset;
    uint32_t first, count;
    int64_t bytes;
};

struct Runs {
    std::vector<iovec> fragments;
    std::vector<uint32_t> requests;  // of which request each fragment is a part
    std::vector<Run> runs;
};

// Requests in the order of their files, those of more than `limit` bytes cut into equal parts of whole sectors, and
// neighbours merged into runs of at most `limit` bytes and `most` fragments. `limit` and `most` are at least 1.
Runs cut_and_merge(std::span<const Request> requests, int64_t limit, uint32_t most = kMostFragments);

// Bytes of a run: an equal share of the total for each of `ways`, between 1 and 4 MiB, in whole sectors.
int64_t run_bytes(int64_t total, int ways);

// --- what both disks do with the answers of the system

// Fragments of a piece that go through the system together; one that is alone may need several calls.
struct Part {
    uint32_t first, count;
    int64_t start;       // bytes of the piece before them
    int64_t moved = 0;   // of a fragment that is alone: what the calls so far have moved,
    int64_t resume = 0;  // and where the next begins: a whole sector
    uint32_t tries = 0;  // calls that were to be tried again
};

// The next call for a part: `count` of `vectors` at `offset`, which have `bytes`.
struct Call {
    const iovec* vectors;
    uint32_t count;
    int64_t offset;
    int64_t bytes;
};

// The bytes of a call, moved once by cuFile.
int64_t move_once(std::shared_ptr<const CuFiles> files, const Piece& piece, const Call& call);

// Whether a piece makes sense: addresses, counts, an offset and a length that a file can have.
bool is_sound(const Piece& piece);

// Appends the parts that a sound piece begins with: one, or where that would be too many bytes one a fragment.
void begin(const Piece& piece, std::vector<Part>& parts);

// Bytes of some fragments.
int64_t bytes_of(const iovec* fragments, uint32_t count);

// `one` is where a vector of its own is put, and lives until the call was made.
Call next_call(const Piece& piece, const Part& part, iovec& one);

// Takes the answer of a part's call, bytes or a negative errno: appends what has ended, and parts that are to be tried
// next. A call that failed for several fragments is made again for each: a bad sector costs no neighbour.
void advance(const Piece& piece, const Part& part, int64_t answer, std::vector<Ended>& ended, std::vector<Part>& again);

}  // namespace gdscache
