// Memory for work that cannot fail: moves under way, and the threads that carry them out.

#pragma once

#include <cstddef>

namespace gdscache {

// Above 0, `new` of this thread does not throw. Initial-exec: the first access must not need memory.
extern constinit thread_local int must_not_fail __attribute__((tls_model("initial-exec")));

// While a `MustNotFail` lives, `new` of this thread does not throw: without memory of the system it takes some of a
// reserve that the library has from the start, and waits if the reserve is used up. Code that begins new work is
// outside, or inside a `MayFail`, and may fail.
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

// The reserve. `take_of_reserve` answers null if no room is left; `give_to_reserve` whether the address is of the
// reserve. `spare`: a small block that may not take the reserve's second half, for allocations of nanobind's in which
// an exception would end the process.
constexpr size_t kReserveBytes = size_t{2} << 20;
void* take_of_reserve(size_t bytes, bool spare = false) noexcept;
bool give_to_reserve(void* address) noexcept;

}  // namespace gdscache
