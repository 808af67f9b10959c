// The arm of XXH3 for aarch64, where every processor has NEON. As in the arms for x86-64, the words of a stripe are
// added up in place and swapped once a block.

#include "hash/xxh3_arms.h"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace gdscache::xxh3_detail {
namespace {

struct Quarter {
    uint64x2_t products, words;
};

template <Out kOut>
inline void add_quarter(Quarter& sums, const uint8_t* in, const uint8_t* key, uint8_t* out) {
    const uint8x16_t bytes = vld1q_u8(in);
    if constexpr (kOut != Out::kNone) vst1q_u8(out, bytes);
    const uint64x2_t data = vreinterpretq_u64_u8(bytes);
    const uint64x2_t mixed = veorq_u64(data, vreinterpretq_u64_u8(vld1q_u8(key)));
    sums.products = vmlal_u32(sums.products, vmovn_u64(mixed), vshrn_n_u64(mixed, 32));
    sums.words = vaddq_u64(sums.words, data);
}

inline uint64x2_t joined(const Quarter& sums) { return vaddq_u64(sums.products, vextq_u64(sums.words, sums.words, 1)); }

inline uint64x2_t scrambled(uint64x2_t value, const uint8_t* key) {
    value = veorq_u64(value, vshrq_n_u64(value, 47));
    value = veorq_u64(value, vreinterpretq_u64_u8(vld1q_u8(key)));
    const uint32x2_t prime = vdup_n_u32(static_cast<uint32_t>(kPrime32_1));
    const uint64x2_t high = vshlq_n_u64(vmull_u32(vshrn_n_u64(value, 32), prime), 32);
    return vmlal_u32(high, vmovn_u64(value), prime);
}

// Compilers offer no NEON store past the caches: a streamed copy is a plain one.
template <Out kOut>
void walk(Lanes& lanes, const uint8_t* in, size_t stripes, uint8_t* out) {
    const uint8_t* const keys = secret();
    Quarter sums[4];
    for (size_t n = 0; n < 4; n++) sums[n] = {vld1q_u64(lanes.sum + 2 * n), vdupq_n_u64(0)};
    size_t at = lanes.stripes;
    while (stripes) {
        const size_t some = stripes < kBlockStripes - at ? stripes : kBlockStripes - at;
        for (size_t i = 0; i < some; i++) {
            const uint8_t* const key = keys + 8 * (at + i);
            for (size_t n = 0; n < 4; n++) add_quarter<kOut>(sums[n], in + 16 * n, key + 16 * n, out + 16 * n);
            in += kStripe;
            if constexpr (kOut != Out::kNone) out += kStripe;
        }
        at += some;
        stripes -= some;
        if (at == kBlockStripes) {
            for (size_t n = 0; n < 4; n++) {
                sums[n] = {scrambled(joined(sums[n]), keys + kScrambleSecret + 16 * n), vdupq_n_u64(0)};
            }
            at = 0;
        }
    }
    for (size_t n = 0; n < 4; n++) vst1q_u64(lanes.sum + 2 * n, joined(sums[n]));
    lanes.stripes = static_cast<uint32_t>(at);
}

constexpr Arm kNeon{"neon", walk<Out::kNone>, walk<Out::kCopy>, walk<Out::kCopy>};

}  // namespace

const Arm* avx512_arm() { return nullptr; }
const Arm* avx2_arm() { return nullptr; }
const Arm* neon_arm() { return &kNeon; }

}  // namespace gdscache::xxh3_detail

#endif
