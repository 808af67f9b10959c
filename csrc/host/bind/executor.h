// An executor as Python has it.

#pragma once

#include "bind/handles.h"
#include "gpu/gpu_server.h"
#include "moves/executor.h"

namespace gdscache {

class OpenExecutor {
public:
    OpenExecutor(const Int64s& bounds, int64_t extent_bytes, int32_t page_blocks, const nb::dict& spaces,
                 const nb::object& limits, const nb::object& reserve, int64_t fence, const OpenPlanes* pool,
                 const OpenGpu* gpu, const nb::sequence& disks, int threads);
    ~OpenExecutor() { close(); }
    OpenExecutor(OpenExecutor&&) = delete;

    Executor& executor() const { return open(closed_ ? nullptr : executor_.get(), "the executor"); }
    bool has_gpu() const { return gpu_ != nullptr; }
    nb::object name_of(int32_t space) const { return names_[space]; }
    const std::string& disk() const {
        executor();
        return disk_;
    }

    void begin(int64_t number, int priority, Nanoseconds until, const nb::sequence& ways, const Int64s& groups,
               const nb::object& routes, const UInt64s& after, bool more);
    void extend(int64_t move, const nb::sequence& ways, bool last);
    void cancel(int64_t move) { executor().cancel(move); }  // an unknown move has ended
    std::optional<int64_t> wait(int64_t move, double seconds, int32_t group);
    nb::tuple outcome(int64_t move);
    void refuse(int status);

    std::vector<std::pair<int64_t, int32_t>> take_late(double seconds, int64_t most);
    int64_t held_slots() const { return closed_ ? 0 : executor_->held_slots(); }
    int64_t free_slots() const { return executor().free_slots(); }

    void trace() {
        executor().trace();
        if (gpu_) gpu_->gpu->trace();
    }
    nb::list take_spans();

    bool closed() const { return closed_; }
    void stop() { executor().stop(); }
    void close() {
        if (std::exchange(closed_, true)) return;
        {
            const Unlocked others;  // a disk's threads and waiting calls may want it
            executor_->stop();
            calls_.end();
            server_.reset();
            executor_.reset();
        }
        gpu_.reset();
        pool_.reset();
        kept_.clear();  // a reference to this object must keep no tier's memory
    }

private:
    int32_t number_of(const nb::object& name) const;
    std::vector<Way> read(const nb::sequence& ways) const;

    std::string disk_;  // the first disk's name
    std::shared_ptr<const HostPlanes> pool_;
    std::shared_ptr<GpuCopies> gpu_;
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<GpuServer> server_;  // ends before the executor
    Calls calls_;                        // slices of waits; signals are handled between them
    bool closed_ = false;
    nb::dict numbers_;  // of spaces, by name
    nb::list names_;
    nb::dict kept_;  // the spaces, which keep the memory behind their addresses alive
};

}  // namespace gdscache
