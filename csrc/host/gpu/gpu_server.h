// The copies of an executor's moves between memory and the planes of a GPU: two threads a direction. One queues what
// may be copied, the other waits for what was queued and says what it was.

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
    // The executor was stopped. Waits for what was queued.
    ~GpuServer();
    GpuServer(GpuServer&&) = delete;

private:
    struct Queued {
        int64_t job, move;
        bool load;
        QueuedCopies copies;
    };
    // What is queued in one direction, in its order.
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
