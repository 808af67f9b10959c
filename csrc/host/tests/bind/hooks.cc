// Additions of the tests' build for Python, as `gdscache._native.hooks`: executors that fail on order or are stepped by
// hand, and copies of pages, which only tests call alone.

#include "bind/handles.h"
#include "hash/xxh3.h"
#include "moves/pages.h"
#include "tests/faulty_disk.h"

namespace gdscache {

// --- faults

namespace {

std::atomic<bool> faulty_disks{false};

// The faulty disks of executors, known until they end, also while a close waits for hanging I/O.
std::mutex lock;
std::map<const OpenExecutor*, FaultyDisk*> faulty;

}  // namespace

std::unique_ptr<Disk> between(std::unique_ptr<Disk> disk) {
    if (!faulty_disks) return disk;
    auto made = open_faulty_disk(std::move(disk));
    made->at_end = [disk = made.get()] {
        const std::lock_guard held(lock);
        std::erase_if(faulty, [&](const auto& one) { return one.second == disk; });
    };
    return made;
}

// --- executors

namespace {

// The fields of both kinds of jobs for Python (tests/support/hooks.py).
template <typename Found>
nb::dict job_of(const OpenExecutor& self, const Found& found, int kind) {
    const auto count = static_cast<int64_t>(found.pages.size());
    const Fresh<int64_t> rows(count), slots(count), places(count);
    for (int64_t n = 0; n < count; ++n) {
        const Transfer& page = found.pages[n];
        rows.data[n] = page.row, slots.data[n] = page.slot, places.data[n] = page.at;
    }
    nb::dict job;
    job["number"] = found.id, job["move"] = found.move, job["kind"] = kind, job["sums"] = found.sums;
    job["memory"] = self.name_of(found.memory);
    job["layers"] = range_of(found.first, found.last);
    job["rows"] = rows.array, job["slots"] = slots.array, job["at"] = places.array;
    return job;
}

nb::object object_of(const nb::dict& fields) { return nb::module_::import_("types").attr("SimpleNamespace")(**fields); }

}  // namespace

// Steps of a test in place of a null disk's I/O, a GPU's foreign copies, and time.
class ExecutorHooks {
public:
    static void fail(const OpenExecutor& self, const Int64s& faults) {
        auto* const disk = dynamic_cast<FaultyDisk*>(self.executor().disks_.at(0).get());
        require(disk, "an executor without faults");
        require(faults.has(faults.shape(0), 5), "faults of other numbers");
        std::vector<Fault> made;
        for (const int64_t* row = faults.data(); row != faults.data() + faults.size(); row += 5) {
            require(row[3] >= 1 && row[3] <= static_cast<int64_t>(Failing::kHang) && row[4] >= 0, "no such fault");
            made.push_back({static_cast<int32_t>(row[0]), row[1], row[2], static_cast<Failing>(row[3]), row[4]});
        }
        disk->fail(std::move(made));
        const std::lock_guard held(lock);
        faulty[&self] = disk;
    }
    static void release(const OpenExecutor& self) {
        const std::lock_guard held(lock);
        const auto found = faulty.find(&self);
        require(found != faulty.end(), "an executor without faults");
        found->second->release();
    }

    static nb::object take_io(const OpenExecutor& self, int32_t disk) {
        require(disk >= 0 && disk < 64, "no such disk");
        Executor& executor = self.executor();
        const IoJob* const found = Executor::Held(executor)->take_io(disk);
        if (!found) return nb::none();
        nb::dict job = job_of(self, *found, found->write);
        job["files"] = self.name_of(found->files);
        job["start"] = found->start, job["stop"] = found->stop;
        return object_of(job);
    }
    static void io_ended(const OpenExecutor& self, int64_t job, const nb::object& pages, int32_t error) {
        const Numbers<int64_t> rows(pages);
        std::vector<IoEnd> ends;
        for (int64_t n = 0; n < rows.size(); ++n) {
            const int64_t page = rows.data()[n];
            ends.push_back({static_cast<int32_t>(std::clamp<int64_t>(page, -1, INT32_MAX)), error});
        }
        const bool known = Executor::Held(self.executor())->io_ended(job, ends.data(), rows.size());
        require(known, "no pages of a job that is under way");
    }
    static void expire(const OpenExecutor& self, Nanoseconds time) { Executor::Held(self.executor())->expire(time); }

    static nb::object take_copy(const OpenExecutor& self) {
        Executor& executor = of(self);
        const CopyJob* const found = executor.take_copy(Hands::kForeign, 0);
        if (!found) return nb::none();
        nb::dict job = job_of(self, *found, static_cast<int>(found->copy));
        job["window"] = range_of(found->window, found->window + found->window_slots);
        const int64_t page_blocks = executor.limits().page_blocks;
        const Fresh<int64_t> blocks(static_cast<int64_t>(found->blocks.size()) / page_blocks, page_blocks);
        std::copy(found->blocks.begin(), found->blocks.end(), blocks.data);
        job["blocks"] = blocks.array;
        return object_of(job);
    }
    static void copy_queued(const OpenExecutor& self, int64_t job, int64_t point) {
        require(point >= 0 && of(self).copy_queued(job, point), "no copy that is under way");
    }
    static void copy_ended(const OpenExecutor& self, int64_t job, const UInt64s& sums, const Text& broken) {
        const bool known =
            of(self).copy_ended(job, sums.data(), broken && !broken->empty() ? broken->c_str() : nullptr);
        require(known, "no copy that is under way");
    }

private:
    static Executor& of(const OpenExecutor& self) {
        require(!self.has_gpu(), "a GPU's copies are its threads'");
        return self.executor();
    }
};

// --- pages

namespace {

// `kMove`: `gather` or `scatter`, of extents whose layers begin at `parts`. Returns checksums, uint64 (pages, layers).
template <typename Part, auto kMove>
nb::object move_pages(const OpenPlanes& from, const Int64s& blocks, const UInt64s& parts, const nb::object& layers,
                      bool streamed) {
    const HostPlanes& pool = open(from.pool, "the pool");
    const Range range(layers);
    const Fresh<uint64_t> sums(parts.size(), range.size());
    for (int64_t n = 0; n < parts.size(); ++n) {
        const auto move = [&] {
            return kMove(pool, blocks.data() + n * pool.page_blocks, range.start, range.stop, at<Part>(parts[n]),
                         sums.data + n * range.size(), streamed ? Store::kStreamed : Store::kCached);
        };
        if constexpr (std::is_void_v<decltype(move())>) move();
        else refuse_if(!move(), "a page that does not fit into a packed extent");
    }
    if (streamed) stream_fence();
    return sums.array;
}

}  // namespace

void bind_hooks(nb::module_& module) {
    nb::module_ hooks = module.def_submodule("hooks");
    hooks.def("set_faulty_disks", [](bool all) { faulty_disks = all; });
    hooks.def("fail", &ExecutorHooks::fail, "executor"_a, "faults"_a);
    hooks.def("release", &ExecutorHooks::release, "executor"_a);
    hooks.def("take_io", &ExecutorHooks::take_io, "executor"_a, "disk"_a);
    hooks.def("io_ended", &ExecutorHooks::io_ended, "executor"_a, "job"_a, "pages"_a, "error"_a = 0);
    hooks.def("expire", &ExecutorHooks::expire, "executor"_a, "now"_a);
    hooks.def("take_copy", &ExecutorHooks::take_copy, "executor"_a);
    hooks.def("copy_queued", &ExecutorHooks::copy_queued, "executor"_a, "job"_a, "point"_a);
    hooks.def("copy_ended", &ExecutorHooks::copy_ended, "executor"_a, "job"_a, "sums"_a.none(),
              "broken"_a.none() = nb::none());
    hooks.def("gather", &move_pages<uint8_t, gather>, "pool"_a, "blocks"_a, "parts"_a, "layers"_a, "streamed"_a = true);
    hooks.def("scatter", &move_pages<const uint8_t, scatter>, "pool"_a, "blocks"_a, "parts"_a, "layers"_a,
              "streamed"_a = true);
}

}  // namespace gdscache
