// Disks by their Python settings, and one that Python drives itself.

#pragma once

#include "base/memory.h"
#include "bind/bind.h"
#include "bind/handles.h"

namespace gdscache {

constexpr int64_t kMostRows = int64_t{1} << 32;
static_assert(sizeof(iovec) == 2 * sizeof(uint64_t), "fragments are given as rows of two words");

// Memory of a GPU, which a transport gets as a `DeviceMemory`.
struct DeviceRange {
    uint64_t address, bytes;
    int device;
};

// A disk by a transport, else by cuFile; else io_uring ("ring"), "threads", or io_uring if available (no kind). Throws
// `Error`. The threads of a transport's take the interpreter's lock: who waits for them, or destroys the disk, has
// released it.
std::unique_ptr<Disk> open_disk_by(const Text& kind, int workers, int depth, const OpenCuFiles* cufile,
                                   const nb::object& transport, std::vector<DeviceRange> devices);

// One thread submits, reaps and closes.
class OpenDisk {
public:
    OpenDisk(const Text& kind, int workers, int depth, const OpenCuFiles* cufile, const nb::object& transport) {
        require(!kind || *kind == "ring" || *kind == "threads", "there is no such disk");
        try {
            disk_ = open_disk_by(kind, workers, depth, cufile, transport, {});
        } catch (const Error& error) {
            const char* const hint = "allow io_uring, or raise ulimit -n and ulimit -u";
            throw NamedError("RefusedDiskError", error.code, error.what(), hint);
        }
    }
    ~OpenDisk() { close(); }
    OpenDisk(OpenDisk&&) = delete;

    void submit(const Int64s& pieces, const UInt64s& fragments) {
        Disk& disk = open(disk_, "the disk");
        const int64_t count = pieces.shape(0), total = fragments.shape(0);
        require(pieces.has(count, 7) && fragments.has(total, 2), "pieces have 7 numbers, and fragments 2");
        require(count <= kMostRows && total <= kMostRows, "too many pieces");
        pieces_.clear();
        for (int64_t n = 0; n < count; n++) {
            const int64_t* const row = pieces.data() + 7 * n;
            const bool sound = row[1] >= 0 && row[1] <= 1 && row[2] >= 0 && row[2] <= INT32_MAX && row[4] >= 0 &&
                               row[5] >= 1 && row[5] <= kMostFragments && row[4] <= total - row[5];
            require(sound, "a piece that makes no sense");
            pieces_.push_back({static_cast<uint64_t>(row[0]),
                               reinterpret_cast<const iovec*>(fragments.data() + 2 * row[4]),
                               static_cast<uint32_t>(row[5]), static_cast<int32_t>(row[2]), row[3],
                               row[1] ? Op::kWrite : Op::kRead, row[6] != 0});
        }
        const MustNotFail reserve;  // begun I/O cannot be taken back
        disk.submit(pieces_);
    }

    nb::object reap(double seconds) {
        Disk& disk = open(disk_, "the disk");
        require(seconds == seconds, "no number of seconds");
        std::vector<Ended> ended;
        {
            const nb::gil_scoped_release others;
            const MustNotFail reserve;
            if (const int count = disk.reap(ended, seconds); count < 0) throw Error(-count, "the disk is broken");
        }
        const Fresh<int64_t> rows(static_cast<int64_t>(ended.size()), 5);
        int64_t* row = rows.data;
        for (const Ended& one : ended) {
            *row++ = static_cast<int64_t>(one.tag), *row++ = one.first, *row++ = one.count, *row++ = one.error;
            *row++ = one.moved;
        }
        return rows.array;
    }

    void close() {
        const nb::gil_scoped_release others;  // the disk's threads may want it
        disk_.reset();
    }

private:
    friend class DiskHooks;  // of the tests' build

    std::unique_ptr<Disk> disk_;
    std::vector<Piece> pieces_;
};

}  // namespace gdscache
