// Copies of an executor's moves between memory and a GPU's planes, by two threads a direction: one queues copies, the
// other waits for their ends and reports them.

#pragma once

#include <exception>
#include <functional>
#include <limits>

#include "base/memory.h"
#include "base/quiet.h"
#include "gpu/gpu.h"
#include "moves/executor.h"

namespace gdscache {

class GpuServer {
public:
    // Both outlive it.
    GpuServer(Executor& executor, Gpu& gpu) : executor_(executor), gpu_(gpu) {
        try {
            start(threads_, "gds-load", 0, &GpuServer::queue, this, Hands::kForeignLoads, std::ref(loads_));
            start(threads_, "gds-load", 1, &GpuServer::end, this, std::ref(loads_));
            start(threads_, "gds-store", 0, &GpuServer::queue, this, Hands::kForeignStores, std::ref(stores_));
            start(threads_, "gds-store", 1, &GpuServer::end, this, std::ref(stores_));
        } catch (...) {
            join();
            throw;
        }
    }
    // Stops the executor, and waits for queued copies.
    ~GpuServer() { join(); }
    GpuServer(GpuServer&&) = delete;

private:
    static constexpr Span::Kind kStreams[2][2] = {{Span::Kind::kLoadCopies, Span::Kind::kLoadKernels},
                                                  {Span::Kind::kStoreCopies, Span::Kind::kStoreKernels}};

    struct Queued {
        int64_t job, move;
        QueuedCopies copies;
    };
    // Queued copies of one direction, in order.
    struct Direction {
        std::mutex lock;
        std::condition_variable changed;
        std::deque<Queued> queued;
        bool over = false;
    };

    void queue(Hands hands, Direction& direction) {
        const MustNotFail reserve;
        std::vector<int64_t> slots;
        gpu_.leave_captures_alone();
        while (const CopyJob* const job = executor_.take_copy(hands, std::numeric_limits<Nanoseconds>::max())) {
            const int64_t number = job->id, move = job->move;
            try {
                if (job->copy == Copy::kDigest) throw CudaError("a look at memory of a GPU, which nothing asks for");
                const bool load = job->copy == Copy::kScatter;
                const Nanoseconds begin = now();
                QueuedCopies queued = gpu_.queue(copies(*job, &slots));
                executor_.tell(span(load ? Span::Kind::kScatter : Span::Kind::kGather, move, queued, {begin, now()}));
                executor_.copy_queued(number, load ? queued.point : queued.read);
                const std::lock_guard held(direction.lock);
                direction.queued.push_back({number, move, std::move(queued)});
                direction.changed.notify_one();
            } catch (const std::exception& error) {
                executor_.copy_ended(number, nullptr, error.what());
            }
        }
    }
    void end(Direction& direction) {
        const MustNotFail reserve;
        std::vector<uint64_t> sums;
        std::vector<uint8_t> unfit;
        gpu_.leave_captures_alone();
        while (true) {
            std::unique_lock held(direction.lock);
            direction.changed.wait(held, [&] { return direction.over || !direction.queued.empty(); });
            if (direction.queued.empty()) return;
            Queued queued = std::move(direction.queued.front());
            direction.queued.pop_front();
            held.unlock();
            QueuedCopies& copies = queued.copies;
            try {
                const Nanoseconds begin = now();
                sums.resize(static_cast<size_t>(copies.pages * (copies.last - copies.first)));
                unfit.assign(static_cast<size_t>(copies.pages), 0);
                const StreamTimes times = gpu_.finish(copies, copies.sums ? sums.data() : nullptr, unfit.data());
                executor_.tell(span(Span::Kind::kDigest, queued.move, copies, {begin, now()}));
                for (const int stream : {0, 1}) {
                    if (times[stream].begin == times[stream].end) continue;
                    executor_.tell(span(kStreams[copies.load ? 0 : 1][stream], queued.move, copies, times[stream]));
                }
                executor_.copy_ended(queued.job, copies.sums ? sums.data() : nullptr, nullptr, unfit.data());
            } catch (const std::exception& error) {
                executor_.copy_ended(queued.job, nullptr, error.what());
            }
        }
    }
    Span span(Span::Kind kind, int64_t move, const QueuedCopies& copies, StreamTime time) const {
        const std::vector<int64_t>& bounds = gpu_.planes().bounds;
        const int64_t bytes = copies.pages * (bounds[copies.last] - bounds[copies.first]);
        return {kind, copies.first, copies.last, move, copies.pages, bytes, time.begin, time.end};
    }
    PageCopies copies(const CopyJob& job, std::vector<int64_t>* slots) const {
        const Place& place = executor_.places()[job.memory];
        slots->clear();
        for (const Transfer& page : job.pages) slots->push_back(page.slot);
        const int64_t base = job.window * executor_.limits().extent_bytes;
        const bool part = job.window_slots != 0;
        const int64_t count = part ? job.window_slots * executor_.limits().extent_bytes / job.stride : place.slots;
        const ExtentSlots extents(reinterpret_cast<uint64_t>(place.memory) + static_cast<uint64_t>(base), job.stride,
                                  job.origin, count, place.foreign, place.pinned, part ? 0 : place.fence);
        const auto pages = static_cast<int64_t>(job.pages.size());
        return PageCopies(job.copy == Copy::kScatter, static_cast<Route>(job.route), job.sums, job.first, job.last,
                          pages, extents, slots->data(), job.blocks.data(), job.after);
    }
    void join() {
        executor_.stop();
        for (size_t n = 0; n < threads_.size(); n += 2) threads_[n].join();  // no more copies are queued
        for (Direction* const direction : {&loads_, &stores_}) {
            const std::lock_guard held(direction->lock);
            direction->over = true;
            direction->changed.notify_all();
        }
        for (size_t n = 1; n < threads_.size(); n += 2) threads_[n].join();
    }

    Executor& executor_;
    Gpu& gpu_;
    Direction loads_, stores_;
    std::vector<std::thread> threads_;
};

}  // namespace gdscache
