// Errors, and handles that close themselves.

#pragma once

#include <dlfcn.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace gdscache {

// An error of the system, a driver or a check. `code`: an errno, or a greater number of cuFile's. `hint`: what to do.
struct Error : std::runtime_error {
    Error(int number, const std::string& why, const char* what_to_do = "see the message")
        : std::runtime_error(why), code(number), hint(what_to_do) {}
    int code;
    const char* hint;
};

inline void refuse_if(bool unsound, const char* why) {
    if (unsound) throw Error(EINVAL, why);
}
inline void require(bool sound, const char* why) { refuse_if(!sound, why); }

// Whether all numbers are in [0, limit).
inline bool within(const int64_t* values, int64_t count, int64_t limit) {
    return std::all_of(values, values + count, [&](int64_t value) { return value >= 0 && value < limit; });
}

// A handle that is closed by `close` at the end of its life, unless it is `none`.
template <typename T, typename Close, T none = T{}>
class Unique {
public:
    Unique() = default;
    explicit Unique(T opened, Close by = {}) : one_(opened), close_(by) {}
    Unique(Unique&& other) noexcept : one_(std::exchange(other.one_, none)), close_(other.close_) {}
    Unique& operator=(Unique&& other) noexcept {
        std::swap(one_, other.one_), std::swap(close_, other.close_);
        return *this;
    }
    ~Unique() {
        if (one_ != none) close_(one_);
    }

    T get() const { return one_; }
    explicit operator bool() const { return one_ != none; }

private:
    T one_ = none;
    [[no_unique_address]] Close close_{};
};

struct CloseDescriptor {
    void operator()(int fd) const { close(fd); }
};
using Descriptor = Unique<int, CloseDescriptor, -1>;

// An eventfd, which ends a wait.
struct Event : Descriptor {
    Event() : Descriptor(eventfd(0, EFD_CLOEXEC)) {
        if (!*this) throw Error(errno, "eventfd cannot be had");
    }
    void signal() const {
        const uint64_t one = 1;
        while (write(get(), &one, sizeof one) < 0 && errno == EINTR) {
        }
    }
};

// A library loaded at run time, and never unloaded. A function, by name, converts to any pointer. Throws `Refused`.
template <typename Refused>
class Library {
public:
    // `there`: a name that is preferred if the process has that library open.
    Library(const char* what, const char* path, const char* there = nullptr)
        : what_(what), library_(there ? dlopen(there, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) : nullptr) {
        if (!library_) library_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library_) throw Refused("there is no " + what_ + ": " + dlerror());
    }

    struct Found {
        void* address;
        template <typename Pointer>
        operator Pointer() const {
            return reinterpret_cast<Pointer>(address);
        }
    };
    Found find(const char* name) const { return {dlsym(library_, name)}; }
    Found operator[](const char* name) const {
        if (const Found found = find(name); found.address) return found;
        throw Refused(what_ + " has no function " + name);
    }

private:
    const std::string what_;
    void* library_;
};

}  // namespace gdscache
