// Memory for work that cannot fail: the reserve against a model, and `new` while the system has no memory.

#include "base/memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <new>
#include <thread>

#include "tests/check.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

TEST_CASE("blocks of any size do not overlap, and all of them can be taken again") {
    Random random(24);
    const uint64_t count = setting("ROUNDS", 20000);
    std::map<unsigned char*, size_t> taken;
    for (uint64_t n = 0; n < count; n++) {
        if (random.below(3) && !taken.empty()) {
            auto one = taken.begin();
            std::advance(one, random.below(taken.size()));
            const auto fill = static_cast<unsigned char>(one->second);
            REQUIRE(std::count(one->first, one->first + one->second, fill) == static_cast<int64_t>(one->second));
            REQUIRE_FAST(give_to_reserve(one->first));
            taken.erase(one);
        } else {
            const size_t bytes = random.below(50) ? random.below(5000) : random.below(kReserveBytes);
            auto* const block = static_cast<unsigned char*>(take_of_reserve(bytes));
            if (!block) continue;
            REQUIRE_FAST(reinterpret_cast<uintptr_t>(block) % alignof(std::max_align_t) == 0);
            std::memset(block, static_cast<int>(bytes & 0xFF), bytes);
            taken.emplace(block, bytes);
        }
    }
    for (const auto& [block, bytes] : taken) REQUIRE(give_to_reserve(block));
    void* const all = take_of_reserve(kReserveBytes - 64);
    REQUIRE((all && !take_of_reserve(64)));
    REQUIRE(give_to_reserve(all));
    REQUIRE((!take_of_reserve(kReserveBytes) && !take_of_reserve(~size_t{0})));
    int other = 0;
    REQUIRE((!give_to_reserve(&other) && !give_to_reserve(nullptr)));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__x86_64__)

bool throws(size_t bytes) {
    try {
        operator delete(operator new(bytes));  // no compiler removes this
        return false;
    } catch (const std::bad_alloc&) {
        return true;
    }
}

// Nothing is checked while there is no memory, which a failed check would take.
TEST_CASE("`new` while the system has no memory") {
    rlimit before;
    REQUIRE(!getrlimit(RLIMIT_AS, &before));
    const rlimit none{1, before.rlim_max};
    constexpr size_t kBytes = size_t{1} << 20;  // of a mapping of its own
    std::atomic<bool> waits{false}, came{false};
    std::jthread waiting([&] {  // started while there is memory
        while (!waits) std::this_thread::yield();
        const MustNotFail reserve;
        operator delete(operator new(2 * kReserveBytes));
        came = true;
    });
    REQUIRE(!setrlimit(RLIMIT_AS, &none));
    const bool fails = throws(kBytes);
    void* other = nullptr;
    bool fails_in_part = false;
    {
        const MustNotFail reserve;
        const MustNotFail within;
        void* const block = operator new(kBytes);
        other = take_of_reserve(kReserveBytes - kBytes);  // none: the block is of the reserve
        const MayFail may_fail;
        fails_in_part = throws(kBytes + 1);
        operator delete(block);
    }
    const bool fails_again = throws(kBytes), fails_small = throws(4096);
    std::vector<void*> spared;
    spared.reserve(kReserveBytes / 4096);
    while (void* const block = take_of_reserve(4096, true)) spared.push_back(block);
    const size_t count = spared.size();
    size_t given = 0;
    for (void* const block : spared) given += give_to_reserve(block);
    waits = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const bool came_early = came;
    REQUIRE(!setrlimit(RLIMIT_AS, &before));
    waiting.join();
    CHECK(came);
    CHECK(!came_early);
    CHECK(fails);
    CHECK(!other);
    CHECK(fails_in_part);
    CHECK(fails_again);
    CHECK(!fails_small);
    CHECK(count >= kReserveBytes / 4096 / 2 - 16);
    CHECK(count < kReserveBytes / 4096 * 3 / 4);
    CHECK(given == count);
}

#endif

}  // namespace
