// Copies of an executor's moves between memory and a GPU's planes, by two threads a direction: one queues copies, the
// other waits for their ends and reports them.

#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "gpu/gpu.h"
#include "moves/executor.h"

namespace gdscache {

class GpuServer {
public:
    // Both outlive it.
    GpuServer(Executor& executor, Gpu& gpu);
    // Stops the executor, and waits for queued copies.
    ~GpuServer();
    GpuServer(GpuServer&&) = delete;

private:
    struct Queued {
        int64_t job, move;
        bool load;
        QueuedCopies copies;
    };
    // Queued copies of one direction, in order.
    struct Direction {
        std::mutex lock;
        std::condition_variable changed;
        std::deque<Queued> queued;
        bool over = false;
    };

    void queue(Hands hands, Direction& direction);
    void end(Direction& direction);
    Span span(Span::Kind kind, int64_t move, const QueuedCopies& copies, StreamTime time) const;
    PageCopies copies(const CopyJob& job, std::vector<int64_t>* slots) const;
    void join();

    Executor& executor_;
    Gpu& gpu_;
    Direction loads_, stores_;
    std::vector<std::thread> threads_;
};

}  // namespace gdscache
