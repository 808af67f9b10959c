// Memory for work that cannot fail: the reserve against a model, and `new` while the system has no memory.

#include "base/memory.h"

#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <thread>

#include "tests/check.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

// Blocks of any size do not overlap, and all of them can be taken again.
void reserve(Random& random, uint64_t count) {
    std::map<unsigned char*, size_t> taken;
    for (uint64_t n = 0; n < count; n++) {
        if (random.below(3) && !taken.empty()) {
            auto one = taken.begin();
            std::advance(one, random.below(taken.size()));
            for (size_t k = 0; k < one->second; k++) CHECK(one->first[k] == static_cast<unsigned char>(one->second));
            CHECK(give_to_reserve(one->first));
            taken.erase(one);
        } else {
            const size_t bytes = random.below(50) ? random.below(5000) : random.below(kReserveBytes);
            auto* const block = static_cast<unsigned char*>(take_of_reserve(bytes));
            if (!block) continue;
            CHECK(reinterpret_cast<uintptr_t>(block) % alignof(std::max_align_t) == 0);
            std::memset(block, static_cast<int>(bytes & 0xFF), bytes);
            taken.emplace(block, bytes);
        }
    }
    for (const auto& [block, bytes] : taken) CHECK(give_to_reserve(block));
    void* const all = take_of_reserve(kReserveBytes - 64);
    CHECK(all && !take_of_reserve(64) && give_to_reserve(all));
    CHECK(!take_of_reserve(kReserveBytes) && !take_of_reserve(~size_t{0}));
    int other = 0;
    CHECK(!give_to_reserve(&other) && !give_to_reserve(nullptr));
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

void system_without_memory() {
    rlimit before;
    CHECK(!getrlimit(RLIMIT_AS, &before));
    const rlimit none{1, before.rlim_max};
    constexpr size_t kBytes = size_t{1} << 20;  // of a mapping of its own
    std::atomic<bool> waits{false}, came{false};
    std::thread waiting([&] {  // started while there is memory
        while (!waits) std::this_thread::yield();
        const MustNotFail reserve;
        operator delete(operator new(2 * kReserveBytes));
        came = true;
    });
    CHECK(!setrlimit(RLIMIT_AS, &none));
    CHECK(throws(kBytes));
    {
        const MustNotFail reserve;
        const MustNotFail within;
        void* const block = operator new(kBytes);
        CHECK(!take_of_reserve(kReserveBytes - kBytes));  // it is of the reserve
        const MayFail may_fail;
        CHECK(throws(kBytes + 1));
        operator delete(block);
    }
    CHECK(throws(kBytes) && !throws(4096));
    std::vector<void*> spared;
    spared.reserve(kReserveBytes / 4096);
    while (void* const block = take_of_reserve(4096, true)) spared.push_back(block);
    CHECK(spared.size() >= kReserveBytes / 4096 / 2 - 16 && spared.size() < kReserveBytes / 4096 * 3 / 4);
    for (void* const block : spared) CHECK(give_to_reserve(block));
    waits = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(!came);
    CHECK(!setrlimit(RLIMIT_AS, &before));
    waiting.join();
    CHECK(came);
}

#else

void system_without_memory() {}

#endif

}  // namespace

int main(int argc, char** argv) {
    Random random(24);
    reserve(random, rounds(argc, argv, 20000));
    system_without_memory();
    std::printf(": good\n");
}
