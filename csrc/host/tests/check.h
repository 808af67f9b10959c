// For the test binaries: a check that says where and ends the process, and numbers at random from a seed.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(what)                                                                                                    \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            std::fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #what);                                        \
            std::abort();                                                                                              \
        }                                                                                                              \
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

    template <typename T, size_t n>
    T pick(const T (&values)[n]) {
        return values[below(n)];
    }

    std::vector<uint8_t> bytes(size_t size) {
        std::vector<uint8_t> made(size);
        for (uint8_t& byte : made) byte = static_cast<uint8_t>(next());
        return made;
    }

private:
    uint64_t state_;
};

// Rounds of a test: `argv[1]`, or `otherwise`.
inline uint64_t rounds(int argc, char** argv, uint64_t otherwise) {
    return argc > 1 ? std::strtoull(argv[1], nullptr, 10) : otherwise;
}

}  // namespace gdscache::test
