// io_uring by its system calls: the rings that are shared with the kernel, and nothing of what they are used for.
//
// Needs Linux 5.15, for timeouts of waits and a limit of the kernel's threads. One thread uses a ring at a time. The
// structures are those of <linux/io_uring.h>, declared here so that old headers do not matter.

#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "disk/disk.h"

namespace gdscache {

enum class Code : uint8_t { kReadv = 1, kWritev = 2, kRead = 22, kWrite = 23 };

// A completion, as the kernel writes it: `result` is bytes or a negative errno.
struct Completion {
    uint64_t data;
    int32_t result;
    uint32_t flags;
};

class Ring {
public:
    // A ring for `entries` requests in flight; `workers` threads of the kernel at most, for files and for all else.
    // It has read a page of memory through the kernel before anybody relies on it.
    static std::unique_ptr<Ring> open(unsigned entries, unsigned workers);  // throws `Error`

    Ring(Ring&&) = delete;  // nothing may be in flight where it ends

    // Queue a request; there must be room. `length`: bytes, or vectors. `worker`: a thread of the kernel does it from
    // the start; else `enter` begins it itself, and moves the bytes where they need no device.
    void put(Code code, int fd, int64_t offset, const void* address, uint32_t length, uint64_t data, bool worker);

    // Hand over what was queued, and wait for `wait` completions, at most so many seconds (below 0: for ever). 0, or a
    // negative errno: -ETIME when the time was over, -EBUSY or -EAGAIN where completions must be taken first.
    int enter(unsigned wait, double seconds);

    // The oldest completion that was not taken, or null. It is `pop`ped before the next.
    const Completion* front() const;
    void pop();

    bool has_queued() const { return queued_ != 0; }

    // Take back the request that was queued last, unless the kernel has it. Its `data`, or null.
    const uint64_t* take_back();

private:
    Ring() = default;

    void map(const void* given);
    void try_it();

    struct Unmap {
        void operator()(void* at) const { munmap(at, bytes); }
        size_t bytes = 0;
    };
    using Mapped = Unique<void*, Unmap>;

    Descriptor fd_;
    Mapped rings_, entries_;
    // Indices that both sides read and one writes: what it covers is written before, and read after.
    uint32_t *submit_tail_ = nullptr, *complete_head_ = nullptr, *complete_tail_ = nullptr;
    uint32_t submit_mask_ = 0, complete_mask_ = 0;
    const Completion* completions_ = nullptr;
    unsigned queued_ = 0;
};

}  // namespace gdscache
