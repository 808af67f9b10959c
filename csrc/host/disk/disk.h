// Reads and writes of files, in pieces that are submitted in order and answered in any.
//
// One thread owns a disk: it submits, reaps and destroys, and outlives the I/O under way (the kernel cancels the
// requests of a thread that ends). Other threads may only wake it. A disk knows no priorities: pieces above the depth
// wait in the order of their submission, so an executor with priorities keeps `pending()` near `room()`.

#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"

namespace gdscache {

enum class Op : uint8_t { kRead, kWrite };

constexpr int32_t kMostErrno = 4095;       // of Linux; greater numbers are errors of our own
constexpr uint32_t kMostFragments = 1024;  // IOV_MAX of Linux
constexpr int64_t kAlignment = 4096;       // the largest alignment that O_DIRECT wants, and an extent's

// Bytes of a piece's memory whose checksum is taken right after the read, in the reader's cache.
struct Look {
    const uint8_t* memory;
    size_t bytes;
    uint64_t* sum;
};

// A stretch of a file and the memory of its bytes: one system call, without errors.
struct Piece {
    uint64_t tag;            // the caller's, returned with the answers
    const iovec* fragments;  // in the order of the file; they and their memory stay until all of them have ended
    uint32_t count;
    int32_t fd;
    int64_t offset;  // in bytes. The caller aligns it and the fragments for O_DIRECT
    Op op;
    // The kernel copies the bytes (page cache, RAM disk): a kernel thread does it, not the submitting one.
    bool copied;
    std::span<const Look> looks{};  // of reads; some disks take none, and none takes those of a piece in parts
};

// Fragments [first, first + count) of a piece have ended: nothing touches their memory any more.
struct Ended {
    uint64_t tag;
    uint32_t first, count;
    int32_t error;  // 0, an errno, or a greater number (moves.h)
    int64_t moved;  // bytes. Without an error, fewer than the fragments' only at a file's end or on a full device
    bool looked = false;  // the piece's looks were taken; these are then all of its fragments
};

class Disk {
public:
    virtual ~Disk() = default;  // waits for I/O under way; pieces that have not begun get no answer

    // Begin pieces, or queue them. An unsound piece ends with EINVAL.
    virtual void submit(std::span<const Piece> pieces) = 0;

    // Append answers, and wait up to `seconds` (below 0: for ever) for the first. Returns their number: 0 after a wake
    // or the time. A negative errno when the disk is broken: the kernel's requests then keep their memory for good.
    virtual int reap(std::vector<Ended>& ended, double seconds) = 0;

    // End the wait of the running `reap`, or of the next. Any thread.
    virtual void wake() = 0;

    // Pieces that have not ended, and the most that may be under way.
    virtual size_t pending() const = 0;
    virtual size_t depth() const = 0;
    // The number of pending pieces at which an executor keeps further ones back: the disk never waits for it.
    virtual size_t room() const = 0;
    // Most fragments of a piece.
    virtual uint32_t most_fragments() const { return kMostFragments; }

    virtual const char* name() const = 0;
};

// io_uring: at most `workers` threads of the kernel, `depth` pieces under way. Throws `Error` if the kernel or a
// container's rules forbid it (EPERM, ENOSYS, EINVAL), or there is no room (EMFILE, ENOMEM).
std::unique_ptr<Disk> open_ring_disk(int workers, int depth);

// preadv and pwritev by `threads` threads of ours, each with one piece under way. Throws `Error`.
std::unique_ptr<Disk> open_threads_disk(int threads);

// io_uring, else threads.
std::unique_ptr<Disk> open_disk(int workers, int depth);

class CuFiles;

// `threads` threads of ours: fragments in memory of `files` go by cuFile, those in host memory by preadv and pwritev.
// Fragments that are adjacent in memory too are one call.
std::unique_ptr<Disk> open_cufile_disk(int threads, const std::shared_ptr<const CuFiles>& files);

// --- cutting and merging

struct Request {
    int32_t fd;
    int64_t offset;
    uint64_t address;
    int64_t bytes;
};

// Fragments [first, first + count) of `Runs`, adjacent in one file.
struct Run {
    int32_t fd;
    int64_t offset;
    uint32_t first, count;
    int64_t bytes;
};

struct Runs {
    std::vector<iovec> fragments;
    std::vector<uint32_t> requests;  // the request of each fragment
    std::vector<Run> runs;
};

// Requests in the order of their files: those above `limit` bytes are cut into equal parts of whole sectors, and
// neighbours are merged into runs of at most `limit` bytes and `most` fragments. `limit` and `most` are at least 1.
Runs cut_and_merge(std::span<const Request> requests, int64_t limit, uint32_t most = kMostFragments);

// Bytes of a run: the total divided by `ways`, between 1 and 4 MiB, in whole sectors.
int64_t run_bytes(int64_t total, int ways);

// --- the system's answers, for all disks

// Fragments of a piece that go through the system together; a single one may need several calls.
struct Part {
    uint32_t first, count;
    int64_t start;       // bytes of the piece before the part
    int64_t moved = 0;   // of a single fragment: bytes moved by the calls before,
    int64_t resume = 0;  // and the start of the next call: a whole sector
    uint32_t tries = 0;  // calls that answered EAGAIN
};

// The next call for a part: `count` of `vectors` at `offset`, with `bytes` in all.
struct Call {
    const iovec* vectors;
    uint32_t count;
    int64_t offset;
    int64_t bytes;
};

// Move the bytes of a call once, by cuFile.
int64_t move_once(std::shared_ptr<const CuFiles> files, const Piece& piece, const Call& call);

// Whether addresses, counts, offset and length are possible for a file.
bool is_sound(const Piece& piece);

// Append a sound piece's first parts: one, or one a fragment if the piece is too large for a call.
void begin(const Piece& piece, std::vector<Part>& parts);

int64_t bytes_of(const iovec* fragments, uint32_t count);

// `one`: room for a vector of the call's own; it lives until the call was made.
Call next_call(const Piece& piece, const Part& part, iovec& one);

// Take the answer of a part's call, bytes or a negative errno: append ended fragments, and parts for further calls. A
// failed call for several fragments is repeated for each: a bad sector costs no neighbour.
void advance(const Piece& piece, const Part& part, int64_t answer, std::vector<Ended>& ended, std::vector<Part>& again);

// --- the bare loop

// The rate of a device for plain reads or writes, perhaps with a copy of reads to other memory; for `gdscache bench`.
struct BareLoop {
    int fd;
    Op op;
    int64_t bytes;        // from the file's first byte
    int64_t piece_bytes;  // of one call
    int threads;
    uint8_t* memory;  // `bytes`: the target of reads and the source of writes; page-locked with `cuda`
    uint64_t target;  // `bytes` that reads are copied to, or 0
    const class Cuda* cuda = nullptr;  // `target` is on its GPU, and each thread has a stream; null: in host memory
};

// Move every piece once, by any free thread. Returns the seconds from the first call to the end of the last, copies
// included. Throws `Error`, with ENODATA after a short call, and CudaError.
double run(const BareLoop& loop);

}  // namespace gdscache
