// The bare loop. See bare.h.

#include "bare.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "xxh3.h"

namespace gdscache {

namespace {

using Clock = std::chrono::steady_clock;

// The answer of a call is needed nowhere; without a use of it the sums would be left out by the compiler.
std::atomic<uint64_t> sink{0};

void sum(const BareLoop& loop, const uint8_t* part, int64_t bytes) {
    uint64_t all = 0;
    for (int64_t at = 0; loop.sum_bytes && at < bytes; at += loop.sum_bytes) {
        all ^= xxh3(part + at, static_cast<size_t>(std::min(loop.sum_bytes, bytes - at)));
    }
    sink.fetch_xor(all, std::memory_order_relaxed);
}

int move(const BareLoop& loop, int64_t piece, int thread) {
    const int64_t at = piece * loop.piece_bytes, bytes = std::min(loop.piece_bytes, loop.bytes - at);
    uint8_t* const part = loop.memory + (loop.memory_bytes < loop.bytes ? thread * loop.piece_bytes : at);
    if (loop.op == Op::kWrite) {
        if (loop.planes) std::memcpy(part, loop.planes + at, static_cast<size_t>(bytes));
        sum(loop, part, bytes);
    }
    const auto size = static_cast<size_t>(bytes);
    const ssize_t moved = loop.op == Op::kRead ? pread(loop.fd, part, size, at) : pwrite(loop.fd, part, size, at);
    if (moved != bytes) return moved < 0 ? -errno : -ENODATA;
    if (loop.op == Op::kRead) {
        sum(loop, part, bytes);
        if (loop.planes) std::memcpy(loop.planes + at, part, static_cast<size_t>(bytes));
    }
    return 0;
}

}  // namespace

int run(const BareLoop& loop, double& seconds) {
    constexpr int64_t kMost = int64_t{1} << 40;
    constexpr int kMostThreads = 1024;
    if (loop.fd < 0 || !loop.memory || loop.sum_bytes < 0 || loop.threads < 1 || loop.threads > kMostThreads) {
        return -EINVAL;
    }
    if (loop.bytes < 1 || loop.bytes > kMost || loop.piece_bytes < 1 || loop.piece_bytes > kMost) return -EINVAL;
    if (loop.memory_bytes < loop.bytes && loop.memory_bytes / loop.threads < loop.piece_bytes) return -EINVAL;
    const int64_t pieces = (loop.bytes + loop.piece_bytes - 1) / loop.piece_bytes;
    std::atomic<int64_t> next{0};
    std::atomic<int> error{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(loop.threads));
    try {
        for (int n = 0; n < loop.threads; ++n) {
            threads.emplace_back([&, n] {
                go.wait(false);
                for (int64_t piece; !error && (piece = next++) < pieces;) {
                    if (const int answer = move(loop, piece, n)) error = answer;
                }
            });
        }
    } catch (const std::system_error&) {
        error = -EAGAIN;
    }
    const Clock::time_point begin = Clock::now();
    go = true;
    go.notify_all();
    for (std::thread& thread : threads) thread.join();
    seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    return error;
}

}  // namespace gdscache
