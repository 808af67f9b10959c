// An executor as Python has it.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../executor.h"
#include "../gpu_server.h"
#include "handles.h"

namespace gdscache {

struct Opened {
    std::string disk;  // the first one's name
    std::shared_ptr<const Pool> pool;
    std::shared_ptr<GpuCopies> gpu;
    std::unique_ptr<Executor> executor;
    std::unique_ptr<GpuServer> server;  // which ends before the executor
    Calls calls;  // parts of waits: signals are heard between two of them
};

class OpenExecutor {
public:
    OpenExecutor(const Int64s& bounds, int64_t extent_bytes, int32_t page_blocks, const nb::dict& spaces,
                 const nb::object& limits, const nb::object& reserve, int64_t fence, const HostPool* pool, const OpenGpu* gpu,
                 const nb::sequence& disks, int threads);
    ~OpenExecutor() { close(); }
    OpenExecutor(OpenExecutor&&) = delete;

    Opened& open() const { return gdscache::open(opened_, "the executor"); }
    nb::object name_of(int32_t space) const { return names_[space]; }
    const std::string& disk() const { return open().disk; }

    void begin(int64_t number, int priority, Nanoseconds until, const nb::sequence& ways, const Int64s& groups,
               const nb::object& routes, const UInt64s& after, bool more);
    void extend(int64_t move, const nb::sequence& ways, bool last);
    void cancel(int64_t move) { open().executor->cancel(move); }  // nothing is left of one that nobody knows any more
    std::optional<int64_t> wait(int64_t move, double seconds, int32_t group);
    nb::tuple outcome(int64_t move);
    void refuse(int status);

    std::vector<std::pair<int64_t, int32_t>> take_late(double seconds, int64_t most);
    int64_t held_slots() const { return opened_ ? opened_->executor->held_slots() : 0; }
    int64_t free_slots() const { return open().executor->free_slots(); }

    void trace() {
        open().executor->trace();
        if (open().gpu) open().gpu->gpu->trace();
    }
    nb::list take_spans();

    bool closed() const { return !opened_; }
    void stop() { open().executor->stop(); }
    void close() {
        const std::shared_ptr<Opened> ended = std::move(opened_);
        if (!ended) return;
        {
            const nb::gil_scoped_release others;  // threads of a disk may want it, and calls that wait
            ended->executor->stop();
            ended->calls.end();
            ended->server.reset();
            ended->executor.reset();
        }
        kept_.clear();  // who still knows us keeps no tier's memory
    }

private:
    int32_t number_of(const nb::object& name) const;
    std::vector<Way> read(const nb::sequence& ways) const;

    std::shared_ptr<Opened> opened_;  // none behind `close`
    nb::dict numbers_;  // of spaces, by their names
    nb::list names_;
    nb::dict kept_;  // the spaces, behind whose addresses there is memory
};

}  // namespace gdscache
