// Calls of the driver fail, one at a time, anywhere: the requested operation throws, nothing is left behind, and later
// operations are right.

#include <optional>

#include "tests/gpu_transfer.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

// Functions that end something are missing: their errors are not reported, and their objects go with the process.
constexpr const char* kAll[] = {"cuCtxPushCurrent_v2",
                                "cuCtxGetStreamPriorityRange",
                                "cuStreamCreateWithPriority",
                                "cuStreamSynchronize",
                                "cuStreamWaitEvent",
                                "cuEventCreate",
                                "cuEventRecord",
                                "cuEventQuery",
                                "cuEventSynchronize",
                                "cuEventElapsedTime",
                                "cuMemAlloc_v2",
                                "cuMemHostAlloc",
                                "cuMemcpyBatchAsync",
                                "cuMemcpyAsync",
                                "cuMemcpy2DAsync_v2",
                                "cuMemcpyDtoH_v2",
                                "cuLaunchKernel"};

struct Shape {
    uint64_t seed;
    Kernels kernels;
    int32_t batches;
};

class Scenario {
public:
    Scenario(const Driver& driver, const Shape& shape) : driver_(driver), random_(shape.seed), pool_(driver, random_) {
        const Cuda cuda(driver.path.c_str(), driver.context());
        std::optional<Gpu> gpu;
        const PageKernels kernels = pool_.kernels(shape.kernels, 2);
        again([&] {
            const Cuda::Entered entered(cuda);
            const int64_t before = driver.living(kEvents) + driver.living(kStreams) + driver.living(kDeviceMemory);
            try {
                ChunkSizes sizes;
                sizes.unbroken = pool_.planes.extent_bytes / 3 + 1;
                gpu.emplace(cuda, pool_.planes, kernels, sizes, 2 * static_cast<size_t>(pool_.planes.extent_bytes));
            } catch (const CudaError&) {
                REQUIRE(driver.living(kEvents) + driver.living(kStreams) + driver.living(kDeviceMemory) == before);
                throw;
            }
        });
        gpu->trace();
        CudaStream stream = nullptr;
        again([&] {
            const Cuda::Entered entered(cuda);
            stream = cuda.open_stream(false);
        });
        for (int n = 0; n < 4; n++) copy(*gpu, stream, n);
        REQUIRE(pool_.matches());
        again([&] {
            const Cuda::Entered entered(cuda);
            cuda.close_stream(stream);
            gpu.reset();
        });
        REQUIRE(failed_ <= 1);
    }

    int failed() const { return failed_; }

private:
    // A call that failed once does not fail again.
    template <typename Work>
    bool again(Work work) {
        try {
            work();
            return true;
        } catch (const CudaError& error) {
            REQUIRE(error.what() == doctest::Contains("719 (FAKE_ERROR)"));
            REQUIRE(failed_++ == 0);
        }
        work();
        return false;
    }

    void copy(Gpu& gpu, CudaStream stream, int number) {
        OneTransfer transfer(driver_, pool_, random_, pool_.all(), false);
        transfer.load = number % 2 == 0;
        transfer.sums = number != 3;
        transfer.fill_planes();
        transfer.fill_mirror();
        transfer.foresee();
        QueuedCopies queued;
        driver_.slow(500);
        again([&] { queued = gpu.queue(transfer.copies()); });
        again([&] { gpu.follow(stream, queued.read); });
        again([&] { gpu.reached(queued.point); });
        std::vector<uint64_t> found(transfer.n_sums());
        bool finished = true;
        try {
            gpu.finish(queued, found.data());
        } catch (const CudaError&) {
            REQUIRE(failed_++ == 0);
            finished = false;
            REQUIRE(gpu.reached(queued.point));  // the blocks are given to others now
        }
        again([&] { REQUIRE(gpu.reached(queued.point)); });
        if (finished && transfer.sums) transfer.check_sums(found);
        transfer.check_extents();
        transfer.check_planes();
    }

    const Driver& driver_;
    Random random_;
    GpuPool pool_;
    int failed_ = 0;
};

// `most`: about the number of failing calls of each function.
int64_t fail_each(const Driver& driver, const Shape& shape, Random& random, uint64_t most) {
    driver.batches(shape.batches);
    int64_t all = 0;
    for (const char* const function : kAll) {
        driver.fail(function, -1);
        const int64_t before = driver.calls(function);
        Scenario(driver, shape);
        driver.check_empty();
        const int64_t calls = driver.calls(function) - before;
        const auto step = [&] {
            return static_cast<int64_t>(random.below(static_cast<uint64_t>(calls) * 2 / most + 1));
        };
        for (int64_t nth = step() / 2; nth < calls; nth += 1 + step()) {
            driver.fail(function, nth);
            INFO(std::string(function), ", call ", nth);
            all += Scenario(driver, shape).failed();
            driver.fail(function, -1);
            driver.check_empty();
        }
    }
    return all;
}

}  // namespace

TEST_CASE("calls of the driver fail, one at a time") {
    const Driver driver;
    Random random(9);
    const uint64_t most = std::max<uint64_t>(1, setting("ROUNDS", 10));
    int64_t failed = 0;
    for (int n = 0; n < 2; n++) {
        for (const Kernels kernels : {Kernels::kNone, Kernels::kPlain, Kernels::kSums, Kernels::kLooks}) {
            constexpr int32_t kForms[] = {0, 12, 13};
            failed += fail_each(driver, {random.next(), kernels, random.pick(kForms)}, random, most);
        }
    }
    CHECK(failed > 20);
}
