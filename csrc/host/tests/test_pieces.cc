// The life of a piece on a system that moves few bytes at a time, is interrupted, or ends early: every byte is moved
// once, after any answer, by calls that O_DIRECT would take. And on a system that never does its work.

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "disk/disk.h"
#include "tests/check.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

struct Script {
    int64_t end;        // of the file
    uint32_t bad;       // a fragment that answers EIO, alone or with others; or an invalid one
    uint64_t whims;     // one call in `whims` is interrupted, is to be tried again, or moves few bytes; 0: none
};

// Play the calls of a piece of whole sectors until all of it has ended. Returns the end of each fragment.
std::vector<Ended> play(const Piece& piece, const Script& script, std::vector<uint8_t>& file, Random& random) {
    std::vector<Part> parts, again;
    std::vector<Ended> ended;
    begin(piece, parts);
    for (int calls = 0; !parts.empty(); calls++) {
        CHECK(calls < 100000);
        const Part part = parts.back();
        parts.pop_back();
        iovec one;
        const Call call = next_call(piece, part, one);
        CHECK(call.offset % kAlignment == 0 && call.bytes % kAlignment == 0 && call.count >= 1);
        int64_t answer = std::clamp<int64_t>(script.end - call.offset, 0, call.bytes);
        const uint64_t whim = script.whims ? random.below(script.whims) : 9;
        if (part.first <= script.bad && script.bad < part.first + part.count) {
            answer = -EIO;
        } else if (whim < 2) {
            answer = whim ? -EINTR : -EAGAIN;
        } else if (whim < 6 && answer > kAlignment) {  // less than a sector is the end of a file
            answer = kAlignment + static_cast<int64_t>(random.below(static_cast<uint64_t>(answer - kAlignment)));
        }
        for (int64_t left = answer, n = 0, at = call.offset; left > 0; n++) {
            const int64_t some = std::min(left, static_cast<int64_t>(call.vectors[n].iov_len));
            std::memcpy(call.vectors[n].iov_base, file.data() + at, static_cast<size_t>(some));
            left -= some;
            at += some;
        }
        again.clear();
        advance(piece, part, answer, ended, again);
        parts.insert(parts.end(), again.begin(), again.end());
    }
    return ended;
}

void check(const Script& script, Random& random) {
    std::vector<uint8_t> file = random.bytes(200 * kAlignment);
    std::vector<std::vector<uint8_t>> memory(1 + random.below(5));
    std::vector<iovec> fragments;
    for (auto& some : memory) {
        some.assign((1 + random.below(8)) * kAlignment, 0);
        fragments.push_back({some.data(), some.size()});
    }
    const int64_t offset = static_cast<int64_t>(random.below(100)) * kAlignment;
    const Piece piece{7, fragments.data(), static_cast<uint32_t>(fragments.size()), 3, offset, Op::kRead, true};
    std::vector<uint32_t> told(fragments.size());
    int64_t moved = 0, expected = 0;
    for (const Ended& answer : play(piece, script, file, random)) {
        for (uint32_t n = answer.first; n < answer.first + answer.count; n++) told[n]++;
        CHECK(answer.tag == 7 && (answer.error == EIO) == (answer.first == script.bad && answer.count == 1));
        moved += answer.moved;
    }
    int64_t at = offset;
    for (size_t n = 0; n < fragments.size(); n++) {
        CHECK(told[n] == 1);
        const int64_t bytes = static_cast<int64_t>(fragments[n].iov_len);
        const int64_t there = n == script.bad ? 0 : std::clamp<int64_t>(script.end - at, 0, bytes);
        CHECK(!std::memcmp(fragments[n].iov_base, file.data() + at, static_cast<size_t>(there)));
        expected += there;
        at += bytes;
    }
    CHECK(moved == expected);
}

// A call that is to be tried again and again ends with its error.
void never(int answer) {
    uint8_t byte = 0;
    iovec fragment{&byte, 1}, one;
    const Piece piece{1, &fragment, 1, 3, 0, Op::kWrite, true};
    std::vector<Part> parts, again;
    std::vector<Ended> ended;
    begin(piece, parts);
    for (int calls = 0; ended.empty(); calls++) {
        CHECK(calls < 10000);
        const Part part = parts.back();
        (void)next_call(piece, part, one);
        again.clear();
        advance(piece, part, answer, ended, again);
        parts = again;
    }
    CHECK(ended.size() == 1 && ended[0].error == -answer && ended[0].moved == 0);
}

}  // namespace

int main(int argc, char** argv) {
    const uint64_t count = rounds(argc, argv, 3000);
    Random random(41);
    const int64_t all = 200 * kAlignment;
    for (uint64_t n = 0; n < count; n++) {
        const int64_t end = static_cast<int64_t>(random.below(static_cast<uint64_t>(all)));
        check({all, 99, 8}, random);
        check({end, 99, 0}, random);
        check({all, static_cast<uint32_t>(random.below(6)), 8}, random);
    }
    never(-EAGAIN);
    std::printf(" pieces: good\n");
}
