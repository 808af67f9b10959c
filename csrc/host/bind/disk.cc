// Disks for Python, and the bare loop.

#include "bind/disk.h"

#include "disk/bare.h"

namespace gdscache {

std::unique_ptr<Disk> open_disk_by(const Text& kind, int workers, int depth, const OpenCuFiles* cufile,
                                   const nb::object& transport, std::vector<DeviceRange> devices) {
    if (!transport.is_none()) return open_transport_disk(workers, transport, std::move(devices));
    const nb::gil_scoped_release others;
    if (cufile) return open_cufile_disk(workers, cufile->shared(), cufile->batched);
    if (!kind) return open_disk(workers, depth);
    return *kind == "ring" ? open_ring_disk(workers, depth) : open_threads_disk(workers);
}

namespace {

double bare(int file, bool write, int64_t nbytes, int64_t piece_bytes, int threads, uint64_t memory,
            int64_t memory_bytes, uint64_t planes, int64_t sum_bytes, const Text& driver, uint64_t context,
            uint64_t device) {
    const nb::gil_scoped_release others;
    std::optional<Cuda> cuda;
    if (driver) cuda.emplace(driver->c_str(), at<void>(context));
    const LoopShape shape{file, write ? Op::kWrite : Op::kRead, nbytes, piece_bytes, threads};
    return run(BareLoop{shape, at<uint8_t>(memory), memory_bytes, at<uint8_t>(planes), sum_bytes,
                        cuda ? &*cuda : nullptr, device});
}

}  // namespace

void bind_disk(nb::module_& module) {
    module.def("bare_loop", &bare, "file"_a, "write"_a, "nbytes"_a, "piece_bytes"_a, "threads"_a, "memory"_a,
               "memory_bytes"_a, "planes"_a = 0, "sum_bytes"_a = 0, "driver"_a.none() = nb::none(), "context"_a = 0,
               "device"_a = 0);
    nb::class_<OpenDisk>(module, "Disk")
        .def(nb::init<const Text&, int, int, const OpenCuFiles*, const nb::object&>(), "kind"_a.none(), "workers"_a,
             "depth"_a, "cufile"_a.none() = nb::none(), "transport"_a.none() = nb::none())
        .def("submit", &OpenDisk::submit, "pieces"_a, "fragments"_a)
        .def("reap", &OpenDisk::reap, "seconds"_a = -1.0)
        .def("close", &OpenDisk::close);
}

}  // namespace gdscache
