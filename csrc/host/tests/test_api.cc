// The C interface of the executor under hostile values: each is refused with -EINVAL, and nothing has changed by it.

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "../api_executor.h"
#include "check.h"

using namespace gdscache::test;

namespace {

constexpr int64_t kHuge[] = {INT64_MAX, INT64_MIN, INT64_MAX - 1, int64_t{1} << 62, int64_t{1} << 48, int64_t{1} << 32,
                             int64_t{1} << 31, (int64_t{1} << 31) + 1, -1, -(int64_t{1} << 31), INT32_MAX};
constexpr int64_t kExtent = 8192, kSlots = 16;
constexpr int32_t kLayers = 2, kPageBlocks = 2, kTokens = 4;
constexpr int64_t kRow = 512, kLayer = kRow * kTokens * kPageBlocks;  // bytes
enum : int32_t { kPlanes, kCpu, kSsd, kForeignCpu, kForeignSsd, kForeignPlanes, kSpaces };

template <typename T>
uint64_t at(const T* address) {
    return reinterpret_cast<uint64_t>(address);
}

struct Opening {
    Opening() : memory(kSlots * kExtent), sums(kSlots * kLayers), pool_bytes(2 * kSlots * kRow * kTokens) {
        file = memfd_create("gdscache-test", 0);
        CHECK(file >= 0);
        for (int64_t layer = 0; layer < kLayers; layer++) {
            const uint64_t base = at(pool_bytes.data()) + static_cast<uint64_t>(layer * kSlots * kRow * kTokens);
            planes.insert(planes.end(), {static_cast<int64_t>(base), kRow * kTokens, kRow, kRow});
        }
        CHECK(!gdscache_pool_open(planes.data(), kLayers, first_plane, kLayers, kSlots, kTokens, kPageBlocks, &pool,
                                  nullptr, 0));
        limits = {at(bounds), kExtent, kLayers, kPageBlocks, 1 << 20, 1 << 16, 1 << 16, 1 << 16, 1 << 16};
        spaces[kPlanes] = {0, 0, kSlots, 0, 0, 0, 0, 0, 0, 0};
        spaces[kCpu] = {1, 0, kSlots, at(memory.data()), at(sums.data()), 0, 0, 0, 0, 0};
        spaces[kSsd] = {2, 0, kSlots, 0, 0, at(&file), 1, 0, 1, 0};
        spaces[kForeignCpu] = {1, 1, kSlots, 0, at(sums.data()), 0, 0, 0, 0, 0};
        spaces[kForeignSsd] = {2, 1, kSlots, 0, 0, 0, 0, 0, 0, 0};
        spaces[kForeignPlanes] = {0, 1, kSlots, 0, 0, 0, 0, 0, 0, 0};
    }
    ~Opening() {
        gdscache_pool_close(pool);
        close(file);
    }
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;

    int32_t open() {
        return gdscache_executor_open(&limits, spaces, n_spaces, reserve_space, reserve_first, reserve_slots, fence,
                                      pool, nullptr, nullptr, workers, depth, threads, &executor, why, sizeof why);
    }

    std::vector<uint8_t> memory;
    std::vector<uint64_t> sums;
    std::vector<uint8_t> pool_bytes;
    std::vector<int64_t> planes;
    int32_t first_plane[3] = {0, 1, 2};
    int64_t bounds[4] = {0, kLayer, 2 * kLayer, 0};
    int file;
    gdscache_pool* pool = nullptr;
    gdscache_limits limits;
    gdscache_space spaces[kSpaces];
    int64_t n_spaces = kSpaces;
    int32_t reserve_space = kCpu;
    int64_t reserve_first = 2, reserve_slots = 4, fence = 0;
    int32_t workers = 2, depth = 0, threads = 1;
    gdscache_executor* executor = nullptr;
    char why[80] = "";
};

void refused_opening(const std::function<void(Opening&)>& spoil) {
    Opening one;
    spoil(one);
    one.why[0] = 0;
    const int32_t answer = one.open();
    CHECK(answer == -EINVAL && one.executor == nullptr && one.why[0] != 0);
}

void hostile_openings() {
    const auto each = [](std::initializer_list<int64_t> values, const std::function<void(Opening&, int64_t)>& put) {
        for (const int64_t value : values) refused_opening([&](Opening& one) { put(one, value); });
    };
    for (const int64_t value : kHuge) {
        const bool bytes = value < 0 || value >= int64_t{1} << 48;  // what is less may be an extent's, or a limit
        if (bytes) each({value}, [](Opening& one, int64_t v) { one.limits.extent_bytes = v; });
        for (int64_t gdscache_limits::* field : {&gdscache_limits::flying_bytes, &gdscache_limits::io_bytes,
                                                 &gdscache_limits::copy_bytes, &gdscache_limits::foreign_io_bytes,
                                                 &gdscache_limits::foreign_copy_bytes}) {
            if (!bytes || value == int64_t{1} << 48) continue;
            each({value}, [&](Opening& one, int64_t v) { one.limits.*field = v; });
        }
        for (const int32_t space : {kPlanes, kCpu, kSsd, kForeignCpu, kForeignSsd, kForeignPlanes}) {
            if (value == INT32_MAX && space != kPlanes) continue;
            each({value}, [&](Opening& one, int64_t v) { one.spaces[space].slots = v; });
        }
        each({value}, [](Opening& one, int64_t v) { one.n_spaces = v; });
        each({value}, [](Opening& one, int64_t v) { one.reserve_first = v; });
        each({value}, [](Opening& one, int64_t v) { one.reserve_slots = v; });
        if (value < 0) each({value}, [](Opening& one, int64_t v) { one.fence = v; });
        if (value < 0) each({value}, [](Opening& one, int64_t v) { one.spaces[kSsd].stretch = v; });
        each({value}, [](Opening& one, int64_t v) { one.bounds[0] = v; });
        each({value}, [](Opening& one, int64_t v) { one.bounds[1] = v; });
        each({value}, [](Opening& one, int64_t v) { one.bounds[2] = v; });
    }
    const auto narrow = [](std::initializer_list<int32_t> values, const std::function<void(Opening&, int32_t)>& put) {
        for (const int32_t value : values) refused_opening([&](Opening& one) { put(one, value); });
    };
    each({0, kExtent - 1, 100}, [](Opening& one, int64_t v) { one.limits.extent_bytes = v; });
    each({0, kLayer - 1, 2 * kLayer}, [](Opening& one, int64_t v) { one.bounds[1] = v; });  // no pool has such layers
    each({kSlots + 1}, [](Opening& one, int64_t v) { one.spaces[kPlanes].slots = v; });
    narrow({0, -1, INT32_MAX, INT32_MIN, 3, 1}, [](Opening& one, int32_t v) { one.limits.layers = v; });
    narrow({0, -1, INT32_MAX, INT32_MIN, 3, 1}, [](Opening& one, int32_t v) { one.limits.page_blocks = v; });
    narrow({-1, 3, INT32_MAX, INT32_MIN}, [](Opening& one, int32_t v) { one.spaces[kCpu].kind = v; });
    narrow({0, -1, INT32_MIN}, [](Opening& one, int32_t v) { one.spaces[kSsd].n_files = v; });
    narrow({-2, kSpaces, INT32_MAX, INT32_MIN, kSsd, kPlanes}, [](Opening& one, int32_t v) { one.reserve_space = v; });
    narrow({0, -1, INT32_MIN}, [](Opening& one, int32_t v) { one.workers = v; });
    narrow({-1, INT32_MIN}, [](Opening& one, int32_t v) { one.depth = v; });
    narrow({0, -1, INT32_MIN, INT32_MAX}, [](Opening& one, int32_t v) { one.threads = v; });
    refused_opening([](Opening& one) { one.reserve_first = kSlots - 1, one.reserve_slots = 2; });
    refused_opening([](Opening& one) { one.workers = INT32_MAX; });
    refused_opening([](Opening& one) { one.limits.bounds = 0; });
    refused_opening([](Opening& one) { one.limits.bounds += 1; });
    refused_opening([](Opening& one) { one.spaces[kCpu].memory = 0; });
    refused_opening([](Opening& one) { one.spaces[kCpu].memory = UINT64_MAX - kSlots * kExtent + 1; });
    refused_opening([](Opening& one) { one.spaces[kCpu].sums += 4; });
    refused_opening([](Opening& one) { one.spaces[kSsd].files = 0; });
    refused_opening([](Opening& one) { one.spaces[kSsd].files += 1; });
    {
        Opening one;
        gdscache_pool* const pool = std::exchange(one.pool, nullptr);
        CHECK(one.open() == -EINVAL && !one.executor);
        one.pool = pool;
        const auto open = [&](const gdscache_limits* sizes, const gdscache_space* spaces, gdscache_executor** made) {
            return gdscache_executor_open(sizes, spaces, kSpaces, -1, 0, 0, 0, pool, nullptr, nullptr, 1, 0, 1, made,
                                          one.why, -1);
        };
        CHECK(open(nullptr, one.spaces, &one.executor) == -EINVAL);
        CHECK(open(&one.limits, nullptr, &one.executor) == -EINVAL);
        CHECK(open(&one.limits, one.spaces, nullptr) == -EINVAL && !one.executor);
    }
}

// A load that is sound: out of files, and out of memory.
struct Asking {
    Asking() {
        for (int64_t n = 0; n < 8; n++) slots[n] = places[n] = n;
        for (int64_t n = 0; n < 16; n++) blocks[n] = n;
        ways[0] = {kSsd, kPlanes, kCpu, 0, 4, at(slots), at(blocks), at(places), at(sums)};
        ways[1] = {kCpu, kPlanes, -1, 0, 4, at(slots), at(blocks), 0, 0};
        groups[0] = {0, 1, 0, kLayer, 0, kLayer, 0, kLayer, 0, 2};
        groups[1] = {1, 2, kLayer, 2 * kLayer, kLayer, 2 * kLayer, kLayer, 2 * kLayer, 1, 0};
    }

    int32_t begin(gdscache_executor* executor) {
        return gdscache_move_begin(executor, move, priority, 0, ways_at, n_ways, groups_at, n_groups, after, n_after, open);
    }

    int64_t slots[8], blocks[16], places[8];
    uint64_t sums[16] = {};
    gdscache_way ways[2];
    gdscache_group groups[2];
    const gdscache_way* ways_at = ways;
    const gdscache_group* groups_at = groups;
    const uint64_t events[2] = {8, 16};
    const uint64_t* after = events;
    int64_t move = 1, n_ways = 2, n_groups = 2, n_after = 2;
    int32_t priority = 0, open = 0;
};

void hostile_moves(gdscache_executor* executor) {
    const auto refused = [&](const std::function<void(Asking&)>& spoil) {
        Asking one;
        spoil(one);
        CHECK(one.begin(executor) == -EINVAL);
        int64_t point;
        CHECK(gdscache_move_wait(executor, one.move, -1, 0, &point) == -ENOENT);
    };
    for (const int64_t value : kHuge) {
        const auto narrow = static_cast<int32_t>(value);
        for (int64_t gdscache_group::* field :
             {&gdscache_group::begin, &gdscache_group::end, &gdscache_group::start, &gdscache_group::stop,
              &gdscache_group::alone_start, &gdscache_group::alone_stop}) {
            for (int group : {0, 1}) refused([&](Asking& one) { one.groups[group].*field = value; });
        }
        for (int way : {0, 1}) {
            refused([&](Asking& one) { one.ways[way].pages = value < 0 ? value : std::max(value, int64_t{1} << 31); });
            refused([&](Asking& one) { one.ways[way].source = narrow ? narrow : kSpaces; });
            refused([&](Asking& one) { one.ways[way].target = narrow ? narrow : kSpaces; });
        }
        refused([&](Asking& one) { one.ways[0].through = narrow; });
        refused([&](Asking& one) { one.slots[3] = value; });
        refused([&](Asking& one) { one.blocks[7] = value; });
        refused([&](Asking& one) { one.places[3] = value; });
        refused([&](Asking& one) { one.n_ways = value; });
        refused([&](Asking& one) { one.n_groups = value < 2 ? value : 1; });
        refused([&](Asking& one) { one.priority = narrow ? narrow : 4; });
        if (value < 0 || value > 1 << 20) refused([&](Asking& one) { one.n_after = value; });
        for (int32_t gdscache_group::* field : {&gdscache_group::route, &gdscache_group::summed_route}) {
            for (int group : {0, 1}) refused([&](Asking& one) { one.groups[group].*field = narrow ? narrow : 3; });
        }
        for (int32_t gdscache_group::* field : {&gdscache_group::first, &gdscache_group::last}) {
            for (int group : {0, 1}) refused([&](Asking& one) { one.groups[group].*field = narrow ? narrow : 7; });
        }
    }
    for (const uint64_t address : {uint64_t{0}, at("12345678") | 1}) {
        refused([&](Asking& one) { one.ways[0].sources = address; });
        refused([&](Asking& one) { one.ways[1].targets = address; });
    }
    refused([&](Asking& one) { one.ways[0].places |= 1; });
    refused([&](Asking& one) { one.ways[0].sums |= 1; });
    refused([](Asking& one) { one.ways_at = nullptr; });
    refused([](Asking& one) { one.groups_at = nullptr; });
    refused([](Asking& one) { one.after = nullptr; });
    refused([](Asking& one) { one.groups[0].route = 3; });
    refused([](Asking& one) { one.n_groups = 0; });
    refused([](Asking& one) { one.slots[0] = kSlots; });
    refused([](Asking& one) { one.blocks[0] = kSlots; });
    refused([](Asking& one) { std::swap(one.groups[0], one.groups[1]); });
    refused([](Asking& one) { one.groups[1] = one.groups[0]; });
    refused([](Asking& one) { one.groups[1].start -= 1; });            // read twice
    refused([](Asking& one) { one.groups[1].alone_start += 1; });      // not read at all
    refused([](Asking& one) { one.groups[1].end -= 1; });              // not the layer's
    refused([](Asking& one) { one.ways[0].through = kSsd; });
    refused([](Asking& one) { one.ways[0].through = kForeignCpu; });   // where our disk reaches nothing
    refused([](Asking& one) { one.ways[1].places = one.ways[0].places; });
    refused([](Asking& one) { one.ways[0].target = kForeignCpu, one.ways[0].places = 0; });
    refused([](Asking& one) { one.ways[0].source = kPlanes; });
    refused([](Asking& one) { one.ways[0] = one.ways[1], one.ways[0].target = kCpu; });
    refused([](Asking& one) { one.ways[0].source = kCpu, one.ways[0].target = kSsd, one.ways[0].places = 0; });
    refused([](Asking& one) {
        one.ways[0] = {kForeignCpu, kSsd, -1, 0, 2, at(one.slots), at(one.slots), 0, 0};
        one.n_ways = 1;
    });
    refused([](Asking& one) {  // a store is not open
        one.ways[0] = {kForeignCpu, kForeignSsd, -1, 0, 2, at(one.slots), at(one.slots), 0, 0};
        one.n_ways = 1, one.open = 1;
    });
    CHECK(gdscache_move_begin(nullptr, 1, 0, 0, nullptr, 0, nullptr, 0, nullptr, 0, 0) == -EINVAL);
}

// The other calls, about moves and jobs that nobody knows.
void hostile_calls(gdscache_executor* executor) {
    for (gdscache_executor* const of : {executor, static_cast<gdscache_executor*>(nullptr)}) {
        for (const int64_t value : kHuge) {
            CHECK(gdscache_move_cancel(of, value) < 0 && gdscache_move_forget(of, value) < 0);
            int64_t n = 0;
            CHECK(gdscache_move_wait(of, value, static_cast<int32_t>(value), value, &n) < 0);
            CHECK(gdscache_move_wait(of, value, static_cast<int32_t>(value), value, nullptr) == -EINVAL);
            CHECK(gdscache_move_outcome(of, value, nullptr, value, nullptr, &n, nullptr, &n, value, nullptr, value) < 0);
            CHECK(gdscache_copy_queued(of, value, value) < 0 && gdscache_copy_ended(of, value, nullptr, "why") < 0);
            CHECK(gdscache_io_ended(of, value, nullptr, value) < 0);
            CHECK(gdscache_take_late(of, 0, nullptr, value) < 0 && gdscache_take_spans(of, nullptr, value) < 0);
            if (value != INT32_MAX) CHECK(gdscache_take_late(of, 0, &n, std::min<int64_t>(value, 0)) < 0);
        }
        for (const int32_t status : {-1, 1, 11, INT32_MAX, INT32_MIN}) CHECK(gdscache_refuse(of, status) == -EINVAL);
        CHECK(gdscache_take_io(of, 0, nullptr) < 0 && gdscache_take_copy(of, 0, nullptr) < 0);
    }
    CHECK(gdscache_trace(nullptr) < 0 && gdscache_expire(nullptr, 0) < 0 && gdscache_held_slots(nullptr) < 0);
    CHECK(gdscache_free_slots(nullptr) < 0 && !gdscache_executor_disk(nullptr)[0] && gdscache_refuse(nullptr, 0) < 0);
    gdscache_executor_stop(nullptr);
    gdscache_executor_close(nullptr);
    CHECK(gdscache_expire(executor, INT64_MAX) == 0 && gdscache_expire(executor, INT64_MIN) == 0);
}

// More ways are taken as the first ones are, and by a move that is open alone.
void more_ways(gdscache_executor* executor) {
    Asking one;
    one.move = 8;
    one.ways[0] = {kForeignSsd, kForeignPlanes, kForeignCpu, 0, 4, at(one.slots), at(one.blocks), at(one.places), 0};
    CHECK(gdscache_move_begin(executor, 8, 0, INT64_MAX, one.ways, 1, one.groups, 2, nullptr, 0, 1) == 0);
    const gdscache_way good = {kForeignCpu, kForeignPlanes, -1, 0, 4, at(one.slots), at(one.blocks), 0, 0};
    const auto more = [&](gdscache_way way, int64_t count = 1, int64_t move = 8) {
        return gdscache_move_extend(executor, move, &way, count, 1);
    };
    const auto bad = [&](auto change) {
        gdscache_way way = good;
        change(way);
        return more(way) == -EINVAL;
    };
    CHECK(bad([](gdscache_way& way) { way.source = kForeignPlanes; }));
    CHECK(bad([](gdscache_way& way) { way.target = kForeignSsd; }));
    CHECK(bad([](gdscache_way& way) { way.sources = 0; }));
    for (const int64_t value : kHuge) {
        CHECK(bad([&](gdscache_way& way) { way.pages = value; }));
        CHECK(more(good, 1, value) == -ENOENT);
        CHECK(more(good, value) == -EINVAL);
    }
    CHECK(gdscache_move_extend(executor, 8, nullptr, 1, 1) == -EINVAL);
    CHECK(gdscache_move_extend(nullptr, 8, &good, 1, 1) == -EINVAL);
    int64_t point = -1;
    CHECK(gdscache_move_cancel(executor, 8) == 0 && gdscache_move_wait(executor, 8, -1, 0, &point) == 0);
    CHECK(gdscache_move_extend(executor, 8, nullptr, 0, 0) == 0 && more(good) == 0 && more(good) == -EINVAL);
    gdscache_io job;
    for (int n = 0; n < 2; n++) {
        CHECK(gdscache_take_io(executor, 0, &job) == 1 && job.move == 8 && job.count == 4);
        const int32_t ends[][2] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}};
        CHECK(gdscache_io_ended(executor, job.id, &ends[0][0], 4) == 0);
    }
    gdscache_copy copy;
    CHECK(gdscache_take_copy(executor, 0, &copy) == 0);  // nothing to copy, and nothing to find out
    CHECK(gdscache_move_wait(executor, 8, -1, 0, &point) == 1 && gdscache_move_forget(executor, 8) == 0);
    CHECK(more(good) == -ENOENT);
}

// What is refused leaves a foreign job as it was.
void refused_ends(gdscache_executor* executor) {
    Asking one;
    one.move = 5;
    one.ways[0].source = kForeignSsd;
    one.ways[0].target = kForeignPlanes;
    one.ways[0].through = kForeignCpu;
    one.n_ways = 1;
    CHECK(gdscache_move_begin(executor, 5, 0, INT64_MAX, one.ways, 1, one.groups, 2, one.events, 2, 0) == 0);
    CHECK(gdscache_move_begin(executor, 5, 0, INT64_MAX, one.ways, 1, one.groups, 2, nullptr, 0, 0) == -EEXIST);
    int64_t point = -1;
    CHECK(gdscache_move_wait(executor, 5, 2, 0, &point) == -ENOENT);
    CHECK(gdscache_move_wait(executor, 5, 1, INT64_MIN, &point) == 0);
    CHECK(gdscache_move_wait(executor, 5, 1, 0, nullptr) == -EINVAL);
    CHECK(gdscache_move_forget(executor, 5) == -EBUSY);
    gdscache_io job;
    gdscache_copy copy;
    const int32_t good[][2] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}};
    for (int32_t group = 0; group < 2; group++) {
        CHECK(gdscache_take_io(executor, 0, &job) == 1 && job.count == 4 && job.first == group);
        for (const int32_t page : {-1, 4, INT32_MAX, INT32_MIN}) {
            const int32_t ends[][2] = {{0, 5}, {page, 0}};
            CHECK(gdscache_io_ended(executor, job.id, &ends[0][0], 2) == -EINVAL);
        }
        CHECK(gdscache_io_ended(executor, job.id, &good[0][0], -1) == -EINVAL);
        CHECK(gdscache_io_ended(executor, job.id, &good[0][0], 4) == 0);
        CHECK(gdscache_io_ended(executor, job.id, &good[0][0], 4) == -EINVAL);
    }
    for (int32_t group = 0; group < 2; group++) {
        CHECK(gdscache_take_copy(executor, 0, &copy) == 1 && copy.sums && copy.first == group);
        for (const int64_t value : kHuge) {
            if (value < 0) CHECK(gdscache_copy_queued(executor, copy.id, value) == -EINVAL);
        }
        CHECK(gdscache_move_wait(executor, 5, group, 0, &point) == 0);
        CHECK(gdscache_copy_queued(executor, copy.id, INT64_MAX - group) == 0);
        CHECK(gdscache_move_wait(executor, 5, group, 0, &point) == 1 && point == INT64_MAX - group);
        CHECK(gdscache_copy_ended(executor, copy.id, nullptr, nullptr) == -EINVAL);
        CHECK(gdscache_copy_ended(executor, copy.id, one.sums, nullptr) == 0);
        CHECK(gdscache_copy_ended(executor, copy.id, one.sums, nullptr) == -EINVAL);
        CHECK(gdscache_copy_queued(executor, copy.id, 1) == -EINVAL);
        CHECK(gdscache_move_wait(executor, 5, group, 0, &point) == 1 && point == 0);
    }
    CHECK(gdscache_move_wait(executor, 5, -1, 0, &point) == 1 && point == 0);
    uint8_t statuses[4];
    int32_t errors[8], late[4];
    int64_t n_errors = 0, n_late = 0;
    char why[8] = "as ever";
    const auto outcome = [&](int64_t rows, int64_t room, int64_t move, int64_t why_size) {
        return gdscache_move_outcome(executor, move, statuses, rows, errors, &n_errors, late, &n_late, room, why,
                                     why_size);
    };
    CHECK(outcome(3, 4, 5, 8) == -EINVAL && outcome(4, 3, 5, 8) == -EINVAL && outcome(4, 4, 5, 8) == 0);
    CHECK(std::equal(why, why + 8, "as ever"));  // nothing was broken
    for (const uint8_t status : statuses) CHECK(status == 1);
    CHECK(n_errors == 0 && n_late == 0 && gdscache_move_forget(executor, 5) == 0);
    // A broken copy says why, as far as there is room.
    one.ways[0] = {kForeignCpu, kForeignPlanes, -1, 0, 4, at(one.slots), at(one.blocks), 0, 0};
    CHECK(gdscache_move_begin(executor, 6, 0, INT64_MAX, one.ways, 1, one.groups, 2, nullptr, 0, 0) == 0);
    CHECK(gdscache_take_copy(executor, 0, &copy) == 1 && !copy.sums);
    CHECK(gdscache_copy_ended(executor, copy.id, nullptr, "the cable is out") == 0);
    CHECK(gdscache_move_wait(executor, 6, 1, 0, &point) == 1 && point == 0 && gdscache_take_copy(executor, 0, &copy) == 0);
    for (const int64_t size : {INT64_MIN, int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{4}, int64_t{8}}) {
        std::fill_n(why, 8, '-');
        CHECK(outcome(4, 4, 6, size) == 1);
        const std::string told = "the cable is out";
        const auto kept = static_cast<size_t>(std::max<int64_t>(size, 1) - 1);
        if (size > 0) CHECK(why == told.substr(0, kept));
        for (int64_t n = std::max<int64_t>(size, 0); n < 8; n++) CHECK(why[n] == '-');
    }
    CHECK(gdscache_move_outcome(executor, 6, statuses, 4, errors, &n_errors, late, &n_late, 4, nullptr, 100) == 1);
    CHECK(gdscache_move_forget(executor, 6) == 0);
}

}  // namespace

int main() {
    hostile_openings();
    Opening one;
    CHECK(one.open() == 0 && one.executor && std::string(gdscache_executor_disk(one.executor)) == "threads");
    hostile_moves(one.executor);
    hostile_calls(one.executor);
    more_ways(one.executor);
    refused_ends(one.executor);
    gdscache_executor_close(one.executor);
    one.executor = nullptr;
    one.reserve_space = -1;
    CHECK(one.open() == 0);
    Asking load;
    load.ways[0].places = 0;
    CHECK(load.begin(one.executor) == -EINVAL);  // it would pass through a reserve
    gdscache_executor_close(one.executor);
    std::printf(" good\n");
}
