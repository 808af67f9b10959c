// A disk of threads, and what they move bytes by.

#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "disk/disk.h"

namespace gdscache {

// One thread's. What it answers is for `advance`: bytes, or a negative error.
class Caller {
public:
    using Told = std::function<void(size_t piece, int64_t answer)>;

    virtual ~Caller() = default;
    // Move the bytes of a call.
    virtual int64_t transfer(const Piece& piece, const Call& call) = 0;
    // Whether checksums are taken of what it reads, part by part; else whoever wants them looks at all of it later.
    virtual bool looks() const { return true; }
    // Whether such pieces of a file are carried out by one thread at a time.
    virtual bool in_turn(const Piece& /*piece*/) const { return false; }
    // Whether a piece may go together with others that wait.
    virtual bool small(const Piece& /*piece*/) const { return false; }
    // Move pieces that are small, and say once of each what was moved of it, from its beginning on: nothing touches its
    // memory any more. There are two or more.
    virtual void transfer_all(std::span<const Piece> /*pieces*/, const Told& /*told*/) {}
};

// The caller of a thread, made and destroyed in it. It does not throw.
using MakeCaller = std::function<std::unique_ptr<Caller>()>;

// preadv or pwritev.
int64_t system_call(const Piece& piece, const Call& call);

// Whether a system call for it keeps a file's lock, and others that want it spin: the kernel copies what is written.
inline bool keeps_lock(const Piece& piece) { return piece.op == Op::kWrite && piece.copied; }

// Fragments of a call that lie in one memory, and go together. `Memory`: what tells them apart; false of the host's.
template <typename Memory>
struct Stretch {
    Memory memory;
    uint64_t address;
    const iovec* vectors;
    uint32_t count;
    int64_t bytes;
};

// The first stretch of some fragments, one behind the other; `scattered`: those of the host may lie anywhere.
// `memory(fragment)`: whose it is.
template <typename Of>
auto first_stretch(const iovec* vectors, uint32_t count, bool scattered, const Of& memory) {
    const auto at = [&](uint32_t n) { return reinterpret_cast<uint64_t>(vectors[n].iov_base); };
    Stretch<decltype(memory(*vectors))> found{memory(*vectors), at(0), vectors, 0, 0};
    const bool anywhere = scattered && !found.memory;
    do {
        found.bytes += static_cast<int64_t>(vectors[found.count++].iov_len);
    } while (found.count < count && memory(vectors[found.count]) == found.memory &&
             (anywhere || at(found.count) == found.address + static_cast<uint64_t>(found.bytes)));
    return found;
}

// Moves a call stretch by stretch: bytes from its beginning on, or the error of its first stretch. `move(stretch,
// offset)`.
template <typename Of, typename Move>
int64_t move_stretches(const Call& call, bool scattered, const Of& memory, const Move& move) {
    int64_t moved = 0;
    for (uint32_t n = 0; n < call.count;) {
        const auto stretch = first_stretch(call.vectors + n, call.count - n, scattered, memory);
        const int64_t answer = move(stretch, call.offset + moved);
        if (answer < 0) return moved ? moved : answer;  // what is left is tried again, and has the error
        moved += answer;
        if (answer < stretch.bytes) break;
        n += stretch.count;
    }
    return moved;
}

// A core's own cache is 1 to 2 MiB, and has a stride when its checksums are taken. Behind pieces of 4 MiB instead,
// sixteen threads read a RAM disk with 33 GB/s and not with 40 (an H100 machine; 42 without checksums).
constexpr size_t kStride = 512 << 10;

// Reads all of a piece, and takes each look when its bytes are there. What the kernel copies comes in strides; a disk
// that does not copy by a processor has more to do at once by one large call. Answers as one call would: the bytes from
// its beginning on, fewer than it has where a call brought fewer or failed, and the error where that was the first
// call. Unless all bytes came, some looks were not taken.
int64_t read_and_look(Caller& caller, const Piece& piece);

// `name`: of the disk, a literal. `most`: fragments of a piece.
std::unique_ptr<Disk> open_threads_disk(int threads, const char* name, MakeCaller make, uint32_t most = kMostFragments);

}  // namespace gdscache
