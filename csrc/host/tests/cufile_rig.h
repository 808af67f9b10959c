// The fake cuFile (fake_cufile.h) with a file, and memory of the fake GPU and the host.

#pragma once

#include <sys/mman.h>

#include "cuda/cufile.h"
#include "disk/disk.h"
#include "tests/fake_cufile.h"
#include "tests/gpu_rig.h"

namespace gdscache::test {

struct FakeCuFile : Beside {
    FakeCuFile() : Beside("libfake_cufile.so") {}

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

}  // namespace gdscache::test
