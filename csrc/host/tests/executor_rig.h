// An executor over planes, memory and files of a test, on two disks; some planes and memory are foreign.

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

class Copier {
public:
    virtual ~Copier() = default;
    // Set the fields that places of foreign spaces need.
    virtual void prepare(Rig&, std::vector<Place>&) {}
    virtual void begin(Rig& rig) = 0;
    // Wait until all copies up to a point are done.
    virtual void await(int64_t point) = 0;
    // The executor was stopped.
    virtual void end() = 0;
    // Whether it takes looks at foreign memory, and copies between that and planes of ours.
    virtual bool all() const { return true; }
};

// One thread a direction. It reports a copy as queued before it begins.
class CopyingThreads : public Copier {
public:
    void begin(Rig& rig) override;
    void await(int64_t point) override {
        std::unique_lock lock(lock_);
        REQUIRE(ended_.wait_for(lock, std::chrono::seconds(60),
                                [&] { return under_way_.empty() || *under_way_.begin() > point; }));
    }
    void end() override {
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

private:
    void copy(Rig& rig, Hands hands);

    std::mutex lock_;
    std::condition_variable ended_;
    int64_t last_ = 0;
    std::set<int64_t> under_way_;  // points
    std::vector<std::thread> threads_;
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
                 std::unique_ptr<Copier> by = std::make_unique<CopyingThreads>())
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
        copier->prepare(*this, places);
        std::vector<std::unique_ptr<Disk>> disks;
        disks.push_back(std::move(disk));
        disks.push_back(open_threads_disk(2, "other", [] { return std::make_unique<OtherCaller>(); }));
        REQUIRE(disks[1]);
        Reserve reserve(1, std::min(kReserve, pages - 1), 4);
        executor = std::make_unique<Executor>(limits, std::move(places), kBounce, std::move(reserve), &pool,
                                              std::move(disks), 2);
        threads_.emplace_back([this] { hear_late(); });
        copier->begin(*this);
    }

    ~Rig() {
        executor->stop();
        copier->end();
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
    std::unique_ptr<Copier> copier;
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

inline void CopyingThreads::begin(Rig& rig) {
    for (const Hands hands : {Hands::kForeignLoads, Hands::kForeignStores}) {
        threads_.emplace_back([this, &rig, hands] { copy(rig, hands); });
    }
}

inline void CopyingThreads::copy(Rig& rig, Hands hands) {
    while (const CopyJob* const job = rig.executor->take_copy(hands, kForever)) {
        const int32_t layers = job->last - job->first;
        CHECK((layers > 0 && !job->pages.empty() && (job->copy == Copy::kGather) == (hands == Hands::kForeignStores)));
        std::vector<uint64_t> found(job->pages.size() * static_cast<size_t>(layers));
        int64_t point;
        {
            const std::lock_guard lock(lock_);
            under_way_.insert(point = ++last_);
        }
        CHECK(rig.executor->copy_queued(job->id, point));
        for (size_t n = 0; n < job->pages.size(); n++) {
            uint8_t* const part = rig.memory[job->memory].data() + job->pages[n].at;
            const int64_t* const blocks = job->blocks.data() + n * kPageBlocks;
            uint64_t* const to = found.data() + n * static_cast<size_t>(layers);
            if (job->copy == Copy::kDigest) digest(rig.pool, job->first, job->last, part, to);
            if (job->copy == Copy::kScatter) scatter(rig.pool, blocks, job->first, job->last, part, to, Store::kCached);
            if (job->copy == Copy::kGather) gather(rig.pool, blocks, job->first, job->last, part, to, Store::kCached);
        }
        {
            const std::lock_guard lock(lock_);
            under_way_.erase(point);
        }
        ended_.notify_all();
        CHECK(rig.executor->copy_ended(job->id, job->sums ? found.data() : nullptr, nullptr));
    }
}

}  // namespace gdscache::test
