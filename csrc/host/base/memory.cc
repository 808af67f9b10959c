#include "base/memory.h"

#include <time.h>

#include <bitset>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

namespace gdscache {

constinit thread_local int must_not_fail = 0;

namespace {

// The reserve is in units. A block's first bytes hold its number of units.
constexpr size_t kSpareBytes = 4096;  // a table of nanobind's has some dozens of entries
constexpr size_t kUnit = 64, kHead = alignof(std::max_align_t), kUnits = kReserveBytes / kUnit;
static_assert(kHead >= sizeof(size_t));

alignas(kUnit) unsigned char reserve[kReserveBytes];
std::bitset<kUnits> used;
std::mutex mutex;

}  // namespace

void* take_of_reserve(size_t bytes, bool spare) noexcept {
    if (bytes > (spare ? kSpareBytes : kReserveBytes - kHead)) return nullptr;
    const size_t units = (bytes + kHead + kUnit - 1) / kUnit;
    const std::lock_guard lock(mutex);
    if (spare && used.count() > kUnits / 2) return nullptr;
    size_t free = 0;
    for (size_t n = 0; n < kUnits; ++n) {
        free = used[n] ? 0 : free + 1;
        if (free < units) continue;
        const size_t first = n + 1 - units;
        for (size_t unit = first; unit <= n; ++unit) used[unit] = true;
        unsigned char* const block = reserve + first * kUnit;
        *reinterpret_cast<size_t*>(block) = units;
        return block + kHead;
    }
    return nullptr;
}

bool give_to_reserve(void* address) noexcept {
    const auto at = reinterpret_cast<uintptr_t>(address), start = reinterpret_cast<uintptr_t>(reserve);
    if (at < start || at >= start + kReserveBytes) return false;
    const size_t units = *reinterpret_cast<size_t*>(static_cast<unsigned char*>(address) - kHead);
    const size_t first = (at - start) / kUnit;
    const std::lock_guard lock(mutex);
    for (size_t unit = first; unit < first + units; ++unit) used[unit] = false;
    return true;
}

}  // namespace gdscache

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // the sanitizers have their own

// The linker has the library, and the compiler's runtime in it, call these in place of `malloc` and `free`: an
// exception needs memory when the system has none.
extern "C" {
void* __real_malloc(size_t) __attribute__((weak));
void __real_free(void*) __attribute__((weak));

void* __wrap_malloc(size_t bytes) {
    void* const found = __real_malloc(bytes);
    return found ? found : gdscache::take_of_reserve(bytes);
}

void __wrap_free(void* address) {
    if (!gdscache::give_to_reserve(address)) __real_free(address);
}
}

void* operator new(size_t bytes) {
    const auto system = __real_malloc ? __real_malloc : std::malloc;  // tests are linked without the wrapper
    for (;;) {
        if (void* const found = system(bytes ? bytes : 1)) return found;
        if (void* const found = gdscache::take_of_reserve(bytes, !gdscache::must_not_fail)) return found;
        if (!gdscache::must_not_fail) throw std::bad_alloc();
        const timespec pause{0, 1'000'000};
        nanosleep(&pause, nullptr);
    }
}

void operator delete(void* address) noexcept {
    if (gdscache::give_to_reserve(address)) return;
    (__real_free ? __real_free : std::free)(address);
}

void operator delete(void* address, size_t) noexcept { operator delete(address); }

#endif
