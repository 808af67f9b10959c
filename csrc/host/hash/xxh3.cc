#include "hash/xxh3.h"

#include <algorithm>
#include <cstring>

#include "base/processor.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the words of inputs are read as they lie");

namespace gdscache {
namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1u;
constexpr uint64_t kPrime32_2 = 0x85EBCA77u;
constexpr uint64_t kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5u;

// The default secret as little-endian words.
alignas(64) constexpr uint64_t kSecretWords[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};

inline const uint8_t* secret() { return reinterpret_cast<const uint8_t*>(kSecretWords); }

constexpr size_t kScrambleSecret = 128;  // the secret's last 64 bytes
constexpr size_t kLastSecret = 121;  // for the last stripe

enum class Out { kNone, kCopy, kStream };

constexpr size_t kShort = 240;  // inputs of up to this size have forms of their own

uint64_t word(const uint8_t* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

uint64_t half_word(const uint8_t* at) {
    uint32_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

uint64_t key(size_t byte) { return word(secret() + byte); }

uint64_t rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

// The xor of both halves of a 128-bit product.
uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t finished(uint64_t value) {
    value = (value ^ value >> 37) * 0x165667919E3779F9u;
    return value ^ value >> 32;
}

// The last step of XXH64, which the shortest forms share.
uint64_t finished_as_xxh64(uint64_t value) {
    value = (value ^ value >> 33) * kPrime64_2;
    value = (value ^ value >> 29) * kPrime64_3;
    return value ^ value >> 32;
}

uint64_t up_to_3(const uint8_t* in, size_t size) {
    const uint64_t spread =
        uint64_t{in[0]} << 16 | uint64_t{in[size / 2]} << 24 | uint64_t{in[size - 1]} | uint64_t{size} << 8;
    return finished_as_xxh64(spread ^ half_word(secret()) ^ half_word(secret() + 4));
}

uint64_t from_4_to_8(const uint8_t* in, size_t size) {
    const uint64_t both = half_word(in) << 32 | half_word(in + size - 4);
    uint64_t value = both ^ key(8) ^ key(16);
    value ^= rotated(value, 49) ^ rotated(value, 24);
    value *= 0x9FB21C651E98DF25u;
    value ^= (value >> 35) + size;
    value *= 0x9FB21C651E98DF25u;
    return value ^ value >> 28;
}

uint64_t from_9_to_16(const uint8_t* in, size_t size) {
    const uint64_t low = word(in) ^ key(24) ^ key(32);
    const uint64_t high = word(in + size - 8) ^ key(40) ^ key(48);
    return finished(size + __builtin_bswap64(low) + high + folded(low, high));
}

uint64_t pair(const uint8_t* in, size_t secret_byte) {
    return folded(word(in) ^ key(secret_byte), word(in + 8) ^ key(secret_byte + 8));
}

// Sixteen bytes at a time from both ends towards the middle.
uint64_t from_17_to_128(const uint8_t* in, size_t size) {
    uint64_t sum = size * kPrime64_1;
    for (size_t n = 0; n <= (size - 1) / 32; n++) {
        sum += pair(in + 16 * n, 32 * n) + pair(in + size - 16 * (n + 1), 32 * n + 16);
    }
    return finished(sum);
}

uint64_t from_129_to_240(const uint8_t* in, size_t size) {
    uint64_t sum = size * kPrime64_1;
    for (size_t n = 0; n < 8; n++) sum += pair(in + 16 * n, 16 * n);
    sum = finished(sum);
    for (size_t n = 8; n < size / 16; n++) sum += pair(in + 16 * n, 16 * (n - 8) + 3);
    return finished(sum + pair(in + size - 16, 119));
}

uint64_t of_short(const uint8_t* in, size_t size) {
    if (size > 128) return from_129_to_240(in, size);
    if (size > 16) return from_17_to_128(in, size);
    if (size > 8) return from_9_to_16(in, size);
    if (size > 3) return from_4_to_8(in, size);
    if (size > 0) return up_to_3(in, size);
    return finished_as_xxh64(key(56) ^ key(64));
}

void add_stripe(uint64_t* sum, const uint8_t* in, const uint8_t* keys) {
    for (size_t i = 0; i < 8; i++) {
        const uint64_t data = word(in + 8 * i), mixed = data ^ word(keys + 8 * i);
        sum[i ^ 1] += data;
        sum[i] += (mixed & 0xFFFFFFFFu) * (mixed >> 32);
    }
}

void add_scalar(Lanes& lanes, const uint8_t* in, size_t stripes, uint8_t*) {
    for (; stripes; stripes--, in += kStripe) {
        add_stripe(lanes.sum, in, secret() + size_t{8} * lanes.stripes);
        if (++lanes.stripes < kBlockStripes) continue;
        for (size_t i = 0; i < 8; i++) {
            const uint64_t value = lanes.sum[i];
            lanes.sum[i] = (value ^ value >> 47 ^ key(kScrambleSecret + 8 * i)) * kPrime32_1;
        }
        lanes.stripes = 0;
    }
}

// Added from a copy of our own, which no other thread writes to.
void add_copy_scalar(Lanes& lanes, const uint8_t* in, size_t stripes, uint8_t* out) {
    uint8_t block[kBlockStripes * kStripe];
    while (stripes) {
        const size_t some = std::min(stripes, kBlockStripes);
        std::memcpy(block, in, some * kStripe);
        std::memcpy(out, block, some * kStripe);
        add_scalar(lanes, block, some, nullptr);
        stripes -= some;
        in += some * kStripe;
        out += some * kStripe;
    }
}

// --- by vector instructions: NEON, which every aarch64 processor has, or AVX2, compiled for its instructions, independent
// of the build's target. AVX-512 gains nothing: in the nearest cache both add up 58 GB/s on a core of an EPYC, and copies
// wait for memory.
//
// A stripe adds to the sums a product of each word with the secret, and the word itself to the neighbouring sum. Words
// are added up in place and swapped once a block: two chains of additions, and no shuffle a stripe.

#if defined(__x86_64__)

// Each function names its instructions itself; a lambda or a template without them could not be inlined.
#define VECTOR __attribute__((target("avx2")))
#define INLINE VECTOR __attribute__((always_inline)) inline

constexpr const char* kName = "avx2";
constexpr uintptr_t kAhead = 1024;

inline bool is_here() { return has_avx2(); }

using Words = __m256i;

INLINE Words read(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
INLINE void write(void* at, Words words) { _mm256_storeu_si256(static_cast<__m256i*>(at), words); }
INLINE void stream(void* at, Words words) { _mm256_stream_si256(static_cast<__m256i*>(at), words); }
INLINE Words mixed(Words one, Words other) { return _mm256_xor_si256(one, other); }
INLINE Words sum(Words one, Words other) { return _mm256_add_epi64(one, other); }
// The sum and the product of both halves of each word.
INLINE Words sum_of_product(Words with, Words words) {
    return sum(with, _mm256_mul_epu32(words, _mm256_srli_epi64(words, 32)));
}
INLINE Words swapped(Words words) { return _mm256_shuffle_epi32(words, 0x4E); }  // the two words of each 16 bytes
INLINE Words shifted(Words words) { return _mm256_srli_epi64(words, 47); }
INLINE Words times_prime(Words words) {
    const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(kPrime32_1));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(words, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(words, prime), _mm256_slli_epi64(high, 32));
}
INLINE void fetch(const uint8_t* in) {
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(in) + kAhead), _MM_HINT_T0);
}

#else

#define VECTOR
#define INLINE inline

constexpr const char* kName = "neon";

inline bool is_here() { return true; }

using Words = uint64x2_t;

INLINE Words read(const void* at) { return vreinterpretq_u64_u8(vld1q_u8(static_cast<const uint8_t*>(at))); }
INLINE void write(void* at, Words words) { vst1q_u8(static_cast<uint8_t*>(at), vreinterpretq_u8_u64(words)); }
INLINE void stream(void* at, Words words) { write(at, words); }  // compilers offer no store past the caches
INLINE Words mixed(Words one, Words other) { return veorq_u64(one, other); }
INLINE Words sum(Words one, Words other) { return vaddq_u64(one, other); }
INLINE Words sum_of_product(Words with, Words words) {
    return vmlal_u32(with, vmovn_u64(words), vshrn_n_u64(words, 32));
}
INLINE Words swapped(Words words) { return vextq_u64(words, words, 1); }
INLINE Words shifted(Words words) { return vshrq_n_u64(words, 47); }
INLINE Words times_prime(Words words) {
    const uint32x2_t prime = vdup_n_u32(static_cast<uint32_t>(kPrime32_1));
    const uint64x2_t high = vshlq_n_u64(vmull_u32(vshrn_n_u64(words, 32), prime), 32);
    return vmlal_u32(high, vmovn_u64(words), prime);
}
INLINE void fetch(const uint8_t*) {}

#endif

constexpr size_t kWide = sizeof(Words), kParts = kStripe / kWide;

// A part of the eight sums.
struct Part {
    Words products, words;
};

template <Out kOut>
INLINE void add_part(Part& part, const uint8_t* in, const uint8_t* key, uint8_t* out) {
    const Words data = read(in);
    if constexpr (kOut == Out::kCopy) write(out, data);
    if constexpr (kOut == Out::kStream) stream(out, data);
    part.products = sum_of_product(part.products, mixed(data, read(key)));
    part.words = sum(part.words, data);
}

INLINE Words joined(const Part& part) { return sum(part.products, swapped(part.words)); }

template <Out kOut>
VECTOR void walk(Lanes& lanes, const uint8_t* in, size_t stripes, uint8_t* out) {
    const uint8_t* const keys = secret();
    uint8_t* const kept = reinterpret_cast<uint8_t*>(lanes.sum);
    Part parts[kParts];
    for (size_t n = 0; n < kParts; n++) parts[n] = {read(kept + n * kWide), Words{}};
    size_t at = lanes.stripes;
    while (stripes) {
        const size_t some = stripes < kBlockStripes - at ? stripes : kBlockStripes - at;
#pragma GCC unroll 4
        for (size_t n = 0; n < some; n++) {
            // It helps beside a second stream, of writes, and hurts without one: the processor then predicts well enough.
            if constexpr (kOut != Out::kNone) fetch(in + n * kStripe);
#pragma GCC unroll 4
            for (size_t part = 0; part < kParts; part++) {
                const size_t byte = part * kWide;
                add_part<kOut>(parts[part], in + n * kStripe + byte, keys + 8 * (at + n) + byte,
                               out + n * kStripe + byte);
            }
        }
        at += some;
        stripes -= some;
        in += some * kStripe;
        if constexpr (kOut != Out::kNone) out += some * kStripe;
        if (at < kBlockStripes) continue;
        for (size_t n = 0; n < kParts; n++) {
            const Words value = joined(parts[n]), key = read(keys + kScrambleSecret + n * kWide);
            parts[n] = {times_prime(mixed(mixed(value, shifted(value)), key)), Words{}};
        }
        at = 0;
    }
    for (size_t n = 0; n < kParts; n++) write(kept + n * kWide, joined(parts[n]));
    lanes.stripes = static_cast<uint32_t>(at);
}

constexpr Arm kVector{kName, walk<Out::kNone>, walk<Out::kCopy>, walk<Out::kStream>};

// --- all arms

constexpr Arm kScalar{"scalar", add_scalar, add_copy_scalar, add_copy_scalar};

constexpr Lanes kStart{{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1},
                       0};

// The hash of a long input whose stripes, except for the last 64 bytes, were added.
uint64_t of_lanes(const Lanes& lanes, const uint8_t* last, uint64_t size) {
    uint64_t sum[8];
    std::memcpy(sum, lanes.sum, sizeof sum);
    add_stripe(sum, last, secret() + kLastSecret);
    uint64_t value = size * kPrime64_1;
    for (size_t i = 0; i < 8; i += 2) value += folded(sum[i] ^ key(11 + 8 * i), sum[i + 1] ^ key(19 + 8 * i));
    return finished(value);
}

}  // namespace

void stream_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

std::vector<const Arm*> arms() {
    if (is_here()) return {&kVector, &kScalar};
    return {&kScalar};
}

const Arm& best_arm() {
    static const Arm& arm = *arms().front();
    return arm;
}

uint64_t xxh3(const void* data, size_t size, const Arm& arm) {
    const uint8_t* const in = static_cast<const uint8_t*>(data);
    if (size <= kShort) return of_short(in, size);
    Lanes lanes = kStart;
    arm.add(lanes, in, (size - 1) / kStripe, nullptr);
    return of_lanes(lanes, in + size - kStripe, size);
}

uint64_t xxh3(const void* data, size_t size) { return xxh3(data, size, best_arm()); }

Xxh3::Xxh3(const Arm& arm) : arm_(&arm), total_(0), held_(0), lanes_(kStart) {}

// Add the held stripes, which are whole and not the end of the input.
void Xxh3::flush() {
    arm_->add(lanes_, hold_, held_ / kStripe, nullptr);
    std::memcpy(last_, hold_ + held_ - kStripe, kStripe);
    held_ = 0;
}

void Xxh3::update_copy(void* to, const void* data, size_t size, bool stream) {
    if (size == 0) return;
    auto* out = static_cast<uint8_t*>(to);
    auto* in = static_cast<const uint8_t*>(data);
    const auto pass = [&](size_t some) { in += some, out += some, size -= some; };
    const auto hold = [&](size_t some) {
        std::memcpy(hold_ + held_, in, some);
        std::memcpy(out, hold_ + held_, some);
        held_ += some;
        pass(some);
    };
    const bool begun = total_ > kHeld;
    total_ += size;
    // Before the input is known to be long, all of it is held; later, only the rest of the last stripe.
    const size_t full = begun ? (held_ + kStripe - 1) / kStripe * kStripe : kHeld;
    hold(std::min(size, full - held_));
    if (size == 0) return;
    if (held_) flush();
    // At least one byte stays: the end of the input is never added here.
    size_t stripes = (size - 1) / kStripe;
    if (stripes && stream && reinterpret_cast<uintptr_t>(out) % kStripe == 0) {
        arm_->add_stream(lanes_, in, stripes - 1, out);
        pass((stripes - 1) * kStripe);
        // The last one from a copy of ours: reading back bytes written past the caches would cost more than all the rest.
        std::memcpy(last_, in, kStripe);
        arm_->add_stream(lanes_, last_, 1, out);
        pass(kStripe);
        if (size == kStripe) {  // held back, and written past the caches too: they would fetch its line first
            Lanes unused = kStart;
            std::memcpy(hold_, in, kStripe);
            arm_->add_stream(unused, hold_, 1, out);
            held_ = kStripe, size = 0;
        }
    } else if (stripes) {
        arm_->add_copy(lanes_, in, stripes, out);
        pass(stripes * kStripe);
        std::memcpy(last_, out - kStripe, kStripe);
    }
    hold(size);
}

uint64_t Xxh3::digest() const {
    if (total_ <= kShort) return of_short(hold_, static_cast<size_t>(total_));
    Lanes lanes = lanes_;
    const size_t stripes = (held_ - 1) / kStripe;
    arm_->add(lanes, hold_, stripes, nullptr);
    if (held_ >= kStripe) return of_lanes(lanes, hold_ + held_ - kStripe, total_);
    uint8_t last[kStripe];
    std::memcpy(last, last_ + held_, kStripe - held_);
    std::memcpy(last + kStripe - held_, hold_, held_);
    return of_lanes(lanes, last, total_);
}

}  // namespace gdscache
