// Keyed BLAKE2b with digests of 32 bytes (RFC 7693), for page keys.

#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace gdscache {

class Blake2b {
public:
    using Digest = std::array<uint8_t, 32>;
    using Bytes = std::span<const uint8_t>;

    // `key`: 1 to 64 bytes, compressed once for all digests.
    explicit Blake2b(Bytes key);

    // Of `head`, 1 to 64 bytes, followed by `data`.
    Digest digest(Bytes head, Bytes data = {}) const;

private:
    using State = std::array<uint64_t, 8>;
    static constexpr size_t kBlock = 128;
    static void compress(State& state, const uint8_t* block, uint64_t bytes, bool last);

    State keyed_;
};

}  // namespace gdscache
