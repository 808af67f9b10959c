// The executor with its threads and real files: pages go out of planes into memory and files, and come back by all
// routes, while others are cancelled, run out of time, or are damaged. Ends in every state that a move may be in.

#include <algorithm>

#include "../faulty_disk.h"
#include "executor_rig.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

using Open = std::unique_ptr<Disk> (*)();

constexpr int64_t kCallers = 3, kOfCaller = kPages / kCallers, kHalf = kOfCaller / 2;

std::unique_ptr<Disk> threads() {
    Refusal refusal;
    return open_threads_disk(3, refusal);
}

std::unique_ptr<Disk> ring() {
    Refusal refusal;
    return open_ring_disk(3, 8, refusal);
}

// A caller with pages, slots and blocks of its own. The upper half of its slots is for what is read.
class Caller {
public:
    Caller(Rig& rig, int64_t number, uint64_t seed) : rig_(rig), base_(number * kOfCaller), random_(seed) {}

    void round_trip() {
        pages_ = static_cast<int64_t>(1 + random_.below(kHalf));
        files_ = random_.below(2) ? kSsd : kForeignSsd;
        memory_ = files_ == kSsd || random_.below(2) ? kCpu : kForeignCpu;  // our disk reaches only what is ours
        fill();
        store();
        damaged_ = random_.below(2) ? static_cast<int64_t>(random_.below(static_cast<uint64_t>(pages_))) : -1;
        if (damaged_ >= 0) damage();
        const std::vector<uint8_t> nothing(want_.size());
        scatter_all(nothing);
        load();
    }

private:
    int64_t bytes() const { return rig_.limits.bounds.back(); }

    int32_t any_planes() { return random_.below(2) ? kPlanes : kForeignPlanes; }

    std::vector<int64_t> shuffled(int64_t first, int64_t count) {
        std::vector<int64_t> all;
        for (int64_t n = 0; n < count; n++) all.push_back(first + n);
        for (size_t n = all.size(); n-- > 1;) std::swap(all[n], all[random_.below(n + 1)]);
        return all;
    }

    const int64_t* blocks_of(int64_t page) const { return blocks_.data() + page * kPageBlocks; }

    void scatter_all(const std::vector<uint8_t>& content) {
        for (int64_t page = 0; page < pages_; page++) {
            std::vector<uint64_t> sums(kLayers);
            const uint8_t* const from = content.data() + page * bytes();
            scatter(rig_.pool, blocks_of(page), 0, kLayers, from, sums.data(), Store::kCached);
        }
    }

    void fill() {
        blocks_ = shuffled(base_ * kPageBlocks, kOfCaller * kPageBlocks);
        slots_ = shuffled(base_, kHalf);
        kept_ = shuffled(base_ + kHalf, kHalf);
        want_ = random_.bytes(static_cast<size_t>(pages_ * bytes()));
        scatter_all(want_);
    }

    bool in_memory(int64_t page, int64_t slot) {
        return !std::memcmp(rig_.at(memory_, slot), want_.data() + page * bytes(), static_cast<size_t>(bytes()));
    }

    bool in_planes(int64_t page, const Group& group) {
        std::vector<uint8_t> found(static_cast<size_t>(group.end - group.begin));
        gather(rig_.pool, blocks_of(page), group.first, group.last, found.data(), nullptr, Store::kCached);
        return !std::memcmp(found.data(), want_.data() + page * bytes() + group.begin, found.size());
    }

    void store() {
        const std::vector<Group> whole = groups_of(rig_.limits, {0});
        Way out;
        out.source = any_planes();
        out.target = memory_;
        out.pages = pages_;
        out.sources.assign(blocks_.begin(), blocks_.begin() + pages_ * kPageBlocks);
        out.targets.assign(slots_.begin(), slots_.begin() + pages_);
        // A gather has no deadline: what it was given is past.
        const Nanoseconds until = random_.below(2) ? 0 : kForever;
        const Outcome gathered = rig_.finish(rig_.begin(Priority::kStore, until, {out}, whole));
        CHECK(!gathered.broken && gathered.late.empty());
        for (int64_t page = 0; page < pages_; page++) {
            CHECK(gathered.statuses[page] == Status::kLoaded && in_memory(page, slots_[page]));
            digest(rig_.pool, 0, kLayers, rig_.at(memory_, slots_[page]), sums_of(page).data());
            CHECK(sums_[page] == std::vector<uint64_t>(kept_sums(page), kept_sums(page) + kLayers));
        }
        Way down;
        down.source = memory_;
        down.target = files_;
        down.pages = pages_;
        down.sources = out.targets;
        down.targets = out.targets;
        const Outcome written = rig_.finish(rig_.begin(Priority::kDemotion, after(60), {down}, whole));
        CHECK(written.errors.empty() && written.late.empty() && !written.broken);
    }

    const uint64_t* kept_sums(int64_t page) { return rig_.sums[memory_].data() + slots_[page] * kLayers; }

    std::vector<uint64_t>& sums_of(int64_t page) {
        sums_.resize(static_cast<size_t>(pages_));
        sums_[page].resize(kLayers);
        return sums_[page];
    }

    void damage() {
        const auto [file, offset] = rig_.where(files_, slots_[damaged_]);
        const auto at = offset + static_cast<int64_t>(random_.below(static_cast<uint64_t>(bytes())));
        uint8_t byte = 0;
        CHECK(pread(file, &byte, 1, at) == 1);
        byte ^= static_cast<uint8_t>(1u << random_.below(8));
        CHECK(pwrite(file, &byte, 1, at) == 1);
    }

    enum Route { kFromMemory, kPassing, kStaying, kPrefetched, kRoutes };

    Way way_of(Route route, const std::vector<int64_t>& pages) {
        Way way;
        way.source = route == kFromMemory ? memory_ : files_;
        way.target = route == kPrefetched ? memory_ : any_planes();
        way.pages = static_cast<int64_t>(pages.size());
        for (const int64_t page : pages) {
            way.sources.push_back(slots_[page]);
            if (route == kPrefetched) way.targets.push_back(kept_[page]);
            else way.targets.insert(way.targets.end(), blocks_of(page), blocks_of(page) + kPageBlocks);
            if (route == kStaying) way.places.push_back(kept_[page]);
            way.sums.insert(way.sums.end(), sums_[page].begin(), sums_[page].end());
        }
        if (route == kStaying) way.through = memory_;
        if (route == kFromMemory && random_.below(2)) way.sums.clear();
        return way;
    }

    void load() {
        std::vector<int64_t> rows;  // pages, in the order of the ways
        std::vector<Route> routes;
        std::vector<Way> ways;
        std::vector<std::vector<int64_t>> by_route(kRoutes);
        for (int64_t page = 0; page < pages_; page++) by_route[random_.below(kRoutes)].push_back(page);
        for (int32_t route = 0; route < kRoutes; route++) {
            if (by_route[route].empty()) continue;
            ways.push_back(way_of(static_cast<Route>(route), by_route[route]));
            rows.insert(rows.end(), by_route[route].begin(), by_route[route].end());
            routes.insert(routes.end(), by_route[route].size(), static_cast<Route>(route));
        }
        std::vector<int32_t> firsts{0};
        for (int32_t layer = 1; layer < kLayers; layer++) {
            if (random_.below(2)) firsts.push_back(layer);
        }
        const std::vector<Group> groups = groups_of(rig_.limits, firsts);
        const uint64_t what = random_.below(4);
        const bool cancels = what == 0, hurries = what == 1, waits = what == 2;
        const Nanoseconds until = hurries ? after(static_cast<double>(random_.below(400)) * 1e-6) : after(60);
        const auto priority = random_.below(2) ? Priority::kLoad : Priority::kPrefetch;
        const int64_t move = rig_.begin(priority, until, std::move(ways), groups);
        if (cancels) {
            std::this_thread::sleep_for(std::chrono::microseconds(random_.below(300)));
            CHECK(rig_.executor->cancel(move));
        }
        for (size_t group = 0; waits && group < groups.size(); group++) {
            Waited waited;
            CHECK(rig_.executor->wait(move, static_cast<int32_t>(group), after(60), &waited));
            CHECK(waited == Waited::kHappened);
            for (size_t row = 0; row < rows.size(); row++) {
                if (routes[row] != kPrefetched && rows[row] != damaged_) CHECK(in_planes(rows[row], groups[group]));
            }
        }
        const Outcome outcome = rig_.finish(move);
        CHECK(!outcome.broken && outcome.errors.empty() && (hurries || outcome.late.empty()));
        for (size_t row = 0; row < rows.size(); row++) {
            const int64_t page = rows[row];
            const Status status = outcome.statuses[row];
            const bool wrong = page == damaged_ && routes[row] != kFromMemory;
            const bool right = status == (wrong ? Status::kChecksum : Status::kLoaded);
            const bool late = hurries && status == Status::kDeadline && routes[row] != kFromMemory;
            CHECK(right || late || (cancels && status == Status::kCancelled && routes[row] == kPassing));
            if (status != Status::kLoaded) continue;
            if (routes[row] == kStaying || routes[row] == kPrefetched) CHECK(in_memory(page, kept_[page]));
            if (routes[row] == kPrefetched || cancels) continue;
            for (const Group& group : groups) CHECK(in_planes(page, group));
        }
    }

    Rig& rig_;
    const int64_t base_;
    Random random_;
    int64_t pages_ = 0, damaged_ = -1;
    int32_t memory_ = kCpu, files_ = kSsd;
    std::vector<int64_t> blocks_, slots_, kept_;
    std::vector<uint8_t> want_;
    std::vector<std::vector<uint64_t>> sums_;
};

void round_trips(Open open, uint64_t count) {
    Rig rig(open());
    rig.executor->trace();
    std::vector<std::thread> callers;
    for (int64_t number = 0; number < kCallers; number++) {
        callers.emplace_back([&rig, number, count] {
            Caller caller(rig, number, 31 + static_cast<uint64_t>(number));
            for (uint64_t n = 0; n < count; n++) caller.round_trip();
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(rig.executor->free_slots() == kReserve && rig.executor->held_slots() == 0);
    std::set<Span::Kind> kinds;
    for (const Span& span : rig.executor->take_spans(1 << 20)) {
        CHECK(span.begin <= span.end && span.first < span.last && span.last <= kLayers);
        kinds.insert(span.kind);
    }
    CHECK(count < 20 || kinds.size() == 6);
}

// Reads of whole pages out of files that have some content, one page a piece, with sums that are right.
Way reads(Rig& rig, int64_t pages) {
    Way way;
    way.source = kSsd;
    way.target = kPlanes;
    way.pages = pages;
    Random random(5);
    for (int64_t page = 0; page < pages; page++) {
        const std::vector<uint8_t> content = random.bytes(static_cast<size_t>(rig.limits.extent_bytes));
        const auto [file, offset] = rig.where(kSsd, page);
        CHECK(pwrite(file, content.data(), content.size(), offset) == static_cast<ssize_t>(content.size()));
        way.sources.push_back(page);
        for (int64_t n = 0; n < kPageBlocks; n++) way.targets.push_back(page * kPageBlocks + n);
        way.sums.resize(static_cast<size_t>((page + 1) * kLayers));
        digest(rig.pool, 0, kLayers, content.data(), way.sums.data() + page * kLayers);
    }
    return way;
}

// Each fault of a disk costs its own page, and a page that hangs is told when it has ended, not before.
void faults(Open open) {
    auto disk = open_faulty_disk(
        open(), {{0, Failing::kError, EIO}, {1, Failing::kShort, 100}, {2, Failing::kFlip, 5}, {3, Failing::kHang, 0},
                 {4, Failing::kLate, 5}, {7, Failing::kError, ENOSPC}});
    FaultyDisk* const faulty = disk.get();
    Rig rig(std::move(disk), 1);
    const Way way = reads(rig, 6);
    const std::vector<Group> whole = groups_of(rig.limits, {0});
    const int64_t move = rig.begin(Priority::kLoad, after(0.5), {way}, whole);
    Waited waited;
    CHECK(rig.executor->wait(move, -1, after(60), &waited) && waited == Waited::kHappened);
    const Status expected[] = {Status::kIoError, Status::kShortRead, Status::kChecksum,
                               Status::kDeadline, Status::kLoaded, Status::kLoaded};
    const Outcome* const outcome = rig.executor->outcome(move);
    CHECK(std::equal(expected, expected + 6, outcome->statuses.begin()));
    CHECK(outcome->late == std::vector<int32_t>{3} && rig.executor->held_slots() == 1);
    CHECK(rig.executor->free_slots() == kReserve - 1);
    std::thread releaser([faulty] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        faulty->release();
    });
    rig.finish(move);  // which waits for what is late
    releaser.join();
    CHECK(rig.executor->held_slots() == 0 && rig.executor->free_slots() == kReserve);
    Way down;
    down.source = kCpu;
    down.target = kSsd;
    down.pages = 2;
    down.sources = down.targets = {kStretch, 3 * kStretch};  // in one file, but no neighbours
    const Outcome written = rig.finish(rig.begin(Priority::kStore, after(60), {down}, whole));
    const std::vector<std::pair<int32_t, int32_t>> failed{{1, ENOSPC}};
    CHECK(written.errors == failed && written.late.empty());
}

// A page that is read in several pieces is there when all of them are, and fails when one does.
void cut(Open open) {
    Rig rig(open_faulty_disk(open(), {{1, Failing::kError, EIO}, {3, Failing::kLate, 30}}), 1, 4, 100);
    CHECK(rig.limits.extent_bytes > 2 << 20);  // three pieces
    const int64_t move = rig.begin(Priority::kLoad, after(60), {reads(rig, 2)}, groups_of(rig.limits, {0}));
    const Outcome outcome = rig.finish(move);
    CHECK(outcome.statuses[0] == Status::kIoError && outcome.statuses[1] == Status::kLoaded);
}

// Moves that end without any I/O end at once, not when somebody looks around.
void refusals(Open open) {
    Rig rig(open());
    const Way way = reads(rig, 6);
    rig.executor->refuse(Status::kSwitchedOff);
    const Nanoseconds end = after(4);
    for (int n = 0; n < 10; n++) {
        const Outcome outcome = rig.finish(rig.begin(Priority::kLoad, after(60), {way}, groups_of(rig.limits, {0, 2})));
        for (const Status status : outcome.statuses) CHECK(status == Status::kSwitchedOff);
    }
    CHECK(after(0) < end);
    rig.executor->refuse(Status::kPending);
    const Outcome outcome = rig.finish(rig.begin(Priority::kLoad, after(60), {way}, groups_of(rig.limits, {0, 2})));
    for (const Status status : outcome.statuses) CHECK(status == Status::kLoaded);
}

// Everybody who waits is let go by `stop`, and what is under way comes to its end before the executor does.
void stops(Open open) {
    auto disk = open_faulty_disk(open(), {{0, Failing::kHang, 0}, {2, Failing::kLate, 30}});
    FaultyDisk* const faulty = disk.get();
    Rig rig(std::move(disk), 1);
    const Way way = reads(rig, 6);
    const int64_t move = rig.begin(Priority::kLoad, kForever, {way}, groups_of(rig.limits, {0, 1}));
    std::vector<std::thread> waiting;
    for (const int32_t group : {-1, 0}) {
        waiting.emplace_back([&rig, move, group] {
            Waited waited;
            CHECK(rig.executor->wait(move, group, kForever, &waited) && waited == Waited::kClosed);
        });
    }
    Waited waited;
    CHECK(rig.executor->wait(move, -1, after(0.02), &waited) && waited == Waited::kTimeout);
    CHECK(!rig.executor->outcome(move) && !rig.executor->forget(move));
    rig.executor->stop();
    for (std::thread& thread : waiting) thread.join();
    CHECK(!rig.executor->wait(move + 1, -1, 0, &waited) && !rig.executor->wait(move, 2, 0, &waited));
    CHECK(!rig.executor->cancel(move + 1) && !rig.executor->begin({move, Priority::kLoad, 0, {}, {}}));
    faulty->release();
}

// An executor that goes in the middle of reads and writes: nothing touches the memory behind it.
void abandon(Open open, uint64_t seed) {
    Random random(seed);
    Rig rig(open(), 1 << 14);
    const Way way = reads(rig, 16);
    Way down;
    down.source = kCpu;
    down.target = kSsd;
    down.pages = 16;
    for (int64_t n = 0; n < 16; n++) down.sources.push_back(n), down.targets.push_back(20 + n);
    for (uint64_t n = 1 + random.below(6); n-- > 0;) {
        const bool write = random.below(2) == 0;
        const int64_t move = rig.begin(write ? Priority::kStore : Priority::kLoad, after(60), {write ? down : way},
                                       groups_of(rig.limits, {0, 2}));
        if (random.below(3) == 0) rig.executor->cancel(move);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(500)));
}

}  // namespace

int main(int argc, char** argv) {
    const uint64_t count = rounds(argc, argv, 200);
    for (const Open open : {ring, threads}) {
        Refusal refusal;
        if (open == ring && !open_ring_disk(1, 1, refusal)) {
            std::printf(" (no ring: %s)", refusal.why.c_str());
            continue;
        }
        round_trips(open, count);
        faults(open);
        cut(open);
        refusals(open);
        stops(open);
        for (uint64_t seed = 0; seed < 10; seed++) abandon(open, seed);
        std::printf(" %s", open == ring ? "ring" : "threads");
    }
    std::printf(": good\n");
}
