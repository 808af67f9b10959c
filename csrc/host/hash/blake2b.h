// Keyed BLAKE2b with digests of 32 bytes (RFC 7693), for page keys.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

namespace gdscache {

class Blake2b {
public:
    using Digest = std::array<uint8_t, 32>;
    using Bytes = std::span<const uint8_t>;

    // `key`: 1 to 64 bytes, compressed once for all digests.
    explicit Blake2b(Bytes key) {
        std::copy(kStart, kStart + 8, keyed_.begin());
        keyed_[0] ^= 0x01010000 | key.size() << 8 | sizeof(Digest);
        uint8_t block[kBlock] = {};
        std::ranges::copy(key, block);
        compress(keyed_, block, kBlock, false);
    }

    // Of `head`, 1 to 64 bytes, followed by `data`.
    Digest digest(Bytes head, Bytes data = {}) const {
        State state = keyed_;
        uint8_t block[kBlock];
        size_t held = head.size();
        std::ranges::copy(head, block);
        uint64_t bytes = kBlock;
        while (data.size() > kBlock - held) {  // the last block differs, even if it is full
            const Bytes some = data.first(kBlock - held);
            std::ranges::copy(some, block + held);
            data = data.subspan(some.size());
            compress(state, block, bytes += kBlock, false);
            held = 0;
        }
        std::ranges::copy(data, block + held);
        held += data.size();
        std::fill(block + held, block + kBlock, uint8_t{0});
        compress(state, block, bytes + held, true);
        Digest digest;
        std::memcpy(digest.data(), state.data(), sizeof digest);
        return digest;
    }

private:
    static constexpr uint64_t kStart[8] = {0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B,
                                           0xA54FF53A5F1D36F1, 0x510E527FADE682D1, 0x9B05688C2B3E6C1F,
                                           0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179};
    static constexpr uint8_t kOrders[10][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
        {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
        {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
        {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
        {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

    static void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
        a += b + x;
        d = std::rotr(d ^ a, 32);
        c += d;
        b = std::rotr(b ^ c, 24);
        a += b + y;
        d = std::rotr(d ^ a, 16);
        c += d;
        b = std::rotr(b ^ c, 63);
    }

    // Unrolled by its caller, so that the words and their order are constants.
    template <size_t kRound>
    [[gnu::always_inline]] static void round(uint64_t (&v)[16], const uint64_t (&m)[16]) {
        constexpr const uint8_t (&kOrder)[16] = kOrders[kRound % 10];
        mix(v[0], v[4], v[8], v[12], m[kOrder[0]], m[kOrder[1]]);
        mix(v[1], v[5], v[9], v[13], m[kOrder[2]], m[kOrder[3]]);
        mix(v[2], v[6], v[10], v[14], m[kOrder[4]], m[kOrder[5]]);
        mix(v[3], v[7], v[11], v[15], m[kOrder[6]], m[kOrder[7]]);
        mix(v[0], v[5], v[10], v[15], m[kOrder[8]], m[kOrder[9]]);
        mix(v[1], v[6], v[11], v[12], m[kOrder[10]], m[kOrder[11]]);
        mix(v[2], v[7], v[8], v[13], m[kOrder[12]], m[kOrder[13]]);
        mix(v[3], v[4], v[9], v[14], m[kOrder[14]], m[kOrder[15]]);
    }

    using State = std::array<uint64_t, 8>;
    static constexpr size_t kBlock = 128;
    static void compress(State& state, const uint8_t* block, uint64_t bytes, bool last) {
        uint64_t m[16], v[16];
        std::memcpy(m, block, sizeof m);
        std::ranges::copy(state, v);
        std::copy(kStart, kStart + 8, v + 8);
        v[12] ^= bytes;
        if (last) v[14] = ~v[14];
        [&]<size_t... kRounds>(std::index_sequence<kRounds...>) {
            (round<kRounds>(v, m), ...);
        }(std::make_index_sequence<12>());
        for (size_t n = 0; n < 8; ++n) state[n] ^= v[n] ^ v[n + 8];
    }

    State keyed_;
};

}  // namespace gdscache
