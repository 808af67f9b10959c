// Orders to the CUDA driver of the tests (fake_cuda.cc), which it has beside the driver's own functions.
//
// Memory of the GPU is host memory whose addresses have a bit more: whoever takes one for an address of the host's stops.
// A stream is a thread, which does what it was given in its order, as late as it likes. What no GPU would survive (memory
// that is not there, copies that leave their registration, blocks that the pool does not have) ends the process.

#pragma once

#include <cstddef>
#include <cstdint>

namespace gdscache::test {

constexpr uint64_t kDeviceBit = uint64_t{1} << 56;

enum : int32_t { kStreams, kEvents, kDeviceMemory, kHostMemory, kEntered, kLiving };
enum : int32_t { kGather, kScatter, kGatherSums, kScatterSums };

}  // namespace gdscache::test

extern "C" {

// What `cuMemcpyBatchAsync` is: of CUDA 13 (13), of CUDA 12.8 (12), or not there (0).
void fake_batches(int32_t form);
// The `nth` call of a function from now on, from 0, fails once; none with -1. And how many calls there were in all.
void fake_fail(const char* function, int64_t nth);
int64_t fake_calls(const char* function);
// Streams wait up to so many microseconds before each of the things that they do. `hold`: they begin nothing, or no
// copies.
void fake_delay(int64_t microseconds);
void fake_hold(int32_t held);
void fake_hold_copies(int32_t held);
// How many of these there are.
int64_t fake_living(int32_t what);
// Contexts that the calling thread has entered.
int64_t fake_entered_here();
// Bytes of the caller's are memory of the GPU from now on: the address that they have there. Or they are page-locked.
uint64_t fake_device(void* address, size_t bytes);
void fake_pin(void* address, size_t bytes);
void fake_forget(void* address);
void* fake_context();
// A kernel of csrc/pages.cu, and the widest access that was compiled into all of them.
void* fake_kernel(int32_t which);
void fake_vector(int32_t bytes);
// Have a stream call something.
void fake_call(void* stream, void (*function)(void*), void* argument);
}
