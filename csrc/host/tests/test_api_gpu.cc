// The C interface of a GPU's copies under hostile values: each is refused with -EINVAL, and nothing has changed by it.

#include <cerrno>
#include <functional>
#include <limits>

#include "../api_executor.h"
#include "../api.h"
#include "../api_gpu.h"
#include "gpu_pool.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

constexpr int64_t kHuge[] = {INT64_MAX, INT64_MIN, INT64_MAX - 1, int64_t{1} << 62, -1, -(int64_t{1} << 31)};

template <typename T>
uint64_t at(const T* address) {
    return reinterpret_cast<uint64_t>(address);
}

// A pool as the C interface takes it, and its one GPU.
struct Opening {
    Opening(const Driver& driver, GpuPool& of) : pool(of), path(driver.path) {
        const GpuPlanes& planes = pool.planes;
        bounds = planes.bounds;
        first_plane = planes.first_plane;
        for (const PlaneRuns& plane : planes.planes) {
            rows.insert(rows.end(), {plane.base, plane.block_stride, plane.run_stride, plane.run_bytes,
                                     plane.runs_per_block, plane.start, plane.end});
        }
        const PageKernels kernels = pool.kernels(driver, Kernels::kLooks, 4);
        spec = {at(driver.context()), at(bounds.data()), at(first_plane.data()), at(rows.data()), at(kernels.gather),
                at(kernels.scatter), at(kernels.gather_sums), at(kernels.scatter_sums), kernels.table, planes.blocks,
                planes.extent_bytes, 4 * planes.extent_bytes, 1 << 20, 1 << 20, 1 << 20, 1 << 20, planes.layers,
                planes.page_blocks, kernels.vector, kernels.processors, kernels.sums, kernels.looks};
    }
    int32_t open() { return gdscache_gpu_open(path.c_str(), &spec, &gpu); }

    GpuPool& pool;
    std::string path;
    std::vector<int64_t> bounds, rows;
    std::vector<int32_t> first_plane;
    gdscache_gpu_spec spec;
    gdscache_gpu* gpu = nullptr;
};

void hostile_openings(const Driver& driver, GpuPool& pool) {
    const auto refused = [&](const std::function<void(Opening&)>& spoil, int32_t answer = -EINVAL) {
        Opening one(driver, pool);
        spoil(one);
        CHECK(one.open() == answer && one.gpu == nullptr && gdscache_gpu_why()[0]);
        driver.check_empty();
    };
    for (const int64_t value : kHuge) {
        const auto narrow = static_cast<int32_t>(value);
        for (int64_t gdscache_gpu_spec::* field :
             {&gdscache_gpu_spec::blocks, &gdscache_gpu_spec::extent_bytes, &gdscache_gpu_spec::staging}) {
            refused([&](Opening& one) { one.spec.*field = value; });
        }
        for (int32_t gdscache_gpu_spec::* field : {&gdscache_gpu_spec::layers, &gdscache_gpu_spec::page_blocks,
                                                   &gdscache_gpu_spec::vector, &gdscache_gpu_spec::processors}) {
            refused([&](Opening& one) { one.spec.*field = narrow < 1 ? narrow : 0; });
            refused([&](Opening& one) { one.spec.*field = 0; });
        }
        for (const size_t n : {0, 1, 2, 3, 4, 5, 6}) {
            const bool stride = n == 1 || n == 2, far = value > int64_t{1} << 60 || value < -(int64_t{1} << 60);
            if (stride && !far) continue;
            if (n == 2 && pool.planes.planes[0].runs_per_block == 1) continue;  // nobody looks at it
            refused([&](Opening& one) { one.rows[n] = value; });
        }
        refused([&](Opening& one) { one.bounds[0] = value; });
        refused([&](Opening& one) { one.bounds[1] = value; });
        refused([&](Opening& one) { one.bounds.back() = value; });
        refused([&](Opening& one) { one.first_plane[0] = narrow ? narrow : 1; });
        refused([&](Opening& one) { one.first_plane[1] = narrow < 1 ? narrow : INT32_MAX; });
        refused([&](Opening& one) { one.rows[5] = value, one.rows[6] = value; });
        refused([&](Opening& one) { one.rows[3] = value, one.rows[4] = value; });
    }
    refused([](Opening& one) { one.rows[0] = 0; });
    refused([](Opening& one) { one.spec.staging = 2 * one.spec.extent_bytes - 1; });
    refused([](Opening& one) { one.spec.chunk_bytes = 0; });
    refused([](Opening& one) { one.spec.look_bytes = -1; });
    refused([](Opening& one) { one.spec.last_look_bytes = INT64_MAX; });
    refused([](Opening& one) { one.spec.unbroken_bytes = 0; });
    refused([](Opening& one) { one.spec.vector = 17; });
    refused([](Opening& one) { one.spec.scatter = 0; });
    refused([](Opening& one) { one.spec.table = 0; });
    for (uint64_t gdscache_gpu_spec::* field :
         {&gdscache_gpu_spec::bounds, &gdscache_gpu_spec::first_plane, &gdscache_gpu_spec::planes}) {
        refused([&](Opening& one) { one.spec.*field = 0; });
        refused([&](Opening& one) { one.spec.*field += 1; });
    }
    refused([](Opening& one) { one.spec.context = 0; }, -EIO);
    refused([](Opening& one) { one.path = "/nowhere/libcuda.so"; }, -EIO);
    refused([](Opening& one) { one.spec.staging = int64_t{1} << 40; }, -EIO);  // more than there is
    Opening one(driver, pool);
    CHECK(gdscache_gpu_open(nullptr, &one.spec, &one.gpu) == -EINVAL);
    CHECK(gdscache_gpu_open(one.path.c_str(), nullptr, &one.gpu) == -EINVAL);
    CHECK(gdscache_gpu_open(one.path.c_str(), &one.spec, nullptr) == -EINVAL && !one.gpu);
}

// Pages of a window of host memory, sound.
struct Asking {
    Asking(const Driver& driver, const GpuPool& pool) : memory(static_cast<size_t>(6 * pool.planes.extent_bytes)) {
        memory.pin(driver);
        const GpuPlanes& planes = pool.planes;
        for (int64_t n = 0; n < 4; n++) slots.push_back(n);
        for (int64_t n = 0; n < 4 * planes.page_blocks; n++) blocks.push_back(n);
        copies = {1, 0, 1, 0, planes.layers, 0, 1, 0, at(memory.data()), planes.extent_bytes, 0, 6, 0, 4,
                  at(slots.data()), at(blocks.data()), 0, 0};
    }
    Bytes memory;
    std::vector<int64_t> slots, blocks;
    gdscache_gpu_copies copies;
};

void hostile_copies(const Driver& driver, GpuPool& pool, gdscache_gpu* gpu) {
    int64_t points[2] = {-7, -7}, ticket = -7;
    const auto refused = [&](const std::function<void(Asking&)>& spoil) {
        Asking one(driver, pool);
        spoil(one);
        CHECK(gdscache_gpu_queue(gpu, &one.copies, points, &ticket) == -EINVAL && gdscache_gpu_why()[0]);
        CHECK(points[0] == -7 && points[1] == -7 && ticket == -7 && gdscache_gpu_last(gpu, 1) == 0);
    };
    for (const int64_t value : kHuge) {
        const auto narrow = static_cast<int32_t>(value);
        for (int64_t gdscache_gpu_copies::* field : {&gdscache_gpu_copies::stride, &gdscache_gpu_copies::origin,
                                                     &gdscache_gpu_copies::extents, &gdscache_gpu_copies::pages}) {
            if (field == &gdscache_gpu_copies::origin && value == -1) continue;  // a byte of something else comes first
            refused([&](Asking& one) { one.copies.*field = value; });
        }
        if (value < 0) refused([&](Asking& one) { one.copies.fence = value; });
        refused([&](Asking& one) { one.copies.n_after = value; });
        refused([&](Asking& one) { one.copies.route = narrow ? narrow : 3; });
        refused([&](Asking& one) { one.copies.first = narrow ? narrow : 99; });
        refused([&](Asking& one) { one.copies.last = narrow ? narrow : 99; });
        refused([&](Asking& one) { one.slots[2] = value; });
        refused([&](Asking& one) { one.blocks[2] = value; });
    }
    refused([](Asking& one) { one.copies.route = 3; });
    refused([](Asking& one) { one.copies.stride = 0; });
    refused([](Asking& one) { one.copies.stride = 1; });  // slots over each other
    refused([](Asking& one) { one.copies.origin = 1; });  // behind the first byte that is copied
    refused([](Asking& one) { one.copies.origin = INT64_MIN / 2; });
    refused([](Asking& one) { one.copies.stride = INT64_MAX / 4; });
    refused([](Asking& one) { one.slots[3] = 6; });
    refused([&](Asking& one) { one.blocks[0] = pool.planes.blocks; });
    refused([](Asking& one) { one.copies.first = 1, one.copies.last = 0; });
    refused([](Asking& one) { one.copies.address = 0; });
    refused([](Asking& one) { one.copies.address = UINT64_MAX - 7; });
    refused([](Asking& one) { one.copies.slots = 0; });
    refused([](Asking& one) { one.copies.slots |= 1; });
    refused([](Asking& one) { one.copies.blocks = 0; });
    refused([](Asking& one) { one.copies.n_after = 1; });
    Asking one(driver, pool);
    CHECK(gdscache_gpu_queue(nullptr, &one.copies, points, &ticket) == -EINVAL);
    CHECK(gdscache_gpu_queue(gpu, nullptr, points, &ticket) == -EINVAL);
    CHECK(gdscache_gpu_queue(gpu, &one.copies, nullptr, &ticket) == -EINVAL);
    CHECK(gdscache_gpu_queue(gpu, &one.copies, points, nullptr) == -EINVAL);
    for (const int64_t value : kHuge) {
        CHECK(gdscache_gpu_finish(gpu, value, nullptr) == -ENOENT && gdscache_gpu_finish(nullptr, value, nullptr) < 0);
        for (gdscache_gpu* const of : {gpu, static_cast<gdscache_gpu*>(nullptr)}) {
            if (value >= 0 && of) continue;
            CHECK(gdscache_gpu_reached(of, value) == -EINVAL && gdscache_gpu_await(of, value, INT64_MAX) == -EINVAL);
            CHECK(gdscache_gpu_follow(of, 0, value) == -EINVAL);
        }
        if (value >= 0) CHECK(gdscache_gpu_reached(gpu, value) == 1 && gdscache_gpu_await(gpu, value, INT64_MAX) == 1);
    }
    CHECK(gdscache_gpu_last(nullptr, 1) == 0 && gdscache_gpu_api(nullptr)[0] == 0);
    gdscache_gpu_close(nullptr);
}

// Sound copies in and out; what was asked for and never finished goes with the GPU.
void sound_copies(const Driver& driver, GpuPool& pool, gdscache_gpu* gpu) {
    CHECK(std::string(gdscache_gpu_api(gpu)) == "batch_13");
    Asking one(driver, pool);
    const std::vector<uint8_t> content = [&] {
        Random random(4);
        return random.bytes(one.memory.size());
    }();
    std::copy(content.begin(), content.end(), one.memory.data());
    const size_t layers = static_cast<size_t>(pool.planes.layers);
    std::vector<uint64_t> loaded(4 * layers), stored(4 * layers);
    int64_t points[2], tickets[2];
    for (int32_t route = 0; route < 3; route++) {
        one.copies.route = route;
        one.copies.load = 1;
        CHECK(gdscache_gpu_queue(gpu, &one.copies, points, &tickets[0]) == 0 && points[0] > 0);
        CHECK(gdscache_gpu_last(gpu, 1) == points[0] && gdscache_gpu_await(gpu, points[0], INT64_MAX) == 1);
        CHECK(gdscache_gpu_reached(gpu, points[0]) == 1);
        one.copies.load = 0;
        CHECK(gdscache_gpu_queue(gpu, &one.copies, points, &tickets[1]) == 0 && tickets[1] > tickets[0]);
        CHECK(gdscache_gpu_finish(gpu, tickets[1], stored.data()) == 0);
        CHECK(gdscache_gpu_finish(gpu, tickets[1], stored.data()) == -ENOENT);
        CHECK(gdscache_gpu_finish(gpu, tickets[0], loaded.data()) == 0 && loaded == stored);
        CHECK(std::equal(content.begin(), content.end(), one.memory.data()));
        // A refusal while others' copies are put away is not that of new ones.
        one.copies.sums = 0;
        CHECK(gdscache_gpu_queue(gpu, &one.copies, points, &tickets[0]) == 0);
        CHECK(gdscache_gpu_await(gpu, points[0], INT64_MAX) == 1);
        const int64_t last = gdscache_gpu_last(gpu, 0);
        driver.fail("cuEventQuery", 0);
        const int32_t answer = gdscache_gpu_queue(gpu, &one.copies, points, &tickets[0]);
        driver.fail("cuEventQuery", -1);
        CHECK(answer == (gdscache_gpu_last(gpu, 0) == last ? -EIO : 0));
        one.copies.sums = 1;
        CHECK(gdscache_gpu_queue(gpu, &one.copies, points, &tickets[0]) == 0);  // which nobody finishes
        CHECK(gdscache_gpu_await(gpu, points[0], INT64_MAX) == 1);
    }
}

// An executor's spaces must fit the GPU's.
void executors(const Driver& driver, GpuPool& pool, gdscache_gpu* gpu) {
    const GpuPlanes& planes = pool.planes;
    Bytes memory(static_cast<size_t>(4 * planes.extent_bytes));
    memory.pin(driver);
    std::vector<uint64_t> sums(static_cast<size_t>(4 * planes.layers));
    gdscache_pool* host = nullptr;
    std::vector<int64_t> rows;
    for (const PlaneMemory& plane : pool.there) {
        const auto base = static_cast<int64_t>(at(plane.base));
        rows.insert(rows.end(), {base, plane.block_stride, plane.token_stride, plane.row_bytes});
    }
    CHECK(!gdscache_pool_open(rows.data(), static_cast<int64_t>(pool.there.size()), planes.first_plane.data(),
                              planes.layers, pool.pool.blocks, pool.pool.block_tokens, planes.page_blocks, &host,
                              nullptr, 0));
    gdscache_executor* executor = nullptr;
    char why[80];
    const auto open = [&](const std::function<void(gdscache_limits&, gdscache_space*)>& spoil) {
        gdscache_limits limits{at(planes.bounds.data()), planes.extent_bytes, planes.layers, planes.page_blocks, 1 << 20,
                               1 << 16, 1 << 16, 1 << 16, 1 << 16};
        gdscache_space spaces[] = {{0, 1, planes.blocks, 0, 0, 0, 0, 0, 0, 0},
                                   {1, 0, 4, at(memory.data()), at(sums.data()), 0, 0, 1, 0, 0},
                                   {1, 1, 4, at(memory.data()) | kDeviceBit, at(sums.data()), 0, 0, 0, 0, 0},
                                   {0, 0, planes.blocks, 0, 0, 0, 0, 0, 0, 0}};
        spoil(limits, spaces);
        why[0] = 0;
        return gdscache_executor_open(&limits, spaces, 4, -1, 0, 0, 0, host, gpu, nullptr, 1, 0, 1, &executor, why,
                                      sizeof why);
    };
    const auto refused = [&](const std::function<void(gdscache_limits&, gdscache_space*)>& spoil) {
        CHECK(open(spoil) == -EINVAL && !executor && why[0]);
    };
    refused([&](gdscache_limits&, gdscache_space* spaces) { spaces[0].slots = planes.blocks + 1; });
    refused([](gdscache_limits&, gdscache_space* spaces) { spaces[2].memory = 0; });
    refused([](gdscache_limits&, gdscache_space* spaces) { spaces[2].memory = UINT64_MAX - 3; });
    refused([](gdscache_limits& limits, gdscache_space*) { limits.page_blocks += 1; });
    for (const int64_t value : kHuge) {
        if (value < 0) refused([&](gdscache_limits&, gdscache_space* spaces) { spaces[1].fence = value; });
    }
    std::vector<int64_t> others = planes.bounds;
    others.back() -= 1;
    if (planes.layers == 1 || others.back() > others[others.size() - 2]) {
        refused([&](gdscache_limits& limits, gdscache_space*) { limits.bounds = at(others.data()); });
    }
    CHECK(open([](gdscache_limits&, gdscache_space*) {}) == 0);
    const int64_t end = planes.bounds.back(), extent = planes.extent_bytes;
    const gdscache_group group{0, planes.layers, 0, end, 0, extent, 0, extent, 0, 0};
    const int64_t slot = 0;
    std::vector<int64_t> blocks(static_cast<size_t>(planes.page_blocks));
    std::iota(blocks.begin(), blocks.end(), 0);
    const auto begin = [&](int64_t move, int32_t source, int32_t target) {
        const gdscache_way way{source, target, -1, 0, 1, at(source == 0 || source == 3 ? blocks.data() : &slot),
                               at(target == 0 || target == 3 ? blocks.data() : &slot), 0, 0};
        return gdscache_move_begin(executor, move, 0, INT64_MAX, &way, 1, &group, 1, nullptr, 0, 0);
    };
    CHECK(begin(1, 2, 3) == -EINVAL && begin(1, 3, 2) == -EINVAL);  // the GPU has no planes of ours
    gdscache_copy job;
    CHECK(gdscache_take_copy(executor, 0, &job) == -EINVAL);  // all of them are the GPU's
    CHECK(gdscache_copy_queued(executor, 1, 1) == -EINVAL && gdscache_copy_ended(executor, 1, nullptr, "why") == -EINVAL);
    for (const auto& [source, target] : {std::pair{1, 0}, {0, 1}, {1, 3}, {3, 1}}) {
        const int64_t move = 2 + 10 * source + target;
        int64_t point = -1;
        CHECK(begin(move, source, target) == 0);
        CHECK(gdscache_move_wait(executor, move, 0, INT64_MAX, &point) == 1 && point >= 0);
        CHECK(gdscache_gpu_await(gpu, point, INT64_MAX) == 1 && gdscache_move_wait(executor, move, -1, INT64_MAX, &point) == 1);
    }
    gdscache_executor_close(executor);
    gdscache_pool_close(host);
}

}  // namespace

int main() {
    const Driver driver;
    driver.batches(13);
    for (uint64_t seed = 0; seed < 8; seed++) {
        Random random(seed);
        GpuPool pool(driver, random);
        hostile_openings(driver, pool);
        Opening one(driver, pool);
        CHECK(one.open() == 0 && one.gpu);
        hostile_copies(driver, pool, one.gpu);
        executors(driver, pool, one.gpu);
        sound_copies(driver, pool, one.gpu);
        gdscache_gpu_close(one.gpu);
        driver.check_empty();
    }
    std::printf(" good\n");
}
