// The disk by cuFile: bytes between a file, memory of a GPU and of the host; every fault that the library can report.

#include <sys/mman.h>

#include <thread>

#include "cuda/cufile.h"
#include "disk/disk.h"
#include "tests/fake_cufile.h"
#include "tests/gpu_rig.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

constexpr size_t kUnit = 4096;

struct FakeCuFile : Beside {
    FakeCuFile() : Beside(beside("libfake_cufile.so")) {}

    decltype(&fake_cufile_fault) fault = (*this)["fake_cufile_fault"];
    decltype(&fake_cufile_refuse) refuse = (*this)["fake_cufile_refuse"];
    decltype(&fake_cufile_release) release = (*this)["fake_cufile_release"];
    decltype(&fake_cufile_contexts) contexts = (*this)["fake_cufile_contexts"];
    decltype(&fake_cufile_calls) calls = (*this)["fake_cufile_calls"];
    decltype(&fake_cufile_moves) moves = (*this)["fake_cufile_moves"];
    decltype(&fake_cufile_waiting) waiting = (*this)["fake_cufile_waiting"];
    decltype(&fake_cufile_living) living = (*this)["fake_cufile_living"];
};

// A file of `bytes`, and equal sizes of GPU and host memory, each with bytes of its own.
class CuFileRig {
public:
    CuFileRig(const Driver& driver, const FakeCuFile& fake, int threads, size_t size, uint64_t seed)
        : gpu(size), host(size), library(fake) {
        fake.contexts(driver.entered_here);
        address = gpu.give_to_device(driver);
        Random random(seed);
        REQUIRE((file = memfd_create("gdscache-test", 0)) >= 0);
        for (uint8_t* const to : {gpu.data(), host.data()}) {
            const std::vector<uint8_t> content = random.bytes(size);
            std::copy(content.begin(), content.end(), to);
        }
        const std::vector<uint8_t> content = random.bytes(size);
        REQUIRE(pwrite(file, content.data(), size, 0) == static_cast<ssize_t>(size));
        files = std::make_shared<CuFiles>(driver.path.c_str(), driver.context(), fake.path.c_str());
        files->open(nullptr);
        files->add_file(file);
        files->add_memory(address, size);
        disk = open_cufile_disk(threads, files);
        REQUIRE(disk);
        REQUIRE(disk->name() == std::string("cufile"));
        REQUIRE(disk->depth() == static_cast<size_t>(threads));
    }

    ~CuFileRig() {
        disk.reset();
        files->remove_memory(address);
        files->remove_file(file);
        CHECK(library.living() == 0);
        close(file);
    }

    std::vector<uint8_t> content() const {
        std::vector<uint8_t> found(gpu.size());
        REQUIRE(pread(file, found.data(), found.size(), 0) == static_cast<ssize_t>(found.size()));
        return found;
    }

    // A fragment: bytes at a place of the GPU's memory, or of the host's.
    iovec at(size_t place, size_t bytes, bool of_gpu) const {
        uint8_t* const there = host.data() + place;
        return {of_gpu ? reinterpret_cast<void*>(address + place) : there, bytes};
    }

    // Of all pieces under way, by tag and fragment: error and bytes moved.
    using Answers = std::map<std::pair<uint64_t, uint32_t>, std::pair<int32_t, int64_t>>;
    Answers finish(const std::vector<Piece>& pieces) {
        std::map<uint64_t, const Piece*> by_tag;
        for (const Piece& piece : pieces) by_tag[piece.tag] = &piece;
        Answers answers;
        std::vector<Ended> ended;
        while (disk->pending()) {
            ended.clear();
            disk->reap(ended, 60);
            REQUIRE(!ended.empty());
            for (const Ended& some : ended) {
                int64_t moved = some.moved;
                for (uint32_t n = some.first; n < some.first + some.count; ++n) {
                    const auto size = static_cast<int64_t>(by_tag.at(some.tag)->fragments[n].iov_len);
                    const std::pair answer{some.error, std::min(moved, size)};
                    REQUIRE(answers.emplace(std::pair{some.tag, n}, answer).second);
                    moved -= answer.second;
                }
                REQUIRE(moved == 0);
            }
        }
        return answers;
    }

    Bytes gpu, host;
    uint64_t address;
    int file;
    std::shared_ptr<CuFiles> files;
    std::unique_ptr<Disk> disk;
    const FakeCuFile& library;
};

// Pieces over the whole file, each place of which is in one of them, in fragments at random places of both memories.
struct Drawn {
    std::vector<std::vector<iovec>> fragments;
    std::vector<Piece> pieces;
    std::vector<std::pair<bool, size_t>> where;  // of each unit of the file: whether in GPU memory, and the place

    Drawn(const CuFileRig& rig, Random& random, Op op) {
        const size_t units = rig.gpu.size() / kUnit;
        std::vector<size_t> places(units);
        for (size_t n = 0; n < units; ++n) places[n] = n;
        if (random.below(2)) random.shuffle(places);
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
        random.shuffle(pieces);
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
