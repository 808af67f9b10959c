// Calls of the executor, behind checks of what comes from outside (api_checks.h). See api_executor.h.

#include "api_executor.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <system_error>

#include "faulty_disk.h"  // before the global kShort of moves.h, which its own would shadow
#include "api_checks.h"
#include "cufile_handle.h"
#include "gpu_handle.h"
#include "gpu_server.h"

using namespace gdscache;

struct gdscache_executor {
    std::string disk;
    FaultyDisk* faulty;  // of the executor, or null
    Executor executor;
    gdscache_gpu* gpu;                  // or null
    std::unique_ptr<GpuServer> server;  // which ends before the executor
};

namespace {

std::atomic<bool> faulty_disks{false};

int32_t refused(const char* cause, int32_t error, char* why, int64_t why_size) {
    if (why && why_size > 0) std::snprintf(why, static_cast<size_t>(why_size), "%s", cause);
    return -error;
}

// Whether the kernel copies the bytes of a file: it is in the page cache, or on a RAM disk.
bool kernel_copies(int file) {
    struct statfs found;
    const bool in_memory = fstatfs(file, &found) == 0 && found.f_type == TMPFS_MAGIC;
    return in_memory || (fcntl(file, F_GETFL) & O_DIRECT) == 0;
}

template <typename T>
std::vector<T> copied(uint64_t address, int64_t count) {
    return address ? std::vector<T>(at<T>(address), at<T>(address) + count) : std::vector<T>();
}

// Whether a way's copies are between memory of a GPU and planes that are not its own.
bool crosses(const gdscache_way& way, const Executor& executor) {
    const auto& spaces = executor.spaces();
    const Space &source = spaces[way.source], &target = spaces[way.target];
    if (source.kind == Kind::kPlanes) return !source.foreign && target.foreign;
    if (target.kind != Kind::kPlanes || target.foreign) return false;
    const int32_t memory = source.kind == Kind::kMemory ? way.source : way.places ? way.through : executor.reserve_space();
    return memory >= 0 && spaces[memory].foreign;
}

// Whether ways are of a load, or a prefetch.
bool loads(const gdscache_way* ways, int64_t n_ways, const Executor& executor) {
    const auto& spaces = executor.spaces();
    return std::all_of(ways, ways + n_ways, [&](const gdscache_way& way) {
        return spaces[way.target].kind != Kind::kFiles && spaces[way.source].kind != Kind::kPlanes;
    });
}

// Whether ways make sense, and together: a store is a store as a whole.
bool sound(const gdscache_way* ways, int64_t n_ways, const Executor& executor, bool on_gpu) {
    if (n_ways < 0 || n_ways > 1 << 10 || (n_ways && !ways)) return false;
    const auto& spaces = executor.spaces();
    int64_t rows = 0;
    for (int64_t n = 0; n < n_ways; ++n) {
        if (!sound(ways[n], executor) || (on_gpu && crosses(ways[n], executor))) return false;
        const bool alike = spaces[ways[n].source].kind == spaces[ways[0].source].kind &&
                           spaces[ways[n].target].kind == spaces[ways[0].target].kind;
        if (!alike && !(loads(ways, 1, executor) && loads(ways + n, 1, executor))) return false;
        rows += ways[n].pages;
    }
    return rows < kMost;
}

std::vector<Way> copied(const gdscache_way* ways, int64_t n_ways, const Executor& executor) {
    std::vector<Way> made(static_cast<size_t>(n_ways));
    for (int64_t n = 0; n < n_ways; ++n) {
        const gdscache_way& from = ways[n];
        const auto many = [&](int32_t space) {
            const bool planes = executor.spaces()[space].kind == Kind::kPlanes;
            return from.pages * (planes ? executor.limits().page_blocks : 1);
        };
        Way& way = made[n];
        way.source = from.source;
        way.target = from.target;
        way.through = from.places ? from.through : -1;
        way.pages = from.pages;
        way.sources = copied<int64_t>(from.sources, many(from.source));
        way.targets = copied<int64_t>(from.targets, many(from.target));
        way.places = copied<int64_t>(from.places, from.pages);
        way.sums = copied<uint64_t>(from.sums, from.pages * executor.limits().layers);
    }
    return made;
}

// Whether cuFile knows all of a GPU's memory.
bool is_reached(const gdscache_cufile* cufile, const gdscache_space& space, int64_t extent_bytes) {
    return cufile && cufile->files->memory(space.memory, static_cast<size_t>(space.slots * extent_bytes));
}

int32_t code(Waited waited) { return waited == Waited::kHappened ? 1 : waited == Waited::kTimeout ? 0 : -ECANCELED; }

}  // namespace

int32_t gdscache_executor_open(const struct gdscache_limits* limits, const struct gdscache_space* spaces,
                               int64_t n_spaces, int32_t reserve_space, int64_t reserve_first, int64_t reserve_slots,
                               int64_t fence, const struct gdscache_pool* pool, struct gdscache_gpu* gpu,
                               struct gdscache_cufile* cufile, int32_t workers, int32_t depth, int32_t threads,
                               struct gdscache_executor** executor, char* why, int64_t why_size) {
    if (!limits || !spaces || !executor) return refused("an address is null", EINVAL, why, why_size);
    if (!sound(*limits) || n_spaces < 1 || n_spaces > 1 << 10) return refused("no sound sizes", EINVAL, why, why_size);
    if (workers < 0 || depth < 0 || threads < 0 || threads > 1 << 10) {
        return refused("no sound number of threads", EINVAL, why, why_size);
    }
    bool files = false, ours = false;
    for (int64_t n = 0; n < n_spaces; ++n) {
        if (const char* cause = unsound(spaces[n], limits->extent_bytes)) return refused(cause, EINVAL, why, why_size);
        files = files || (spaces[n].kind == 2 && !spaces[n].foreign);
        ours = ours || !spaces[n].foreign;
    }
    if (files && workers < 1) return refused("files without a disk", EINVAL, why, why_size);
    if (ours && threads < 1) return refused("nobody for what is not foreign", EINVAL, why, why_size);
    if (reserve_space < -1 || reserve_space >= n_spaces || reserve_first < 0 || reserve_slots < 0 || fence < 0 ||
        (reserve_space >= 0 &&
         (spaces[reserve_space].kind != 1 || reserve_slots > spaces[reserve_space].slots - reserve_first))) {
        return refused("a reserve outside its memory", EINVAL, why, why_size);
    }
    try {
        const Limits sizes{limits->extent_bytes,
                           limits->layers,
                           limits->page_blocks,
                           copied<int64_t>(limits->bounds, int64_t{limits->layers} + 1),
                           limits->flying_bytes,
                           limits->io_bytes,
                           limits->copy_bytes,
                           limits->foreign_io_bytes,
                           limits->foreign_copy_bytes};
        if (!ascending(sizes.bounds, sizes.extent_bytes)) return refused("no sound layers", EINVAL, why, why_size);
        for (int64_t n = 0; n < n_spaces; ++n) {
            const char* cause = nullptr;
            const auto bytes = static_cast<uint64_t>(spaces[n].kind == 1 ? spaces[n].slots * sizes.extent_bytes : 0);
            const bool of_gpu = spaces[n].foreign && gpu;
            if (spaces[n].fence < 0) cause = "a fence of no sound number of slots";
            else if (of_gpu && spaces[n].memory > UINT64_MAX - bytes) cause = "a memory that leaves the address space";
            else if (of_gpu) cause = unsound(spaces[n], gpu->gpu->planes(), sizes);
            else if (!spaces[n].foreign && spaces[n].kind == 0) cause = unsound(spaces[n], pool, sizes);
            if (cause) return refused(cause, EINVAL, why, why_size);
        }
        std::vector<Space> kinds;
        std::vector<Place> places;
        for (int64_t n = 0; n < n_spaces; ++n) {
            const gdscache_space& space = spaces[n];
            auto* const sums = reinterpret_cast<uint64_t*>(space.sums);
            kinds.push_back({static_cast<Kind>(space.kind), space.foreign != 0, sums});
            Place place;
            place.memory = reinterpret_cast<uint8_t*>(space.memory);
            place.slots = space.slots;
            place.stretch = space.stretch;
            place.pinned = space.pinned != 0;
            place.fence = space.fence;
            place.reached = space.kind == 1 && (!space.foreign || is_reached(cufile, space, sizes.extent_bytes));
            if (!space.foreign && space.kind == 2) place.files = copied<int>(space.files, space.n_files);
            place.copied = std::any_of(place.files.begin(), place.files.end(), kernel_copies);
            places.push_back(std::move(place));
        }
        std::unique_ptr<Disk> disk;
        if (files) {
            Refusal refusal;
            disk = cufile  ? open_cufile_disk(workers, cufile->files, cufile->batched, refusal)
                   : depth ? open_disk(workers, depth, refusal)
                           : open_threads_disk(workers, refusal);
            if (!disk) return refused(refusal.why.c_str(), refusal.error, why, why_size);
        }
        const std::string name = disk ? disk->name() : "";
        FaultyDisk* faulty = nullptr;
        if (disk && faulty_disks) {
            auto made = open_faulty_disk(std::move(disk), {});
            faulty = made.get();
            disk = std::move(made);
        }
        auto made = std::unique_ptr<gdscache_executor>(new gdscache_executor{
            name, faulty,
            Executor(sizes, std::move(kinds), std::move(places), reserve_space,
                     Reserve(reserve_first, reserve_space < 0 ? 0 : reserve_slots, fence),
                     pool ? &pool->pool : nullptr, std::move(disk), threads),
            gpu, nullptr});
        if (gpu) made->server = std::make_unique<GpuServer>(made->executor, *gpu->gpu);
        *executor = made.release();
        return 0;
    } catch (const std::bad_alloc&) {
        return refused("no memory", ENOMEM, why, why_size);
    } catch (const std::length_error&) {
        return refused("no memory", ENOMEM, why, why_size);
    } catch (const std::system_error& error) {  // a thread
        return refused(error.what(), EAGAIN, why, why_size);
    }
}

void gdscache_executor_close(struct gdscache_executor* executor) { delete executor; }

void gdscache_executor_stop(struct gdscache_executor* executor) {
    if (executor) executor->executor.stop();
}

const char* gdscache_executor_disk(struct gdscache_executor* executor) {
    return executor ? executor->disk.c_str() : "";
}

int32_t gdscache_move_begin(struct gdscache_executor* executor, int64_t move, int32_t priority, int64_t until,
                            const struct gdscache_way* ways, int64_t n_ways, const struct gdscache_group* groups,
                            int64_t n_groups, const uint64_t* after, int64_t n_after, int32_t open) {
    if (!executor || n_after < 0 || n_after > 1 << 20 || (n_after && !after)) return -EINVAL;
    Executor& of = executor->executor;
    if (n_groups < 1 || !groups || !sound(ways, n_ways, of, executor->gpu)) return -EINVAL;
    if (priority < 0 || priority >= kPriorities || !sound(groups, n_groups, of.limits())) return -EINVAL;
    if (open && !loads(ways, n_ways, of)) return -EINVAL;
    try {
        MoveSpec spec;
        spec.id = move;
        spec.priority = static_cast<Priority>(priority);
        spec.until = until;
        spec.ways = copied(ways, n_ways, of);
        for (int64_t n = 0; n < n_groups; ++n) {
            const gdscache_group& from = groups[n];
            spec.groups.push_back({from.first, from.last, from.begin, from.end, from.start, from.stop,
                                   from.alone_start, from.alone_stop, from.route, from.summed_route});
        }
        spec.after.assign(after, after + n_after);
        spec.open = open != 0;
        return of.begin(std::move(spec)) ? 0 : -EEXIST;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    } catch (const std::length_error&) {
        return -ENOMEM;
    }
}

int32_t gdscache_move_extend(struct gdscache_executor* executor, int64_t move, const struct gdscache_way* ways,
                             int64_t n_ways, int32_t last) {
    if (!executor) return -EINVAL;
    Executor& of = executor->executor;
    if (!of.knows(move)) return -ENOENT;
    if (!sound(ways, n_ways, of, executor->gpu) || !loads(ways, n_ways, of)) return -EINVAL;
    try {
        return of.extend(move, copied(ways, n_ways, of), last != 0) ? 0 : -EINVAL;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    } catch (const std::length_error&) {
        return -ENOMEM;
    }
}

int32_t gdscache_move_cancel(struct gdscache_executor* executor, int64_t move) {
    if (!executor) return -EINVAL;
    return executor->executor.cancel(move) ? 0 : -ENOENT;
}

int32_t gdscache_move_wait(struct gdscache_executor* executor, int64_t move, int32_t group, int64_t until,
                           int64_t* point) {
    if (!executor || !point) return -EINVAL;
    Waited waited;
    if (!executor->executor.wait(move, group, until, &waited, point)) return -ENOENT;
    return code(waited);
}

int32_t gdscache_move_outcome(struct gdscache_executor* executor, int64_t move, uint8_t* statuses, int64_t rows,
                              int32_t* errors, int64_t* n_errors, int32_t* late, int64_t* n_late, int64_t room,
                              char* why, int64_t why_size) {
    if (!executor) return -EINVAL;
    const Outcome* const outcome = executor->executor.outcome(move);
    if (!outcome) return -EAGAIN;
    const auto size = static_cast<int64_t>(outcome->statuses.size());
    if (rows != size || room < size || !n_errors || !n_late) return -EINVAL;
    if (size && (!statuses || !errors || !late)) return -EINVAL;
    if (size) std::memcpy(statuses, outcome->statuses.data(), static_cast<size_t>(size));
    *n_errors = static_cast<int64_t>(outcome->errors.size());
    for (int64_t n = 0; n < *n_errors; ++n) {
        errors[2 * n] = outcome->errors[n].first;
        errors[2 * n + 1] = outcome->errors[n].second;
    }
    *n_late = static_cast<int64_t>(outcome->late.size());
    std::copy(outcome->late.begin(), outcome->late.end(), late);
    if (outcome->broken) refused(outcome->why.c_str(), 0, why, why_size);
    return outcome->broken ? 1 : 0;
}

int32_t gdscache_move_forget(struct gdscache_executor* executor, int64_t move) {
    if (!executor) return -EINVAL;
    return executor->executor.forget(move) ? 0 : -EBUSY;
}

int32_t gdscache_refuse(struct gdscache_executor* executor, int32_t status) {
    if (!executor || status < 0 || status > static_cast<int32_t>(Status::kAborted)) return -EINVAL;
    if (status == static_cast<int32_t>(Status::kLoaded)) return -EINVAL;  // nobody has read them
    executor->executor.refuse(static_cast<Status>(status));
    return 0;
}

int32_t gdscache_take_io(struct gdscache_executor* executor, int64_t until, struct gdscache_io* job) {
    if (!executor || !job) return -EINVAL;
    Waited waited;
    if (const IoJob* const found = executor->executor.take_io(until, &waited)) {
        *job = {found->id,
                found->move,
                found->write,
                found->files,
                found->memory,
                found->first,
                found->last,
                0,
                found->start,
                found->stop,
                static_cast<int64_t>(found->pages.size()),
                reinterpret_cast<uint64_t>(found->pages.data())};
    }
    return code(waited);
}

int32_t gdscache_take_copy(struct gdscache_executor* executor, int64_t until, struct gdscache_copy* job) {
    if (!executor || !job || executor->gpu) return -EINVAL;  // a GPU's copies are its threads'
    Waited waited;
    if (const CopyJob* const found = executor->executor.take_copy(Hands::kForeign, until, &waited)) {
        *job = {found->id,
                static_cast<int32_t>(found->copy),
                found->memory,
                found->first,
                found->last,
                found->sums,
                0,
                found->move,
                found->window,
                found->window_slots,
                static_cast<int64_t>(found->pages.size()),
                reinterpret_cast<uint64_t>(found->pages.data()),
                reinterpret_cast<uint64_t>(found->blocks.data())};
    }
    return code(waited);
}

int32_t gdscache_io_ended(struct gdscache_executor* executor, int64_t job, const int32_t* ends, int64_t count) {
    static_assert(sizeof(IoEnd) == 2 * sizeof(int32_t));
    if (!executor || count < 0 || (count && !ends)) return -EINVAL;
    return executor->executor.io_ended(job, reinterpret_cast<const IoEnd*>(ends), count) ? 0 : -EINVAL;
}

int32_t gdscache_copy_queued(struct gdscache_executor* executor, int64_t job, int64_t point) {
    if (!executor || point < 0 || executor->gpu) return -EINVAL;
    return executor->executor.copy_queued(job, point) ? 0 : -EINVAL;
}

int32_t gdscache_copy_ended(struct gdscache_executor* executor, int64_t job, const uint64_t* sums,
                            const char* broken) {
    if (!executor || executor->gpu) return -EINVAL;
    return executor->executor.copy_ended(job, sums, broken) ? 0 : -EINVAL;
}

int32_t gdscache_expire(struct gdscache_executor* executor, int64_t now) {
    if (!executor) return -EINVAL;
    executor->executor.expire(now);
    return 0;
}

int32_t gdscache_take_late(struct gdscache_executor* executor, int64_t until, int64_t* late, int64_t room) {
    if (!executor || room < 1 || !late) return -EINVAL;
    Waited waited;
    const auto ended = executor->executor.take_ended_late(until, static_cast<size_t>(room), &waited);
    for (size_t n = 0; n < ended.size(); ++n) {
        late[2 * n] = ended[n].first;
        late[2 * n + 1] = ended[n].second;
    }
    return waited == Waited::kHappened ? static_cast<int32_t>(ended.size()) : code(waited);
}

int64_t gdscache_held_slots(struct gdscache_executor* executor) {
    if (!executor) return -EINVAL;
    return executor->executor.held_slots();
}

int64_t gdscache_free_slots(struct gdscache_executor* executor) {
    if (!executor) return -EINVAL;
    return executor->executor.free_slots();
}

int32_t gdscache_trace(struct gdscache_executor* executor) {
    if (!executor) return -EINVAL;
    executor->executor.trace();
    if (executor->gpu) executor->gpu->gpu->trace();
    return 0;
}

int64_t gdscache_take_spans(struct gdscache_executor* executor, struct gdscache_span* spans, int64_t room) {
    if (!executor || room < 0 || (room && !spans)) return -EINVAL;
    const auto taken = executor->executor.take_spans(static_cast<size_t>(room));
    for (size_t n = 0; n < taken.size(); ++n) {
        const Span& span = taken[n];
        spans[n] = {static_cast<int32_t>(span.kind), span.first, span.last, 0, span.move,
                    span.pages, span.bytes, span.begin, span.end};
    }
    return static_cast<int64_t>(taken.size());
}

void gdscache_executor_faulty(int32_t faulty) { faulty_disks = faulty != 0; }

int32_t gdscache_executor_fail(struct gdscache_executor* executor, const int64_t* faults, int64_t n_faults) {
    if (!executor || !executor->faulty || n_faults < 0 || n_faults > 1 << 20 || (n_faults && !faults)) return -EINVAL;
    try {
        std::vector<PlaceFault> made;
        for (int64_t n = 0; n < n_faults; ++n) {
            const int64_t* const row = faults + 5 * n;
            if (row[3] < 1 || row[3] > static_cast<int64_t>(Failing::kHang) || row[4] < 0) return -EINVAL;
            made.push_back({static_cast<int32_t>(row[0]), row[1], row[2], static_cast<Failing>(row[3]), row[4]});
        }
        executor->faulty->fail(std::move(made));
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

int32_t gdscache_executor_release(struct gdscache_executor* executor) {
    if (!executor || !executor->faulty) return -EINVAL;
    executor->faulty->release();
    return 0;
}
