
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <semaphore>
#include <system_error>
#include <thread>

#include "cuda/cuda.h"
#include "disk/disk.h"

namespace gdscache {
namespace {

using Clock = std::chrono::steady_clock;

// One thread of the loop.
class Worker {
public:
    explicit Worker(const BareLoop& loop) : loop_(loop) {
        if (!loop.cuda) return;
        entered_.emplace(*loop.cuda);
        stream_ = own_stream(*loop.cuda, false);
    }
    ~Worker() {
        try {
            finish();  // after a loop that broke off
        } catch (const CudaError&) {  // nothing runs any more
        }
    }
    Worker(Worker&&) = delete;

    // Answers 0 or a negative error.
    int move(int64_t piece) {
        const int64_t at = piece * loop_.piece_bytes;
        uint8_t* const part = loop_.memory + at;
        const auto size = static_cast<size_t>(std::min(loop_.piece_bytes, loop_.bytes - at));
        const bool read = loop_.op == Op::kRead;
        const ssize_t moved = read ? pread(loop_.fd, part, size, at) : pwrite(loop_.fd, part, size, at);
        if (moved != static_cast<ssize_t>(size)) return moved < 0 ? -errno : -ENODATA;
        if (!loop_.target) return 0;
        const uint64_t target = loop_.target + static_cast<uint64_t>(at);
        if (stream_) {
            list_.clear();
            list_.add(target, reinterpret_cast<uint64_t>(part), size, false);
            loop_.cuda->copy(list_, 0, 1, stream_.get(), true);
        } else {
            std::memcpy(reinterpret_cast<void*>(target), part, size);
        }
        return 0;
    }

    void finish() const {
        if (stream_) loop_.cuda->synchronize(stream_.get());
    }

private:
    const BareLoop& loop_;
    std::optional<Cuda::Entered> entered_;
    OwnStream stream_;  // copies to GPU memory
    CopyList list_;
};

void check(const BareLoop& loop) {
    constexpr int64_t kMost = int64_t{1} << 40;
    constexpr int kMostThreads = 1024;
    const auto some = [](int64_t count, int64_t most) { return count > 0 && count <= most; };
    const bool counts = some(loop.threads, kMostThreads) && some(loop.bytes, kMost) && some(loop.piece_bytes, kMost);
    const bool onward = loop.target ? loop.op == Op::kRead : !loop.cuda;
    require(counts && onward && loop.memory && loop.fd >= 0, "a loop that makes no sense");
}

}  // namespace

double run(const BareLoop& loop) {
    check(loop);
    const int64_t pieces = (loop.bytes + loop.piece_bytes - 1) / loop.piece_bytes;
    std::atomic<int64_t> next{0};
    std::atomic<int> error{0};
    std::counting_semaphore ready{0}, go{0};
    std::mutex lock;
    std::exception_ptr refused;
    const auto work = [&] {
        bool waited = false;
        try {
            Worker worker(loop);
            ready.release();
            go.acquire();
            waited = true;
            for (int64_t piece; !error && (piece = next++) < pieces;) {
                if (const int answer = worker.move(piece)) error = answer;
            }
            worker.finish();
        } catch (const std::exception&) {  // CudaError, or no memory
            error = -EIO;
            const std::lock_guard held(lock);
            if (!refused) refused = std::current_exception();
            if (!waited) ready.release();
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(loop.threads));
    try {
        for (int n = 0; n < loop.threads; ++n) threads.emplace_back(work);
    } catch (const std::system_error&) {
        error = -EAGAIN;
    }
    for (size_t n = 0; n < threads.size(); ++n) ready.acquire();
    const Clock::time_point begin = Clock::now();
    go.release(static_cast<ptrdiff_t>(threads.size()));
    for (std::thread& thread : threads) thread.join();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (refused) std::rethrow_exception(refused);
    if (error) throw Error(-error, std::generic_category().message(-error));
    return seconds;
}

}  // namespace gdscache
