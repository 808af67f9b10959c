// For tests: a disk that passes pieces on to another, and fails some of them on order.

#pragma once

#include <functional>

#include "disk/disk.h"

namespace gdscache {

enum class Failing : uint8_t {
    kError = 1,  // ends with the errno `value`; no byte is moved
    kShortMove = 2,  // reports only `value` bytes as moved, though all were
    kTorn = 3,   // moves only the first `value` bytes, and reports all as moved
    kFlip = 4,   // a read: flips a bit of the byte `value` at its end
    kLate = 5,   // is answered `value` milliseconds after its end
    kHang = 6,   // does not begin before `release`
};

// The fault of the bytes [begin, end) of the file `fd`, or of every file with -1. It meets only fragments that touch
// them; the first matching fault applies. `value` is an errno or milliseconds; counted bytes end at `begin`.
struct Fault {
    int32_t fd;
    int64_t begin, end;
    Failing what;
    int64_t value;
};

class FaultyDisk : public Disk {
public:
    ~FaultyDisk() override {
        if (at_end) at_end();
    }
    // Fail these from now on, and no others by their place. Any thread.
    virtual void fail(std::vector<Fault> faults) = 0;
    // Release all hanging pieces, now and later. Any thread, like `wake`.
    virtual void release() = 0;

    std::function<void()> at_end;
};

std::unique_ptr<FaultyDisk> open_faulty_disk(std::unique_ptr<Disk> disk, std::vector<Fault> faults = {});

}  // namespace gdscache
