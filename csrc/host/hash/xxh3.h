// XXH3-64 (Yann Collet's xxHash, seed 0, default secret): the checksum of a layer.
//
// Written from the published algorithm (xxhash_spec.md of the xxHash project, version 0.8). An input of more than 240
// bytes is walked in stripes of 64 bytes, 16 to a block; shorter ones have forms of their own.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gdscache {

constexpr size_t kStripe = 64;
constexpr size_t kBlockStripes = 16;

// The eight sums that stripes are added to, and the number of stripes in the current block.
struct alignas(64) Lanes {
    uint64_t sum[8];
    uint32_t stripes;
};

// The functions that add stripes, for one set of vector instructions.
struct Arm {
    using Add = void (*)(Lanes& lanes, const uint8_t* in, size_t stripes, uint8_t* out);

    const char* name;  // "scalar", "avx2", "neon"
    // Add `stripes` stripes at `in`, without the last of the input, which is added apart. `out`: null.
    Add add;
    // The same, and copy them to `out`. The sum is of the written bytes, even if other threads write to `in`.
    Add add_copy;
    // The same past the processor's caches; `out` is a multiple of 64. Other threads see it after `stream_fence`.
    Add add_stream;
};

// Writes after this are seen after the stores of `add_stream`.
void stream_fence();

// The arms that this processor has, the fastest first.
std::vector<const Arm*> arms();

// The fastest arm, chosen at the first call.
const Arm& best_arm();

uint64_t xxh3(const void* data, size_t size, const Arm& arm);
uint64_t xxh3(const void* data, size_t size);

// XXH3-64 of bytes that come in chunks of any size. Without heap memory; some 700 bytes on the stack.
class Xxh3 {
public:
    explicit Xxh3(const Arm& arm);

    // Add `size` bytes and copy them to `out`; the sum covers the bytes written there. `stream`: past the caches as far
    // as `out` allows; the caller then fences.
    void update_copy(void* to, const void* data, size_t size, bool stream);

    // The hash of all bytes so far; more may follow.
    uint64_t digest() const;

private:
    void flush();

    static constexpr size_t kHeld = 256;  // more than the short forms cover, in whole stripes

    const Arm* arm_;
    uint64_t total_;
    size_t held_;  // bytes in `hold_` not added yet; at least one after the first, since the last stripe is special
    Lanes lanes_;
    uint8_t last_[kStripe];  // the last added stripe: the end of the input may reach back into it
    uint8_t hold_[kHeld];
};

}  // namespace gdscache
