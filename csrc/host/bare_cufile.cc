// The bare loop of cuFile's calls. See bare_cufile.h.

#include "bare_cufile.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

namespace gdscache {

namespace {

using Clock = std::chrono::steady_clock;

bool is_sound(const CuFileLoop& loop) {
    constexpr int64_t kMost = int64_t{1} << 40;
    constexpr int kMostThreads = 1024;
    return loop.threads >= 1 && loop.threads <= kMostThreads && loop.bytes >= 1 && loop.bytes <= kMost &&
           loop.piece_bytes >= 1 && loop.piece_bytes <= kMost;
}

}  // namespace

int run(const CuFileLoop& loop, double& seconds) {
    if (!is_sound(loop)) return -EINVAL;
    const CuFileHandle file = loop.files->file(loop.fd);
    const auto base = loop.files->memory(loop.memory, static_cast<size_t>(loop.bytes));
    if (!file || !base) return -EINVAL;
    const int64_t pieces = (loop.bytes + loop.piece_bytes - 1) / loop.piece_bytes;
    const auto before = static_cast<int64_t>(loop.memory - *base);
    std::atomic<int64_t> next{0};
    std::atomic<int> error{0}, ready{0};
    std::atomic<bool> go{false};
    const auto work = [&] {
        try {
            const Cuda::Entered entered(loop.files->cuda());
            ++ready;
            ready.notify_one();
            go.wait(false);
            for (int64_t piece; !error && (piece = next++) < pieces;) {
                const int64_t at = piece * loop.piece_bytes, bytes = std::min(loop.piece_bytes, loop.bytes - at);
                const int64_t moved = loop.files->cufile().move(loop.op == Op::kWrite, file, *base,
                                                                static_cast<size_t>(bytes), at, before + at);
                if (moved != bytes) error = moved < 0 ? static_cast<int>(moved) : -ENODATA;
            }
        } catch (const CudaError&) {
            error = -EIO;
            ++ready;
            ready.notify_one();
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(loop.threads));
    try {
        while (threads.size() < static_cast<size_t>(loop.threads)) threads.emplace_back(work);
    } catch (const std::system_error&) {
        error = -EAGAIN;
    }
    for (int seen; (seen = ready) < static_cast<int>(threads.size());) ready.wait(seen);
    const Clock::time_point begin = Clock::now();
    go = true;
    go.notify_all();
    for (std::thread& thread : threads) thread.join();
    seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    return error;
}

}  // namespace gdscache
