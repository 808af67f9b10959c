// The fake driver (fake_cuda.h), and memory of its GPU.

#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

#include "tests/check.h"
#include "tests/fake_cuda.h"

namespace gdscache::test {

// A library beside the test's binary. Opening it by its path gives the same one.
class Beside {
public:
    explicit Beside(const char* name) {
        char self[4096];
        const ssize_t size = readlink("/proc/self/exe", self, sizeof self);
        REQUIRE((size > 0 && size < static_cast<ssize_t>(sizeof self)));
        path = std::string(self, static_cast<size_t>(size));
        path = path.substr(0, path.rfind('/') + 1) + name;
        library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library_) FAIL(std::string(dlerror()));
    }

    // A function, which converts to a pointer of its type.
    struct Found {
        void* address;
        template <typename Pointer>
        operator Pointer() const {
            return reinterpret_cast<Pointer>(address);
        }
    };
    Found operator[](const char* name) const {
        void* const address = dlsym(library_, name);
        REQUIRE(address);
        return {address};
    }

    std::string path;

private:
    void* library_;
};

struct Driver : Beside {
    Driver() : Beside("libfake_cuda.so") {}

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

inline int64_t between(Random& random, int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random.below(static_cast<uint64_t>(most - least + 1)));
}

template <typename T>
void shuffle(Random& random, std::vector<T>& values) {
    for (size_t n = values.size(); n-- > 1;) std::swap(values[n], values[random.below(n + 1)]);
}

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

}  // namespace gdscache::test
