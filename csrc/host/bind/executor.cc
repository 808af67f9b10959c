// The executor for Python: moves are handed over whole, and their ends come back in lists.

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>

#include "bind/checks.h"
#include "bind/handles.h"

namespace gdscache {
namespace {

constexpr Nanoseconds kNever = INT64_MAX;
// Of a wait for layers with the interpreter's lock: a fifth of another thread's turn. A layer is often ready in less
// time than taking the lock again costs.
constexpr Nanoseconds kKept = 1'000'000;
constexpr double kLongest = 1e8;  // seconds; a longer wait has no deadline (three years)

// Whether the kernel copies a file's bytes: it uses the page cache, or lies on a RAM disk.
bool kernel_copies(int file) {
    struct statfs found;
    const bool in_memory = fstatfs(file, &found) == 0 && found.f_type == TMPFS_MAGIC;
    return in_memory || (fcntl(file, F_GETFL) & O_DIRECT) == 0;
}

Nanoseconds deadline(double seconds) {
    if (seconds > kLongest) return kNever;
    return seconds > 0 ? now() + static_cast<Nanoseconds>(seconds * 1e9) : 0;
}

// The settings of a disk (Descriptors in gdscache/storage/base.py).
struct Means {
    explicit Means(nb::handle about)
        : threads(field<int>(about, "threads")),
          kind(field<bool>(about, "uring") ? Text() : Text("threads")),
          cufile(field<const OpenCuFiles*>(about, "cufile")),
          transport(about.attr("transport")) {}
    // A transport itself refuses memory that it does not reach.
    bool reaches(uint64_t address, size_t bytes) const {
        return !transport.is_none() || (cufile && cufile->shared()->memory(address, bytes));
    }
    std::unique_ptr<Disk> open(const std::vector<DeviceRange>& devices) const {
        return open_disk_by(kind, threads, cufile, transport, devices);
    }

    int threads;
    Text kind;
    const OpenCuFiles* cufile;
    nb::object transport;  // of Python's, with file numbers of its own; or none
};

// Call `take(until)` until it is true, or the time. Signals are handled. `with_lock`: the first slice keeps Python's lock.
template <typename Take>
void wait_for(Calls& calls, double seconds, Take take, bool with_lock = false) {
    const Nanoseconds until = deadline(seconds);
    for (;; with_lock = false) {
        const Nanoseconds slice = std::min(until, now() + (with_lock ? kKept : kSlice));
        {
            std::optional<Unlocked> others;
            if (!with_lock) others.emplace();
            const Calls::Inside inside(calls);
            if (inside.over) throw Stopped();
            if (take(slice) || slice == until) return;
        }
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

}  // namespace

OpenExecutor::OpenExecutor(const Int64s& bounds, int64_t extent_bytes, int32_t page_blocks, const nb::dict& spaces,
                           const nb::object& limits, const nb::object& reserve, int64_t fence, const OpenPlanes* pool,
                           const OpenGpu* gpu, const nb::sequence& disks, int threads) {
    const auto bytes = [&](const char* name) { return field<int64_t>(limits, name); };
    Limits sizes(extent_bytes, static_cast<int32_t>(std::min(bounds.size() - 1, kMostLayers + 1)), page_blocks,
                 std::vector(bounds.data(), bounds.data() + bounds.size()), bytes("flying"), bytes("io"), bytes("copy"),
                 bytes("foreign_copy"));
    check(sizes);
    refuse_if(nb::len(spaces) == 0 || nb::len(spaces) > 1 << 10, "no sound number of spaces");
    refuse_if(threads < 0 || threads > 1 << 10, "no sound number of threads");
    refuse_if(nb::len(disks) > kMostDisks, "no sound number of disks");
    pool_ = pool ? pool->pool : nullptr;
    gpu_ = gpu ? gpu->copies : nullptr;
    std::vector<std::optional<Means>> means;
    for (const nb::handle about : disks) {
        about.is_none() ? means.emplace_back() : means.emplace_back(about);
        refuse_if(means.back() && means.back()->threads < 1, "no sound number of threads");
    }
    std::vector<DeviceRange> devices;
    std::vector<Place> places;
    bool ours = false;
    for (const auto [name, about] : spaces) {
        const std::string kind = field<std::string>(about, "kind");
        const bool in_planes = kind == "planes", in_memory = kind == "memory", in_files = kind == "files";
        refuse_if(!in_planes && !in_memory && !in_files, "a space of no kind");
        Place space;
        space.kind = in_planes ? Space::Kind::kPlanes : in_memory ? Space::Kind::kMemory : Space::Kind::kFiles;
        space.foreign = field<bool>(about, "foreign") && !in_files;
        space.slots = field<int64_t>(about, "slots");
        space.stretch = field<int64_t>(about, "stretch");
        space.pinned = field<bool>(about, "pinned");
        space.fence = field<int64_t>(about, "fence");
        space.memory = at<uint8_t>(field<uint64_t>(about, "device_memory"));
        Array<std::byte> memory;
        Array<uint64_t> sums;
        const nb::object bytes_of = about.attr("memory"), sums_of = about.attr("sums");
        require(memory.take(bytes_of.ptr()) && sums.take(sums_of.ptr()), "a space of no arrays");
        if (!memory.none()) space.memory = reinterpret_cast<uint8_t*>(memory.data());
        space.sums = sums.data();
        if (in_files) {
            space.disk = field<int32_t>(about, "disk");
            refuse_if(space.disk < 0 || space.disk >= static_cast<int32_t>(means.size()), "files without a disk");
            for (const nb::handle file : nb::iter(about.attr("files"))) space.files.push_back(nb::cast<int>(file));
            if (const auto& by = means[space.disk]) {
                const bool asked = !by->transport.is_none();
                refuse_if(space.files.empty(), "a space without files");
                space.copied = !asked && std::ranges::any_of(space.files, kernel_copies);
                if (asked) space.io_bytes = field<int64_t>(by->transport, "call_bytes");
                refuse_if(space.io_bytes < 0 || space.io_bytes > kMostBytes, "no sound sizes");
            }
        }
        check(space, extent_bytes, has_gpu());
        const int64_t size = space.slots * extent_bytes;
        refuse_if(!memory.none() && memory.bytes() < size, "a memory of fewer bytes than its slots");
        refuse_if(!sums.none() && !sums.has(space.slots, sizes.layers), "checksums of other slots");
        if (in_planes && !space.foreign) check(space, pool_.get(), sizes);
        if (in_planes && space.foreign && gpu_) check(space, gpu_->gpu->planes(), sizes);
        const auto address = reinterpret_cast<uint64_t>(space.memory);
        const bool on_gpu = in_memory && space.foreign;
        if (on_gpu) devices.push_back({address, static_cast<size_t>(size), field<int>(about, "device")});
        for (size_t n = 0; in_memory && n < means.size(); ++n) {
            const bool reached = !on_gpu || !means[n] || means[n]->reaches(address, static_cast<size_t>(size));
            if (reached) space.reached |= uint64_t{1} << n;
        }
        ours = ours || (!space.foreign && !in_files);
        numbers_[name] = places.size();
        names_.append(name);
        places.push_back(std::move(space));
    }
    refuse_if(ours && threads < 1, "no threads for spaces that are not foreign");
    int32_t reserve_space = -1;
    int64_t first = 0, slots = 0;
    if (!reserve.is_none()) {
        reserve_space = number_of(reserve[0]);
        first = nb::cast<int64_t>(reserve[1]), slots = nb::cast<int64_t>(reserve[2]);
        const bool inside = places[reserve_space].kind == Space::Kind::kMemory && first >= 0 && slots >= 0 &&
                            slots <= places[reserve_space].slots - first;
        refuse_if(!inside, "a reserve outside its memory");
    }
    refuse_if(fence < 0, "a reserve outside its memory");
    std::vector<std::unique_ptr<Disk>> opened;
    for (const auto& by : means) opened.push_back(by ? by->open(devices) : nullptr);
    if (!opened.empty() && opened[0]) {
        disk_ = opened[0]->name();
        if (between) opened[0] = between(std::move(opened[0]));
    }
    kept_ = spaces;
    const Unlocked others;
    executor_ = std::make_unique<Executor>(sizes, std::move(places), reserve_space, Reserve(first, slots, fence),
                                           pool_.get(), std::move(opened), threads);
    if (gpu_) server_ = std::make_unique<GpuServer>(*executor_, *gpu_->gpu);
}

int32_t OpenExecutor::number_of(const nb::object& name) const {
    PyObject* const found = PyDict_GetItemWithError(numbers_.ptr(), name.ptr());
    if (found) return static_cast<int32_t>(PyLong_AsLong(found));
    if (PyErr_Occurred()) throw nb::python_error();
    throw Error(EINVAL, "no space is called " + std::string(nb::str(name).c_str()));
}

std::vector<Way> OpenExecutor::read(const nb::sequence& ways) const {
    std::vector<Way> made;
    const int64_t page_blocks = executor().limits().page_blocks;
    for (const nb::handle from : ways) {
        Way way;
        way.source = number_of(from.attr("source"));
        way.target = number_of(from.attr("target"));
        way.sources = Numbers<int64_t>(from.attr("sources")).copied();
        way.targets = Numbers<int64_t>(from.attr("targets")).copied();
        const nb::object places = from.attr("places"), sums = from.attr("sums");
        way.places = Numbers<int64_t>(places).copied();
        way.sums = Numbers<uint64_t>(sums).copied();
        if (!way.places.empty()) way.through = number_of(from.attr("through"));
        const bool planes = executor().places()[way.source].kind == Space::Kind::kPlanes;
        const auto count = static_cast<int64_t>(way.sources.size());
        require(!planes || count % page_blocks == 0, "blocks of half a page");
        way.pages = planes ? count / page_blocks : count;
        // Empty arrays would pass for None: for bytes that are known to be right, and reads that stay nowhere.
        const bool none = (way.sums.empty() && !sums.is_none()) || (way.places.empty() && !places.is_none());
        refuse_if(none && way.pages != 0, "checksums or places of no page");
        made.push_back(std::move(way));
    }
    return made;
}

void OpenExecutor::begin(int64_t number, int priority, Nanoseconds until, const nb::sequence& ways,
                         const Int64s& groups, const nb::object& routes, const UInt64s& after, bool more) {
    MoveSpec spec;
    spec.id = number;
    spec.priority = static_cast<Priority>(priority);
    spec.until = until;
    spec.ways = read(ways);
    const int64_t count = groups.shape(0);
    require(count > 0 && groups.has(count, 8), "groups have 8 numbers");
    for (int64_t n = 0; n < count; ++n) {
        const int64_t* const row = groups.data() + 8 * n;
        require(row[0] >= 0 && row[0] <= kMostLayers && row[1] >= 0 && row[1] <= kMostLayers, "no such layers");
        const auto first = static_cast<int32_t>(row[0]), last = static_cast<int32_t>(row[1]);
        spec.groups.push_back({first, last, row[2], row[3], row[4], row[5], row[6], row[7]});
        if (routes.is_none()) continue;
        const auto both = nb::cast<std::pair<int32_t, int32_t>>(routes(range_of(first, last)));
        std::tie(spec.groups.back().route, spec.groups.back().summed_route) = both;
    }
    if (!after.none()) spec.after.assign(after.data(), after.data() + after.size());
    spec.open = more;
    Executor& known = executor();
    const bool good = priority >= 0 && priority < kPriorities && spec.after.size() <= 1 << 20 &&
                      sound(spec.ways, known, has_gpu()) && sound(spec.groups, known.limits()) &&
                      (!more || loads(spec.ways, known));
    require(good, "a move that makes no sense");
    bool begun = false;
    {
        // Waking the threads takes as long as the rest. A load's caller, often the thread that launches a model's
        // kernels, would wait for the lock longer than that.
        std::optional<Unlocked> others;
        if (spec.priority != Priority::kLoad) others.emplace();
        const Calls::Inside inside(calls_);
        if (inside.over) throw Stopped();
        begun = known.begin(std::move(spec));
    }
    if (!begun) throw Error(EEXIST, "another move has that number");
}

void OpenExecutor::extend(int64_t move, const nb::sequence& ways, bool last) {
    if (!executor().knows(move)) throw Error(ENOENT, "no such move");
    std::vector<Way> more = read(ways);
    const bool good = sound(more, executor(), has_gpu()) && loads(more, executor());
    require(good && executor().extend(move, std::move(more), last), "ways that make no sense for this move");
}

nb::tuple OpenExecutor::outcome(int64_t move) {
    const Outcome* const found = executor().outcome(move);
    if (!found) throw Error(EAGAIN, "the move has not ended", "wait for it");
    const Fresh<uint8_t> statuses(static_cast<int64_t>(found->statuses.size()));
    if (!found->statuses.empty()) std::memcpy(statuses.data, found->statuses.data(), found->statuses.size());
    const nb::object errors = nb::cast(found->errors), late = nb::cast(found->late);
    const std::string why = !found->broken ? "" : found->why.empty() ? "no reason" : found->why;
    const nb::object told = nb::steal(PyUnicode_DecodeUTF8(why.data(), static_cast<Py_ssize_t>(why.size()), "replace"));
    require(executor().forget(move), "the move has not ended");
    return nb::make_tuple(statuses.array, errors, late, told);
}

void OpenExecutor::refuse(int status) {
    const auto given = static_cast<Status>(status);
    const bool good = status >= 0 && status <= static_cast<int>(Status::kUnfit) && given != Status::kLoaded;
    require(good, "no such verdict for pages without a read");
    executor().refuse(given);
}

std::vector<std::pair<int64_t, int32_t>> OpenExecutor::take_late(double seconds, int64_t most) {
    require(most > 0, "no room for late pages");
    executor();
    std::vector<std::pair<int64_t, int32_t>> found;
    wait_for(calls_, seconds, [&](Nanoseconds until) {
        found = executor_->take_ended_late(until, static_cast<size_t>(most));
        return !found.empty();
    });
    return found;
}

std::optional<int64_t> OpenExecutor::wait(int64_t move, double seconds, int32_t group) {
    executor();
    std::optional<int64_t> point;
    const auto look = [&](Nanoseconds until) { return (point = executor_->wait(move, group, until)).has_value(); };
    wait_for(calls_, seconds, look, group >= 0 || seconds <= 0);
    return point;
}

nb::list OpenExecutor::take_spans() {
    nb::list rows;
    for (const Span& span : executor().take_spans(4096)) {
        rows.append(nb::make_tuple(static_cast<int>(span.kind), range_of(span.first, span.last), span.move, span.pages,
                                   span.bytes, span.begin, span.end));
    }
    return rows;
}

void bind_executor(nb::module_& module) {
    module.attr("NEVER") = kNever;
    module.attr("SHORT") = kShort;
    module.attr("GONE") = kGone;
    module.attr("WRONG") = kWrong;
    nb::class_<OpenExecutor>(module, "Executor")
        .def(nb::init<const Int64s&, int64_t, int32_t, const nb::dict&, const nb::object&, const nb::object&, int64_t,
                      const OpenPlanes*, const OpenGpu*, const nb::sequence&, int>(),
             "bounds"_a, "extent_bytes"_a, "page_blocks"_a, "spaces"_a, "limits"_a, "reserve"_a.none() = nb::none(),
             "fence"_a = 0, "pool"_a.none() = nb::none(), "gpu"_a.none() = nb::none(), "disks"_a = nb::make_tuple(),
             "threads"_a = 0)
        .def_prop_ro("disk", &OpenExecutor::disk)
        .def_prop_ro("closed", &OpenExecutor::closed)
        .def("begin", &OpenExecutor::begin, "number"_a, "priority"_a, "until"_a, "ways"_a, "groups"_a,
             "routes"_a.none() = nb::none(), "after"_a.none() = nb::none(), "open"_a = false)
        .def("extend", &OpenExecutor::extend, "move"_a, "ways"_a, nb::kw_only(), "last"_a)
        .def("cancel", &OpenExecutor::cancel, "move"_a)
        .def("wait", &OpenExecutor::wait, "move"_a, "seconds"_a, "group"_a = -1)
        .def("outcome", &OpenExecutor::outcome, "move"_a)
        .def("refuse", &OpenExecutor::refuse, "status"_a)
        .def("take_late", &OpenExecutor::take_late, "seconds"_a, "most"_a = 256)
        .def("held_slots", &OpenExecutor::held_slots)
        .def("free_slots", &OpenExecutor::free_slots)
        .def("trace", &OpenExecutor::trace)
        .def("take_spans", &OpenExecutor::take_spans)
        .def("stop", &OpenExecutor::stop)
        .def("close", &OpenExecutor::close);
}

}  // namespace gdscache
