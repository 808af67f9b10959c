// Pieces that are read, with looks and without, from a file that moves few bytes at a time, is interrupted, fails
// somewhere or ends early: every byte comes to its place once, by calls that O_DIRECT would take and that are not too
// large, and looks reported as taken have the right checksums.

#include <atomic>
#include <cstring>

#include "disk/threads_disk.h"
#include "hash/xxh3.h"
#include "tests/check.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

struct File {
    std::vector<uint8_t> content;
    int64_t bad = -1;  // the place that answers EIO
    bool whims = false;  // half of the calls are interrupted, are to be tried again, or move few bytes
    bool never = false;  // each call is to be tried again
    std::atomic<int> calls{0};
    std::atomic<int64_t> largest{0};
};

class FileCaller final : public Caller {
public:
    FileCaller(File& file, uint64_t seed) : file_(file), random_(seed) {}

    int64_t transfer(const Piece& piece, const Call& call) override {
        CHECK(piece.op == Op::kRead);
        CHECK((call.offset % kAlignment == 0 && call.bytes > 0 && call.bytes % kAlignment == 0));
        CHECK(++file_.calls < 100000);
        if (file_.never) return -EAGAIN;
        file_.largest = std::max<int64_t>(file_.largest, call.bytes);
        if (file_.bad >= call.offset && file_.bad < call.offset + call.bytes) return -EIO;
        int64_t left = std::clamp<int64_t>(static_cast<int64_t>(file_.content.size()) - call.offset, 0, call.bytes);
        const uint64_t whim = file_.whims ? random_.below(16) : 9;
        if (whim < 2) return whim ? -EINTR : -EAGAIN;
        if (whim < 4) left = std::min<int64_t>(left, kAlignment * static_cast<int64_t>(1 + random_.below(20)));
        else if (whim < 8 && left > kAlignment) left -= static_cast<int64_t>(random_.below(left - kAlignment));
        const int64_t moved = left;
        const uint8_t* from = file_.content.data() + call.offset;
        for (uint32_t n = 0; n < call.count && left; ++n) {
            const auto some = std::min<size_t>(call.vectors[n].iov_len, static_cast<size_t>(left));
            std::memcpy(call.vectors[n].iov_base, from, some);
            from += some, left -= static_cast<int64_t>(some);
        }
        return moved;
    }

private:
    File& file_;
    Random random_;
};

// A piece of up to 24 fragments. Most of them are tiled with looks, which need not end with sectors.
struct Read {
    std::vector<std::vector<uint8_t>> memory;
    std::vector<iovec> fragments;
    std::vector<Look> looks;
    std::vector<uint64_t> sums, expected;
    int64_t offset = 0, bytes = 0;
};

Read drawn(Random& random, const File& file) {
    constexpr size_t kSectors[] = {1, 2, 16, 64, 128, 300, 1024};
    Read made;
    made.offset = kAlignment * static_cast<int64_t>(random.below(8));
    for (uint64_t n = 1 + random.below(random.below(2) ? 24 : 2); n-- > 0;) {
        const size_t size = random.pick(kSectors) * kAlignment;
        made.memory.emplace_back(size, uint8_t{0xEE});
        made.fragments.push_back({made.memory.back().data(), size});
        const auto* const begin = file.content.data() + std::min<size_t>(made.offset + made.bytes, file.content.size());
        const size_t there = static_cast<size_t>(file.content.data() + file.content.size() - begin);
        for (size_t from = 0, left = random.below(5) ? size : 0; left;) {
            const size_t some = std::min(left, 1 + random.below(random.below(2) ? size : 3 * kStride));
            made.looks.push_back({made.memory.back().data() + from, some, nullptr});
            made.expected.push_back(from + some <= there ? xxh3(begin + from, some) : 0);
            from += some, left -= some;
        }
        made.bytes += static_cast<int64_t>(size);
    }
    made.sums.resize(made.looks.size());
    for (size_t n = 0; n < made.looks.size(); ++n) made.looks[n].sum = &made.sums[n];
    return made;
}

std::vector<Ended> ends_of(File& file, const Read& read, bool copied) {
    std::atomic<uint64_t> seed{7};
    const auto disk = open_threads_disk(2, "file", [&] { return std::make_unique<FileCaller>(file, seed++); });
    REQUIRE(disk != nullptr);
    file.calls = 0, file.largest = 0;
    const auto count = static_cast<uint32_t>(read.fragments.size());
    const Piece piece{1, read.fragments.data(), count, 0, read.offset, Op::kRead, copied, read.looks};
    disk->submit({&piece, 1});
    std::vector<Ended> ended;
    while (disk->pending()) REQUIRE(disk->reap(ended, 10) >= 0);
    return ended;
}

void check(File& file, Read& read, bool copied) {
    const std::vector<Ended> ended = ends_of(file, read, copied);
    const auto count = static_cast<uint32_t>(read.fragments.size());
    const int64_t there = static_cast<int64_t>(file.content.size()) - read.offset;
    const bool fails = file.bad >= read.offset && file.bad < read.offset + read.bytes;
    const bool quiet = !fails && !file.whims && there >= read.bytes;
    bool looked = false;
    std::vector<uint32_t> told(count);
    for (const Ended& one : ended) {
        looked = looked || one.looked;
        REQUIRE((!one.looked || (one.first == 0 && one.count == count && one.error == 0 && one.moved == read.bytes)));
        int64_t at = read.offset, moved = 0;
        for (uint32_t n = 0; n < one.first + one.count; at += static_cast<int64_t>(read.fragments[n++].iov_len)) {
            if (n < one.first) continue;
            ++told[n];
            const auto size = static_cast<int64_t>(read.fragments[n].iov_len);
            const bool bad = file.bad >= at && file.bad < at + size;
            REQUIRE(one.error == (bad ? EIO : 0));
            REQUIRE((!bad || one.count == 1));
            const auto some = bad ? 0 : std::clamp<int64_t>(std::ssize(file.content) - at, 0, size);
            REQUIRE(!std::memcmp(read.fragments[n].iov_base, file.content.data() + at, static_cast<size_t>(some)));
            moved += some;
        }
        REQUIRE(one.moved == moved);
    }
    REQUIRE(std::ranges::all_of(told, [](uint32_t times) { return times == 1; }));
    if (looked) REQUIRE(read.sums == read.expected);
    if (!quiet) return;
    REQUIRE(looked == !read.looks.empty());
    const int64_t stride = kStride, strides = (read.bytes + stride - 1) / stride;
    if (looked && copied) REQUIRE(file.largest <= stride);
    if (looked && copied) REQUIRE(file.calls == strides);
    if (!copied) REQUIRE(file.calls == 1);
}

}  // namespace

TEST_CASE("every byte comes once, and looks have the right sums") {
    Random random(41);
    File file;
    file.content = random.bytes((6 << 20) + 777);  // ends within a sector
    for (uint64_t n = setting("ROUNDS", 400); n-- > 0;) {
        Read read = drawn(random, file);
        if (random.below(4) == 0) read.looks.clear();
        file.whims = random.below(2) == 0;
        file.bad = random.below(3) ? -1 : static_cast<int64_t>(random.below(file.content.size()));
        check(file, read, random.below(4) != 0);
    }
}

TEST_CASE("a file that never does its work") {
    Random random(42);
    File file;
    file.content = random.bytes(6 << 20);
    file.never = true;
    for (const Ended& one : ends_of(file, drawn(random, file), false)) {
        CHECK(one.error == EAGAIN);
        CHECK(one.moved == 0);
    }
}
