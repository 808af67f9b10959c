#include "disk/bare.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <semaphore>
#include <system_error>
#include <thread>
#include <vector>

#include "hash/xxh3.h"

namespace gdscache {
namespace {

using Clock = std::chrono::steady_clock;

// A use of the sums: the compiler would drop them otherwise.
std::atomic<uint64_t> sink{0};

void sum(const BareLoop& loop, const uint8_t* part, int64_t bytes) {
    uint64_t all = 0;
    for (int64_t at = 0; loop.sum_bytes && at < bytes; at += loop.sum_bytes) {
        all ^= xxh3(part + at, static_cast<size_t>(std::min(loop.sum_bytes, bytes - at)));
    }
    sink.fetch_xor(all, std::memory_order_relaxed);
}

// One thread of the loop. It moves through the loop's memory, or through its share of `slots` pieces if the memory has
// fewer bytes than the loop.
class Worker {
public:
    Worker(const BareLoop& loop, int number)
        : loop_(loop),
          shared_(loop.memory_bytes < loop.bytes),
          slots_(shared_ ? slots(loop) : 0),
          own_(loop.memory + (shared_ ? number * slots_ * loop.piece_bytes : 0)) {
        if (!loop.cuda) return;
        entered_.emplace(*loop.cuda);
        stream_ = own_stream(*loop.cuda, false);
        for (int64_t n = 0; n < slots_; ++n) events_.push_back(own_event(*loop.cuda, EventUse::kOrder));
    }
    ~Worker() {
        try {
            finish();  // after a loop that broke off
        } catch (const CudaError&) {  // nothing runs any more
        }
    }
    Worker(Worker&&) = delete;

    int move(int64_t piece) {
        const int64_t at = piece * loop_.piece_bytes, bytes = std::min(loop_.piece_bytes, loop_.bytes - at);
        const int64_t slot = shared_ ? turn_++ % slots_ : 0;
        const CudaEvent copied = events_.empty() ? nullptr : events_[static_cast<size_t>(slot)].get();
        uint8_t* const part = own_ + (shared_ ? slot * loop_.piece_bytes : at);
        const auto size = static_cast<size_t>(bytes);
        if (loop_.op == Op::kWrite) {
            if (loop_.planes) std::memcpy(part, loop_.planes + at, size);
            sum(loop_, part, bytes);
        }
        if (copied) loop_.cuda->await(copied);  // the copy still reads the slot
        const bool read = loop_.op == Op::kRead;
        const ssize_t moved = read ? pread(loop_.fd, part, size, at) : pwrite(loop_.fd, part, size, at);
        if (moved != bytes) return moved < 0 ? -errno : -ENODATA;
        if (read) {
            sum(loop_, part, bytes);
            if (loop_.planes) std::memcpy(loop_.planes + at, part, size);
            if (stream_) {
                list_.clear();
                list_.add(loop_.device + static_cast<uint64_t>(at), reinterpret_cast<uint64_t>(part), size, false);
                loop_.cuda->copy(list_, 0, 1, stream_.get(), true);
            }
            if (copied) loop_.cuda->record(copied, stream_.get());
        }
        return 0;
    }

    void finish() const {
        if (stream_) loop_.cuda->synchronize(stream_.get());
    }

private:
    // Without asynchronous copies one slot is enough, and stays in the processor's cache.
    static int64_t slots(const BareLoop& loop) {
        return loop.cuda ? loop.memory_bytes / loop.threads / loop.piece_bytes : 1;
    }

    const BareLoop& loop_;
    const bool shared_;
    const int64_t slots_;
    uint8_t* const own_;
    int64_t turn_ = 0;
    std::optional<Cuda::Entered> entered_;
    OwnStream stream_;  // copies to GPU memory
    std::vector<OwnEvent> events_;  // of each slot, behind the copy that reads it
    CopyList list_;
};

class CuFileWorker {
public:
    CuFileWorker(const CuFileLoop& loop, CuFileHandle file, uint64_t base)
        : loop_(loop), entered_(loop.files->cuda()), file_(file), base_(base) {}

    int move(int64_t piece) const {
        const int64_t at = piece * loop_.piece_bytes, bytes = std::min(loop_.piece_bytes, loop_.bytes - at);
        const int64_t moved = loop_.files->move(loop_.op == Op::kWrite, file_, base_, static_cast<size_t>(bytes), at,
                                                static_cast<int64_t>(loop_.memory - base_) + at);
        return moved == bytes ? 0 : moved < 0 ? static_cast<int>(moved) : -ENODATA;
    }
    void finish() const {}

private:
    const CuFileLoop& loop_;
    const Cuda::Entered entered_;
    const CuFileHandle file_;
    const uint64_t base_;
};

void check(const LoopShape& loop, bool sound) {
    constexpr int64_t kMost = int64_t{1} << 40;
    constexpr int kMostThreads = 1024;
    const auto some = [](int64_t count, int64_t most) { return count > 0 && count <= most; };
    const bool counts = some(loop.threads, kMostThreads) && some(loop.bytes, kMost) && some(loop.piece_bytes, kMost);
    require(sound && counts && loop.fd >= 0, "a loop that makes no sense");
}

// `make(n)`: the mover of thread `n`. Its `move` answers 0 or a negative error.
template <typename Make>
double run(const LoopShape& loop, Make make) {
    const int64_t pieces = (loop.bytes + loop.piece_bytes - 1) / loop.piece_bytes;
    std::atomic<int64_t> next{0};
    std::atomic<int> error{0};
    std::counting_semaphore ready{0}, go{0};
    std::mutex lock;
    std::exception_ptr refused;
    const auto work = [&](int number) {
        bool waited = false;
        try {
            auto worker = make(number);
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
        for (int n = 0; n < loop.threads; ++n) threads.emplace_back(work, n);
    } catch (const std::system_error&) {
        error = -EAGAIN;
    }
    for (size_t n = 0; n < threads.size(); ++n) ready.acquire();
    const Clock::time_point begin = Clock::now();
    go.release(static_cast<ptrdiff_t>(threads.size()));
    for (std::thread& thread : threads) thread.join();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (refused) std::rethrow_exception(refused);
    if (error) throw Error(-error, cufile_text(-error));
    return seconds;
}

}  // namespace

double run(const BareLoop& loop) {
    const int64_t share = loop.memory_bytes / std::max(loop.threads, 1);
    const bool memory = loop.memory && (loop.memory_bytes >= loop.bytes || share >= loop.piece_bytes);
    const bool onward = !loop.cuda || (loop.op == Op::kRead && loop.device);
    check(loop, memory && loop.sum_bytes >= 0 && onward);
    return run(loop, [&](int number) { return Worker(loop, number); });
}

double run(const CuFileLoop& loop) {
    const CuFileHandle file = loop.files->file(loop.fd);
    const auto base = loop.files->memory(loop.memory, static_cast<size_t>(loop.bytes));
    check(loop, file && base);
    return run(loop, [&](int) { return CuFileWorker(loop, file, *base); });
}

}  // namespace gdscache
