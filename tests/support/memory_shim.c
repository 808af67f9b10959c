// malloc that fails for the native library, and for nobody else: LD_PRELOAD of memory_child.py.
//
// shim_first: the number of the first allocation that fails, counted from 1; 0: none. shim_count: how many from there on.
// shim_seen, shim_failed: allocations of the library since, and those that failed.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

extern void *__libc_malloc(size_t);

long shim_first, shim_count, shim_seen, shim_failed;
char *shim_low, *shim_high;  // where the library lies; the child says it

void *malloc(size_t bytes) {
    char *const caller = __builtin_return_address(0);
    if (caller >= shim_low && caller < shim_high) {
        const long number = __sync_add_and_fetch(&shim_seen, 1);
        if (shim_first && number >= shim_first && number - shim_first < shim_count) {
            __sync_add_and_fetch(&shim_failed, 1);
            errno = ENOMEM;
            return NULL;
        }
    }
    return __libc_malloc(bytes);
}
