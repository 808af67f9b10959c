// The executor with foreign copies by a GPU: round trips by all routes, copies that fail, moves that are cancelled or
// abandoned while their copies are under way.

#include <numeric>

#include "gpu/gpu_server.h"
#include "tests/executor_rig.h"
#include "tests/gpu_rig.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

// Foreign planes and memory of a rig are those of the fake driver's GPU, in the same bytes.
class GpuCopier : public Copier {
public:
    static constexpr int64_t kFence = 4;  // slots of a registration, as in the rig's reserve

    GpuCopier(const Driver& driver, Kernels kernels, bool pinned)
        : driver_(driver), wanted_(kernels), pinned_(pinned) {}
    ~GpuCopier() override { end(); }

    void prepare(Rig& rig, std::vector<Place>& places) override {
        GpuPlanes planes;
        planes.layers = rig.limits.layers;
        planes.page_blocks = rig.limits.page_blocks;
        planes.blocks = rig.pool.blocks;
        planes.extent_bytes = rig.limits.extent_bytes;
        planes.bounds = rig.limits.bounds;
        planes.first_plane = rig.first_plane;
        for (int32_t n = 0; n < planes.layers; n++) {
            const PlaneMemory& plane = rig.planes[n];
            const int64_t bytes = rig.limits.bounds[n + 1] - rig.limits.bounds[n], run = plane.block_stride;
            adopt(plane.base, static_cast<size_t>(run * planes.blocks));
            const auto base = static_cast<int64_t>(reinterpret_cast<uint64_t>(plane.base) | kDeviceBit);
            planes.planes.push_back({base, run, plane.token_stride, run, 1, 0, bytes});
        }
        loaded_.emplace(driver_, planes, 4);
        for (const int32_t space : {kCpu, kBounce}) {
            if (!pinned_) continue;
            places[space].pinned = true;
            places[space].fence = kFence;
            const int64_t slots = places[space].slots;
            for (int64_t slot = 0; slot < slots; slot += kFence) {
                const int64_t count = std::min(kFence, slots - slot);
                driver_.pin(rig.at(space, slot), static_cast<size_t>(count * rig.limits.extent_bytes));
                told_.push_back(rig.at(space, slot));
            }
        }
        adopt(rig.memory[kForeignCpu].data(), rig.memory[kForeignCpu].size());
        places[kForeignCpu].memory =
            reinterpret_cast<uint8_t*>(reinterpret_cast<uint64_t>(rig.memory[kForeignCpu].data()) | kDeviceBit);
        cuda_.emplace(driver_.path.c_str(), driver_.context());
        const Cuda::Entered entered(*cuda_);
        gpu_.emplace(*cuda_, std::move(planes), loaded_->get(wanted_, 3), ChunkSizes{},
                     static_cast<size_t>(6 * rig.limits.extent_bytes));
    }

    void begin(Rig& rig) override { server_.emplace(*rig.executor, *gpu_); }
    void await(int64_t point) override { gpu_->await(point); }

    void end() override {
        server_.reset();
        if (gpu_) {
            const Cuda::Entered entered(*cuda_);
            gpu_.reset();
        }
        for (void* const one : std::exchange(told_, {})) driver_.forget(one);
        loaded_.reset();
    }

    Gpu& gpu() { return *gpu_; }

private:
    void adopt(uint8_t* memory, size_t bytes) {
        driver_.device(memory, bytes);
        told_.push_back(memory);
    }

    const Driver& driver_;
    const Kernels wanted_;
    const bool pinned_;
    std::optional<LoadedKernels> loaded_;
    std::vector<void*> told_;
    std::optional<Cuda> cuda_;
    std::optional<Gpu> gpu_;
    std::optional<GpuServer> server_;
};

std::unique_ptr<Disk> disk() { return open_threads_disk(3); }

struct GpuRig {
    GpuRig(const Driver& driver, Kernels kernels, bool pinned, std::unique_ptr<Disk> by = disk(),
           int64_t io_bytes = 3 << 16)
        : copier(new GpuCopier(driver, kernels, pinned)),
          rig(std::move(by), io_bytes, kPages, 1, std::unique_ptr<Copier>(copier)) {}

    GpuCopier* copier;
    Rig rig;
};

void round_trips_each(const Driver& driver, uint64_t count) {
    for (const Kernels kernels : {Kernels::kNone, Kernels::kPlain, Kernels::kSums, Kernels::kLooks}) {
        for (const bool pinned : {false, true}) {
            driver.batches(pinned ? 13 : 12);
            GpuRig of(driver, kernels, pinned);
            of.copier->gpu().trace();
            const size_t kinds = round_trips(of.rig, 5 + 10 * static_cast<uint64_t>(kernels), count);
            if (count >= 20) CHECK(kinds == (kernels == Kernels::kNone ? 8 : 10));
        }
        driver.check_empty();
    }
}

// Pages of the rig's own memory into the GPU's planes, without checksums.
Way out_of_memory(Rig& rig, int64_t pages) {
    Way way;
    way.source = kCpu;
    way.target = kForeignPlanes;
    way.pages = pages;
    Random random(11);
    for (int64_t page = 0; page < pages; page++) {
        const std::vector<uint8_t> content = random.bytes(static_cast<size_t>(rig.limits.extent_bytes));
        std::copy(content.begin(), content.end(), rig.at(kCpu, page));
        way.sources.push_back(page);
        for (int64_t n = 0; n < kPageBlocks; n++) way.targets.push_back(page * kPageBlocks + n);
    }
    return way;
}

// Pages of other blocks than a way's, out of the planes, which nothing else orders after it.
Way into_memory(int64_t pages) {
    Way way;
    way.source = kForeignPlanes;
    way.target = kCpu;
    way.pages = pages;
    for (int64_t page = kPages - pages; page < kPages; page++) {
        way.targets.push_back(page);
        for (int64_t n = 0; n < kPageBlocks; n++) way.sources.push_back(page * kPageBlocks + n);
    }
    return way;
}

bool is_in_planes(Rig& rig, const Way& way, int64_t page) {
    std::vector<uint8_t> found(static_cast<size_t>(rig.limits.bounds.back()));
    gather(rig.pool, way.targets.data() + page * kPageBlocks, 0, kLayers, found.data(), nullptr, Store::kCached);
    return std::equal(found.begin(), found.end(), rig.at(kCpu, way.sources[page]));
}

void broken(const Driver& driver) {
    constexpr const char* kRefused[] = {"cuLaunchKernel", "cuEventSynchronize", "cuStreamWaitEvent",
                                        "cuMemcpyBatchAsync", "cuEventRecord"};
    driver.batches(13);
    GpuRig of(driver, Kernels::kSums, true);
    const std::vector<Group> groups = groups_of(of.rig.limits, {0, 2}), whole = groups_of(of.rig.limits, {0});
    for (const char* const function : kRefused) {
        for (const int32_t kind : {0, 1, 2, 3}) {
            const bool load = kind < 2, one = kind % 2 == 0;  // `one`: a move of one copy
            const Way way = out_of_memory(of.rig, one ? 2 : 8);
            const Way back = into_memory(way.pages);
            driver.hold(1);
            driver.fail(function, 0);
            const int64_t move = of.rig.begin(Priority::kLoad, after(60), {load ? way : back}, one ? whole : groups);
            CHECK(!of.rig.executor->wait(move, -1, after(0.02)));
            driver.hold(0);
            const Outcome outcome = of.rig.finish(move);
            driver.fail(function, -1);
            REQUIRE(outcome.broken);
            REQUIRE(outcome.why == std::string(function) + " answered 719 (FAKE_ERROR)");
            const Outcome next = of.rig.finish(of.rig.begin(Priority::kLoad, after(60), {way}, groups));
            REQUIRE((!next.broken && next.why.empty()));
            for (int64_t page = 0; page < way.pages; page++) {
                REQUIRE(next.statuses[page] == Status::kLoaded);
                REQUIRE(is_in_planes(of.rig, way, page));
            }
        }
    }
    // A look at memory of the GPU.
    Way prefetch;
    prefetch.source = kOtherSsd;
    prefetch.target = kForeignCpu;
    prefetch.pages = 1;
    prefetch.sources = prefetch.targets = {0};
    prefetch.sums.resize(kLayers);
    const std::vector<uint8_t> content(static_cast<size_t>(of.rig.limits.extent_bytes));
    REQUIRE(pwrite(of.rig.files[2], content.data(), content.size(), 0) == static_cast<ssize_t>(content.size()));
    const Outcome looked = of.rig.finish(of.rig.begin(Priority::kPrefetch, after(60), {prefetch}, groups));
    REQUIRE(looked.broken);
    REQUIRE(looked.why.c_str() == doctest::Contains("look"));
}

// While nothing has begun, groups are ready behind their points, and the move has not ended. Then it is cancelled.
void held(const Driver& driver, bool cancels) {
    driver.batches(13);
    GpuRig of(driver, Kernels::kLooks, true);
    Rig& rig = of.rig;
    const Way way = out_of_memory(rig, 12);
    const std::vector<Group> groups = groups_of(rig.limits, {0, 1, 2, 3});
    driver.hold(1);
    const int64_t move = rig.begin(Priority::kLoad, after(60), {way}, groups);
    int64_t before = 0;
    for (int32_t group = 0; group < 4; group++) {
        const auto point = rig.executor->wait(move, group, after(60));
        CHECK(point.value_or(0) > before);
        before = point.value_or(0);
        CHECK(!of.copier->gpu().reached(before));
    }
    CHECK(!rig.executor->wait(move, -1, after(0.02)));
    if (cancels) CHECK(rig.executor->cancel(move));
    const int64_t store = rig.begin(Priority::kStore, 0, {into_memory(12)}, groups);
    const auto point = rig.executor->wait(store, 0, after(60));
    CHECK(point.value_or(0) > 0);
    CHECK(!of.copier->gpu().reached(point.value_or(0)));
    driver.hold(0);
    of.copier->await(before);
    for (int64_t page = 0; page < way.pages; page++) REQUIRE(is_in_planes(rig, way, page));
    REQUIRE((!rig.finish(move).broken && !rig.finish(store).broken));
}

void events(const Driver& driver) {
    driver.batches(12);
    GpuRig of(driver, Kernels::kPlain, true);
    Rig& rig = of.rig;
    const Cuda& cuda = of.copier->gpu().cuda();
    const Cuda::Entered entered(cuda);
    const CudaStream stream = cuda.open_stream(false);
    const CudaEvent event = cuda.open_event(EventUse::kOrder);
    const Way way = out_of_memory(rig, 6);
    const auto spoil = [](void* of_rig) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        Rig& spoilt = *static_cast<Rig*>(of_rig);
        for (int32_t layer = 0; layer < kLayers; layer++) std::memset(spoilt.planes[layer].base, 9, 5000);
    };
    driver.call(stream, spoil, &rig);
    cuda.record(event, stream);
    REQUIRE(rig.executor->begin(
        {1000, Priority::kLoad, kForever, {way}, groups_of(rig.limits, {0, 2}), {reinterpret_cast<uint64_t>(event)}}));
    REQUIRE(!rig.finish(1000).broken);
    for (int64_t page = 0; page < way.pages; page++) REQUIRE(is_in_planes(rig, way, page));
    cuda.close_event(event);
    cuda.close_stream(stream);
}

// An executor that ends while copies are under way: nothing touches the memory afterwards. Each move has blocks and slots
// of its own, which belong to it until its end.
void abandon(const Driver& driver, uint64_t seed) {
    constexpr int64_t kMoves = 6, kEach = kPages / kMoves;
    Random random(seed);
    driver.delay(random.below(2) ? 200 : 0);
    {
        GpuRig of(driver, static_cast<Kernels>(random.below(4)), random.below(2) == 0);
        Way ways[] = {out_of_memory(of.rig, kEach), reads(of.rig, kEach), into_memory(kEach)};
        ways[1].target = kForeignPlanes;
        for (int64_t n = random.between(1, kMoves); n-- > 0;) {
            Way& one = ways[n % 3];
            const bool loads = n % 3 != 2;
            std::vector<int64_t>& blocks = loads ? one.targets : one.sources;
            std::iota(blocks.begin(), blocks.end(), n * kEach * kPageBlocks);
            if (!loads) std::iota(one.targets.begin(), one.targets.end(), n * kEach);
            const int64_t move = of.rig.begin(Priority::kLoad, after(60), {one}, groups_of(of.rig.limits, {0, 2}));
            if (random.below(3) == 0) of.rig.executor->cancel(move);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(800)));
    }
    driver.delay(0);
    driver.check_empty();
}

}  // namespace

TEST_CASE("round trips by all routes") { round_trips_each(Driver(), setting("ROUNDS", 25)); }
TEST_CASE("a refused call breaks its own move, which ends when its copies have, and no other") { broken(Driver()); }

TEST_CASE("groups are ready behind their points while nothing has begun") {
    for (const bool cancels : {false, true}) held(Driver(), cancels);
}

TEST_CASE("copies come behind the events of their move, whenever these happen") { events(Driver()); }

TEST_CASE("nothing touches memory after the end of an executor with copies under way") {
    for (uint64_t seed = 0; seed < 12; seed++) abandon(Driver(), seed);
    Driver().check_empty();
}
