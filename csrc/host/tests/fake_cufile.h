// Orders to the cuFile of the tests (fake_cufile.cc), beside the library's own functions.
//
// It reads and writes files by pread and pwrite, in memory of the GPU of fake_cuda.h or of the host. Errors that a real
// cuFile may not survive (a call outside registered memory of that GPU, without a context, or on a file that was
// deregistered) end the process.

#pragma once

#include <cstdint>

namespace gdscache::test {

// Calls that may be refused, or hang with `kHang` in place of a code.
enum : int32_t { kDriver, kHandle, kBuffer, kCuFileCalls };
constexpr int32_t kHang = -1;

// The fault of a read or a write. `value`: for kError a code, for kErrno a number, else bytes; for kShort
// and kLie from the fault's offset on.
enum : int32_t {
    kNoFault,
    kError,  // answers the code, moves nothing
    kErrno,  // answers -1 with errno, moves nothing
    kShort,  // moves fewer bytes, and says so
    kMore,  // moves all, and says that it moved more
    kLie,  // moves fewer bytes, and says that it moved all
    kWait,  // moves nothing before `release`
    kFewer,  // moves all, and says that it moved fewer
};

}  // namespace gdscache::test

extern "C" {

// The next `times` reads (0) or writes (1) that touch the byte `offset`, or any with a negative one.
int fake_cufile_fault(int op, int kind, long value, long offset, int times);
void fake_cufile_refuse(int call, int code);
// No faults and no refusals any more; hanging calls go on.
void fake_cufile_release();
// Files and memories are not registered any more.
void fake_cufile_forget();
// A file that counts reads and writes like the nvidia-fs driver.
void fake_cufile_stats(const char* path);
// A function that tells whether the calling thread has a context (0: none).
void fake_cufile_contexts(int64_t (*entered)());
// The number of calls: of a refusable call; of reads (0) or writes (1).
long fake_cufile_calls(int call);
long fake_cufile_moves(int op);
// The number of hanging calls; the number of living handles and registrations.
int fake_cufile_waiting();
long fake_cufile_living();
}
