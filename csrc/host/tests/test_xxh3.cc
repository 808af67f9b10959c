// XXH3-64: answers of the xxhash library, all arms against each other, and streams.

#include <algorithm>
#include <cstring>
#include <string>

#include "hash/xxh3.h"
#include "tests/check.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

struct Known {
    size_t size;
    uint64_t sum;
};

// Of the first bytes of 0, 1, 2 ... 250, 0, 1 ...; by xxhash.xxh3_64_intdigest.
constexpr Known kKnown[] = {
    {0, 0x2d06800538d394c2},     {1, 0xc44bdff4074eecdb},      {2, 0xd6645fc3051a9457},      {3, 0x5f4299fc161c9cbb},
    {4, 0x60dab036a58211f2},     {5, 0xb075753a84ca0fbe},      {8, 0x3a1c2d7c85af88f8},      {9, 0xe9612598145bb9dc},
    {15, 0x55ecedc2b87bb042},    {16, 0x8355e3a6f61770db},     {17, 0x9ef341a99de37328},     {32, 0x3523581fe96e4c05},
    {33, 0xe68c56ba88991e58},    {64, 0x6187eb9089b0ed55},     {65, 0x6928c76ce90422d0},     {96, 0x278a3e12ea046dfb},
    {97, 0xe7220282dc4e14f4},    {127, 0x120b9787f8425f2f},    {128, 0x85c6174c7ff4c46b},    {129, 0xec7642b431ba3e5a},
    {130, 0x4d3224b100908a87},   {143, 0x8222e885f060341d},    {144, 0x028e1e35ff4c0a01},    {239, 0x972b14e3c46f214b},
    {240, 0x375a384d957fe865},   {241, 0x02e8cd95421c6d02},    {256, 0x44f5d90dacde463a},    {257, 0x88fc3f7934a6c9be},
    {511, 0x455cffca2755aa1e},   {512, 0x5c021aac13954143},    {1023, 0xd3d91d80ac495685},   {1024, 0xe5d78bafa45b2aa5},
    {1025, 0xe95c42288f28186e},  {1088, 0x1a848d807034c403},   {1089, 0xa51e35ec282cb1d8},   {2047, 0xc95eaacd676cd049},
    {2048, 0x25339063db861586},  {2049, 0x6c9600c0e506e2ae},   {4096, 0x7135ffa504f1bc71},   {5000, 0xb418500fc42320ee},
    {65536, 0xaaae63800707a868}, {100003, 0xacf33ba3cf61e369}, {200000, 0xf0543157a23a8634},
};

void check_arm(const Arm& arm, const Arm& scalar, uint64_t rounds) {
    std::vector<uint8_t> counted(200000);
    for (size_t n = 0; n < counted.size(); n++) counted[n] = static_cast<uint8_t>(n % 251);
    for (const Known& known : kKnown) REQUIRE(xxh3(counted.data(), known.size, arm) == known.sum);

    Random random(5);
    const std::vector<uint8_t> data = random.bytes(40000);
    for (size_t size = 0; size <= 4096; size++) {
        REQUIRE_FAST(xxh3(data.data() + size % 13, size, arm) == xxh3(data.data() + size % 13, size, scalar));
    }
    constexpr size_t kSizes[] = {1, 3, 63, 64, 65, 128, 255, 256, 257, 700, 1024, 4096};
    for (uint64_t round = 0; round < rounds; round++) {
        const size_t size = random.below(data.size() - 64), start = random.below(64), shift = random.below(3) * 32;
        // separate blocks, so that a sanitizer sees a byte too many
        const std::vector<uint8_t> in(data.data() + start, data.data() + start + size);
        uint8_t* const room = static_cast<uint8_t*>(std::aligned_alloc(64, (size + shift + 127) / 64 * 64));
        for (const bool stream : {false, true}) {
            std::memset(room, 0, size + shift);
            Xxh3 hash(arm);
            for (size_t at = 0; at < size;) {
                const size_t some = std::min(size - at, random.pick(kSizes));
                hash.update_copy(room + shift + at, in.data() + at, some, stream);
                at += some;
                if (random.below(8) == 0) REQUIRE(hash.digest() == xxh3(in.data(), at, scalar));
            }
            stream_fence();
            REQUIRE(hash.digest() == xxh3(in.data(), size, scalar));
            REQUIRE(!std::memcmp(room + shift, in.data(), size));
        }
        std::free(room);
    }
}

}  // namespace

TEST_CASE("XXH3-64 by each arm") {
    const std::vector<const Arm*> all = arms();
    REQUIRE(all.size() >= 2);  // the architecture's arm, and the scalar one
    CHECK(all.back()->name == std::string("scalar"));
    for (const Arm* const arm : all) {
        INFO(std::string(arm->name));
        check_arm(*arm, *all.back(), setting("ROUNDS", 300));
        std::printf(" %s", arm->name);
    }
}
