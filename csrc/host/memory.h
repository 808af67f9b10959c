// Memory for what cannot fail: a move that is under way, and the thread that carries it out.

#pragma once

#include <cstddef>

namespace gdscache {

// While this lives, `new` of this thread does not throw: where the system has no memory it takes some of a reserve that
// the library has had from the start, and where that is used up too, it waits. What begins new work is outside, and fails.
class MustNotFail {
public:
    MustNotFail() noexcept { ++depth_; }
    ~MustNotFail() { --depth_; }
    MustNotFail(MustNotFail&&) = delete;

    static bool here() noexcept { return depth_ != 0; }

private:
    friend class MayFail;
    // Of the library's own block: one that is made at a thread's first look would need memory.
    static thread_local int depth_ __attribute__((tls_model("initial-exec")));
};

// While this lives, `new` of this thread throws again, within a `MustNotFail` too.
class MayFail {
public:
    MayFail() noexcept : before_(MustNotFail::depth_) { MustNotFail::depth_ = 0; }
    ~MayFail() { MustNotFail::depth_ = before_; }
    MayFail(MayFail&&) = delete;

private:
    const int before_;
};

// The reserve. `take` answers null where no room is left; `give` whether the address was of it.
constexpr size_t kReserveBytes = size_t{2} << 20;
void* take_of_reserve(size_t bytes) noexcept;
// The same of what moves under way can spare: some bytes, as nanobind asks for where an exception would end the process.
void* take_of_spare(size_t bytes) noexcept;
bool give_to_reserve(void* address) noexcept;

}  // namespace gdscache
