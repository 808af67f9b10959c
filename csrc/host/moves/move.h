// Moves as plain data, in the words of gdscache/moves/__init__.py. A row is a page's place in a move, over all ways.

#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace gdscache {

using Nanoseconds = int64_t;  // of CLOCK_MONOTONIC, or of a test's clock

inline Nanoseconds now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

// How a page ended, in the order of `PageStatus`.
enum class Status : uint8_t {
    kPending,
    kLoaded,
    kChecksum,
    kShortRead,
    kIoError,
    kGone,
    kDeadline,
    kSwitchedOff,
    kLockLost,
    kCancelled,
    kAborted,
    kUnfit
};

// The smaller value goes first on a device that both need.
enum class Priority : uint8_t { kLoad, kPrefetch, kStore, kDemotion };
constexpr int kPriorities = 4;
constexpr int kMostDisks = 64;  // of an executor

// A place for bytes. `foreign`: planes and memory of a GPU; other threads take copies of them as jobs and report their
// ends (Moves::take_copy). `sums`: uint64 (slots, layers), or null. Stores write the checksums of a memory's slots
// there, and a transport that reads files those of a page's bytes before it reports the page's end.
struct Space {
    enum class Kind : uint8_t { kPlanes, kMemory, kFiles };
    Kind kind;
    bool foreign = false;
    uint64_t* sums = nullptr;
    int32_t disk = 0;        // of files: the disk that reads and writes them
    int64_t io_bytes = 0;    // most bytes of one job of these files; 0: as in `Limits`
};

// Layers that move together, and the bytes of an extent that are read for them: the bytes that the groups before did
// not read, or all of the group's (`alone`).
struct Group {
    int32_t first, last;
    int64_t begin, end;  // the layers' bytes in an extent
    int64_t start, stop;
    int64_t alone_start, alone_stop;
    int32_t route = 0, summed_route = 0;  // the way of a GPU's copies, without checksums and with (gpu.h)

    int64_t bytes(bool alone) const { return alone ? alone_stop - alone_start : stop - start; }
};

// Pages that go from one space to another. See `Way` in gdscache/moves/__init__.py.
struct Way {
    int32_t source, target;
    int32_t through = -1;          // the memory of `places`; -1: the reserve
    int64_t pages = 0;
    std::vector<int64_t> sources;  // slots, or the blocks of each page
    std::vector<int64_t> targets;
    std::vector<int64_t> places;   // empty: reads pass through the reserve
    std::vector<uint64_t> sums;    // (pages, layers); empty: the bytes are known to be right
};

struct MoveSpec {
    int64_t id = 0;  // the caller's, unique
    Priority priority = Priority::kLoad;
    Nanoseconds until = 0;
    std::vector<Way> ways;
    std::vector<Group> groups;  // in their order; each layer is in one group
    std::vector<uint64_t> after;  // events that a GPU's copies wait for; they live until the move is forgotten
    bool open = false;            // of a load: more ways follow (Moves::extend)
};

// The memory of a way's bytes that are copied or checked. `reserve`: the memory of reads that pass through.
inline int32_t memory_of(const Way& way, Space::Kind source, Space::Kind target, int32_t reserve) {
    if (source == Space::Kind::kPlanes) return way.target;
    if (source != Space::Kind::kFiles) return way.source;
    if (!way.places.empty()) return way.through;
    return target == Space::Kind::kPlanes ? reserve : way.target;
}

// Sizes in bytes, and limits of work in flight.
struct Limits {
    int64_t extent_bytes = 0;
    int32_t layers = 0;
    int32_t page_blocks = 1;
    std::vector<int64_t> bounds;      // the first byte of each layer in an extent, and the end of the last
    int64_t flying_bytes = 64 << 20;  // of one disk's reads and writes, over all moves
    int64_t io_bytes = 4 << 20;       // of one job
    int64_t copy_bytes = 2 << 20;
    int64_t foreign_copy_bytes = 64 << 20;
    int64_t copies = 64;  // about the number of copies by which a load goes from reads into a GPU
};

// A page of a job. `slot`: in the files. `at`: the first byte that moves, from the memory's first byte.
struct Transfer {
    int32_t row;
    int64_t slot;
    int64_t at;
};

// Reads or writes of the bytes [start, stop) of some pages' extents.
struct IoJob {
    int64_t id = 0, move = 0;
    bool write = false;
    int32_t files = 0, memory = 0;
    int32_t first = 0, last = 0;  // layers
    int64_t start = 0, stop = 0;
    bool sums = false;  // the reader may take the checksums of a page's layers
    std::vector<Transfer> pages;
};

// Copies of bytes in memory: into the planes, out of them, or checksums only.
enum class Copy : uint8_t { kScatter, kGather, kDigest };

// Takers of copies: threads of ours, or those of foreign spaces (all copies, those of loads, those of stores).
enum class Hands : uint8_t { kOurs, kForeign, kForeignLoads, kForeignStores };

// Layers [first, last) of some pages. `slot`: in the memory, or in the pages' common window [window, window +
// window_slots) of the reserve. `at`: the first byte of layer `first`. `blocks`: (pages, page_blocks), or none.
struct CopyJob {
    int64_t id = 0, move = 0;
    Copy copy = Copy::kScatter;
    int32_t memory = 0;
    int32_t first = 0, last = 0;
    bool sums = false;
    bool large = false;  // the move has more bytes than a cache keeps
    int64_t window = 0, window_slots = 0;
    int64_t stride = 0, origin = 0;  // bytes from slot to slot, and the byte of an extent at which a slot begins
    int32_t route = 0;
    std::vector<uint64_t> after;
    std::vector<Transfer> pages;
    std::vector<int64_t> blocks;
};

}  // namespace gdscache
