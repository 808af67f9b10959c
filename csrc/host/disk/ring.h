// io_uring by its system calls: the rings shared with the kernel, without their use.
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
    // A ring for `entries` requests in flight, with at most `workers` threads of the kernel for files and as many for
    // all else. It has read a page of memory through the kernel before it is returned.
    static std::unique_ptr<Ring> open(unsigned entries, unsigned workers);  // throws `Error`

    Ring(Ring&&) = delete;  // nothing may be in flight at its end

    // Queue a request; there must be room. `length`: bytes, or vectors. `worker`: a kernel thread does the request from
    // the start; else `enter` begins it, and copies the bytes itself if no device is needed.
    void put(Code code, int fd, int64_t offset, const void* address, uint32_t length, uint64_t data, bool worker);

    // Submit the queued requests, and wait up to `seconds` (below 0: for ever) for `wait` completions. 0, or a negative
    // errno: -ETIME after the time, -EBUSY or -EAGAIN if completions must be taken first.
    int enter(unsigned wait, double seconds);

    // The oldest completion, or null. `pop` it before the next.
    const Completion* front() const;
    void pop();

    bool has_queued() const { return queued_ != 0; }

    // Take back the last queued request, unless the kernel has it. Its `data`, or null.
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
    // Indices that both sides read and one side writes: the entries they cover are written before, and read after.
    uint32_t *submit_tail_ = nullptr, *complete_head_ = nullptr, *complete_tail_ = nullptr;
    uint32_t submit_mask_ = 0, complete_mask_ = 0;
    const Completion* completions_ = nullptr;
    unsigned queued_ = 0;
};

}  // namespace gdscache
