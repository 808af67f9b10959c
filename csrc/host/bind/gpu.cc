// Copies to and from a GPU, behind checks of their arguments.

#include "gpu/gpu.h"

#include "bind/checks.h"
#include "bind/handles.h"
#include "moves/executor.h"

namespace gdscache {
namespace {

// A call that may run while the GPU's copies are closed: `gpu` is null after that.
class Asking {
public:
    explicit Asking(const OpenGpu& open) : copies_(open.copies) {
        if (copies_) inside_.emplace(copies_->calls);
    }
    Gpu* gpu() const { return copies_ ? &*copies_->gpu : nullptr; }

private:
    const std::shared_ptr<GpuCopies> copies_;
    std::optional<Calls::Inside> inside_;
};

std::shared_ptr<GpuCopies> of(const OpenGpu& self) {
    open(self.copies, "the copies of the GPU");
    return self.copies;
}

// Returns a point behind the copies, a point behind the last read of their source, and a ticket.
std::tuple<int64_t, int64_t, int64_t> queue(const OpenGpu& self, uint64_t address, int64_t stride, int64_t extents,
                                            int64_t fence, bool device, bool pinned, const Int64s& slots,
                                            const Int64s& blocks, const UInt64s& after, const nb::object& layers,
                                            int route, bool load, bool sums) {
    const auto copies = of(self);
    const Range range(layers);
    const GpuPlanes& planes = copies->gpu->planes();
    require(range.start >= 0 && range.stop <= planes.layers && range.start <= range.stop, "no such layers");
    require(blocks.size() == slots.size() * planes.page_blocks, "blocks for other pages");
    const ExtentSlots memory{address, stride, 0, extents, device, pinned, fence};
    const auto first = static_cast<int32_t>(range.start), last = static_cast<int32_t>(range.stop);
    const PageCopies asked(load, static_cast<Route>(route), sums, first, last, slots.size(), memory, slots.data(),
                           blocks.data(), {after.data(), static_cast<size_t>(after.size())});
    check(asked, planes);
    const Unlocked others;
    {  // before anything is queued: its errors are of other copies
        const std::lock_guard held(copies->lock);
        while (!copies->unasked.empty() && copies->gpu->reached(copies->unasked.front().point)) {
            copies->gpu->finish(copies->unasked.front(), nullptr);
            copies->unasked.pop_front();
        }
    }
    QueuedCopies queued = copies->gpu->queue(asked);
    const std::lock_guard held(copies->lock);
    const std::tuple answer{queued.point, queued.read, ++copies->tickets};
    if (sums) copies->asked.emplace(copies->tickets, std::move(queued));
    else copies->unasked.push_back(std::move(queued));
    return answer;
}

nb::object finish(const OpenGpu& self, int64_t ticket) {
    const auto copies = of(self);
    QueuedCopies queued;
    {
        const std::lock_guard held(copies->lock);
        auto node = copies->asked.extract(ticket);
        if (node.empty()) throw Error(ENOENT, "no such copies");
        queued = std::move(node.mapped());
    }
    const Fresh<uint64_t> sums(queued.pages, queued.last - queued.first);
    const Unlocked others;
    copies->gpu->finish(queued, sums.data);
    return sums.array;
}

int64_t last(const OpenGpu& self, bool loads) { return of(self)->gpu->last(loads); }

template <bool (Gpu::*kAsk)(int64_t)>
bool is(const OpenGpu& self, int64_t point) {
    require(point >= 0, "no point");
    const Asking asking(self);
    return !asking.gpu() || (asking.gpu()->*kAsk)(point);
}

void wait(const OpenGpu& self, int64_t point) {
    require(point >= 0, "no point");
    for (bool over = false; !over;) {
        {
            const Asking asking(self);
            const Unlocked others;
            const Nanoseconds until = now() + kSlice;
            // The driver has no wait with a timeout. Most waits are short; the others cost a look in 50 us.
            over = !asking.gpu();
            for (int looks = 0; !over && !(over = asking.gpu()->reached(point)) && now() < until; ++looks) {
                if (looks < 64) std::this_thread::yield();
                else std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
        }
        if (!over && PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

void follow(const OpenGpu& self, uint64_t stream, int64_t point) {
    require(point >= 0, "no point");
    const Asking asking(self);
    if (asking.gpu()) asking.gpu()->follow(at<void>(stream), point);
}

void close(OpenGpu& self) {
    std::shared_ptr<GpuCopies> ended = std::move(self.copies);
    const Unlocked others;
    if (ended) ended->calls.end();
    ended.reset();
}

}  // namespace

OpenGpu::OpenGpu(const char* library, const nb::object& spec) {
    const auto number = [&](const char* name) { return field<int64_t>(spec, name); };
    const auto count = [&](const char* name) { return field<int32_t>(spec, name); };
    const auto function = [&](const char* name) { return at<void>(field<uint64_t>(spec, name)); };
    GpuPlanes planes;
    planes.bounds = Numbers<int64_t>(spec.attr("bounds")).copied();
    planes.first_plane = Numbers<int32_t>(spec.attr("first_plane")).copied();
    planes.layers = static_cast<int32_t>(planes.bounds.size()) - 1;
    planes.page_blocks = count("page_blocks");
    planes.blocks = number("blocks");
    planes.extent_bytes = number("extent_bytes");
    planes.packed = field<bool>(spec, "packed");
    const Numbers<int64_t> rows(spec.attr("planes"));
    require(rows.size() % 7 == 0, "planes have 7 numbers");
    for (const int64_t* row = rows.data(); row != rows.data() + rows.size(); row += 7) {
        planes.planes.push_back({row[0], row[1], row[2], row[3], row[4], row[5], row[6]});
    }
    const PageKernels kernels(function("gather"), function("scatter"), function("gather_sums"),
                              function("scatter_sums"), field<uint64_t>(spec, "table"), count("vector"),
                              count("processors"), field<bool>(spec, "sums"), field<bool>(spec, "looks"));
    const ChunkSizes sizes{number("moved"), number("looked"), number("looked_last"), number("unbroken")};
    const int64_t staging = number("staging");
    check(planes, kernels, sizes, staging);
    void* const context = function("context");
    const Unlocked others;
    copies = std::make_shared<GpuCopies>(library, context);
    const Cuda::Entered entered(copies->cuda);
    copies->gpu.emplace(copies->cuda, std::move(planes), kernels, sizes, static_cast<size_t>(staging));
}

void bind_gpu(nb::module_& module) {
    nb::class_<OpenGpu>(module, "Gpu")
        .def(nb::init<const char*, const nb::object&>(), "library"_a, "spec"_a)
        .def_prop_ro("closed", [](const OpenGpu& self) { return !self.copies; })
        .def_prop_ro("api", [](const OpenGpu& self) { return of(self)->cuda.api(); })
        .def("queue", &queue, "address"_a, "stride"_a, "extents"_a, "fence"_a, "device"_a, "pinned"_a, "slots"_a,
             "blocks"_a, "after"_a, "layers"_a, "route"_a, "load"_a, "sums"_a)
        .def("finish", &finish, "ticket"_a)
        .def("last", &last, nb::kw_only(), "loads"_a)
        .def("reached", &is<&Gpu::reached>, "point"_a)
        .def("past", &is<&Gpu::past>, "point"_a)
        .def("wait", &wait, "point"_a)
        .def("follow", &follow, "stream"_a, "point"_a)
        .def("close", &close);
}

}  // namespace gdscache
