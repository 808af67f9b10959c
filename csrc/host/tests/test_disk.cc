// Both disks: sound and hostile pieces at random, compared with the file's bytes; wakes from other threads; many disks
// at once. With a count of rounds it is the fuzz of `make sanitize`.

#include <fcntl.h>
#include <sys/resource.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "disk/disk.h"
#include "disk/threads_disk.h"
#include "tests/disks.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

struct Asked {
    Piece piece;
    std::vector<iovec> fragments;
    std::vector<std::vector<uint8_t>> memory;
    uint32_t left;
    bool hostile = false, writes = false;
};

int temporary(const std::vector<uint8_t>& content) {
    char path[] = "/tmp/gdscache-test-XXXXXX";
    const int file = mkstemp(path);
    REQUIRE((file >= 0 && !unlink(path)));
    REQUIRE(write(file, content.data(), content.size()) == static_cast<ssize_t>(content.size()));
    return file;
}

std::unique_ptr<Asked> asked(Random& random, int file, int64_t file_bytes, uint64_t tag) {
    auto made = std::make_unique<Asked>();
    constexpr size_t kSizes[] = {1, 7, 512, 4096, 5000, 20000};
    const uint32_t count = static_cast<uint32_t>(1 + random.below(random.below(20) ? 5 : 1024));
    for (uint32_t n = 0; n < count; n++) {
        const size_t size = count > 8 ? 16 : random.pick(kSizes);
        made->memory.emplace_back(size, uint8_t{0xEE});
        made->fragments.push_back({made->memory.back().data(), size});
    }
    made->writes = random.below(4) == 0;
    // Writes go beyond the reads, each to a place of its own.
    const int64_t offset = made->writes ? file_bytes + (int64_t{1} << 20) * static_cast<int64_t>(tag + 1)
                                        : static_cast<int64_t>(random.below(static_cast<uint64_t>(file_bytes)));
    made->piece = {tag, nullptr, count, file, offset, made->writes ? Op::kWrite : Op::kRead, random.below(2) == 0};
    if (random.below(4) == 0) {
        made->hostile = true;
        Piece& piece = made->piece;
        switch (random.below(8)) {
            case 0: piece.offset = -static_cast<int64_t>(random.next() >> 1) - 1; break;
            case 1: piece.offset = INT64_MAX - static_cast<int64_t>(random.below(1)); break;
            case 2: piece.count = 0; break;
            case 3: piece.count = 1025 + static_cast<uint32_t>(random.below(1u << 31)); break;
            case 4: piece.fd = -1 - static_cast<int32_t>(random.below(1 << 20)); break;
            case 5: made->fragments[random.below(count)].iov_base = nullptr; break;
            case 6: made->fragments[random.below(count)].iov_len = random.below(2) ? 0 : SIZE_MAX; break;
            case 7: piece.op = static_cast<Op>(2 + random.below(200)); break;
        }
    }
    made->piece.fragments = made->fragments.data();
    made->left = made->piece.count;
    return made;
}

void check_answer(Asked& one, const Ended& answer, const std::vector<uint8_t>& content) {
    if (one.hostile) {
        REQUIRE(answer.error == EINVAL);
        REQUIRE(answer.first == 0);
        REQUIRE(answer.count == one.piece.count);
        REQUIRE(answer.moved == 0);
        one.left = 0;
        return;
    }
    REQUIRE(answer.error == 0);
    REQUIRE(answer.count >= 1);
    REQUIRE(answer.count <= one.left);
    REQUIRE(answer.first + answer.count <= one.piece.count);
    one.left -= answer.count;
    int64_t at = one.piece.offset, moved = 0;
    for (uint32_t n = 0; n < answer.first; n++) at += static_cast<int64_t>(one.fragments[n].iov_len);
    for (uint32_t n = answer.first; n < answer.first + answer.count; n++) {
        const int64_t size = static_cast<int64_t>(one.fragments[n].iov_len);
        const int64_t there = std::clamp<int64_t>(static_cast<int64_t>(content.size()) - at, 0, size);
        const int64_t expected = one.writes ? size : there;
        if (!one.writes && there) {
            REQUIRE(!std::memcmp(one.memory[n].data(), content.data() + at, static_cast<size_t>(there)));
        }
        moved += expected;
        at += size;
    }
    REQUIRE(answer.moved == moved);
}

using Open = std::unique_ptr<Disk> (*)(int depth);

void fuzz(Open open, uint64_t seed, uint64_t count) {
    Random random(seed);
    const std::vector<uint8_t> content = random.bytes(200000);
    const int file = temporary(content);
    std::map<uint64_t, std::unique_ptr<Asked>> live;
    const auto disk = open(static_cast<int>(1 + random.below(40)));
    REQUIRE(disk);
    const std::jthread waker([&](const std::stop_token& over) {
        while (!over.stop_requested()) {
            disk->wake();
            std::this_thread::yield();
        }
    });
    std::vector<Ended> ended;
    for (uint64_t tag = 0; tag < count || !live.empty();) {
        std::vector<Piece> pieces;
        for (uint64_t n = random.below(12); n-- > 0 && tag < count; tag++) {
            // Reads see only the first content: a piece that writes makes the file longer, with a hole.
            auto one = asked(random, file, static_cast<int64_t>(content.size()) / 2, tag);
            pieces.push_back(one->piece);
            live.emplace(tag, std::move(one));
        }
        disk->submit(pieces);
        ended.clear();
        const int reaped = disk->reap(ended, random.below(3) ? 0.001 : 0);
        REQUIRE(reaped == std::ssize(ended));
        for (const Ended& answer : ended) {
            Asked& one = *live.at(answer.tag);
            check_answer(one, answer, content);
            if (!one.left) live.erase(answer.tag);
        }
        REQUIRE(disk->pending() == live.size());
    }
    close(file);
}

void abandon(Open open) {
    Random random(9);
    const std::vector<uint8_t> content = random.bytes(1 << 20);
    const int file = temporary(content);
    for (int n = 0; n < 20; n++) {
        std::vector<uint8_t> memory(1 << 16);
        iovec fragments[16];
        std::vector<Piece> pieces;
        auto disk = open(3);
        for (uint64_t k = 0; k < 16; k++) {
            fragments[k] = {memory.data() + k * 4096, 4096};
            pieces.push_back({k, &fragments[k], 1, file, static_cast<int64_t>(k * 4096), Op::kRead, true});
        }
        disk->submit(pieces);
        disk.reset();
    }
    close(file);
}

// Calls under way, by file and operation.
struct Meeting {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::pair<int32_t, Op>, int> now, most;
    std::map<int32_t, std::vector<int64_t>> written;  // offsets, in the order of their begins

    // The most of each kind under way at a time.
    int all() const {
        return std::accumulate(most.begin(), most.end(), 0, [](int sum, const auto& one) { return sum + one.second; });
    }
};

// A call ends when the wanted number of calls have met, or after a while.
class MeetingCaller final : public Caller {
public:
    MeetingCaller(Meeting& meeting, int wanted) : meeting_(meeting), wanted_(wanted) {}

    int64_t transfer(const Piece& piece, const Call& call) override {
        std::unique_lock lock(meeting_.mutex);
        const std::pair key{piece.fd, piece.op};
        meeting_.most[key] = std::max(meeting_.most[key], ++meeting_.now[key]);
        if (piece.op == Op::kWrite) meeting_.written[piece.fd].push_back(call.offset);
        meeting_.changed.notify_all();
        meeting_.changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return meeting_.all() >= wanted_; });
        --meeting_.now[key];
        return call.bytes;
    }

    bool in_turn(const Piece& piece) const override { return keeps_lock(piece); }

private:
    Meeting& meeting_;
    const int wanted_;
};

TEST_CASE("writes that the kernel copies go to a file by one thread at a time, in order; all else in parallel") {
    for (const bool copied : {true, false}) {
        const int files[2] = {temporary({1}), temporary({1})};
        const int wanted = copied ? 5 : 8;  // at a time, at most: of 3 + 3 writes and of 3 reads by eight threads
        Meeting meeting;
        const auto disk =
            open_threads_disk(8, "meeting", [&] { return std::make_unique<MeetingCaller>(meeting, wanted); });
        REQUIRE(disk != nullptr);
        uint8_t memory[16];
        iovec fragment{memory, sizeof memory};
        std::vector<Piece> pieces;
        for (uint64_t n = 0; n < 9; n++) {
            const Op op = n < 6 ? Op::kWrite : Op::kRead;
            pieces.push_back({n, &fragment, 1, files[n < 6 ? n % 2 : 0], static_cast<int64_t>(n * 16), op, copied});
        }
        disk->submit(pieces);
        std::vector<Ended> ended;
        while (disk->pending()) REQUIRE(disk->reap(ended, 10) >= 0);
        REQUIRE(ended.size() == 9);
        const std::map<int32_t, std::vector<int64_t>> in_order{{files[0], {0, 32, 64}}, {files[1], {16, 48, 80}}};
        if (copied) {
            REQUIRE(meeting.most.at({files[0], Op::kWrite}) == 1);
            REQUIRE(meeting.most.at({files[1], Op::kWrite}) == 1);
            REQUIRE(meeting.written == in_order);
        }
        REQUIRE(meeting.all() >= wanted);
        for (const int file : files) close(file);
    }
}

std::unique_ptr<Disk> ring(int depth) { return open_ring_disk(2, depth); }

// The descriptors of this process's rings.
std::vector<int> rings() {
    std::vector<int> found;
    for (int fd = 0; fd < 1024; fd++) {
        char target[64] = "";
        if (readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof target - 1) < 0) continue;
        if (std::string(target) == "anon_inode:[io_uring]") found.push_back(fd);
    }
    return found;
}

// A ring that fails for good is replaced by another one, and no submitted piece is lost. Without another ring each
// piece fails, until there is one.
void ring_that_fails(Open open_disk) {
    if (open_disk != ring) return;
    const std::vector<uint8_t> content(1 << 20, 0x5A);
    const int file = temporary(content), nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    const auto disk = ring(4);
    std::vector<std::vector<uint8_t>> memory(64, std::vector<uint8_t>(4096));
    std::vector<iovec> fragments;
    for (auto& one : memory) fragments.push_back({one.data(), one.size()});
    const auto read = [&](int wanted) {
        std::vector<Piece> pieces;
        for (uint64_t n = 0; n < 64; n++) {
            std::fill(memory[n].begin(), memory[n].end(), uint8_t{0});
            pieces.push_back({n, &fragments[n], 1, file, static_cast<int64_t>(n) * 4096, Op::kRead, n % 2 == 0});
        }
        disk->submit(pieces);
        std::vector<Ended> ended;
        while (disk->pending()) disk->reap(ended, 1);
        REQUIRE(ended.size() == 64);
        for (const Ended& one : ended) {
            REQUIRE((one.error != 0) == (wanted != 0));
            if (!one.error) REQUIRE(memory[one.tag][0] == 0x5A);
        }
    };
    read(0);
    for (int n = 0; n < 3; n++) {
        for (const int fd : rings()) REQUIRE(dup2(nothing, fd) == fd);
        read(0);
        const std::jthread other([&] { disk->wake(); });  // the new ring hears it
        std::vector<Ended> none;
        REQUIRE((disk->reap(none, 20) == 0 && none.empty()));
    }
    // Requests that the kernel has of a failed ring still end.
    const int late = eventfd(0, EFD_CLOEXEC);
    uint64_t got = 0;
    const iovec where{&got, sizeof got};
    const Piece hanging{99, &where, 1, late, 0, Op::kRead, false};
    disk->submit({&hanging, 1});
    std::vector<Ended> ended;
    CHECK(disk->reap(ended, 0.01) == 0);
    for (const int fd : rings()) CHECK(dup2(nothing, fd) == fd);
    const auto some = [&] {
        std::vector<Piece> pieces;
        for (uint64_t n = 0; n < 8; n++) pieces.push_back({n, &fragments[n], 1, file, 0, Op::kRead, false});
        disk->submit(pieces);
        while (disk->pending() > 1) disk->reap(ended, 1);
        CHECK(ended.size() == 8);
        ended.clear();
    };
    some();
    some();
    CHECK(write(late, &fragments[0].iov_len, sizeof(uint64_t)) == sizeof(uint64_t));
    REQUIRE(disk->reap(ended, 20) == 1);
    REQUIRE(ended[0].tag == 99);
    REQUIRE(!ended[0].error);
    REQUIRE(got == 4096);
    REQUIRE(disk->pending() == 0);
    close(late);
    rlimit limit;
    REQUIRE(!getrlimit(RLIMIT_NOFILE, &limit));
    const rlimit none{3, limit.rlim_max};
    for (const int fd : rings()) REQUIRE(dup2(nothing, fd) == fd);
    REQUIRE(!setrlimit(RLIMIT_NOFILE, &none));
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    read(EMFILE);
    REQUIRE(std::string(disk->name()) == "ring (failed)");
    REQUIRE(!setrlimit(RLIMIT_NOFILE, &limit));
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    read(0);
    REQUIRE(std::string(disk->name()) == "ring");
    close(nothing);
    close(file);
}

// Cut and merged requests: their bytes once, in the order of the files, in equal parts of whole sectors; runs within
// their limits, which end only at a gap or at a limit.
void cuts(Random& random) {
    const int64_t limit = kAlignment * static_cast<int64_t>(1 + random.below(random.below(2) ? 5 : 64));
    constexpr uint32_t kMost[] = {1, 2, 1024};
    const uint32_t most = random.pick(kMost);
    std::vector<Request> requests;
    int64_t ends[2] = {};
    for (uint64_t n = random.below(40); n-- > 0;) {
        const auto fd = static_cast<int32_t>(random.below(2));
        const int64_t begin = ends[fd] + kAlignment * static_cast<int64_t>(random.below(2) * random.below(30));
        const int64_t bytes = kAlignment * static_cast<int64_t>(1 + random.below(7));
        requests.push_back({fd, begin, (n + 1) << 32, bytes});
        ends[fd] = begin + bytes;
    }
    random.shuffle(requests);
    const Runs made = cut_and_merge(requests, limit, most);
    std::vector<int64_t> covered(requests.size());
    uint32_t next = 0;
    for (size_t n = 0; n < made.runs.size(); n++) {
        const Run& run = made.runs[n];
        REQUIRE((run.first == next && run.count >= 1 && run.count <= most && run.bytes <= limit));
        int64_t at = run.offset;
        for (; next < run.first + run.count; next++) {
            const uint32_t number = made.requests[next];
            const Request& request = requests[number];
            const auto size = static_cast<int64_t>(made.fragments[next].iov_len);
            REQUIRE(request.fd == run.fd);
            REQUIRE(request.offset + covered[number] == at);
            REQUIRE(size % kAlignment == 0);
            const auto place = reinterpret_cast<uint64_t>(made.fragments[next].iov_base);
            REQUIRE(place == request.address + static_cast<uint64_t>(covered[number]));
            const int64_t parts = (request.bytes + limit - 1) / limit, left = request.bytes - covered[number];
            const int64_t equal = ((request.bytes + parts - 1) / parts + kAlignment - 1) / kAlignment * kAlignment;
            REQUIRE(size == std::min(equal, left));
            covered[number] += size, at += size;
        }
        REQUIRE(at == run.offset + run.bytes);
        if (n == 0) continue;
        const Run& before = made.runs[n - 1];
        const auto first = static_cast<int64_t>(made.fragments[run.first].iov_len), end = before.offset + before.bytes;
        REQUIRE((before.fd < run.fd || (before.fd == run.fd && end <= run.offset)));
        REQUIRE((before.fd != run.fd || end < run.offset || before.count == most || before.bytes + first > limit));
    }
    REQUIRE(next == made.fragments.size());
    for (size_t n = 0; n < requests.size(); n++) REQUIRE(covered[n] == requests[n].bytes);
}

std::unique_ptr<Disk> threads(int depth) { return open_threads_disk(std::min(depth, 6)); }

}  // namespace

TEST_CASE("sound and hostile pieces, by two disks at once") {
    each_disk<Open>(ring, threads, [](Open open) {
        std::vector<std::jthread> beside;  // each with an owner of its own
        for (uint64_t n = 0; n < 2; n++)
            beside.push_back(started([=] { fuzz(open, 100 + n, setting("ROUNDS", 1500)); }));
    });
}

TEST_CASE("nothing touches memory after the end of a busy disk") { each_disk(ring, threads, abandon); }
TEST_CASE("a ring that fails for good") { each_disk(ring, threads, ring_that_fails); }

TEST_CASE("cut and merged requests") {
    Random random(6);
    for (int n = 0; n < 300; n++) cuts(random);
}
