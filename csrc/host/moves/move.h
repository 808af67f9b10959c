// What moves, as plain data: the words of gdscache/moves/base.py. A row is a page's place in a move, over all ways.

#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace gdscache {

using Nanoseconds = int64_t;  // of CLOCK_MONOTONIC, or of a test's clock

// The monotonic clock.
inline Nanoseconds now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

// How a page ended. The order is that of `PageStatus`.
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
};

// The smaller goes first where both wait for the same device.
enum class Priority : uint8_t { kLoad, kPrefetch, kStore, kDemotion };
constexpr int kPriorities = 4;

// Where bytes lie. `foreign`: planes and memory of a GPU, whose copies are made by threads that ask for jobs, and say
// what came of them (Moves::take_copy). `sums`: uint64 (slots, layers). Of a memory, what stores leave there, and reads
// of files that have such a table: there who has read a page has put down what its bytes give, before its end is said.
struct Space {
    enum class Kind : uint8_t { kPlanes, kMemory, kFiles };
    Kind kind;
    bool foreign = false;
    uint64_t* sums = nullptr;
    int32_t disk = 0;        // of files: which disk reads and writes them
    int64_t io_bytes = 0;    // of one job of them; 0: as in `Limits`
};

// Layers that move together, and the bytes of an extent that are read for them: behind the groups before them, or
// alone.
struct Group {
    int32_t first, last;
    int64_t begin, end;  // the layers' bytes in an extent
    int64_t start, stop;
    int64_t alone_start, alone_stop;
    int32_t route = 0, summed_route = 0;  // which way copies of a GPU take, without checksums and with (gpu.h)

    int64_t bytes(bool alone) const { return alone ? alone_stop - alone_start : stop - start; }
};

// Pages that go from one space to another. See `Way` in gdscache/moves/base.py.
struct Way {
    int32_t source, target;
    int32_t through = -1;          // the memory that has `places`, or of the reserve
    int64_t pages = 0;
    std::vector<int64_t> sources;  // slots, or blocks of each page
    std::vector<int64_t> targets;
    std::vector<int64_t> places;   // none: what is read passes through the reserve
    std::vector<uint64_t> sums;    // (pages, layers); none: the bytes are known to be right
};

struct MoveSpec {
    int64_t id = 0;  // the caller's; no other move has it
    Priority priority = Priority::kLoad;
    Nanoseconds until = 0;
    std::vector<Way> ways;
    std::vector<Group> groups;  // in their order; they have every layer once
    std::vector<uint64_t> after;  // events that copies of a GPU come behind; they live until the move was forgotten
    bool open = false;            // of a load: more ways follow (Moves::extend)
};

// The memory that a way's bytes are copied from or to, or are looked at in. `reserve`: what passes through is there.
inline int32_t memory_of(const Way& way, Space::Kind source, Space::Kind target, int32_t reserve) {
    if (source == Space::Kind::kPlanes) return way.target;
    if (source != Space::Kind::kFiles) return way.source;
    if (!way.places.empty()) return way.through;
    return target == Space::Kind::kPlanes ? reserve : way.target;
}

// Sizes that a job has, in bytes, and what may be in flight.
struct Limits {
    int64_t extent_bytes = 0;
    int32_t layers = 0;
    int32_t page_blocks = 1;
    std::vector<int64_t> bounds;      // where each layer begins in an extent, and where the last one ends
    int64_t flying_bytes = 64 << 20;  // of reads and writes, over all moves
    int64_t io_bytes = 4 << 20;       // of one job
    int64_t copy_bytes = 2 << 20;
    int64_t foreign_copy_bytes = 64 << 20;
    int64_t copies = 64;  // with about so many a load into a GPU is copied, of reads that land
};

// A page of a job. `slot`: of the files; `at`: where the first byte that moves lies, from the memory's first byte.
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
    bool sums = false;  // whoever reads a page's bytes may take the checksums of its layers
    std::vector<Transfer> pages;
};

// What becomes of bytes that are in memory: into the planes, out of them, or only looked at.
enum class Copy : uint8_t { kScatter, kGather, kDigest };

// For whom a copy is: threads of ours, or those of what is foreign: all of them, those of loads, those of stores.
enum class Hands : uint8_t { kOurs, kForeign, kForeignLoads, kForeignStores };

// Layers [first, last) of some pages. `slot`: of the memory, or of the pages that passed through [window, window +
// window_slots) of it together; `at`: where layer `first` begins. `blocks`: (pages, page_blocks), none to look.
struct CopyJob {
    int64_t id = 0, move = 0;
    Copy copy = Copy::kScatter;
    int32_t memory = 0;
    int32_t first = 0, last = 0;
    bool sums = false;
    bool large = false;  // its move has more bytes than a cache keeps
    int64_t window = 0, window_slots = 0;
    int64_t stride = 0, origin = 0;  // from slot to slot, and the byte of an extent that a slot begins with
    int32_t route = 0;
    std::vector<uint64_t> after;
    std::vector<Transfer> pages;
    std::vector<int64_t> blocks;
};

}  // namespace gdscache
