// Disks that Python drives itself, requests cut and merged for them, and the bare loop.

#include "../disk.h"

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "../bare.h"
#include "../cuda.h"
#include "../cufile_disk.h"
#include "../faulty_disk.h"
#include "../memory.h"
#include "bind.h"
#include "handles.h"
#include "transport.h"

namespace gdscache {

namespace {

constexpr int64_t kMostRows = int64_t{1} << 32;
static_assert(sizeof(iovec) == 2 * sizeof(uint64_t), "fragments are given as rows of two words");

// One thread submits, reaps and closes; any may wake.
class OpenDisk {
public:
    OpenDisk(const Text& kind, int workers, int depth, const OpenCuFiles* cufile, const Array<const int64_t>& faults,
             const nb::object& transport) {
        Refusal refusal;
        if (!transport.is_none()) {
            disk_ = open_transport_disk(workers, transport, {}, refusal);
        } else if (cufile) {
            disk_ = open_cufile_disk(workers, cufile->shared(), cufile->batched, refusal);
        } else if (!kind) {
            disk_ = open_disk(workers, depth, refusal);
        } else if (*kind == "ring") {
            disk_ = open_ring_disk(workers, depth, refusal);
        } else {
            require(*kind == "threads", "there is no such disk");
            disk_ = open_threads_disk(workers, refusal);
        }
        if (!disk_) {
            const int error = refusal.error ? refusal.error : EIO;
            throw CallError{refusal.why, error, "allow io_uring, or raise ulimit -n and ulimit -u", "RefusedDiskError"};
        }
        if (faults.size()) fail(faults);
    }
    ~OpenDisk() { close(); }
    OpenDisk(const OpenDisk&) = delete;
    OpenDisk& operator=(const OpenDisk&) = delete;

    std::string name() const { return open(disk_, "the disk").name(); }
    size_t pending() const { return open(disk_, "the disk").pending(); }
    void wake() { open(disk_, "the disk").wake(); }

    void submit(const Array<const int64_t>& pieces, const Array<const uint64_t>& fragments) {
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
        const MustNotFail reserve;  // what has begun cannot be taken back
        disk.submit(pieces_);
    }

    nb::object reap(double seconds) {
        Disk& disk = open(disk_, "the disk");
        require(seconds == seconds, "no number of seconds");
        std::vector<Ended> ended;
        {
            const nb::gil_scoped_release others;
            const MustNotFail reserve;
            if (const int count = disk.reap(ended, seconds); count < 0) throw CallError{"the disk is broken", -count};
        }
        const Fresh<int64_t> rows({static_cast<int64_t>(ended.size()), 5});
        int64_t* row = rows.data;
        for (const Ended& one : ended) {
            *row++ = static_cast<int64_t>(one.tag), *row++ = one.first, *row++ = one.count, *row++ = one.error;
            *row++ = one.moved;
        }
        return rows.array;
    }

    void release() {
        require(faulty_, "a disk without faults");
        faulty_->release();
    }

    void close() {
        const nb::gil_scoped_release others;  // its threads may want it
        disk_.reset();
    }

private:
    void fail(const Array<const int64_t>& faults) {
        require(faults.has(faults.shape(0), 3), "faults have 3 numbers");
        std::vector<Fault> made;
        for (int64_t n = 0; n < faults.shape(0); ++n) {
            const int64_t* const row = faults.data() + 3 * n;
            require(row[0] >= 0 && row[1] >= 1 && row[1] <= static_cast<int64_t>(Failing::kHang) && row[2] >= 0, "no such fault");
            made.push_back({static_cast<uint64_t>(row[0]), static_cast<Failing>(row[1]), row[2]});
        }
        auto faulty = open_faulty_disk(std::move(disk_), std::move(made));
        faulty_ = faulty.get();
        disk_ = std::move(faulty);
    }

    std::unique_ptr<Disk> disk_;
    FaultyDisk* faulty_ = nullptr;
    std::vector<Piece> pieces_;
};

nb::tuple cut(const Array<const int64_t>& requests, int64_t limit, int64_t most) {
    const int64_t count = requests.shape(0);
    require(requests.has(count, 4), "requests have 4 numbers");
    require(limit >= 1 && most >= 1 && most <= kMostFragments, "runs of no sound size");
    std::vector<Request> given;
    int64_t parts = 0;
    for (int64_t n = 0; n < count; n++) {
        const int64_t* const row = requests.data() + 4 * n;
        const bool sound = row[0] >= 0 && row[0] <= INT32_MAX && row[1] >= 0 && row[3] >= 1 && row[1] <= INT64_MAX - row[3];
        require(sound && (parts += row[3] / limit + 1) <= kMostRows, "a request that makes no sense");
        given.push_back({static_cast<int32_t>(row[0]), row[1], static_cast<uint64_t>(row[2]), row[3]});
    }
    Runs made;
    {
        const nb::gil_scoped_release others;
        made = cut_and_merge(given, limit, static_cast<uint32_t>(most));
    }
    const Fresh<int64_t> fragments({static_cast<int64_t>(made.fragments.size()), 3});
    for (size_t n = 0; n < made.fragments.size(); n++) {
        int64_t* const row = fragments.data + 3 * n;
        row[0] = reinterpret_cast<int64_t>(made.fragments[n].iov_base);
        row[1] = static_cast<int64_t>(made.fragments[n].iov_len);
        row[2] = made.requests[n];
    }
    const Fresh<int64_t> runs({static_cast<int64_t>(made.runs.size()), 5});
    for (size_t n = 0; n < made.runs.size(); n++) {
        const Run& run = made.runs[n];
        const int64_t row[5] = {run.fd, run.offset, run.first, run.count, run.bytes};
        std::memcpy(runs.data + 5 * n, row, sizeof row);
    }
    return nb::make_tuple(fragments.array, runs.array);
}

double bare(int file, bool write, int64_t nbytes, int64_t piece_bytes, int threads, uint64_t memory, int64_t memory_bytes,
            uint64_t planes, int64_t sum_bytes, const Text& driver, uint64_t context, uint64_t device) {
    double seconds = 0;
    int answer = 0;
    {
        const nb::gil_scoped_release others;
        std::optional<Cuda> cuda;
        if (driver) cuda.emplace(driver->c_str(), at<void>(context));
        answer = run({file, write ? Op::kWrite : Op::kRead, nbytes, piece_bytes, threads, at<uint8_t>(memory), memory_bytes,
                      at<uint8_t>(planes), sum_bytes, cuda ? &*cuda : nullptr, device},
                     seconds);
    }
    if (answer < 0) throw CallError{std::strerror(-answer), -answer};
    return seconds;
}

}  // namespace

void bind_disk(nb::module_& module) {
    module.attr("MOST_FRAGMENTS") = kMostFragments;
    module.def("cut_and_merge", &cut, nb::arg("requests"), nb::arg("limit"), nb::arg("most") = kMostFragments);
    module.def("bare_loop", &bare, nb::arg("file"), nb::arg("write"), nb::arg("nbytes"), nb::arg("piece_bytes"),
               nb::arg("threads"), nb::arg("memory"), nb::arg("memory_bytes"), nb::arg("planes") = 0,
               nb::arg("sum_bytes") = 0, nb::arg("driver").none() = nb::none(), nb::arg("context") = 0, nb::arg("device") = 0);
    nb::class_<OpenDisk>(module, "Disk")
        .def(nb::init<const Text&, int, int, const OpenCuFiles*, const Array<const int64_t>&, const nb::object&>(), nb::arg("kind").none(),
             nb::arg("workers"), nb::arg("depth"), nb::arg("cufile").none() = nb::none(), nb::arg("faults").none() = nb::none(),
             nb::arg("transport").none() = nb::none())
        .def_prop_ro("name", &OpenDisk::name)
        .def_prop_ro("pending", &OpenDisk::pending)
        .def("submit", &OpenDisk::submit, nb::arg("pieces"), nb::arg("fragments"))
        .def("reap", &OpenDisk::reap, nb::arg("seconds") = -1.0)
        .def("wake", &OpenDisk::wake)
        .def("release", &OpenDisk::release)
        .def("close", &OpenDisk::close);
}

}  // namespace gdscache
