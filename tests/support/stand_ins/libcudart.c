/* A stand-in for the two calls of libcudart.so.13 that NIXL's plugin GDS_MT makes: there is one GPU. */

int cudaSetDevice(int device) { return device ? 101 : 0; } /* cudaErrorInvalidDevice */

const char *cudaGetErrorString(int error) { return error ? "invalid device ordinal" : "no error"; }
