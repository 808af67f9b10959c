// The executor: moves are handed over whole, and their ends come back in lists.

#include "executor.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../checks.h"
#include "handles.h"
#include "transport.h"

namespace gdscache {
namespace {

constexpr Nanoseconds kNever = INT64_MAX;
// Of a wait for layers, with the interpreter's lock: a fifth of what others have it at a time. A layer is often there
// within less than it takes to have the lock again.
constexpr Nanoseconds kKept = 1'000'000;
constexpr int kDepth = 8;          // pieces under way of each thread of the kernel
constexpr double kLongest = 1e8;  // seconds that are no deadline: three years

// Whether the kernel copies the bytes of a file: it is in the page cache, or on a RAM disk.
bool kernel_copies(int file) {
    struct statfs found;
    const bool in_memory = fstatfs(file, &found) == 0 && found.f_type == TMPFS_MAGIC;
    return in_memory || (fcntl(file, F_GETFL) & O_DIRECT) == 0;
}

Nanoseconds deadline(double seconds) {
    if (seconds > kLongest) return kNever;
    return seconds > 0 ? now() + static_cast<Nanoseconds>(seconds * 1e9) : 0;
}

// What a disk is opened by (Descriptors in gdscache/moves/machine.py).
struct Means {
    explicit Means(nb::handle about)
        : threads(nb::cast<int>(about.attr("threads"))), uring(nb::cast<bool>(about.attr("uring"))), transport(about.attr("transport")) {
        const auto* const opened = nb::cast<const OpenCuFiles*>(about.attr("cufile"));
        if (opened) cufile = opened->shared(), batched = opened->batched;
    }
    // A transport refuses what it does not reach itself.
    bool reaches(uint64_t address, size_t bytes) const {
        return !transport.is_none() || (cufile && cufile->memory(address, bytes));
    }
    std::unique_ptr<Disk> open(const std::vector<DeviceRange>& devices) const {
        if (!transport.is_none()) return open_transport_disk(threads, transport, devices);
        const nb::gil_scoped_release others;
        if (cufile) return open_cufile_disk(threads, cufile, batched);
        return uring ? open_disk(threads, kDepth * threads) : open_threads_disk(threads);
    }

    int threads;
    bool uring;
    nb::object transport;  // of Python's, which gives files numbers of its own; or none
    std::shared_ptr<CuFiles> cufile;
    int64_t batched = 0;
};

nb::object range_of(int64_t start, int64_t stop) {
    return nb::module_::import_("builtins").attr("range")(start, stop);
}

}  // namespace

OpenExecutor::OpenExecutor(const Array<const int64_t>& bounds, int64_t extent_bytes, int32_t page_blocks,
                           const nb::dict& spaces, const nb::object& limits, const nb::object& reserve, int64_t fence,
                           const HostPool* pool, const OpenGpu* gpu, const nb::sequence& disks, int threads) {
    const auto bytes = [&](const char* name) { return nb::cast<int64_t>(limits.attr(name)); };
    Limits sizes{extent_bytes, static_cast<int32_t>(std::min(bounds.size() - 1, kMostLayers + 1)), page_blocks,
                 {bounds.data(), bounds.data() + bounds.size()}, bytes("flying"), bytes("io"), bytes("copy"),
                 bytes("foreign_copy")};
    check(sizes);
    refuse_if(spaces.size() < 1 || spaces.size() > 1 << 10, "no sound number of spaces");
    refuse_if(threads < 0 || threads > 1 << 10, "no sound number of threads");
    refuse_if(nb::len(disks) > 64, "no sound number of disks");
    auto made = std::make_shared<Opened>();
    made->pool = pool ? pool->pool : nullptr;
    made->gpu = gpu ? gpu->copies : nullptr;
    const Pool* const planes = made->pool ? &made->pool->pool : nullptr;
    std::vector<std::optional<Means>> means;
    for (const nb::handle about : disks) {
        about.is_none() ? means.emplace_back() : means.emplace_back(about);
        refuse_if(means.back() && means.back()->threads < 1, "no sound number of threads");
    }
    std::vector<DeviceRange> devices;
    std::vector<Space> kinds;
    std::vector<Place> places;
    bool ours = false;
    for (const auto [name, about] : spaces) {
        const auto has = [&about = about](const char* field) { return nb::object(about.attr(field)); };
        const std::string kind = nb::cast<std::string>(has("kind"));
        Space space;
        space.kind = kind == "planes" ? Space::Kind::kPlanes : kind == "memory" ? Space::Kind::kMemory : Space::Kind::kFiles;
        refuse_if(space.kind == Space::Kind::kFiles && kind != "files", "a space of no kind");
        space.foreign = nb::cast<bool>(has("foreign"));
        Place place;
        place.slots = nb::cast<int64_t>(has("slots"));
        place.stretch = nb::cast<int64_t>(has("stretch"));
        place.pinned = nb::cast<bool>(has("pinned"));
        place.fence = nb::cast<int64_t>(has("fence"));
        place.memory = at<uint8_t>(nb::cast<uint64_t>(has("device_memory")));
        Array<std::byte> memory;
        Array<uint64_t> sums;
        require(memory.take(has("memory").ptr()) && sums.take(has("sums").ptr()), "a space of no arrays");
        if (!memory.none()) place.memory = reinterpret_cast<uint8_t*>(memory.data());
        space.sums = sums.data();
        if (space.kind == Space::Kind::kFiles) {
            space.foreign = false;
            space.disk = nb::cast<int32_t>(has("disk"));
            refuse_if(space.disk < 0 || space.disk >= static_cast<int32_t>(means.size()), "files without a disk");
            for (const nb::handle file : nb::iter(has("files"))) place.files.push_back(nb::cast<int>(file));
            if (const auto& by = means[space.disk]) {
                const bool asked = !by->transport.is_none();
                refuse_if(place.files.empty(), "a space without files");
                place.copied = !asked && std::any_of(place.files.begin(), place.files.end(), kernel_copies);
                if (asked) space.io_bytes = nb::cast<int64_t>(by->transport.attr("call_bytes"));
                refuse_if(space.io_bytes < 0 || space.io_bytes > kMostBytes, "no sound sizes");
            }
        }
        check(space, place, extent_bytes, made->gpu != nullptr);
        refuse_if(!memory.none() && memory.bytes() < place.slots * extent_bytes, "a memory of fewer bytes than its slots");
        refuse_if(!sums.none() && !sums.has(place.slots, sizes.layers), "checksums of other slots");
        if (space.foreign && made->gpu) check(space, place, made->gpu->gpu->planes(), sizes);
        else if (!space.foreign && space.kind == Space::Kind::kPlanes) check(place, planes, sizes);
        const auto size = static_cast<size_t>(place.slots * extent_bytes);
        const auto address = reinterpret_cast<uint64_t>(place.memory);
        const bool on_gpu = space.kind == Space::Kind::kMemory && space.foreign;
        if (on_gpu) devices.push_back({address, size, nb::cast<int>(has("device"))});
        for (size_t n = 0; n < means.size() && space.kind == Space::Kind::kMemory; ++n) {
            if (!on_gpu || !means[n] || means[n]->reaches(address, size)) place.reached |= uint64_t{1} << n;
        }
        ours = ours || (!space.foreign && space.kind != Space::Kind::kFiles);
        numbers_[name] = kinds.size();
        names_.append(name);
        kinds.push_back(space);
        places.push_back(std::move(place));
    }
    refuse_if(ours && threads < 1, "nobody for what is not foreign");
    int32_t reserve_space = -1;
    int64_t first = 0, slots = 0;
    if (!reserve.is_none()) {
        reserve_space = number_of(reserve[0]);
        first = nb::cast<int64_t>(reserve[1]), slots = nb::cast<int64_t>(reserve[2]);
        const bool inside = kinds[reserve_space].kind == Space::Kind::kMemory && first >= 0 && slots >= 0 &&
                            slots <= places[reserve_space].slots - first;
        refuse_if(!inside, "a reserve outside its memory");
    }
    refuse_if(fence < 0, "a reserve outside its memory");
    std::vector<std::unique_ptr<Disk>> opened;
    for (const auto& by : means) opened.push_back(by ? by->open(devices) : nullptr);
    if (!opened.empty() && opened[0]) {
        made->disk = opened[0]->name();
        if (between) opened[0] = between(std::move(opened[0]));
    }
    {
        const nb::gil_scoped_release others;
        made->executor = std::make_unique<Executor>(sizes, std::move(kinds), std::move(places), reserve_space,
                                                    Reserve(first, slots, fence), planes, std::move(opened), threads);
        if (made->gpu) made->server = std::make_unique<GpuServer>(*made->executor, *made->gpu->gpu);
    }
    opened_ = std::move(made);
    kept_ = spaces;
}

int32_t OpenExecutor::number_of(const nb::object& name) const {
    PyObject* const found = PyDict_GetItemWithError(numbers_.ptr(), name.ptr());
    if (found) return static_cast<int32_t>(PyLong_AsLong(found));
    if (PyErr_Occurred()) throw nb::python_error();
    throw CallError{"no space is called " + std::string(nb::str(name).c_str()), EINVAL};
}

std::vector<Way> OpenExecutor::read(const nb::sequence& ways) const {
    std::vector<Way> made;
    const int64_t page_blocks = open().executor->limits().page_blocks;
    for (const nb::handle from : ways) {
        Way way;
        way.source = number_of(from.attr("source"));
        way.target = number_of(from.attr("target"));
        way.sources = Numbers<int64_t>(from.attr("sources")).copied();
        way.targets = Numbers<int64_t>(from.attr("targets")).copied();
        way.places = Numbers<int64_t>(from.attr("places")).copied();
        way.sums = Numbers<uint64_t>(from.attr("sums")).copied();
        if (!way.places.empty()) way.through = number_of(from.attr("through"));
        const bool planes = open().executor->spaces()[way.source].kind == Space::Kind::kPlanes;
        const auto count = static_cast<int64_t>(way.sources.size());
        require(!planes || count % page_blocks == 0, "blocks of half a page");
        way.pages = planes ? count / page_blocks : count;
        made.push_back(std::move(way));
    }
    return made;
}

void OpenExecutor::begin(int64_t number, int priority, Nanoseconds until, const nb::sequence& ways,
                         const Array<const int64_t>& groups, const nb::object& routes, const Array<const uint64_t>& after,
                         bool more) {
    Opened& opened = open();
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
        spec.groups.push_back({static_cast<int32_t>(row[0]), static_cast<int32_t>(row[1]), row[2], row[3], row[4], row[5],
                               row[6], row[7]});
        if (routes.is_none()) continue;
        const nb::object both = routes(range_of(row[0], row[1]));
        spec.groups.back().route = nb::cast<int32_t>(both[0]);
        spec.groups.back().summed_route = nb::cast<int32_t>(both[1]);
    }
    if (!after.none()) spec.after.assign(after.data(), after.data() + after.size());
    spec.open = more;
    const Executor& executor = *opened.executor;
    const bool good = priority >= 0 && priority < kPriorities && spec.after.size() <= 1 << 20 &&
                      sound(spec.ways, executor, opened.gpu != nullptr) && sound(spec.groups, executor.limits()) &&
                      (!more || loads(spec.ways, executor));
    require(good, "a move that makes no sense");
    if (!opened.executor->begin(std::move(spec))) throw CallError{"another move has that number", EEXIST};
}

void OpenExecutor::extend(int64_t move, const nb::sequence& ways, bool last) {
    Executor& executor = *open().executor;
    if (!executor.knows(move)) throw CallError{"no such move", ENOENT};
    std::vector<Way> more = read(ways);
    const bool good = sound(more, executor, open().gpu != nullptr) && loads(more, executor);
    require(good && executor.extend(move, std::move(more), last), "ways that make no sense for this move");
}

nb::tuple OpenExecutor::outcome(int64_t move) {
    Executor& executor = *open().executor;
    const Outcome* const found = executor.outcome(move);
    if (!found) throw CallError{"the move has not ended", EAGAIN, "wait for it"};
    const Fresh<uint8_t> statuses({static_cast<int64_t>(found->statuses.size())});
    if (!found->statuses.empty()) std::memcpy(statuses.data, found->statuses.data(), found->statuses.size());
    nb::list errors, late;
    for (const auto& [row, error] : found->errors) errors.append(nb::make_tuple(row, error));
    for (const int32_t row : found->late) late.append(row);
    const std::string why = !found->broken ? "" : found->why.empty() ? "no reason" : found->why;
    const nb::object told = nb::steal(PyUnicode_DecodeUTF8(why.data(), static_cast<Py_ssize_t>(why.size()), "replace"));
    require(executor.forget(move), "the move has not ended");
    return nb::make_tuple(statuses.array, errors, late, told);
}

void OpenExecutor::refuse(int status) {
    const bool good = status >= 0 && status <= static_cast<int>(Status::kAborted) && status != static_cast<int>(Status::kLoaded);
    require(good, "no verdict of pages that nobody has read");
    open().executor->refuse(static_cast<Status>(status));
}

namespace {

// What `take(until, &waited)` gives, null where nothing came in time. Signals are heard. `with_lock`: others of Python
// wait at first.
template <typename Take>
auto taken(Opened& opened, double seconds, Take take, bool with_lock = false) {
    const Nanoseconds until = deadline(seconds);
    for (;; with_lock = false) {
        const Nanoseconds slice = std::min(until, now() + (with_lock ? kKept : kSlice));
        Waited waited;
        decltype(take(slice, &waited)) found{};
        {
            std::optional<nb::gil_scoped_release> others;
            if (!with_lock) others.emplace();
            const Inside inside(opened);
            if (inside.closed) waited = Waited::kClosed;
            else found = take(slice, &waited);
        }
        if (waited == Waited::kClosed) throw CallError{"the executor was stopped", ECANCELED, "wait before close"};
        if (waited == Waited::kHappened || slice == until) return found;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

}  // namespace

nb::object OpenExecutor::take_late(double seconds, int64_t most) {
    require(most > 0, "no room for late pages");
    open();
    const std::shared_ptr<Opened> kept = opened_;
    nb::list rows;
    const auto found = taken(*kept, seconds, [&](Nanoseconds until, Waited* waited) {
        return kept->executor->take_ended_late(until, static_cast<size_t>(most), waited);
    });
    for (const auto& [move, row] : found) rows.append(nb::make_tuple(move, row));
    return rows;
}

nb::object OpenExecutor::wait(int64_t move, double seconds, int32_t group) {
    open();
    const std::shared_ptr<Opened> kept = opened_;
    const auto look = [&](Nanoseconds until, Waited* waited) {
        int64_t point = 0;
        // One that nobody knows any more was over.
        if (!kept->executor->wait(move, group, until, waited, &point)) *waited = Waited::kHappened;
        return *waited == Waited::kHappened ? std::optional(point) : std::nullopt;
    };
    const std::optional<int64_t> point = taken(*kept, seconds, look, group >= 0 || seconds <= 0);
    return point ? nb::int_(*point) : nb::object(nb::none());
}

nb::list OpenExecutor::take_spans() {
    nb::list rows;
    for (const Span& span : open().executor->take_spans(4096)) {
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
        .def(nb::init<const Array<const int64_t>&, int64_t, int32_t, const nb::dict&, const nb::object&, const nb::object&,
                      int64_t, const HostPool*, const OpenGpu*, const nb::sequence&, int>(),
             nb::arg("bounds"), nb::arg("extent_bytes"), nb::arg("page_blocks"), nb::arg("spaces"), nb::arg("limits"),
             nb::arg("reserve").none() = nb::none(), nb::arg("fence") = 0, nb::arg("pool").none() = nb::none(),
             nb::arg("gpu").none() = nb::none(), nb::arg("disks") = nb::make_tuple(), nb::arg("threads") = 0)
        .def_prop_ro("disk", &OpenExecutor::disk)
        .def_prop_ro("closed", &OpenExecutor::closed)
        .def("begin", &OpenExecutor::begin, nb::arg("number"), nb::arg("priority"), nb::arg("until"), nb::arg("ways"),
             nb::arg("groups"), nb::arg("routes").none() = nb::none(), nb::arg("after").none() = nb::none(),
             nb::arg("open") = false)
        .def("extend", &OpenExecutor::extend, nb::arg("move"), nb::arg("ways"), nb::kw_only(), nb::arg("last"))
        .def("cancel", &OpenExecutor::cancel, nb::arg("move"))
        .def("wait", &OpenExecutor::wait, nb::arg("move"), nb::arg("seconds"), nb::arg("group") = -1)
        .def("outcome", &OpenExecutor::outcome, nb::arg("move"))
        .def("refuse", &OpenExecutor::refuse, nb::arg("status"))
        .def("take_late", &OpenExecutor::take_late, nb::arg("seconds"), nb::arg("most") = 256)
        .def("held_slots", &OpenExecutor::held_slots)
        .def("free_slots", &OpenExecutor::free_slots)
        .def("trace", &OpenExecutor::trace)
        .def("take_spans", &OpenExecutor::take_spans)
        .def("stop", &OpenExecutor::stop)
        .def("close", &OpenExecutor::close);
}

}  // namespace gdscache
