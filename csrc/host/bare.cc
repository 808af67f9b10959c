// The bare loop. See bare.h.

#include "bare.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace gdscache {

int bare(int fd, Op op, int64_t offset, int64_t bytes, int64_t piece_bytes, int depth, int workers, bool copied,
         Bare& result) {
    constexpr int64_t kMost = int64_t{1} << 40;
    if (fd < 0 || offset < 0 || bytes < 1 || bytes > kMost || piece_bytes < kAlignment || depth < 1) return -EINVAL;
    if (offset > INT64_MAX - bytes || piece_bytes > kMost / depth || piece_bytes % kAlignment) return -EINVAL;
    Refusal refusal;
    const auto disk = open_disk(workers, depth, refusal);
    if (!disk) return refusal.error ? -refusal.error : -EIO;
    const size_t room = static_cast<size_t>(piece_bytes) * static_cast<size_t>(depth);
    void* const memory = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return -errno;
    std::memset(memory, 0x5A, room);  // every page of it is there before the clock runs
    std::vector<iovec> fragments(static_cast<size_t>(depth));
    std::vector<Ended> ended;
    int64_t begun = 0;
    int error = 0;
    result = {0, 0, disk->name()};
    const auto submit = [&](uint64_t buffer) {
        const int64_t some = std::min(piece_bytes, bytes - begun);
        fragments[buffer] = {static_cast<uint8_t*>(memory) + static_cast<int64_t>(buffer) * piece_bytes,
                             static_cast<size_t>(some)};
        const Piece piece{buffer, &fragments[buffer], 1, fd, offset + begun, op, copied};
        disk->submit({&piece, 1});
        begun += some;
    };
    const auto start = std::chrono::steady_clock::now();
    for (int n = 0; n < depth && begun < bytes; n++) submit(static_cast<uint64_t>(n));
    while (disk->pending() && !error) {
        ended.clear();
        const int count = disk->reap(ended, -1);
        if (count < 0) error = -count;
        for (const Ended& one : ended) {
            result.moved += one.moved;
            if (one.error && !error) error = one.error;
            if (!error && begun < bytes) submit(one.tag);
        }
    }
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    while (disk->pending() && disk->reap(ended, -1) >= 0) {  // nothing may write to the buffers any more
    }
    if (!disk->pending()) munmap(memory, room);
    return -error;
}

}  // namespace gdscache
