// An executor over planes, memory and files of a test, on two disks; some planes and memory are foreign. Callers have
// pages go out of planes into memory and files, and come back by all routes.

#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <set>

#include "disk/threads_disk.h"
#include "hash/xxh3.h"
#include "moves/executor.h"
#include "tests/check.h"
#include "tests/digest.h"
#include "tests/fake_cuda.h"
#include "tests/faulty_disk.h"

namespace gdscache::test {

enum : int32_t { kPlanes, kForeignPlanes, kCpu, kForeignCpu, kBounce, kSsd, kOtherSsd, kSpaces };

constexpr int64_t kPages = 48, kTokens = 4, kPageBlocks = 2;
constexpr int64_t kStretch = 3, kReserve = 6;
constexpr int64_t kRows[] = {700, 1100, 40, 900};             // bytes of a token, of each layer
constexpr int32_t kLayers = 4;
constexpr int64_t kSector = 4096;

inline Nanoseconds after(double seconds) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() + static_cast<Nanoseconds>(seconds * 1e9);
}

inline int64_t rounded_up(int64_t bytes) { return (bytes + kSector - 1) / kSector * kSector; }

// Groups that begin with these layers.
inline std::vector<Group> groups_of(const Limits& limits, const std::vector<int32_t>& firsts) {
    std::vector<Group> groups;
    for (size_t n = 0; n < firsts.size(); n++) {
        const int32_t first = firsts[n], last = n + 1 < firsts.size() ? firsts[n + 1] : limits.layers;
        const int64_t begin = limits.bounds[first], end = limits.bounds[last], stop = rounded_up(end);
        groups.push_back({first, last, begin, end, rounded_up(begin), stop, begin / kSector * kSector, stop});
    }
    return groups;
}

constexpr Nanoseconds kForever = std::numeric_limits<Nanoseconds>::max();

class Rig;

// Copies of the rig's foreign spaces.
class Copier {
public:
    virtual ~Copier() = default;
    // Set the fields that places of foreign spaces need.
    virtual void prepare(Rig& rig, std::vector<Place>& places) = 0;
    virtual void begin(Rig& rig) = 0;
    // Wait until all copies up to a point are done.
    virtual void await(int64_t point) = 0;
    // The executor was stopped.
    virtual void end() = 0;
};

// The caller of the other disk, which reaches GPU memory too.
class OtherCaller : public ::gdscache::Caller {
public:
    int64_t transfer(const Piece& piece, const Call& call) override {
        std::vector<iovec> reached(call.vectors, call.vectors + call.count);
        for (iovec& one : reached) {
            one.iov_base = reinterpret_cast<void*>(reinterpret_cast<uint64_t>(one.iov_base) & ~kDeviceBit);
        }
        return system_call(piece, {reached.data(), call.count, call.offset, call.bytes});
    }
    bool looks() const override { return false; }
};

class Rig {
public:
    // `pages`: of the planes, and slots of each other space; `scale`: of their bytes.
    explicit Rig(std::unique_ptr<Disk> disk, int64_t io_bytes = 3 << 16, int64_t pages = kPages, int64_t scale = 1,
                 std::unique_ptr<Copier> by = nullptr)
        : copier(std::move(by)) {
        limits.bounds = {0};
        for (const int64_t one : kRows) {
            const int64_t row = one * scale;
            planes_.push_back(std::vector<uint8_t>(static_cast<size_t>(row * kTokens * kPageBlocks * pages)));
            planes.push_back({planes_.back().data(), row * kTokens, row, row});
            first_plane.push_back(static_cast<int32_t>(planes.size()));
            limits.bounds.push_back(limits.bounds.back() + row * kTokens * kPageBlocks);
        }
        pool = {planes, first_plane, kPageBlocks * pages, kTokens, kPageBlocks};
        check(pool);
        limits.layers = kLayers;
        limits.page_blocks = kPageBlocks;
        limits.extent_bytes = rounded_up(limits.bounds.back());
        limits.flying_bytes = 20 * limits.extent_bytes;
        limits.io_bytes = io_bytes;
        limits.copy_bytes = limits.foreign_copy_bytes = 2 * limits.extent_bytes;
        std::vector<Place> places(kSpaces);
        for (int32_t n = 0; n < kSpaces; n++) {
            const Kind kind = n <= kForeignPlanes ? Kind::kPlanes : n <= kBounce ? Kind::kMemory : Kind::kFiles;
            sums[n].resize(static_cast<size_t>(pages * kLayers));
            places[n].kind = kind;
            places[n].foreign = n == kForeignPlanes || n == kForeignCpu;
            places[n].sums = kind == Kind::kFiles ? nullptr : sums[n].data();
            if (kind == Kind::kMemory) memory[n].resize(static_cast<size_t>(pages * limits.extent_bytes));
            places[n].slots = pages;
            places[n].memory = memory[n].data();
        }
        for (int& file : files) REQUIRE((file = memfd_create("gdscache-test", 0)) >= 0);
        places[kSsd].files = {files[0], files[1]};
        places[kSsd].stretch = kStretch;
        places[kSsd].copied = true;
        places[kOtherSsd].files = {files[2]};
        places[kOtherSsd].stretch = 1;
        places[kOtherSsd].disk = 1;
        places[kOtherSsd].io_bytes = 2 * limits.extent_bytes;
        if (copier) copier->prepare(*this, places);
        std::vector<std::unique_ptr<Disk>> disks;
        disks.push_back(std::move(disk));
        disks.push_back(open_threads_disk(2, "other", [] { return std::make_unique<OtherCaller>(); }));
        REQUIRE(disks[1]);
        Reserve reserve(1, std::min(kReserve, pages - 1), 4);
        executor = std::make_unique<Executor>(limits, std::move(places), kBounce, std::move(reserve), &pool,
                                              std::move(disks), 2);
        threads_.emplace_back([this] { hear_late(); });
        if (copier) copier->begin(*this);
    }

    ~Rig() {
        executor->stop();
        if (copier) copier->end();
        for (std::thread& thread : threads_) thread.join();
        executor.reset();
        for (const int file : files) close(file);
    }

    uint8_t* at(int32_t space, int64_t slot) { return memory[space].data() + slot * limits.extent_bytes; }

    // The file of a slot, and its place there.
    std::pair<int, int64_t> where(int32_t space, int64_t slot) const {
        if (space == kOtherSsd) return {files[2], slot * limits.extent_bytes};
        const int64_t number = slot / kStretch;
        return {files[number % 2], (number / 2 * kStretch + slot % kStretch) * limits.extent_bytes};
    }

    int64_t begin(Priority priority, Nanoseconds until, std::vector<Way> ways, std::vector<Group> groups) {
        const int64_t id = next_++;
        REQUIRE(executor->begin({id, priority, until, std::move(ways), std::move(groups), {}}));
        return id;
    }

    // The same, way by way, with other work between.
    int64_t begin_open(Priority priority, Nanoseconds until, std::vector<Way> ways, std::vector<Group> groups) {
        const int64_t id = next_++;
        REQUIRE(executor->begin({id, priority, until, {}, std::move(groups), {}, true}));
        for (size_t n = 0; n < ways.size(); n++) {
            std::this_thread::sleep_for(std::chrono::microseconds(30 * n));
            REQUIRE((!executor->wait(id, -1, 0) && !executor->wait(id, 0, 0)));
            REQUIRE(executor->extend(id, {std::move(ways[n])}, false));
        }
        REQUIRE((executor->extend(id, {}, true) && !executor->extend(id, {}, true)));
        return id;
    }

    // The outcome of a move, once nothing touches its bytes any more.
    Outcome finish(int64_t move) {
        REQUIRE(executor->wait(move, -1, after(60)) == 0);
        const Outcome outcome = *executor->outcome(move);
        REQUIRE(executor->forget(move));
        std::unique_lock lock(lock_);
        for (const int32_t row : outcome.late) {
            REQUIRE(told_.wait_for(lock, std::chrono::seconds(60), [&] { return late_.erase({move, row}) == 1; }));
        }
        return outcome;
    }

    Limits limits;
    std::vector<PlaneMemory> planes;
    std::vector<int32_t> first_plane{0};
    HostPlanes pool;
    std::vector<uint8_t> memory[kSpaces];
    std::vector<uint64_t> sums[kSpaces];
    int files[3];
    std::unique_ptr<Copier> copier;  // none: nothing asks for foreign copies
    std::unique_ptr<Executor> executor;

private:
    using Kind = Space::Kind;

    void hear_late() {
        for (;;) {
            std::vector<std::pair<int64_t, int32_t>> ended;
            try {
                ended = executor->take_ended_late(kForever, 3);
            } catch (const Stopped&) {
                return;
            }
            const std::lock_guard lock(lock_);
            for (const auto& one : ended) CHECK(late_.insert(one).second);
            told_.notify_all();
        }
    }

    std::vector<std::vector<uint8_t>> planes_;
    std::atomic<int64_t> next_{1};
    std::mutex lock_;
    std::condition_variable told_;
    std::set<std::pair<int64_t, int32_t>> late_;
    std::vector<std::thread> threads_;
};

constexpr int64_t kCallers = 3, kOfCaller = kPages / kCallers, kHalf = kOfCaller / 2;

// A caller with pages, slots and blocks of its own. Reads use the upper half of its slots.
class Caller {
public:
    Caller(Rig& rig, int64_t number, uint64_t seed) : rig_(rig), base_(number * kOfCaller), random_(seed) {}

    void round_trip() {
        pages_ = static_cast<int64_t>(1 + random_.below(kHalf));
        files_ = random_.below(2) ? kSsd : kOtherSsd;
        // Our disk reaches only our memory.
        memory_ = !rig_.copier || files_ == kSsd || random_.below(2) ? kCpu : kForeignCpu;
        all_ = memory_ == kCpu;  // a GPU takes no looks, and copies nothing between its memory and planes of ours
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

    int32_t any_planes() { return !rig_.copier || (all_ && random_.below(2)) ? kPlanes : kForeignPlanes; }

    // With any routes, for a GPU's copies.
    std::vector<Group> routed(std::vector<Group> groups) {
        for (Group& group : groups) {
            group.route = static_cast<int32_t>(random_.below(3));
            group.summed_route = static_cast<int32_t>(random_.below(3));
        }
        return groups;
    }

    std::vector<int64_t> shuffled(int64_t first, int64_t count) {
        std::vector<int64_t> all;
        for (int64_t n = 0; n < count; n++) all.push_back(first + n);
        random_.shuffle(all);
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
        const std::vector<Group> whole = routed(groups_of(rig_.limits, {0}));
        Way out;
        out.source = any_planes();
        out.target = memory_;
        out.pages = pages_;
        out.sources.assign(blocks_.begin(), blocks_.begin() + pages_ * kPageBlocks);
        out.targets.assign(slots_.begin(), slots_.begin() + pages_);
        // a gather has no deadline: a past one has no effect
        const Nanoseconds until = random_.below(2) ? 0 : kForever;
        const Outcome gathered = rig_.finish(rig_.begin(Priority::kStore, until, {out}, whole));
        REQUIRE((!gathered.broken && gathered.late.empty()));
        for (int64_t page = 0; page < pages_; page++) {
            REQUIRE(gathered.statuses[page] == Status::kLoaded);
            REQUIRE(in_memory(page, slots_[page]));
            digest(rig_.pool, 0, kLayers, rig_.at(memory_, slots_[page]), sums_of(page).data());
            REQUIRE(sums_[page] == std::vector<uint64_t>(kept_sums(page), kept_sums(page) + kLayers));
        }
        Way down;
        down.source = memory_;
        down.target = files_;
        down.pages = pages_;
        down.sources = out.targets;
        down.targets = out.targets;
        const Outcome written = rig_.finish(rig_.begin(Priority::kDemotion, after(60), {down}, whole));
        REQUIRE((written.errors.empty() && written.late.empty()));
        REQUIRE(!written.broken);
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
        REQUIRE(pread(file, &byte, 1, at) == 1);
        byte ^= static_cast<uint8_t>(1u << random_.below(8));
        REQUIRE(pwrite(file, &byte, 1, at) == 1);
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
        const uint64_t possible = all_ ? kRoutes : kPrefetched;
        for (int64_t page = 0; page < pages_; page++) by_route[random_.below(possible)].push_back(page);
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
        const std::vector<Group> groups = routed(groups_of(rig_.limits, firsts));
        const uint64_t what = random_.below(4);
        const bool cancels = what == 0 && all_, hurries = what == 1, waits = what == 2;
        const Nanoseconds until = hurries ? after(static_cast<double>(random_.below(400)) * 1e-6) : after(60);
        const auto priority = random_.below(2) ? Priority::kLoad : Priority::kPrefetch;
        const int64_t move = random_.below(2) ? rig_.begin(priority, until, std::move(ways), groups)
                                              : rig_.begin_open(priority, until, std::move(ways), groups);
        if (cancels) {
            std::this_thread::sleep_for(std::chrono::microseconds(random_.below(300)));
            REQUIRE(rig_.executor->cancel(move));
        }
        for (size_t group = 0; waits && group < groups.size(); group++) {
            const auto point = rig_.executor->wait(move, static_cast<int32_t>(group), after(60));
            REQUIRE(point.value_or(-1) >= 0);
            if (rig_.copier) rig_.copier->await(*point);
            for (size_t row = 0; row < rows.size(); row++) {
                if (routes[row] != kPrefetched && rows[row] != damaged_) REQUIRE(in_planes(rows[row], groups[group]));
            }
        }
        const Outcome outcome = rig_.finish(move);
        REQUIRE((!outcome.broken && outcome.errors.empty()));
        if (!hurries) REQUIRE(outcome.late.empty());
        for (size_t row = 0; row < rows.size(); row++) {
            const int64_t page = rows[row];
            const Status status = outcome.statuses[row];
            const bool wrong = page == damaged_ && routes[row] != kFromMemory;
            const bool right = status == (wrong ? Status::kChecksum : Status::kLoaded);
            const bool late = hurries && status == Status::kDeadline && routes[row] != kFromMemory;
            REQUIRE((right || late || (cancels && status == Status::kCancelled && routes[row] == kPassing)));
            if (status != Status::kLoaded) continue;
            if (routes[row] == kStaying || routes[row] == kPrefetched) REQUIRE(in_memory(page, kept_[page]));
            if (routes[row] == kPrefetched || cancels) continue;
            for (const Group& group : groups) REQUIRE(in_planes(page, group));
        }
    }

    Rig& rig_;
    const int64_t base_;
    Random random_;
    int64_t pages_ = 0, damaged_ = -1;
    int32_t memory_ = kCpu, files_ = kSsd;
    bool all_ = true;  // tries all kinds of moves
    std::vector<int64_t> blocks_, slots_, kept_;
    std::vector<uint8_t> want_;
    std::vector<std::vector<uint64_t>> sums_;
};

// `count` round trips of each caller. Returns the number of kinds of spans that they left.
inline size_t round_trips(Rig& rig, uint64_t seed, uint64_t count) {
    rig.executor->trace();
    std::vector<std::jthread> callers;
    for (int64_t number = 0; number < kCallers; number++) {
        callers.push_back(started([&rig, number, seed, count] {
            Caller caller(rig, number, seed + static_cast<uint64_t>(number));
            for (uint64_t n = 0; n < count; n++) caller.round_trip();
        }));
    }
    callers.clear();
    REQUIRE((rig.executor->free_slots() == kReserve && rig.executor->held_slots() == 0));
    std::set<Span::Kind> kinds;
    for (const Span& span : rig.executor->take_spans(1 << 20)) {
        REQUIRE((span.begin <= span.end && span.first < span.last && span.last <= kLayers));
        kinds.insert(span.kind);
    }
    return kinds.size();
}

// The fault of the bytes [from, to) of a page in our files; a fragment that touches them has it.
inline Fault fault(const Rig& rig, int64_t slot, Failing what, int64_t value = 0, int64_t from = 0, int64_t to = 1) {
    const auto [file, offset] = rig.where(kSsd, slot);
    return {file, offset + from, offset + to, what, value};
}

// Reads of whole pages out of files with some content, one page a piece, with the right sums.
inline Way reads(Rig& rig, int64_t pages) {
    Way way;
    way.source = kSsd;
    way.target = kPlanes;
    way.pages = pages;
    Random random(5);
    for (int64_t page = 0; page < pages; page++) {
        const std::vector<uint8_t> content = random.bytes(static_cast<size_t>(rig.limits.extent_bytes));
        const auto [file, offset] = rig.where(kSsd, page);
        REQUIRE(pwrite(file, content.data(), content.size(), offset) == static_cast<ssize_t>(content.size()));
        way.sources.push_back(page);
        for (int64_t n = 0; n < kPageBlocks; n++) way.targets.push_back(page * kPageBlocks + n);
        way.sums.resize(static_cast<size_t>((page + 1) * kLayers));
        digest(rig.pool, 0, kLayers, content.data(), way.sums.data() + page * kLayers);
    }
    return way;
}

}  // namespace gdscache::test
