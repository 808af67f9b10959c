// For tests: a disk that passes pieces on to another, and fails some of them on order.

#pragma once

#include <functional>

#include "disk/disk.h"

namespace gdscache {

enum class Failing : uint8_t {
    kError = 1,  // ends with the errno `value`; no byte is moved
    kShortMove = 2,  // says that only `value` bytes were moved, though all were
    kTorn = 3,   // moves only the first `value` bytes, and says that all were moved
    kFlip = 4,   // a read: flips a bit of the byte `value` when it has ended
    kLate = 5,   // is answered `value` milliseconds after it has ended
    kHang = 6,   // is not begun before `release`
};

struct Fault {
    uint64_t at;  // which piece of those submitted, from 0 on
    Failing what;
    int64_t value;
};

// What becomes of the bytes [begin, end) of the file `fd`, or of every file with -1. It meets each fragment that
// touches them, and no other; the first fault that does has it. `value` is an errno or milliseconds; where bytes are
// counted, that is `begin`.
struct PlaceFault {
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
    virtual void fail(std::vector<PlaceFault> faults) = 0;
    // Let go of everything that hangs, now and later. Any thread, as `wake`.
    virtual void release() = 0;

    std::function<void()> at_end;
};

std::unique_ptr<FaultyDisk> open_faulty_disk(std::unique_ptr<Disk> disk, std::vector<Fault> faults);

}  // namespace gdscache
