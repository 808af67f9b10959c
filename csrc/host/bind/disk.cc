// Disks for Python, the files and the GPU memory that cuFile knows, and the bare loop.

#include "bind/disk.h"

#include "disk/bare.h"

namespace gdscache {

std::unique_ptr<Disk> open_disk_by(const Text& kind, int workers, int depth, const OpenCuFiles* cufile,
                                   const nb::object& transport, std::vector<DeviceRange> devices) {
    if (!transport.is_none()) return open_transport_disk(workers, transport, std::move(devices));
    const nb::gil_scoped_release others;
    if (cufile) return open_cufile_disk(workers, cufile->shared());
    if (!kind) return open_disk(workers, depth);
    return *kind == "ring" ? open_ring_disk(workers, depth) : open_threads_disk(workers);
}

OpenCuFiles::OpenCuFiles(const char* driver, uint64_t context, const char* library, const Text& log_folder) {
    require(context, "a device without a context");
    const nb::gil_scoped_release others;  // cuFile may never answer
    files = std::make_shared<CuFiles>(driver, at<void>(context), library);
    files->open(chars(log_folder));
}

namespace {

// A call outside the interpreter's lock. `close` may run meanwhile.
template <auto kCall, typename... Arguments>
void ask(const OpenCuFiles& self, Arguments... of) {
    const auto files = self.shared();
    const nb::gil_scoped_release others;
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
    const nb::gil_scoped_release others;
    return move_once(files, piece, {&one, 1, offset, nbytes});
}

double bare(int file, bool write, int64_t nbytes, int64_t piece_bytes, int threads, uint64_t memory, uint64_t target,
            const Text& driver, uint64_t context) {
    const nb::gil_scoped_release others;
    std::optional<Cuda> cuda;
    if (driver) cuda.emplace(driver->c_str(), at<void>(context));
    return run({file, write ? Op::kWrite : Op::kRead, nbytes, piece_bytes, threads, at<uint8_t>(memory), target,
                cuda ? &*cuda : nullptr});
}

}  // namespace

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
        const nb::gil_scoped_release others;
        ended.reset();
    });
    module.def("bare_loop", &bare, "file"_a, "write"_a, "nbytes"_a, "piece_bytes"_a, "threads"_a, "memory"_a,
               "target"_a = 0, "driver"_a.none() = nb::none(), "context"_a = 0);
    nb::class_<OpenDisk>(module, "Disk")
        .def(nb::init<const Text&, int, int, const OpenCuFiles*, const nb::object&>(), "kind"_a.none(), "workers"_a,
             "depth"_a, "cufile"_a.none() = nb::none(), "transport"_a.none() = nb::none())
        .def("submit", &OpenDisk::submit, "pieces"_a, "fragments"_a)
        .def("reap", &OpenDisk::reap, "seconds"_a = -1.0)
        .def("close", &OpenDisk::close);
}

}  // namespace gdscache
