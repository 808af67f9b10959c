// The executor with its threads and real files: pages go out of planes into memory and files, and come back by all
// routes, while others are cancelled, run out of time, or are damaged. Ends in every state of a move.

#include <numeric>

#include "tests/disks.h"
#include "tests/executor_rig.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

using Open = std::unique_ptr<Disk> (*)();

std::unique_ptr<Disk> threads() { return open_threads_disk(3); }

std::unique_ptr<Disk> ring() { return open_ring_disk(3, 8); }

// Pages out of memory into the same slots of the files.
Way writes(const std::vector<int64_t>& slots) {
    Way way;
    way.source = kCpu;
    way.target = kSsd;
    way.pages = std::ssize(slots);
    way.sources = way.targets = slots;
    return way;
}

void faults(Open open) {
    auto disk = open_faulty_disk(open());
    FaultyDisk* const faulty = disk.get();
    Rig rig(std::move(disk), 1);
    const Way way = reads(rig, 6);
    faulty->fail({fault(rig, 0, Failing::kError, EIO), fault(rig, 1, Failing::kShortMove, 0, 100, 101),
                  fault(rig, 2, Failing::kFlip, 0, 5, 6), fault(rig, 3, Failing::kHang),
                  fault(rig, 4, Failing::kLate, 5)});
    const std::vector<Group> whole = groups_of(rig.limits, {0});
    const int64_t move = rig.begin(Priority::kLoad, after(0.5), {way}, whole);
    CHECK(rig.executor->wait(move, -1, after(60)) == 0);
    const Status expected[] = {Status::kIoError,  Status::kShortRead, Status::kChecksum,
                               Status::kDeadline, Status::kLoaded,    Status::kLoaded};
    const Outcome* const outcome = rig.executor->outcome(move);
    CHECK(std::equal(expected, expected + 6, outcome->statuses.begin()));
    CHECK((outcome->late == std::vector<int32_t>{3} && rig.executor->held_slots() == 1));
    CHECK(rig.executor->free_slots() == kReserve - 1);
    std::thread releaser([faulty] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        faulty->release();
    });
    rig.finish(move);  // waits for late pages
    releaser.join();
    REQUIRE((rig.executor->held_slots() == 0 && rig.executor->free_slots() == kReserve));
    const Way down = writes({kStretch, 3 * kStretch});  // in one file, but no neighbours
    faulty->fail({fault(rig, 3 * kStretch, Failing::kError, ENOSPC)});
    const Outcome written = rig.finish(rig.begin(Priority::kStore, after(60), {down}, whole));
    const std::vector<std::pair<int32_t, int32_t>> failed{{1, ENOSPC}};
    REQUIRE((written.errors == failed && written.late.empty()));
}

// Pages that stay where they are read are checked by their reader, if pieces end with layers and sectors, else by
// copiers. A wrong byte of any layer is found either way.
void looks(Open open) {
    for (const int64_t scale : {64, 100, 128}) {
        Rig rig(open(), 1, 6, scale);
        rig.executor->trace();
        REQUIRE(rig.limits.extent_bytes > 5 << 18);
        Way way = reads(rig, 1 + kLayers);
        way.target = kCpu;
        way.targets = way.sources;
        for (int32_t layer = 0; layer < kLayers; layer++) {
            const auto [file, offset] = rig.where(kSsd, 1 + layer);
            const int64_t at = offset + rig.limits.bounds[layer + 1] - 1;
            uint8_t byte;
            REQUIRE(pread(file, &byte, 1, at) == 1);
            byte ^= 4;
            REQUIRE(pwrite(file, &byte, 1, at) == 1);
        }
        const int64_t move = rig.begin(Priority::kPrefetch, after(60), {way}, groups_of(rig.limits, {0}));
        const Outcome outcome = rig.finish(move);
        REQUIRE(outcome.statuses[0] == Status::kLoaded);
        for (int32_t layer = 0; layer < kLayers; layer++) REQUIRE(outcome.statuses[1 + layer] == Status::kChecksum);
        const std::vector<Span> spans = rig.executor->take_spans(1000);
        const auto by_copier = std::ranges::count(spans, Span::Kind::kDigest, &Span::kind);
        REQUIRE((by_copier == 0) == (open == threads && scale == 64));  // scale 100: no sector; 128: a layer over 1 MiB
    }
}

void refusals(Open open) {
    Rig rig(open());
    const Way way = reads(rig, 6);
    rig.executor->refuse(Status::kSwitchedOff);
    const Nanoseconds end = after(4);
    for (int n = 0; n < 10; n++) {
        const Outcome outcome = rig.finish(rig.begin(Priority::kLoad, after(60), {way}, groups_of(rig.limits, {0, 2})));
        for (const Status status : outcome.statuses) REQUIRE(status == Status::kSwitchedOff);
    }
    REQUIRE(after(0) < end);
    rig.executor->refuse(Status::kPending);
    const Outcome outcome = rig.finish(rig.begin(Priority::kLoad, after(60), {way}, groups_of(rig.limits, {0, 2})));
    for (const Status status : outcome.statuses) REQUIRE(status == Status::kLoaded);
}

void stops(Open open) {
    auto disk = open_faulty_disk(open());
    FaultyDisk* const faulty = disk.get();
    Rig rig(std::move(disk), 1);
    const Way way = reads(rig, 6);
    faulty->fail({fault(rig, 0, Failing::kHang), fault(rig, 2, Failing::kLate, 30)});
    const int64_t move = rig.begin(Priority::kLoad, kForever, {way}, groups_of(rig.limits, {0, 1}));
    std::vector<std::jthread> waiting;
    for (const int32_t group : {-1, 0}) {
        waiting.emplace_back([&rig, move, group] {
            bool stopped = false;
            try {
                rig.executor->wait(move, group, kForever);
            } catch (const Stopped&) {
                stopped = true;
            }
            CHECK(stopped);
        });
    }
    CHECK(!rig.executor->wait(move, -1, after(0.02)));
    CHECK((!rig.executor->outcome(move) && !rig.executor->forget(move)));
    rig.executor->stop();
    waiting.clear();
    CHECK((rig.executor->wait(move + 1, -1, 0) == 0 && rig.executor->wait(move, 2, 0) == 0));  // unknown moves
    CHECK((!rig.executor->cancel(move + 1) && !rig.executor->begin({move, Priority::kLoad, 0, {}, {}, {}})));
    faulty->release();
}

void abandon(Open open, uint64_t seed) {
    Random random(seed);
    Rig rig(open(), 1 << 14);
    const Way way = reads(rig, 16);
    std::vector<int64_t> slots(16);
    std::iota(slots.begin(), slots.end(), 20);
    const Way down = writes(slots);
    for (uint64_t n = 1 + random.below(6); n-- > 0;) {
        const bool write = random.below(2) == 0;
        const int64_t move = rig.begin(write ? Priority::kStore : Priority::kLoad, after(60), {write ? down : way},
                                       groups_of(rig.limits, {0, 2}));
        if (random.below(3) == 0) rig.executor->cancel(move);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(500)));
}

// A read that hangs is given up at its deadline, however many copies wait.
void deadlines(Open open) {
    auto disk = open_faulty_disk(open());
    FaultyDisk* const faulty = disk.get();
    Rig rig(std::move(disk), 1, 16, 64);
    const Way way = reads(rig, 1);
    faulty->fail({fault(rig, 0, Failing::kHang)});
    const std::vector<Group> whole = groups_of(rig.limits, {0});
    const int64_t load = rig.begin(Priority::kLoad, after(0.05), {way}, whole);
    Way up;
    up.source = kPlanes;
    up.target = kCpu;
    up.pages = 8;
    up.sources.resize(static_cast<size_t>(up.pages * kPageBlocks));
    std::iota(up.sources.begin(), up.sources.end(), 0);
    up.targets.resize(static_cast<size_t>(up.pages));
    std::iota(up.targets.begin(), up.targets.end(), 8);
    int64_t store = 0;
    for (int n = 0; n < 1000; n++) store = rig.begin(Priority::kStore, kForever, {up}, whole);  // for seconds
    CHECK(rig.executor->wait(load, -1, after(60)) == 0);
    CHECK(!rig.executor->wait(store, -1, 0));
    faulty->release();
}

}  // namespace

TEST_CASE("pages go out of planes into memory and files, and come back by all routes") {
    each_disk<Open>(ring, threads, [](Open open) {
        const uint64_t count = setting("ROUNDS", 200);
        Rig rig(open());
        const size_t kinds = round_trips(rig, 31, count);
        if (count >= 20) CHECK(kinds == 6);
    });
}

TEST_CASE("a fault costs its own page; a hanging one is told at its end") { each_disk(ring, threads, faults); }
TEST_CASE("a deadline passes while all that copy have work") { each_disk(ring, threads, deadlines); }
TEST_CASE("a wrong byte of any layer is found") { each_disk(ring, threads, looks); }
TEST_CASE("moves without any I/O end at once") { each_disk(ring, threads, refusals); }
TEST_CASE("`stop` releases all waiting threads, and I/O ends first") { each_disk(ring, threads, stops); }

TEST_CASE("nothing touches memory after the end of an executor during reads and writes") {
    each_disk<Open>(ring, threads, [](Open open) {
        for (uint64_t seed = 0; seed < 10; seed++) abandon(open, seed);
    });
}
