/* A stand-in for libcuda.so.1 on machines without a driver: every call answers CUDA_ERROR_NOT_INITIALIZED, except
 * those that hand out plain host memory or text, and the version: kvikio asks for it while it loads the library, and
 * deadlocks in its own error path if that fails. kvikio looks symbols up with and without a version suffix. */
#include <stddef.h>
#include <stdlib.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3 };

#define REFUSE(name)                                    \
    int name(void) { return NOT_INITIALIZED; }          \
    int name##_v2(void) { return NOT_INITIALIZED; }     \
    int name##_v3(void) { return NOT_INITIALIZED; }     \
    int name##_v4(void) { return NOT_INITIALIZED; }

REFUSE(cuInit)
REFUSE(cuMemHostRegister)
REFUSE(cuMemHostUnregister)
REFUSE(cuMemcpyHtoDAsync)
REFUSE(cuMemcpyDtoHAsync)
REFUSE(cuMemcpyAsync)
REFUSE(cuMemcpyBatchAsync)
REFUSE(cuPointerGetAttribute)
REFUSE(cuPointerGetAttributes)
REFUSE(cuCtxCreate)
REFUSE(cuCtxDestroy)
REFUSE(cuCtxPushCurrent)
REFUSE(cuCtxPopCurrent)
REFUSE(cuCtxGetCurrent)
REFUSE(cuCtxGetDevice)
REFUSE(cuMemGetAddressRange)
REFUSE(cuDeviceGet)
REFUSE(cuDeviceGetCount)
REFUSE(cuDeviceGetAttribute)
REFUSE(cuDevicePrimaryCtxRetain)
REFUSE(cuDevicePrimaryCtxRelease)
REFUSE(cuStreamSynchronize)
REFUSE(cuStreamCreate)
REFUSE(cuStreamDestroy)
REFUSE(cuEventSynchronize)
REFUSE(cuEventCreate)
REFUSE(cuEventDestroy)
REFUSE(cuEventRecord)
REFUSE(cuEventQuery)
REFUSE(cuLaunchHostFunc)
REFUSE(cuGetProcAddress)

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
