/* A stand-in for libcuda.so.1 on machines without a driver: every call answers CUDA_ERROR_NOT_INITIALIZED, except
 * those that hand out plain host memory or text, and the version: kvikio asks for it while it loads the library, and
 * deadlocks in its own error path if that fails. kvikio looks symbols up with and without a version suffix.
 *
 * With -DSTAND_IN_GPU there is one GPU. Its memory is the host memory that stand_in_gpu_memory() names. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3 };

#define REFUSE(name)                                    \
    int name(void) { return NOT_INITIALIZED; }          \
    int name##_v2(void) { return NOT_INITIALIZED; }     \
    int name##_v3(void) { return NOT_INITIALIZED; }     \
    int name##_v4(void) { return NOT_INITIALIZED; }

REFUSE(cuMemcpyAsync)
REFUSE(cuCtxCreate)
REFUSE(cuCtxDestroy)
REFUSE(cuDeviceGetAttribute)
REFUSE(cuLaunchHostFunc)
REFUSE(cuGetProcAddress)
REFUSE(cuCtxGetStreamPriorityRange)
REFUSE(cuStreamCreateWithPriority)
REFUSE(cuStreamWaitEvent)
REFUSE(cuEventElapsedTime)
REFUSE(cuMemAlloc)
REFUSE(cuMemFree)
REFUSE(cuMemcpyDtoH)
REFUSE(cuMemcpy2DAsync)
REFUSE(cuLaunchKernel)
REFUSE(cuThreadExchangeStreamCaptureMode)

int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    return posix_memalign(memory, 4096, bytes) ? OUT_OF_MEMORY : SUCCESS;
}

int cuMemFreeHost(void *memory)
{
    free(memory);
    return SUCCESS;
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return SUCCESS;
}

int cuGetErrorName(int error, const char **text)
{
    (void)error;
    *text = "CUDA_ERROR_NOT_INITIALIZED";
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text)
{
    (void)error;
    *text = "stand-in without a device";
    return SUCCESS;
}

#ifndef STAND_IN_GPU

void stand_in_gpu_memory(const void *base, size_t bytes)
{
    (void)base, (void)bytes;
}

REFUSE(cuInit)
REFUSE(cuMemcpyHtoDAsync)
REFUSE(cuMemcpyDtoHAsync)
REFUSE(cuPointerGetAttribute)
REFUSE(cuPointerGetAttributes)
REFUSE(cuCtxPushCurrent)
REFUSE(cuCtxPopCurrent)
REFUSE(cuCtxGetCurrent)
REFUSE(cuCtxGetDevice)
REFUSE(cuMemGetAddressRange)
REFUSE(cuDeviceGet)
REFUSE(cuDeviceGetCount)
REFUSE(cuDevicePrimaryCtxRetain)
REFUSE(cuDevicePrimaryCtxRelease)
REFUSE(cuStreamSynchronize)
REFUSE(cuStreamCreate)
REFUSE(cuStreamDestroy)
REFUSE(cuMemcpyBatchAsync)
REFUSE(cuEventSynchronize)
REFUSE(cuEventCreate)
REFUSE(cuEventDestroy)
REFUSE(cuEventRecord)
REFUSE(cuEventQuery)
REFUSE(cuMemHostRegister)
REFUSE(cuMemHostUnregister)

#else

/* What a function is called in another version of the driver. */
#define ALSO(name) \
    int name##_v2() __attribute__((alias(#name)));

enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, DEVICE_ORDINAL = 9 }; /* of CUpointer_attribute */
enum { DEVICE_MEMORY = 2, RANGES = 64 };

static struct { uintptr_t base; size_t bytes; } ranges[RANGES];
static int used;
static int context; /* its address is the context */

void stand_in_gpu_memory(const void *base, size_t bytes)
{
    if (used < RANGES) {
        ranges[used].base = (uintptr_t)base;
        ranges[used++].bytes = bytes;
    }
}

static int range_of(uintptr_t pointer)
{
    for (int at = 0; at < used; at++)
        if (pointer >= ranges[at].base && pointer - ranges[at].base < ranges[at].bytes)
            return at;
    return -1;
}

int cuPointerGetAttribute(void *data, int attribute, uintptr_t pointer)
{
    if (range_of(pointer) < 0)
        return INVALID_VALUE;
    if (attribute == CONTEXT)
        *(void **)data = &context;
    else if (attribute == MEMORY_TYPE)
        *(unsigned *)data = DEVICE_MEMORY;
    else if (attribute == DEVICE_POINTER)
        *(uintptr_t *)data = pointer;
    else if (attribute == DEVICE_ORDINAL)
        *(int *)data = 0;
    else
        return INVALID_VALUE;
    return SUCCESS;
}

int cuPointerGetAttributes(unsigned count, const int *attributes, void **data, uintptr_t pointer)
{
    for (unsigned at = 0; at < count; at++)
        if (cuPointerGetAttribute(data[at], attributes[at], pointer) && attributes[at] == MEMORY_TYPE)
            *(unsigned *)data[at] = 0; /* host memory that nobody registered */
    return SUCCESS;
}

int cuMemGetAddressRange(uintptr_t *base, size_t *bytes, uintptr_t pointer)
{
    int at = range_of(pointer);
    if (at < 0)
        return INVALID_VALUE;
    if (base)
        *base = ranges[at].base;
    if (bytes)
        *bytes = ranges[at].bytes;
    return SUCCESS;
}

int cuMemcpyHtoDAsync(uintptr_t to, const void *from, size_t bytes, void *stream)
{
    (void)stream;
    memcpy((void *)to, from, bytes);
    return SUCCESS;
}

int cuMemcpyDtoHAsync(void *to, uintptr_t from, size_t bytes, void *stream)
{
    (void)stream;
    memcpy(to, (const void *)from, bytes);
    return SUCCESS;
}

/* As of CUDA 13, by the name that it has there. */
int cuMemcpyBatchAsync_v2(const uintptr_t *to, const uintptr_t *from, const size_t *bytes, size_t count)
{
    for (size_t at = 0; at < count; at++)
        memcpy((void *)to[at], (const void *)from[at], bytes[at]);
    return SUCCESS;
}

int cuMemcpyBatchAsync(void) { return NOT_INITIALIZED; }

/* Each answers one handle or number, and it is always the same one. */
int cuInit(unsigned flags) { return (void)flags, SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { return *device = 0, ordinal ? INVALID_VALUE : SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
int cuDevicePrimaryCtxRetain(void **out, int device) { return (void)device, *out = &context, SUCCESS; }
int cuDevicePrimaryCtxRelease(int device) { return (void)device, SUCCESS; }
int cuCtxPushCurrent(void *given) { return (void)given, SUCCESS; }
int cuCtxPopCurrent(void **out) { return out ? (*out = &context, SUCCESS) : SUCCESS; }
int cuCtxGetCurrent(void **out) { return *out = &context, SUCCESS; }
int cuCtxGetDevice(int *device) { return *device = 0, SUCCESS; }
int cuMemHostRegister(void *at, size_t n, unsigned flags) { return (void)at, (void)n, (void)flags, SUCCESS; }
int cuMemHostUnregister(void *memory) { return (void)memory, SUCCESS; }
int cuStreamSynchronize(void *stream) { return (void)stream, SUCCESS; }
int cuStreamCreate(void **stream, unsigned flags) { return (void)flags, *stream = &context, SUCCESS; }
int cuStreamDestroy(void *stream) { return (void)stream, SUCCESS; }
int cuEventCreate(void **event, unsigned flags) { return (void)flags, *event = &context, SUCCESS; }
int cuEventDestroy(void *event) { return (void)event, SUCCESS; }
int cuEventRecord(void *event, void *stream) { return (void)event, (void)stream, SUCCESS; }
int cuEventQuery(void *event) { return (void)event, SUCCESS; }
int cuEventSynchronize(void *event) { return (void)event, SUCCESS; }

ALSO(cuPointerGetAttribute)
ALSO(cuPointerGetAttributes)
ALSO(cuMemGetAddressRange)
ALSO(cuMemcpyHtoDAsync)
ALSO(cuMemcpyDtoHAsync)
ALSO(cuDevicePrimaryCtxRelease)
ALSO(cuCtxPushCurrent)
ALSO(cuCtxPopCurrent)
ALSO(cuStreamDestroy)
ALSO(cuMemHostRegister)
ALSO(cuEventDestroy)

#endif
