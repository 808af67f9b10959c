// Disks for Python, Python's transports as callers of a disk of threads, cuFile's files and memory, and the bare loop.

#include "base/memory.h"
#include "bind/handles.h"

#include "disk/threads_disk.h"
#include "moves/moves.h"

namespace gdscache {
namespace {

nb::object imported(const char* module, const char* name) { return nb::module_::import_(module).attr(name); }

// Shared by all threads of a disk.
struct Shared {
    Shared(const nb::object& transport, std::vector<DeviceRange> ranges)
        : read(transport.attr("read")),
          write(transport.attr("write")),
          device_memory(imported("gdscache.storage.base", "DeviceMemory")),
          to_gpu(nb::cast<bool>(transport.attr("memory_kinds").attr("__contains__")("cuda"))),
          devices(std::move(ranges)) {}

    const DeviceRange* device(const iovec& fragment) const {
        const auto address = reinterpret_cast<uint64_t>(fragment.iov_base);
        const auto found = std::ranges::find_if(devices, [&](const DeviceRange& one) {
            return address >= one.address && address - one.address < one.bytes;
        });
        return found == devices.end() ? nullptr : &*found;
    }

    // The last thread may call it, without the lock.
    static void end(const Shared* shared) {
        if (!nb::is_alive()) return;  // the interpreter has ended: there is nothing to release
        const Locked lock;
        delete shared;
    }

    const nb::object read, write, device_memory;
    const bool to_gpu;
    const std::vector<DeviceRange> devices;
};

// The negative error of a transport's exception. Exceptions that are no I/O errors are logged.
int64_t told(nb::handle error) {
    using Named = std::pair<const char*, int32_t>;
    const Named all[] = {{"ShortIOError", kShort}, {"PageGoneError", kGone}, {"PageBytesError", kWrong}};
    for (const auto& [name, code] : all) {
        if (PyObject_IsInstance(error.ptr(), imported("gdscache.errors", name).ptr()) == 1) return -code;
    }
    const nb::object known = nb::make_tuple(nb::borrow(PyExc_OSError), imported("gdscache.errors", "GdsCacheError"));
    if (PyObject_IsInstance(error.ptr(), known.ptr()) != 1) {
        imported("gdscache.runtime.threads", "log_failure")(error);
        return -EIO;
    }
    int code = EIO;
    const nb::object said = nb::getattr(error, "errno", nb::none());
    if (!nb::try_cast(said, code) || code < 1 || code > kMostErrno || code == EINTR) code = EIO;
    return -code;
}

class TransportCaller final : public Caller {
public:
    explicit TransportCaller(std::shared_ptr<const Shared> shared) : shared_(std::move(shared)) {}

    // Adjacent fragments in one memory are one call.
    int64_t transfer(const Piece& piece, const Call& call) override {
        const auto memory = [&](const iovec& fragment) { return shared_->device(fragment); };
        return move_stretches(call, false, memory, [&](const OneCall& one, int64_t offset) {
            return move(piece, one.memory, one.address, one.bytes, offset);
        });
    }

    bool looks() const override { return false; }  // a page is read by as few calls as possible

private:
    using OneCall = Stretch<const DeviceRange*>;

    int64_t move(const Piece& piece, const DeviceRange* device, uint64_t address, int64_t bytes, int64_t offset) const {
        if (!nb::is_alive()) return -ECANCELED;
        if (device && !shared_->to_gpu) return -EFAULT;
        const Locked lock;
        return or_stay([&] { return move_locked(piece, device, address, bytes, offset); });
    }

    int64_t move_locked(const Piece& piece, const DeviceRange* device, uint64_t address, int64_t bytes,
                        int64_t offset) const {
        try {
            if (device) return ask(piece, shared_->device_memory(address, bytes, device->device), bytes, offset);
            const int access = piece.op == Op::kRead ? PyBUF_WRITE : PyBUF_READ;
            const nb::object view = nb::steal(
                PyMemoryView_FromMemory(reinterpret_cast<char*>(address), static_cast<Py_ssize_t>(bytes), access));
            if (!view.is_valid()) throw nb::python_error();
            const int64_t answer = ask(piece, view, bytes, offset);
            view.attr("release")();  // later access through a kept view raises
            return answer;
        } catch (nb::python_error& error) {
            try {
                imported("gdscache.runtime.threads", "log_failure")(error.value());
            } catch (nb::python_error&) {  // the log is gone
            }
            return -EIO;
        }
    }

    int64_t ask(const Piece& piece, const nb::object& memory, int64_t bytes, int64_t offset) const {
        try {
            const nb::object& way = piece.op == Op::kRead ? shared_->read : shared_->write;
            const nb::object answer = or_stay([&] { return way(piece.fd, offset, memory); });
            int64_t moved = -1;
            if (nb::try_cast(answer, moved) && moved >= 0 && moved <= bytes) return moved;
            PyErr_Format(PyExc_ValueError, "a transport says that %R of %zd bytes have moved", answer.ptr(),
                         static_cast<Py_ssize_t>(bytes));
            throw nb::python_error();
        } catch (nb::python_error& error) {
            return told(error.value());
        }
    }

    const std::shared_ptr<const Shared> shared_;
};

// They take the interpreter's lock for `transport` (gdscache/storage/base.py).
std::unique_ptr<Disk> open_transport_disk(int threads, const nb::object& transport, std::vector<DeviceRange> devices) {
    const std::shared_ptr<const Shared> shared(new Shared(transport, std::move(devices)), Shared::end);
    const uint32_t most = nb::cast<bool>(transport.attr("merges")) ? kMostFragments : 1;
    const MakeCaller make = [shared] { return std::make_unique<TransportCaller>(shared); };
    return open_threads_disk(threads, "transport", make, most);
}

// A call outside the interpreter's lock. `close` may run meanwhile.
template <auto kCall, typename... Arguments>
void ask(const OpenCuFiles& self, Arguments... of) {
    const auto files = self.shared();
    const Unlocked others;
    ((*files).*kCall)(of...);
}

void add_file(const OpenCuFiles& self, int file) {
    require(file >= 0, "no file");
    ask<&CuFiles::add_file>(self, file);
}

void add_memory(const OpenCuFiles& self, uint64_t address, int64_t nbytes) {
    const bool ends = nbytes > 0 && address <= UINT64_MAX - static_cast<uint64_t>(nbytes);
    require(address && ends, "no memory that there could be");
    ask<&CuFiles::add_memory>(self, address, static_cast<size_t>(nbytes));
}

int64_t move(const OpenCuFiles& self, int file, int64_t offset, uint64_t address, int64_t nbytes, bool write) {
    const auto files = self.shared();
    const iovec one{at<void>(address), static_cast<size_t>(nbytes)};
    const Piece piece{0, &one, 1, file, offset, write ? Op::kWrite : Op::kRead, false};
    require(is_sound(piece), "a piece that makes no sense");
    const Unlocked others;
    return move_once(files, piece, {&one, 1, offset, nbytes});
}

constexpr int64_t kMostMoved = int64_t{1} << 44;  // bytes of a call

// Move pieces of files as an executor does, by a disk of its own. `rows`: int64 (pieces, 4), file, offset, address and
// bytes. Returns int64 (pieces, 2): 0 or the error, and the bytes moved. Without pieces the disk is only opened.
nb::object move_pieces(const Text& kind, int workers, const Int64s& rows, bool write, bool copied,
                       const OpenCuFiles* cufile, const nb::object& transport) {
    require(!kind || *kind == "ring" || *kind == "threads", "there is no such disk");
    const int64_t count = rows.shape(0);
    require(rows.has(count, 4), "pieces have 4 numbers");
    std::vector<Request> requests;
    int64_t total = 0;
    for (const int64_t* row = rows.data(); row != rows.data() + 4 * count; row += 4) {
        const bool sound = row[0] >= 0 && row[0] <= INT32_MAX && row[1] >= 0 && row[2] && row[3] > 0;
        require(sound && row[3] <= kMostMoved - total && row[1] <= INT64_MAX - row[3], "a piece that makes no sense");
        total += row[3];
        requests.push_back({static_cast<int32_t>(row[0]), row[1], static_cast<uint64_t>(row[2]), row[3]});
    }
    const Fresh<int64_t> found(count, 2);
    std::fill_n(found.data, 2 * count, 0);
    std::unique_ptr<Disk> opened;
    try {
        opened = open_disk_by(kind, workers, cufile, transport, {});
    } catch (const Error& error) {
        const char* const hint = "allow io_uring, or raise ulimit -n and ulimit -u";
        throw NamedError("RefusedDiskError", error.code, error.what(), hint);
    }
    const Unlocked others;  // the disk's threads may want it, also at its end
    const int64_t limit = run_bytes(total, static_cast<int>(opened->depth()));
    const Runs runs = cut_and_merge(requests, limit, opened->most_fragments());
    const std::unique_ptr<Disk> disk = std::move(opened);  // ends before its fragments
    const MustNotFail reserve;  // begun I/O cannot be taken back
    std::vector<Piece> pieces;
    for (const Run& run : runs.runs) {
        pieces.push_back({pieces.size(), runs.fragments.data() + run.first, run.count, run.fd, run.offset,
                          write ? Op::kWrite : Op::kRead, copied});
    }
    disk->submit(pieces);
    std::vector<Ended> ended;
    while (disk->pending() != 0) {
        if (const int answer = disk->reap(ended, -1); answer < 0) throw Error(-answer, "the disk is broken");
    }
    for (const Ended& some : ended) {
        int64_t left = some.moved;
        for (uint32_t n = runs.runs[some.tag].first + some.first, end = n + some.count; n < end; ++n) {
            int64_t* const row = found.data + size_t{2} * runs.requests[n];
            const int64_t moved = std::min(left, static_cast<int64_t>(runs.fragments[n].iov_len));
            if (row[0] == 0) row[0] = some.error;
            row[1] += moved, left -= moved;
        }
    }
    return found.array;
}

double bare(int file, bool write, int64_t nbytes, int64_t piece_bytes, int threads, uint64_t memory, uint64_t target,
            const Text& driver, uint64_t context) {
    const Unlocked others;
    std::optional<Cuda> cuda;
    if (driver) cuda.emplace(driver->c_str(), at<void>(context));
    return run({file, write ? Op::kWrite : Op::kRead, nbytes, piece_bytes, threads, at<uint8_t>(memory), target,
                cuda ? &*cuda : nullptr});
}

}  // namespace

std::unique_ptr<Disk> open_disk_by(const Text& kind, int workers, const OpenCuFiles* cufile,
                                   const nb::object& transport, std::vector<DeviceRange> devices) {
    constexpr int kDepth = 8;  // pieces under way for each thread of the kernel
    require(workers >= 1 && workers <= 1 << 10, "no sound number of threads");
    if (!transport.is_none()) return open_transport_disk(workers, transport, std::move(devices));
    const Unlocked others;
    if (cufile) return open_cufile_disk(workers, cufile->shared());
    if (!kind) return open_disk(workers, kDepth * workers);
    return *kind == "ring" ? open_ring_disk(workers, kDepth * workers) : open_threads_disk(workers);
}

OpenCuFiles::OpenCuFiles(const char* driver, uint64_t context, const char* library, const Text& log_folder) {
    require(context, "a device without a context");
    const Unlocked others;  // cuFile may never answer
    files = std::make_shared<CuFiles>(driver, at<void>(context), library);
    files->open(chars(log_folder));
}

void bind_disk(nb::module_& module) {
    module.attr("CUFILE_ERRORS") = kCuFileErrors;
    module.def("error_text", &cufile_text, "error"_a);
    nb::class_<OpenCuFiles>(module, "CuFiles")
        .def(nb::init<const char*, uint64_t, const char*, const Text&>(), "driver"_a, "context"_a, "library"_a,
             "log_folder"_a.none() = nb::none())
        .def("add_file", &add_file, "file"_a)
        .def("remove_file", &ask<&CuFiles::remove_file, int>, "file"_a)
        .def("add_memory", &add_memory, "address"_a, "nbytes"_a)
        .def("remove_memory", &ask<&CuFiles::remove_memory, uint64_t>, "address"_a)
        .def("move", &move, "file"_a, "offset"_a, "address"_a, "nbytes"_a, nb::kw_only(), "write"_a)
        .def("close", [](OpenCuFiles& self) {
        std::shared_ptr<CuFiles> ended = std::move(self.files);
        const Unlocked others;
        ended.reset();
    });
    module.def("bare_loop", &bare, "file"_a, "write"_a, "nbytes"_a, "piece_bytes"_a, "threads"_a, "memory"_a,
               "target"_a = 0, "driver"_a.none() = nb::none(), "context"_a = 0);
    module.def("move_pieces", &move_pieces, "kind"_a.none(), "workers"_a, "pieces"_a, nb::kw_only(), "write"_a,
               "copied"_a = true, "cufile"_a.none() = nb::none(), "transport"_a.none() = nb::none());
}

}  // namespace gdscache
