// Memory for what cannot fail: a move that is under way, and the thread that carries it out.

#pragma once

#include <cstddef>

namespace gdscache {

// Above 0 `new` of this thread does not throw. Of the library's own block: one that is made at a thread's first look
// would need memory.
extern constinit thread_local int must_not_fail __attribute__((tls_model("initial-exec")));

// While a `MustNotFail` lives, `new` of this thread does not throw: where the system has no memory it takes some of a
// reserve that the library has had from the start, and where that is used up too, it waits. What begins new work is
// outside, and fails; or within, while a `MayFail` lives.
template <bool kMust>
class Allocating {
public:
    Allocating() noexcept : before_(must_not_fail) { must_not_fail = kMust; }
    ~Allocating() { must_not_fail = before_; }
    Allocating(Allocating&&) = delete;

private:
    const int before_;
};
using MustNotFail = Allocating<true>;
using MayFail = Allocating<false>;

// The reserve. `take` answers null where no room is left; `give` whether the address was of it. `spare`: of what moves
// under way can spare, some bytes, as nanobind asks for where an exception would end the process.
constexpr size_t kReserveBytes = size_t{2} << 20;
void* take_of_reserve(size_t bytes, bool spare = false) noexcept;
bool give_to_reserve(void* address) noexcept;

}  // namespace gdscache
