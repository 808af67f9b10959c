// For the test binaries: doctest, and numbers at random from a seed.

#pragma once

#include <doctest.h>

#include <cstdint>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

// For checks that run millions of times: one that holds costs no more than its condition.
#define REQUIRE_FAST(...)                                                                                              \
    do {                                                                                                               \
        if (!(__VA_ARGS__)) [[unlikely]]                                                                               \
            FAIL("not " #__VA_ARGS__);                                                                                 \
    } while (0)

namespace gdscache::test {

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t next() {
        uint64_t x = state_ += 0x9E3779B97F4A7C15u;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
        x = (x ^ x >> 27) * 0x94D049BB133111EBu;
        return x ^ x >> 31;
    }

    // Below `end`, which is not 0.
    uint64_t below(uint64_t end) { return next() % end; }

    int64_t between(int64_t least, int64_t most) {
        return least + static_cast<int64_t>(below(static_cast<uint64_t>(most - least + 1)));
    }

    template <typename T, size_t n>
    T pick(const T (&values)[n]) {
        return values[below(n)];
    }

    template <typename T>
    void shuffle(std::vector<T>& values) {
        for (size_t n = values.size(); n-- > 1;) std::swap(values[n], values[below(n + 1)]);
    }

    std::vector<uint8_t> bytes(size_t size) {
        std::vector<uint8_t> made(size);
        for (uint8_t& byte : made) byte = static_cast<uint8_t>(next());
        return made;
    }

private:
    uint64_t state_;
};

// A thread, which a failed REQUIRE ends like a test.
template <typename Work>
std::jthread started(Work work) {
    return std::jthread([work] {
        try {
            work();
        } catch (const doctest::detail::TestFailureException&) {  // is reported already
        }
    });
}

// A number of the environment: ROUNDS of a random test, or its FIRST_SEED.
inline uint64_t setting(const char* name, uint64_t otherwise) {
    const char* const set = std::getenv(name);
    return set ? std::strtoull(set, nullptr, 10) : otherwise;
}

}  // namespace gdscache::test
