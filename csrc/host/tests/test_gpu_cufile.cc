// The disk by cuFile: bytes between a file, memory of a GPU and of the host; every fault that the library can report.

#include <chrono>
#include <thread>

#include "tests/cufile_rig.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

constexpr size_t kUnit = 4096;

// Pieces over the whole file, each place of which is in one of them, in fragments at random places of both memories.
struct Drawn {
    std::vector<std::vector<iovec>> fragments;
    std::vector<Piece> pieces;
    std::vector<std::pair<bool, size_t>> where;  // of each unit of the file: whether in GPU memory, and the place

    Drawn(const CuFileRig& rig, Random& random, Op op) {
        const size_t units = rig.gpu.size() / kUnit;
        std::vector<size_t> places(units);
        for (size_t n = 0; n < units; ++n) places[n] = n;
        if (random.below(2)) shuffle(random, places);
        for (size_t unit = 0; unit < units;) {
            std::vector<iovec> own;
            const size_t first = unit, count = 1 + random.below(6);
            const bool mixed = random.below(4) == 0;
            for (; unit < units && own.size() < count; ++unit) {
                const bool of_gpu = !mixed || random.below(2);
                own.push_back(rig.at(places[unit] * kUnit, kUnit, of_gpu));
                where.emplace_back(of_gpu, places[unit]);
            }
            fragments.push_back(std::move(own));
            pieces.push_back({pieces.size(), nullptr, 0, rig.file, static_cast<int64_t>(first * kUnit), op, false});
        }
        for (size_t n = 0; n < pieces.size(); ++n) {
            pieces[n].fragments = fragments[n].data();
            pieces[n].count = static_cast<uint32_t>(fragments[n].size());
        }
        shuffle(random, pieces);
    }
};

void bytes_arrive(const Driver& driver, const FakeCuFile& fake, uint64_t count) {
    Random random(1);
    for (uint64_t n = 0; n < count; ++n) {
        const int threads = static_cast<int>(1 + random.below(5));
        CuFileRig rig(driver, fake, threads, kUnit * (1 + random.below(120)), n);
        for (const Op op : {Op::kWrite, Op::kRead, Op::kWrite}) {
            const std::vector<uint8_t> before = rig.content();
            const Drawn drawn(rig, random, op);
            rig.disk->submit(drawn.pieces);
            for (const auto& [which, answer] : rig.finish(drawn.pieces))
                REQUIRE(answer == std::pair(0, int64_t{kUnit}));
            const std::vector<uint8_t> now = rig.content();
            for (size_t unit = 0; unit < drawn.where.size(); ++unit) {
                const auto& [of_gpu, place] = drawn.where[unit];
                const uint8_t* const memory = (of_gpu ? rig.gpu : rig.host).data() + place * kUnit;
                REQUIRE(std::equal(memory, memory + kUnit, now.begin() + static_cast<ptrdiff_t>(unit * kUnit)));
            }
            if (op == Op::kRead) REQUIRE(now == before);
        }
    }
}

std::vector<Piece> each(const CuFileRig& rig, const std::vector<iovec>& fragments, Op op, uint32_t a_piece = 1) {
    std::vector<Piece> pieces;
    for (uint32_t n = 0; n < fragments.size(); n += a_piece) {
        const auto some = std::min(a_piece, static_cast<uint32_t>(fragments.size()) - n);
        pieces.push_back({n, fragments.data() + n, some, rig.file, static_cast<int64_t>(n * kUnit), op, false});
    }
    return pieces;
}

std::vector<iovec> units(const CuFileRig& rig, size_t first = 0) {
    std::vector<iovec> made;
    for (size_t at = first * kUnit; at < rig.gpu.size(); at += kUnit) made.push_back(rig.at(at, kUnit, true));
    return made;
}

void neighbours(const Driver& driver, const FakeCuFile& fake) {
    CuFileRig rig(driver, fake, 2, 16 * kUnit, 5);
    const std::vector<iovec> all = units(rig);
    const std::vector<Piece> pieces = each(rig, all, Op::kRead, 8);
    const long before = fake.moves(0);
    rig.disk->submit(pieces);
    REQUIRE(rig.finish(pieces).size() == 16);
    REQUIRE(fake.moves(0) == before + 2);
}

// The file equals the GPU's memory, unit by unit, except for one.
void check_same(const CuFileRig& rig, const std::vector<iovec>& all, size_t except = SIZE_MAX) {
    const std::vector<uint8_t> now = rig.content();
    for (size_t unit = 0; unit < all.size(); ++unit) {
        const size_t place = reinterpret_cast<uint64_t>(all[unit].iov_base) - rig.address;
        const auto there = now.begin() + static_cast<ptrdiff_t>(unit * kUnit);
        if (unit != except) REQUIRE(std::equal(there, there + kUnit, rig.gpu.data() + place));
    }
}

void faults(const Driver& driver, const FakeCuFile& fake) {
    struct {
        int kind;
        long value;
        int32_t error;
        int64_t moved;
    } const kinds[] = {
        {kError, 5011, 5011, 0}, {kErrno, EIO, EIO, 0}, {kErrno, ENOSPC, ENOSPC, 0}, {kErrno, 0, EIO, 0},
        {kShort, 0, 0, 0},       {kShort, 100, 0, 100}, {kMore, 1, EIO, 0},          {kMore, kUnit, EIO, 0},
    };
    constexpr size_t kBad = 7;
    for (const uint32_t a_piece : {1u, 2u, 3u}) {
        CuFileRig rig(driver, fake, 1, 24 * kUnit, 3);
        std::vector<iovec> all = units(rig);
        if (a_piece == 3) std::reverse(all.begin(), all.end());  // so that none are one call
        for (const Op op : {Op::kRead, Op::kWrite}) {
            for (const auto& kind : kinds) {
                const std::vector<Piece> pieces = each(rig, all, op, a_piece);
                const int write = op == Op::kWrite;
                const auto offset = static_cast<long>(kBad * kUnit);
                fake.fault(write, kind.kind, kind.value, offset, 100);  // of the call, and again of it alone
                if (op == Op::kRead) std::fill_n(rig.gpu.data(), rig.gpu.size(), uint8_t{0});
                rig.disk->submit(pieces);
                const CuFileRig::Answers answers = rig.finish(pieces);
                REQUIRE(answers.size() == 24);
                for (const auto& [which, answer] : answers) {
                    const bool bad = which.first + which.second == kBad;
                    REQUIRE(answer == (bad ? std::pair(kind.error, kind.moved) : std::pair(0, int64_t{kUnit})));
                }
                fake.release();
                if (op == Op::kRead) check_same(rig, all, kBad);
                rig.disk->submit(pieces);
                for (const auto& [which, answer] : rig.finish(pieces)) REQUIRE(answer == std::pair(0, int64_t{kUnit}));
            }
        }
        check_same(rig, all);
    }
}

void hangs(const Driver& driver, const FakeCuFile& fake) {
    CuFileRig rig(driver, fake, 2, 24 * kUnit, 6);
    const std::vector<iovec> all = units(rig);
    const std::vector<Piece> pieces = each(rig, all, Op::kRead);
    fake.fault(0, kWait, 0, static_cast<long>(3 * kUnit), 1);
    rig.disk->submit(pieces);
    std::vector<Ended> ended;
    while (rig.disk->pending() > 1) rig.disk->reap(ended, 60);
    while (fake.waiting() == 0) std::this_thread::yield();  // its thread may be the last to get there
    CHECK(ended.size() == 23);
    CHECK(fake.waiting() == 1);
    CHECK(rig.disk->reap(ended, 0.01) == 0);
    const std::vector<iovec> one{rig.at(9 * kUnit, kUnit, true)};
    const Piece other{99, one.data(), 1, rig.file, 0, Op::kRead, false};
    rig.disk->submit({&other, 1});
    CHECK(rig.disk->reap(ended, 60) == 1);
    CHECK(ended.back().tag == 99);
    CHECK(ended.back().error == 0);
    fake.release();
    REQUIRE(rig.disk->reap(ended, 60) == 1);
    REQUIRE(ended.back().tag == 3);
    REQUIRE(ended.back().moved == kUnit);
}

void strangers(const Driver& driver, const FakeCuFile& fake) {
    CuFileRig rig(driver, fake, 2, 4 * kUnit, 7);
    const std::vector<iovec> known{rig.at(0, kUnit, true)};
    const std::vector<iovec> unknown{{reinterpret_cast<void*>(rig.address + 4 * kUnit), kUnit}};
    const std::vector<iovec> beyond{{reinterpret_cast<void*>(rig.address + 3 * kUnit + 1), kUnit}};
    const int other = memfd_create("gdscache-test", 0);
    const std::vector<Piece> pieces{{1, known.data(), 1, other, 0, Op::kRead, false},
                                    {2, unknown.data(), 1, rig.file, 0, Op::kRead, false},
                                    {3, beyond.data(), 1, rig.file, 0, Op::kRead, false}};
    rig.disk->submit(pieces);
    const CuFileRig::Answers answers = rig.finish(pieces);
    const std::map<uint64_t, int32_t> errors{{1, EBADF}, {2, EFAULT}, {3, EFAULT}};
    for (const auto& [tag, error] : errors) CHECK(answers.at({tag, 0}).first == error);
    const auto refused = [](auto call, const char* said) {
        try {
            call();
            return false;
        } catch (const CuFileError& error) {
            return std::string(error.what()).find(said) != std::string::npos;
        }
    };
    for (const int64_t at : {-1, 0, 1}) {  // some of it is known
        CHECK(refused([&] { rig.files->add_memory(rig.address + static_cast<uint64_t>(at), kUnit); }, "before"));
    }
    fake.refuse(kHandle, 5027);
    CHECK(refused([&] { rig.files->add_file(other); }, "5027"));
    CHECK(!rig.files->file(other));
    fake.refuse(kBuffer, 5016);
    CHECK(refused([&] { rig.files->add_memory(rig.address + (1 << 20), kUnit); }, "5016"));
    CHECK(!rig.files->memory(rig.address + (1 << 20), kUnit));
    fake.release();
    CHECK(refused([&] { CuFiles(driver.path.c_str(), driver.context(), "/nowhere/libcufile.so.0"); }, "no libcufile"));
    CHECK(refused([&] { CuFiles(driver.path.c_str(), driver.context(), driver.path.c_str()); }, "no function"));
    close(other);
    // A context that the driver refuses is an error of the calls that need it.
    driver.fail("cuCtxPushCurrent_v2", 0);
    const Piece good{4, known.data(), 1, rig.file, 0, Op::kRead, false};
    rig.disk = open_cufile_disk(1, rig.files);
    for (const int32_t error : {EIO, 0}) {
        rig.disk->submit({&good, 1});
        CHECK(rig.finish({good}).at({4, 0}).first == error);
    }
}

}  // namespace

TEST_CASE("bytes arrive, of any pieces") { bytes_arrive(Driver(), FakeCuFile(), setting("ROUNDS", 40)); }
TEST_CASE("neighbours in the file and in memory are one call") { neighbours(Driver(), FakeCuFile()); }
TEST_CASE("a fault is an error of its own fragment; afterwards all calls succeed") { faults(Driver(), FakeCuFile()); }
TEST_CASE("a hanging call is pending, delays no other, and ends when it can") { hangs(Driver(), FakeCuFile()); }

TEST_CASE("files and memory unknown to cuFile, and calls that it refuses") {
    strangers(Driver(), FakeCuFile());
    Driver().check_empty();
}
