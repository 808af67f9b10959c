// XXH3-64 (Yann Collet's xxHash, seed 0, default secret): what the checksum of a layer is.
//
// Written from the published algorithm (xxhash_spec.md of the xxHash project, version 0.8). An input of more than 240
// bytes is walked over in stripes of 64 bytes, 16 of which are a block; shorter ones have forms of their own.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gdscache {

constexpr size_t kStripe = 64;
constexpr size_t kBlockStripes = 16;

// The eight sums that stripes are added to, and how many stripes the current block has.
struct alignas(64) Lanes {
    uint64_t sum[8];
    uint32_t stripes;
};

// How stripes are added: one set of functions for each kind of vector instructions.
struct Arm {
    using Add = void (*)(Lanes& lanes, const uint8_t* in, size_t stripes, uint8_t* out);

    const char* name;  // "scalar", "avx2", "avx512", "neon"
    // Add `stripes` stripes at `in`. They are not the last of the input, which is a stripe of its own. `out`: null.
    Add add;
    // The same, and copy them to `out`: what is added is what is written, even where another writes to `in` meanwhile.
    Add add_copy;
    // The same past the processor's caches; `out` is a multiple of 64. Others see it after `stream_fence`.
    Add add_stream;
};

// What others must not see before the stores of `add_stream` is written after this.
void stream_fence();

// The arms that this processor has, the fastest first.
std::vector<const Arm*> arms();

// The first of them. Decided at the first call.
const Arm& best_arm();

// XXH3-64 of `size` bytes.
uint64_t xxh3(const void* data, size_t size, const Arm& arm);
uint64_t xxh3(const void* data, size_t size);

// XXH3-64 of bytes that come in chunks of any size. No heap; some 700 bytes, to be had on the stack.
class Xxh3 {
public:
    explicit Xxh3(const Arm& arm);

    // The next `size` bytes, which are copied to `out` on the way: the sum covers what is written there. `stream`:
    // past the caches as far as `out` allows; the caller then fences.
    void update_copy(void* to, const void* data, size_t size, bool stream);

    // The hash of all that came so far; more may follow.
    uint64_t digest() const;

private:
    void flush();

    static constexpr size_t kHeld = 256;  // more than the short forms cover, and whole stripes

    const Arm* arm_;
    uint64_t total_;
    size_t held_;  // bytes in `hold_` that are not added yet. Never none after the first: the last stripe is special
    Lanes lanes_;
    uint8_t last_[kStripe];  // the last stripe that was added: the end of the input may reach back into it
    uint8_t hold_[kHeld];
};

}  // namespace gdscache
