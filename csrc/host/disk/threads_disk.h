// A disk of threads, and the callers by which they move bytes.

#pragma once

#include <functional>

#include "disk/disk.h"

namespace gdscache {

// The caller of one thread. Its answers are for `advance`: bytes, or a negative error.
class Caller {
public:
    virtual ~Caller() = default;
    virtual int64_t transfer(const Piece& piece, const Call& call) = 0;
    // Whether the checksums of reads are taken part by part; else they are taken of the whole later.
    virtual bool looks() const { return true; }
    // Whether one thread at a time carries out such pieces of a file.
    virtual bool in_turn(const Piece& /*piece*/) const { return false; }
};

// Makes a thread's caller, which is used and destroyed in that thread. Does not throw.
using MakeCaller = std::function<std::unique_ptr<Caller>()>;

// preadv or pwritev.
int64_t system_call(const Piece& piece, const Call& call);

// Whether a call for a piece holds a file's lock, on which other threads would spin: the kernel copies written bytes.
inline bool keeps_lock(const Piece& piece) { return piece.op == Op::kWrite && piece.copied; }

// Fragments of a call in one memory that go together. `Memory`: tells memories apart; false for the host's.
template <typename Memory>
struct Stretch {
    Memory memory;
    uint64_t address;
    const iovec* vectors;
    uint32_t count;
    int64_t bytes;
};

// Move a call stretch by stretch by `move(stretch, offset)`: fragments each behind the last; with `scattered` those of the
// host may lie anywhere. `memory(fragment)`: the fragment's memory. Returns bytes from the call's beginning on, or the
// error of its first stretch.
template <typename Of, typename Move>
int64_t move_stretches(const Call& call, bool scattered, const Of& memory, const Move& move) {
    const auto at = [&](uint32_t n) { return reinterpret_cast<uint64_t>(call.vectors[n].iov_base); };
    int64_t moved = 0;
    for (uint32_t n = 0; n < call.count;) {
        Stretch<decltype(memory(*call.vectors))> stretch{memory(call.vectors[n]), at(n), call.vectors + n, 0, 0};
        const bool anywhere = scattered && !stretch.memory;
        do {
            stretch.bytes += static_cast<int64_t>(call.vectors[n++].iov_len);
            stretch.count++;
        } while (n < call.count && memory(call.vectors[n]) == stretch.memory &&
                 (anywhere || at(n) == stretch.address + static_cast<uint64_t>(stretch.bytes)));
        const int64_t answer = move(stretch, call.offset + moved);
        if (answer < 0) return moved ? moved : answer;  // the rest is tried again, and answers the error
        moved += answer;
        if (answer < stretch.bytes) break;
    }
    return moved;
}

// A core's own cache is 1 to 2 MiB, and still has a stride when its checksums are taken. Behind pieces of 4 MiB,
// sixteen threads read a RAM disk at 33 GB/s instead of 40 (an H100 machine; 42 without checksums).
constexpr size_t kStride = 512 << 10;

// Read all of a piece, and take each look when its bytes have come. Bytes that the kernel copies come in strides; a
// device that does not use the processor for copies is faster by one large call. Answers as one call would: the bytes
// from the piece's beginning on, or the error of the first call. After a short answer some looks were not taken.
int64_t read_and_look(Caller& caller, const Piece& piece);

// `name`: the disk's, a literal. `most`: fragments of a piece.
std::unique_ptr<Disk> open_threads_disk(int threads, const char* name, MakeCaller make, uint32_t most = kMostFragments);

}  // namespace gdscache
