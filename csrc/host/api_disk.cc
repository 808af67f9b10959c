// The plain C interface of disks: checks, and calls of what it stands for. See api.h.

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>

#include "api_cufile.h"
#include "bare.h"
#include "cuda.h"
#include "cufile_handle.h"
#include "disk.h"
#include "faulty_disk.h"
#include "memory.h"

using namespace gdscache;

struct gdscache_disk {
    std::unique_ptr<Disk> disk;
    FaultyDisk* faulty = nullptr;
    bool used = false;
    std::vector<Piece> pieces;
    std::vector<Ended> ended;  // that did not fit
};

namespace {

// No exception leaves the library.
template <typename Call>
auto guarded(Call call) -> decltype(call()) {
    try {
        return call();
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    } catch (const std::length_error&) {
        return -ENOMEM;
    } catch (...) {
        return -EIO;
    }
}

constexpr int64_t kMostRows = int64_t{1} << 32;

static_assert(sizeof(iovec) == 2 * sizeof(uint64_t), "fragments are given as rows of two words");

std::unique_ptr<Disk> opened(const char* kind, int workers, int depth, Refusal& refusal) {
    if (!kind) return open_disk(workers, depth, refusal);
    if (!std::strcmp(kind, "ring")) return open_ring_disk(workers, depth, refusal);
    if (!std::strcmp(kind, "threads")) return open_threads_disk(workers, refusal);
    refusal = {EINVAL, "there is no such disk"};
    return nullptr;
}

}  // namespace

namespace {

template <typename Open>
int32_t give_out(Open open, struct gdscache_disk** disk, char* why, int64_t why_size) {
    return guarded([&]() -> int32_t {
        Refusal refusal;
        auto made = std::make_unique<gdscache_disk>();
        made->disk = open(refusal);
        if (made->disk) {
            *disk = made.release();
            return 0;
        }
        if (why && why_size > 0) std::snprintf(why, static_cast<size_t>(why_size), "%s", refusal.why.c_str());
        return refusal.error ? -refusal.error : -EIO;
    });
}

}  // namespace

int32_t gdscache_disk_open(const char* kind, int32_t workers, int32_t depth, struct gdscache_disk** disk, char* why,
                           int64_t why_size) {
    if (!disk) return -EINVAL;
    return give_out([&](Refusal& refusal) { return opened(kind, workers, depth, refusal); }, disk, why, why_size);
}

int32_t gdscache_cufile_disk(struct gdscache_cufile* cufile, int32_t workers, struct gdscache_disk** disk, char* why,
                             int64_t why_size) {
    if (!cufile || !disk) return -EINVAL;
    const auto open = [&](Refusal& refusal) {
        return open_cufile_disk(workers, cufile->files, cufile->batched, refusal);
    };
    return give_out(open, disk, why, why_size);
}

void gdscache_disk_close(struct gdscache_disk* disk) { delete disk; }

const char* gdscache_disk_name(const struct gdscache_disk* disk) { return disk ? disk->disk->name() : nullptr; }

int64_t gdscache_disk_pending(const struct gdscache_disk* disk) {
    return disk ? static_cast<int64_t>(disk->disk->pending()) : -EINVAL;
}

int32_t gdscache_disk_submit(struct gdscache_disk* disk, const int64_t* pieces, int64_t n_pieces,
                             const uint64_t* fragments, int64_t n_fragments) {
    if (!disk || n_pieces < 0 || n_fragments < 0 || n_pieces > kMostRows || n_fragments > kMostRows) return -EINVAL;
    if ((n_pieces && !pieces) || (n_fragments && !fragments)) return -EINVAL;
    return guarded([&]() -> int32_t {
        disk->pieces.clear();
        for (int64_t n = 0; n < n_pieces; n++) {
            const int64_t* const row = pieces + 7 * n;
            const bool sound = row[1] >= 0 && row[1] <= 1 && row[2] >= 0 && row[2] <= INT32_MAX && row[4] >= 0 &&
                               row[5] >= 1 && row[5] <= kMostFragments && row[4] <= n_fragments - row[5];
            if (!sound) return -EINVAL;
            disk->pieces.push_back({static_cast<uint64_t>(row[0]),
                                    reinterpret_cast<const iovec*>(fragments + 2 * row[4]),
                                    static_cast<uint32_t>(row[5]), static_cast<int32_t>(row[2]), row[3],
                                    row[1] ? Op::kWrite : Op::kRead, row[6] != 0});
        }
        disk->used = true;
        const MustNotFail reserve;  // what has begun cannot be taken back
        disk->disk->submit(disk->pieces);
        return 0;
    });
}

int64_t gdscache_disk_reap(struct gdscache_disk* disk, int64_t* ended, int64_t room, double seconds) {
    if (!disk || room < 1 || !ended || !(seconds == seconds)) return -EINVAL;
    return guarded([&]() -> int64_t {
        const MustNotFail reserve;
        if (disk->ended.empty()) {
            const int count = disk->disk->reap(disk->ended, seconds);
            if (count < 0) return count;
        }
        const size_t some = std::min(static_cast<size_t>(room), disk->ended.size());
        for (size_t n = 0; n < some; n++) {
            const Ended& one = disk->ended[n];
            const int64_t row[5] = {static_cast<int64_t>(one.tag), one.first, one.count, one.error, one.moved};
            std::memcpy(ended + 5 * n, row, sizeof row);
        }
        disk->ended.erase(disk->ended.begin(), disk->ended.begin() + static_cast<ptrdiff_t>(some));
        return static_cast<int64_t>(some);
    });
}

int32_t gdscache_disk_wake(struct gdscache_disk* disk) {
    if (!disk) return -EINVAL;
    disk->disk->wake();
    return 0;
}

int32_t gdscache_disk_fail(struct gdscache_disk* disk, const int64_t* faults, int64_t n_faults) {
    if (!disk || n_faults < 0 || n_faults > kMostRows || (n_faults && !faults) || disk->used || disk->faulty) {
        return -EINVAL;
    }
    return guarded([&]() -> int32_t {
        std::vector<Fault> made;
        for (int64_t n = 0; n < n_faults; n++) {
            const int64_t* const row = faults + 3 * n;
            if (row[0] < 0 || row[1] < 1 || row[1] > static_cast<int64_t>(Failing::kHang) || row[2] < 0) return -EINVAL;
            made.push_back({static_cast<uint64_t>(row[0]), static_cast<Failing>(row[1]), row[2]});
        }
        auto faulty = open_faulty_disk(std::move(disk->disk), std::move(made));
        disk->faulty = faulty.get();
        disk->disk = std::move(faulty);
        return 0;
    });
}

int32_t gdscache_disk_release(struct gdscache_disk* disk) {
    if (!disk || !disk->faulty) return -EINVAL;
    disk->faulty->release();
    return 0;
}

int32_t gdscache_cut_and_merge(const int64_t* requests, int64_t n_requests, int64_t limit, int64_t most_a_run,
                               int64_t* fragments, int64_t most_fragments, int64_t* runs, int64_t most_runs,
                               int64_t counts[2]) {
    if (n_requests < 0 || n_requests > kMostRows || (n_requests && !requests) || !counts) return -EINVAL;
    if (limit < 1 || most_a_run < 1 || most_a_run > kMostFragments || most_fragments < 0 || most_runs < 0) {
        return -EINVAL;
    }
    if ((most_fragments && !fragments) || (most_runs && !runs)) return -EINVAL;
    return guarded([&]() -> int32_t {
        std::vector<Request> given;
        int64_t parts = 0;
        for (int64_t n = 0; n < n_requests; n++) {
            const int64_t* const row = requests + 4 * n;
            const bool sound = row[0] >= 0 && row[0] <= INT32_MAX && row[1] >= 0 && row[3] >= 1 &&
                               row[1] <= INT64_MAX - row[3];
            if (!sound || (parts += row[3] / limit + 1) > kMostRows) return -EINVAL;
            given.push_back({static_cast<int32_t>(row[0]), row[1], static_cast<uint64_t>(row[2]), row[3]});
        }
        const Runs made = cut_and_merge(given, limit, static_cast<uint32_t>(most_a_run));
        counts[0] = static_cast<int64_t>(made.fragments.size());
        counts[1] = static_cast<int64_t>(made.runs.size());
        if (counts[0] > most_fragments || counts[1] > most_runs) return -ERANGE;
        for (size_t n = 0; n < made.fragments.size(); n++) {
            const int64_t row[3] = {reinterpret_cast<int64_t>(made.fragments[n].iov_base),
                                    static_cast<int64_t>(made.fragments[n].iov_len), made.requests[n]};
            std::memcpy(fragments + 3 * n, row, sizeof row);
        }
        for (size_t n = 0; n < made.runs.size(); n++) {
            const Run& run = made.runs[n];
            const int64_t row[5] = {run.fd, run.offset, run.first, run.count, run.bytes};
            std::memcpy(runs + 5 * n, row, sizeof row);
        }
        return 0;
    });
}

int32_t gdscache_bare(const struct gdscache_bare_loop* loop, double* seconds, char* why, int64_t why_size) {
    if (!loop || !seconds) return -EINVAL;
    return guarded([&]() -> int32_t {
        try {
            std::optional<Cuda> cuda;
            if (loop->driver) {
                cuda.emplace(reinterpret_cast<const char*>(loop->driver), reinterpret_cast<void*>(loop->context));
            }
            return run({loop->fd, loop->write ? Op::kWrite : Op::kRead, loop->bytes, loop->piece_bytes, loop->threads,
                        reinterpret_cast<uint8_t*>(loop->memory), loop->memory_bytes,
                        reinterpret_cast<uint8_t*>(loop->planes), loop->sum_bytes, cuda ? &*cuda : nullptr,
                        loop->device},
                       *seconds);
        } catch (const CudaError& error) {
            if (why && why_size > 0) std::snprintf(why, static_cast<size_t>(why_size), "%s", error.what());
            return -EIO;
        }
    });
}
