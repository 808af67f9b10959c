// An executor as Python has it.

#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../executor.h"
#include "../gpu_server.h"
#include "handles.h"

namespace gdscache {

struct Opened {
    std::string disk;  // the first one's name
    std::shared_ptr<OpenPool> pool;
    std::shared_ptr<GpuCopies> gpu;
    std::unique_ptr<Executor> executor;
    std::unique_ptr<GpuServer> server;  // which ends before the executor
    std::atomic<int> inside{0};  // calls that wait there
    std::atomic<bool> closing{false};
};

// A part of a wait within the executor, which is not closed meanwhile. Signals are heard between two of them. Throws
// `Stopped` where it is too late.
class Inside {
public:
    explicit Inside(Opened& opened) : inside_(opened.inside) {
        ++inside_;
        if (!opened.closing) return;
        --inside_;
        throw Stopped();
    }
    ~Inside() { --inside_; }
    Inside(Inside&&) = delete;

private:
    std::atomic<int>& inside_;
};

class OpenExecutor {
public:
    OpenExecutor(const Array<const int64_t>& bounds, int64_t extent_bytes, int32_t page_blocks, const nb::dict& spaces,
                 const nb::object& limits, const nb::object& reserve, int64_t fence, const HostPool* pool, const OpenGpu* gpu,
                 const nb::sequence& disks, int threads);
    ~OpenExecutor() { close(); }
    OpenExecutor(OpenExecutor&&) = delete;

    Opened& open() const { return gdscache::open(closed_ ? nullptr : opened_, "the executor"); }
    nb::object name_of(int32_t space) const { return names_[space]; }
    const std::string& disk() const { return open().disk; }

    void begin(int64_t number, int priority, Nanoseconds until, const nb::sequence& ways, const Array<const int64_t>& groups,
               const nb::object& routes, const Array<const uint64_t>& after, bool more);
    void extend(int64_t move, const nb::sequence& ways, bool last);
    void cancel(int64_t move) { open().executor->cancel(move); }  // nothing is left of one that nobody knows any more
    nb::object wait(int64_t move, double seconds, int32_t group);
    nb::tuple outcome(int64_t move);
    void refuse(int status);

    nb::object take_late(double seconds, int64_t most);
    int64_t held_slots() const { return closed_ ? 0 : opened_->executor->held_slots(); }
    int64_t free_slots() const { return open().executor->free_slots(); }

    void trace() {
        open().executor->trace();
        if (open().gpu) open().gpu->gpu->trace();
    }
    nb::list take_spans();

    bool closed() const { return closed_; }
    void stop() { open().executor->stop(); }
    void close() {
        if (closed_) return;
        closed_ = true;
        {
            const nb::gil_scoped_release others;  // threads of a disk may want it, and calls that wait
            opened_->closing = true;
            opened_->executor->stop();
            while (opened_->inside) std::this_thread::sleep_for(std::chrono::microseconds(100));
            opened_->server.reset();
            opened_->executor.reset();
        }
        opened_.reset();
        kept_.clear();  // who still knows us keeps no tier's memory
    }

private:
    int32_t number_of(const nb::object& name) const;
    std::vector<Way> read(const nb::sequence& ways) const;

    std::shared_ptr<Opened> opened_;  // none behind `close`
    bool closed_ = false;
    nb::dict numbers_;                // of spaces, by their names
    nb::list names_;
    nb::dict kept_;  // the spaces, behind whose addresses there is memory
};

}  // namespace gdscache
