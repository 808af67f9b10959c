// Shared by the arms of XXH3: the secret and the primes.

#pragma once

#include "hash/xxh3.h"

namespace gdscache::xxh3_detail {

constexpr uint64_t kPrime32_1 = 0x9E3779B1u;
constexpr uint64_t kPrime32_2 = 0x85EBCA77u;
constexpr uint64_t kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5u;

// The default secret as little-endian words. Both architectures of the build are little-endian.
alignas(64) inline constexpr uint64_t kSecretWords[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};

inline const uint8_t* secret() { return reinterpret_cast<const uint8_t*>(kSecretWords); }

constexpr size_t kScrambleSecret = 128;  // the secret's last 64 bytes
constexpr size_t kLastSecret = 121;      // for the last stripe

enum class Out { kNone, kCopy, kStream };

// Arms of this processor; null if its architecture or the processor lacks the instructions.
const Arm* avx512_arm();
const Arm* avx2_arm();
const Arm* neon_arm();

}  // namespace gdscache::xxh3_detail
