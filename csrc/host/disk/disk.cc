#include "disk/disk.h"

#include <limits>
#include <numeric>

namespace gdscache {
namespace {

constexpr int64_t kMostBytes = 1 << 30;  // of one call; Linux moves up to 2 GiB less 4,096
constexpr uint32_t kMostTries = 1000;    // of a call that answers EAGAIN
constexpr int64_t kLeastRun = 1 << 20, kMostRun = 4 << 20;

int64_t bytes_of(const iovec& fragment) { return static_cast<int64_t>(fragment.iov_len); }

int64_t whole_sectors(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void alone(const Piece& piece, uint32_t first, uint32_t last, int64_t start, std::vector<Part>& parts) {
    for (uint32_t n = first; n < last; n++) {
        parts.push_back({.first = n, .count = 1, .start = start});
        start += bytes_of(piece.fragments[n]);
    }
}

// The answer of a call for one fragment.
void advance_one(const Piece& piece, Part part, int64_t answer, std::vector<Ended>& ended, std::vector<Part>& again) {
    const int64_t bytes = bytes_of(piece.fragments[part.first]);
    const auto end = [&](int error, int64_t moved) { ended.push_back({piece.tag, part.first, 1, error, moved}); };
    if (answer < 0) return end(static_cast<int>(-answer), 0);
    const int64_t reached = part.resume + answer;
    if (reached == bytes) return end(0, bytes);
    // A continuation begins on a whole sector, and a file that ends within a sector has no more bytes.
    if (answer == 0 || reached <= part.moved) return end(0, part.moved);
    part.moved = reached;
    part.resume = reached / kAlignment * kAlignment;
    part.tries = 0;
    again.push_back(part);
}

}  // namespace

bool is_sound(const Piece& piece) {
    if (piece.fd < 0 || piece.offset < 0 || !piece.fragments || !piece.count) return false;
    if (piece.count > kMostFragments || (piece.op != Op::kRead && piece.op != Op::kWrite)) return false;
    uint64_t room = static_cast<uint64_t>(std::numeric_limits<int64_t>::max() - piece.offset);
    for (uint32_t n = 0; n < piece.count; n++) {
        const iovec& fragment = piece.fragments[n];
        if (!fragment.iov_base || !fragment.iov_len || fragment.iov_len > room) return false;
        room -= fragment.iov_len;
    }
    return true;
}

void begin(const Piece& piece, std::vector<Part>& parts) {
    if (bytes_of(piece.fragments, piece.count) > kMostBytes) alone(piece, 0, piece.count, 0, parts);
    else parts.push_back({.first = 0, .count = piece.count, .start = 0});
}

int64_t bytes_of(const iovec* fragments, uint32_t count) {
    return std::accumulate(fragments, fragments + count, int64_t{0},
                           [](int64_t sum, const iovec& one) { return sum + bytes_of(one); });
}

Call next_call(const Piece& piece, const Part& part, iovec& one) {
    const iovec* const fragments = piece.fragments + part.first;
    const int64_t offset = piece.offset + part.start + part.resume;
    if (part.count > 1) return {fragments, part.count, offset, bytes_of(fragments, part.count)};
    const int64_t bytes = std::min(bytes_of(*fragments) - part.resume, kMostBytes);
    one = {static_cast<uint8_t*>(fragments->iov_base) + part.resume, static_cast<size_t>(bytes)};
    return {&one, 1, offset, bytes};
}

void advance(const Piece& piece, const Part& part, int64_t answer, std::vector<Ended>& ended,
             std::vector<Part>& again) {
    if (answer == -EINTR || (answer == -EAGAIN && part.tries < kMostTries)) {
        again.push_back(part);
        again.back().tries += answer == -EAGAIN;
        return;
    }
    if (part.count == 1) return advance_one(piece, part, answer, ended, again);
    const uint32_t last = part.first + part.count;
    uint32_t next = part.first;
    int64_t moved = 0;
    for (; next < last && moved + bytes_of(piece.fragments[next]) <= answer; next++) {
        moved += bytes_of(piece.fragments[next]);
    }
    if (next > part.first) ended.push_back({piece.tag, part.first, next - part.first, 0, moved});
    alone(piece, next, last, part.start + moved, again);
}

std::unique_ptr<Disk> open_disk(int workers, int depth) {
    try {
        return open_ring_disk(workers, depth);
    } catch (const Error&) {
        return open_threads_disk(workers);
    }
}

int64_t run_bytes(int64_t total, int ways) {
    const int64_t share = whole_sectors((total + ways - 1) / std::max(ways, 1));
    return std::clamp(share, kLeastRun, kMostRun);
}

Runs cut_and_merge(std::span<const Request> requests, int64_t limit, uint32_t most) {
    std::vector<uint32_t> order(requests.size());
    std::iota(order.begin(), order.end(), 0u);
    const auto before = [&](uint32_t a, uint32_t b) {
        const Request &x = requests[a], &y = requests[b];
        return x.fd != y.fd ? x.fd < y.fd : x.offset < y.offset;
    };
    if (!std::ranges::is_sorted(order, before)) std::ranges::stable_sort(order, before);
    Runs made;
    made.fragments.reserve(requests.size());
    made.requests.reserve(requests.size());
    for (const uint32_t index : order) {
        const Request& request = requests[index];
        int64_t step = request.bytes;
        if (step > limit) {
            const int64_t parts = step / limit + (step % limit != 0);
            step = whole_sectors(step / parts + (step % parts != 0));
        }
        for (int64_t at = 0; at < request.bytes; at += step) {
            const int64_t bytes = std::min(step, request.bytes - at), offset = request.offset + at;
            Run* const run = made.runs.empty() ? nullptr : &made.runs.back();
            if (run && run->fd == request.fd && run->offset + run->bytes == offset && run->bytes + bytes <= limit &&
                run->count < most) {
                run->bytes += bytes;
                run->count++;
            } else {
                made.runs.push_back({request.fd, offset, static_cast<uint32_t>(made.fragments.size()), 1, bytes});
            }
            made.fragments.push_back(
                {reinterpret_cast<void*>(request.address + static_cast<uint64_t>(at)), static_cast<size_t>(bytes)});
            made.requests.push_back(index);
        }
    }
    return made;
}

}  // namespace gdscache
