// Copies of a GPU against those of pages.h: pools, extents and routes at random, many at once, through small rings.

#include <optional>
#include <thread>

#include "tests/gpu_transfer.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

// A stream of the test, beside those of the GPU's lanes: a model that works in the planes.
class Model {
public:
    explicit Model(const Cuda& cuda) : cuda_(cuda) {
        const Cuda::Entered entered(cuda_);
        stream = cuda_.open_stream(false);
    }
    ~Model() {
        const Cuda::Entered entered(cuda_);
        for (const CudaEvent event : events_) cuda_.close_event(event);
        cuda_.close_stream(stream);
    }
    CudaEvent record() {
        const Cuda::Entered entered(cuda_);
        events_.push_back(cuda_.open_event(EventUse::kOrder));
        cuda_.record(events_.back(), stream);
        return events_.back();
    }
    bool happened(CudaEvent event) {
        const Cuda::Entered entered(cuda_);
        return cuda_.happened(event);
    }
    void await(CudaEvent event) {
        const Cuda::Entered entered(cuda_);
        cuda_.await(event);
    }

    CudaStream stream;

private:
    const Cuda& cuda_;
    std::vector<CudaEvent> events_;
};

// A caller that copies pages of its own, one transfer after the other or several at once.
class Caller {
public:
    Caller(const Driver& driver, GpuPool& pool, Gpu& gpu, std::vector<int64_t> pages, uint64_t seed)
        : driver_(driver), pool_(pool), gpu_(gpu), model_(gpu.cuda()), pages_(std::move(pages)), random_(seed) {}

    void transfers(uint64_t n, bool traced) {
        while (n-- > 0) {
            if (random_.below(3)) one(traced);
            else several();
        }
    }

private:
    using Made = std::unique_ptr<OneTransfer>;

    Made made(const std::vector<int64_t>& pages) {
        return std::make_unique<OneTransfer>(driver_, pool_, random_, pages, random_.below(4) == 0);
    }

    // The model fills the planes, and `after` says when; the transfer is queued long before.
    void fill(OneTransfer& transfer) {
        transfer.fill_mirror();
        transfer.foresee();
        if (random_.below(2)) {
            const auto fill = [](void* of) { static_cast<OneTransfer*>(of)->fill_planes(); };
            for (uint64_t n = random_.below(3); n-- > 0;) transfer.after.push_back(address(model_.record()));
            driver_.call(model_.stream, fill, &transfer);
            transfer.after.push_back(address(model_.record()));
        } else {
            transfer.fill_planes();
        }
    }

    static uint64_t address(CudaEvent event) { return reinterpret_cast<uint64_t>(event); }

    void check(OneTransfer& transfer, QueuedCopies& queued, bool traced) {
        std::vector<uint64_t> found(transfer.n_sums(), 1);
        const bool wanted = transfer.sums && random_.below(8) != 0, some = queued.point != 0;
        const StreamTimes times = gpu_.finish(queued, wanted ? found.data() : nullptr);
        CHECK((gpu_.reached(queued.point) && gpu_.reached(queued.read)));
        for (const StreamTime& time : times) CHECK((time.begin <= time.end && (traced || time.begin == 0)));
        CHECK((times[0].begin != 0 || times[1].begin != 0) == (traced && some));
        if (wanted) transfer.check_sums(found);
        transfer.check_extents();
    }

    void one(bool traced) {
        const Made transfer = made(pages_);
        fill(*transfer);
        QueuedCopies queued = gpu_.queue(transfer->copies());
        CHECK((queued.point != 0) == (transfer->count != 0 && transfer->first != transfer->last));
        if (queued.point) CHECK(gpu_.last(transfer->load) >= queued.point);
        if (queued.point) CHECK(queued.read != 0);
        const bool spoils = !transfer->load && random_.below(2);
        if (spoils && random_.below(2)) {
            gpu_.await(queued.read);  // a store has read its source
        } else if (spoils) {
            gpu_.follow(model_.stream, queued.read);
            model_.await(model_.record());
        }
        const bool awaited = !queued.point && !transfer->after.empty();
        if (awaited) model_.await(reinterpret_cast<CudaEvent>(transfer->after.back()));  // nothing was queued
        if (spoils && queued.point) transfer->spoil();
        if (random_.below(3) == 0) {
            gpu_.follow(model_.stream, queued.point);
            model_.await(model_.record());
            CHECK(gpu_.reached(queued.point));
            if (!spoils) transfer->check_planes();
        }
        check(*transfer, queued, traced);
        transfer->check_planes();
    }

    // Several transfers under way, without common pages.
    void several() {
        std::vector<std::vector<int64_t>> parts(1 + random_.below(4));
        for (const int64_t page : pages_) parts[random_.below(parts.size())].push_back(page);
        std::vector<Made> transfers;
        std::vector<QueuedCopies> queued;
        for (const std::vector<int64_t>& part : parts) {
            if (part.empty()) continue;
            transfers.push_back(made(part));
            fill(*transfers.back());
            queued.push_back(gpu_.queue(transfers.back()->copies()));
            if (!queued.back().point) continue;
            int64_t& greatest = greatest_[transfers.back()->load];  // later transfers have greater points
            CHECK(std::min(queued.back().point, queued.back().read) > greatest);
            greatest = std::max(queued.back().point, queued.back().read);
        }
        for (const size_t backwards : {random_.below(2)}) {
            for (size_t n = 0; n < queued.size(); n++) {
                const size_t at = backwards ? queued.size() - 1 - n : n;
                std::vector<uint64_t> found(transfers[at]->n_sums());
                gpu_.finish(queued[at], found.data());
                if (!queued[at].point && !transfers[at]->after.empty()) model_.await(model_.record());
                if (transfers[at]->sums) transfers[at]->check_sums(found);
                transfers[at]->check_extents();
                transfers[at]->check_planes();
            }
        }
    }

    const Driver& driver_;
    GpuPool& pool_;
    Gpu& gpu_;
    Model model_;
    const std::vector<int64_t> pages_;
    int64_t greatest_[2] = {};
    Random random_;
};

void check_pool(const Driver& driver, uint64_t seed) {
    Random random(seed);
    constexpr int32_t kForms[] = {0, 12, 13};
    constexpr const char* kNames[] = {"single", "batch_12_8", "batch_13"};
    const uint64_t form = random.below(3);
    driver.batches(kForms[form]);
    driver.delay(random.below(3) == 0 ? 60 : 0);
    GpuPool pool(driver, random);
    {
        const Cuda cuda(driver.path.c_str(), driver.context());
        CHECK(std::string(cuda.api()) == kNames[form]);
        const auto kernels = static_cast<Kernels>(random.below(4));
        std::optional<Gpu> gpu;
        {
            const Cuda::Entered entered(cuda);
            const size_t staging = pool.staging(random);
            const auto size = [&] { return static_cast<int64_t>(random.between(1, 8)) * pool.planes.extent_bytes; };
            ChunkSizes sizes;
            if (random.below(2) == 0) {
                Random other(~seed);  // keeps the other draws unchanged
                const int64_t unbroken = static_cast<int64_t>(other.between(1, 8)) * pool.planes.extent_bytes / 3 + 1;
                sizes = {size(), size(), size(), unbroken, random.between(1, 12)};
            }
            gpu.emplace(cuda, pool.planes, pool.kernels(kernels, static_cast<int32_t>(random.between(1, 8))), sizes,
                        staging);
        }
        const bool traced = random.below(3) == 0;
        if (traced) gpu->trace();
        std::vector<std::vector<int64_t>> parts(1 + random.below(3));
        const bool mixed = random.below(2) == 0;  // or each has neighbours
        for (int64_t page = 0; page < pool.pages; page++) {
            const auto n = parts.size();
            parts[mixed ? random.below(n) : static_cast<size_t>(page) * n / static_cast<size_t>(pool.pages)].push_back(
                page);
        }
        std::vector<std::jthread> threads;
        for (size_t n = 0; n < parts.size(); n++) {
            if (parts[n].empty()) continue;
            threads.emplace_back([&, n] { Caller(driver, pool, *gpu, parts[n], seed * 7 + n).transfers(6, traced); });
        }
        threads.clear();
        if (seed % 8 == 0) {
            // Points give their events back: a caller alone needs those of the segments, those of points of four loads
            // and of four stores, and times. (Behind a thread that stands still, points of other threads pile up.)
            const int64_t most = 2 * (1 + 2 * 8) + 2 * 4 * 7 + (traced ? 1 + 4 * 7 : 0), made = driver.living(kEvents);
            Caller(driver, pool, *gpu, pool.all(), ~seed).transfers(6, traced);
            CHECK(driver.living(kEvents) <= std::max(made, most));
        }
        CHECK(pool.matches());
        const Cuda::Entered entered(cuda);
        gpu.reset();
    }
    driver.check_empty();
}

void check_times(const Driver& driver, int count) {
    driver.batches(13);
    for (uint64_t seed = 0; count > 0; seed++) {
        Random random(seed);
        GpuPool pool(driver, random);
        if (pool.pages < 2) continue;
        OneTransfer transfer(driver, pool, random, {0, 1}, true);
        if (transfer.count != 2 || transfer.first == transfer.last || transfer.kind == Extents::kDevice) continue;
        const Cuda cuda(driver.path.c_str(), driver.context());
        const Cuda::Entered entered(cuda);
        Gpu gpu(cuda, pool.planes, pool.kernels(Kernels::kPlain, 4), ChunkSizes{1, 1, 1, 1}, pool.staging(random));
        gpu.trace();
        transfer.load = count-- % 2 == 0;
        transfer.sums = false;
        transfer.route = Route::kZeroCopy;
        transfer.fill_planes();
        transfer.fill_mirror();
        transfer.foresee();
        driver.slow(40'000);
        QueuedCopies queued = gpu.queue(transfer.copies());
        const StreamTime kernels = gpu.finish(queued, nullptr)[1];
        CHECK(kernels.end - kernels.begin >= 40'000'000);
    }
}

// A model that computes until it is told to end.
class Busy {
public:
    Busy(const Driver& driver, const Cuda& cuda) : model_(cuda) {
        driver.call(model_.stream, [](void* of) { static_cast<std::atomic<bool>*>(of)->wait(true); }, &busy_);
        behind = model_.record();
    }
    ~Busy() { end(); }
    void end() {
        busy_ = false;
        busy_.notify_all();
    }

    CudaEvent behind;

private:
    std::atomic<bool> busy_ = true;
    Model model_;
};

// Transfers both ways, by all routes. Each comes after those before it that need its pages' planes, by their points
// alone. Some wait for one of two models: those behind them go on in other streams, and leave alone the tables and the
// bytes in the ring that work in front of them still needs. Some fail, and are queued again.
void check_overtaking(const Driver& driver, uint64_t seed) {
    constexpr const char* kQueues[] = {"cuLaunchKernel", "cuMemcpyBatchAsync", "cuStreamWaitEvent",
                                       "cuEventRecord",  "cuEventCreate",      "cuMemHostAlloc"};
    Random random(seed);
    driver.batches(13);
    driver.delay(random.below(2) ? 100 : 0);
    GpuPool pool(driver, random);
    const Cuda cuda(driver.path.c_str(), driver.context());
    std::optional<Gpu> gpu;
    {
        const Cuda::Entered entered(cuda);
        ChunkSizes sizes;
        const auto bytes = [&] { return static_cast<int64_t>(random.between(1, 4)) * pool.planes.extent_bytes; };
        if (random.below(2)) sizes = {bytes(), bytes(), bytes(), bytes() / 2 + 1, random.between(1, 12)};
        const auto kernels = static_cast<Kernels>(random.below(4));
        gpu.emplace(cuda, pool.planes, pool.kernels(kernels, 4), sizes, pool.staging(random) * (1 + random.below(4)));
    }
    struct Page {
        std::unique_ptr<Model> model;
        int64_t written = 0;        // a point behind the last change of its planes
        std::vector<int64_t> read;  // points behind reads since then
    };
    {
        std::vector<Page> all(static_cast<size_t>(pool.pages));
        for (Page& page : all) page.model = std::make_unique<Model>(cuda);
        Busy busy[] = {{driver, cuda}, {driver, cuda}};
        std::vector<std::unique_ptr<OneTransfer>> transfers;
        std::vector<QueuedCopies> queued;
        const auto finish = [&](size_t n) {
            std::vector<uint64_t> found(transfers[n]->n_sums());
            gpu->finish(queued[n], found.data());
            if (transfers[n]->sums) transfers[n]->check_sums(found);
            transfers[n]->check_extents();
            std::swap(transfers[n], transfers.back());
            std::swap(queued[n], queued.back());
            transfers.pop_back();
            queued.pop_back();
        };
        driver.hold_copies(random.below(4) == 0);
        const uint64_t loads = random.below(3), route = random.below(6), kind = random.below(6);
        const uint64_t waits = 2 + random.below(20);
        const bool fails = random.below(3) == 0;
        // A call that fails waits for all work before it, so another thread ends the models then.
        const auto end = [&](int n) {
            if (n == 1) driver.hold_copies(0);
            busy[n].end();
        };
        std::jthread ends([&] {
            for (int n = 0; fails && n < 2; n++) {
                std::this_thread::sleep_for(std::chrono::milliseconds(2 + n));
                end(n);
            }
        });
        for (uint64_t left = 60; left > 0;) {
            std::vector<int64_t> some = pool.all();
            random.shuffle(some);
            some.resize(random.below(4) ? 1 : static_cast<size_t>(random.between(1, 4)));
            auto made = std::make_unique<OneTransfer>(driver, pool, random, some, random.below(4) != 0);
            if (made->count == 0 || made->first == made->last) continue;
            if (kind < 3 && made->kind != static_cast<Extents>(kind)) continue;
            if (route < 3) made->route = static_cast<Route>(route);
            made->load = random.below(2) < loads;
            std::vector<Page*> pages;
            for (int64_t n = 0; n < made->count; n++) {
                const int64_t block = made->blocks[static_cast<size_t>(n * pool.planes.page_blocks)];
                pages.push_back(&all[static_cast<size_t>(block / pool.planes.page_blocks)]);
            }
            const bool fills = random.below(12) == 0, writes = fills || made->load;
            Model& model = *pages[0]->model;
            bool follows = fills;
            for (const Page* const page : pages) {
                follows = follows || page->written || (writes && !page->read.empty());
                gpu->follow(model.stream, page->written);
                for (const int64_t point : page->read) {
                    if (writes) gpu->follow(model.stream, point);
                }
            }
            if (fills) {
                made->fill_mirror();
                driver.call(model.stream, [](void* of) { static_cast<OneTransfer*>(of)->fill_planes(); }, made.get());
            }
            made->foresee();
            const auto wait = [&](CudaEvent event) { made->after.push_back(reinterpret_cast<uint64_t>(event)); };
            if (follows) wait(model.record());
            if (random.below(waits) == 0) wait(busy[random.below(2)].behind);
            while (true) {
                try {
                    for (const char* const function : kQueues) {
                        if (fails && random.below(60) == 0) driver.fail(function, random.between(0, 12));
                    }
                    queued.push_back(gpu->queue(made->copies()));
                    break;
                } catch (const CudaError&) {
                    if (!fails) throw;
                    CHECK(gpu->reached(gpu->last(made->load)));
                }
            }
            for (const char* const function : kQueues) driver.fail(function, -1);
            for (Page* const page : pages) {
                if (writes) page->written = queued.back().point, page->read.clear();
                else page->read.push_back(queued.back().read);
            }
            transfers.push_back(std::move(made));
            if (left-- == 30 && !fails) end(0);
            for (size_t n = random.below(transfers.size()); n < transfers.size(); n++) {
                if (gpu->reached(queued[n].point)) finish(n);
            }
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(random.below(3)));
        if (!fails) end(1);
        ends.join();
        while (!transfers.empty()) finish(random.below(transfers.size()));
        CHECK(pool.matches());
    }
    const Cuda::Entered entered(cuda);
    gpu.reset();
    driver.delay(0);
}

void check_ways(const Driver& driver) {
    for (const bool loads : {true, false}) {
        const Cuda cuda(driver.path.c_str(), driver.context());
        const Cuda::Entered entered(cuda);
        driver.delay(60);
        {
            Lane lane(cuda, {1 << 16, 4096, 4096, 100}, loads);
            CHECK(driver.living(kStreams) == 0);  // before its first turn
            lane.begin_turn();
            const CudaStream one = lane.copies;
            lane.make_way(200);  // the first go in any case
            CHECK(lane.copies == one);
            const int64_t before = lane.done.record(std::array{lane.copies}, 1);
            lane.make_way(1);
            const CudaStream other = lane.copies;
            CHECK(other != one);
            lane.done.await(lane.done.record(std::array{other}, 2));
            CHECK(lane.done.reached(before));
            lane.make_way(99);  // up to the last byte
            CHECK(lane.copies == other);
            lane.make_way(1);
            CHECK(lane.copies == one);
        }
        driver.delay(0);
        driver.check_empty(1);
    }
}

}  // namespace

TEST_CASE("the time of kernels ends with the last of them, in any stream") { check_times(Driver(), 4); }

TEST_CASE("transfers overtake others that wait") {
    const Driver driver;
    for (uint64_t seed = 0; seed < 1 + setting("ROUNDS", 300) / 3; seed++) {
        CAPTURE(seed);
        check_overtaking(driver, seed);
    }
    driver.check_empty();
}

TEST_CASE("copies go on in the other stream after `unbroken` bytes, behind all of those") { check_ways(Driver()); }

TEST_CASE("pools, extents and routes at random") {
    const Driver driver;
    const uint64_t count = setting("ROUNDS", 300), from = setting("FIRST_SEED", 0);
    for (uint64_t seed = from; seed < from + count; seed++) {
        CAPTURE(seed);
        check_pool(driver, seed);
    }
    const bool whole = from == 0 && count >= 100;
    if (whole) CHECK(driver.calls("cuMemcpy2DAsync_v2") > static_cast<int64_t>(count / 2));  // pages in equal steps
}
