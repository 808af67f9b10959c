// The fake driver (fake_cuda.h), and memory of its GPU.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "gpu/gpu.h"
#include "tests/check.h"
#include "tests/fake_cuda.h"

namespace gdscache::test {

// A library beside the test's binary. Opening it by its path gives the same one.
struct Beside : Library<std::runtime_error> {
    explicit Beside(const std::string& by) : Library("test", by.c_str()), path(by) {}

    static std::string beside(const char* name) {
        char self[4096];
        const ssize_t size = readlink("/proc/self/exe", self, sizeof self);
        REQUIRE((size > 0 && size < static_cast<ssize_t>(sizeof self)));
        const std::string own(self, static_cast<size_t>(size));
        return own.substr(0, own.rfind('/') + 1) + name;
    }

    const std::string path;
};

struct Driver : Beside {
    Driver() : Beside(beside("libfake_cuda.so")) {}

    decltype(&fake_batches) batches = (*this)["fake_batches"];
    decltype(&fake_fail) fail = (*this)["fake_fail"];
    decltype(&fake_calls) calls = (*this)["fake_calls"];
    decltype(&fake_delay) delay = (*this)["fake_delay"];
    decltype(&fake_hold) hold = (*this)["fake_hold"];
    decltype(&fake_hold_copies) hold_copies = (*this)["fake_hold_copies"];
    decltype(&fake_slow) slow = (*this)["fake_slow"];
    decltype(&fake_living) living = (*this)["fake_living"];
    decltype(&fake_entered_here) entered_here = (*this)["fake_entered_here"];
    decltype(&fake_device) device = (*this)["fake_device"];
    decltype(&fake_pin) pin = (*this)["fake_pin"];
    decltype(&fake_forget) forget = (*this)["fake_forget"];
    decltype(&fake_context) context = (*this)["fake_context"];
    decltype(&fake_kernel) kernel = (*this)["fake_kernel"];
    decltype(&fake_vector) vector = (*this)["fake_vector"];
    decltype(&fake_call) call = (*this)["fake_call"];

    // All objects are gone. `entered`: except for this number of entered contexts.
    void check_empty(int64_t entered = 0) const {
        for (int32_t what = 0; what < kLiving; ++what) {
            CAPTURE(what);
            REQUIRE(living(what) == (what == kEntered ? entered : 0));
        }
    }
};

// Memory of the GPU, or of the host, that a test owns.
class Bytes {
public:
    explicit Bytes(size_t size) : memory_(size + 64) {
        at_ = memory_.data() + (64 - reinterpret_cast<uint64_t>(memory_.data()) % 64) % 64;
    }
    ~Bytes() {
        for (void* const one : told_) driver_->forget(one);
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;

    uint8_t* data() const { return at_; }
    size_t size() const { return memory_.size() - 64; }

    uint64_t give_to_device(const Driver& driver) {
        driver_ = &driver;
        told_ = {at_};
        return driver.device(at_, size());
    }
    // In registrations of `piece` bytes from `first` on, or as a whole.
    void pin(const Driver& driver, size_t first = 0, size_t piece = 0) {
        driver_ = &driver;
        for (size_t begin = 0; begin < size();) {
            const size_t end = piece ? std::min(size(), (begin ? begin : first) + piece) : size();
            driver.pin(at_ + begin, end - begin);
            told_.push_back(at_ + begin);
            begin = end;
        }
    }

private:
    std::vector<uint8_t> memory_;
    uint8_t* at_;
    const Driver* driver_ = nullptr;
    std::vector<void*> told_;
};

enum class Kernels { kNone, kPlain, kSums, kLooks };

// The fake driver's kernels for some planes, with their table in memory of the GPU.
class LoadedKernels {
public:
    LoadedKernels(const Driver& driver, const GpuPlanes& planes, int32_t vector)
        : driver_(driver), vector_(vector), table_(8 * (4 * planes.layers + 6 * planes.planes.size())) {
        auto* words = reinterpret_cast<int64_t*>(table_.data());
        const auto add = [&](std::initializer_list<int64_t> row) { words = std::ranges::copy(row, words).out; };
        for (int32_t n = 0; n < planes.layers; n++) {
            const int64_t first = planes.first_plane[n], begin = planes.bounds[n];
            add({first, planes.first_plane[n + 1] - first, begin, planes.bounds[n + 1] - begin});
        }
        for (const PlaneRuns& one : planes.planes) {
            add({one.base, one.block_stride, one.run_stride, one.run_bytes, one.runs_per_block, one.end});
        }
        address_ = table_.give_to_device(driver);
        driver.vector(vector);
    }

    PageKernels get(Kernels wanted, int32_t processors, bool sums = true, bool looks = true) const {
        if (wanted == Kernels::kNone) return {};
        const auto by = [&](int32_t which) { return driver_.kernel(which); };
        return {by(kGather),
                by(kScatter),
                by(kGatherSums),
                by(kScatterSums),
                address_,
                vector_,
                processors,
                wanted >= Kernels::kSums && sums,
                wanted >= Kernels::kLooks && looks};
    }

private:
    const Driver& driver_;
    const int32_t vector_;
    Bytes table_;
    uint64_t address_;
};

}  // namespace gdscache::test
