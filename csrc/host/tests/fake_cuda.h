// Orders to the CUDA driver of the tests (fake_cuda.cc), beside the driver's own functions.
//
// Memory of the GPU is host memory whose addresses have one more bit, so that a use as a host address stops. A stream
// is a thread that does its work in order, with any delay. Errors that no GPU would survive (missing memory, copies
// that leave their registration, blocks outside the pool) end the process.

#pragma once

#include <cstddef>
#include <cstdint>

namespace gdscache::test {

constexpr uint64_t kDeviceBit = uint64_t{1} << 56;

enum : int32_t { kStreams, kEvents, kDeviceMemory, kHostMemory, kEntered, kLiving };
enum : int32_t { kGather, kScatter, kGatherSums, kScatterSums, kGatherPacked, kScatterPacked };

}  // namespace gdscache::test

extern "C" {

// The form of `cuMemcpyBatchAsync`: of CUDA 13 (13), of CUDA 12.8 (12), or missing (0).
void fake_batches(int32_t form);
// `fake_fail`: the `nth` call of a function from now on, from 0, fails once; -1: none. `fake_calls`: all its calls so
// far.
void fake_fail(const char* function, int64_t nth);
int64_t fake_calls(const char* function);
// Streams wait up to `microseconds` before each piece of work. `hold`: they begin nothing, or no copies.
void fake_delay(int64_t microseconds);
void fake_hold(int32_t held);
void fake_hold_copies(int32_t held);
// The kernel that is launched next ends `microseconds` later.
void fake_slow(int64_t microseconds);
// The number of living objects of a kind.
int64_t fake_living(int32_t what);
// Contexts that the calling thread has entered.
int64_t fake_entered_here();
// Make the caller's bytes memory of the GPU: returns their address there. Or page-lock them.
uint64_t fake_device(void* address, size_t bytes);
void fake_pin(void* address, size_t bytes);
void fake_forget(void* address);
void* fake_context();
// A kernel of csrc/pages.cu, and the widest access compiled into all of them.
void* fake_kernel(int32_t which);
void fake_vector(int32_t bytes);
// Have a stream call a function.
void fake_call(void* stream, void (*function)(void*), void* argument);
}
