/* Fails reads, writes and syncs of files below a directory, for tests: LD_PRELOAD, and ctypes to set what follows.
 *
 * shim_dir: the directory; "" counts and fails nothing. shim_at: which call fails, from 1 on. shim_share: else each
 * fails with this chance in a million, drawn from shim_seed. shim_kinds: of r (reads), w (writes), s (syncs).
 * shim_calls and shim_failed count.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

long shim_calls = 0, shim_at = 0, shim_share = 0, shim_failed = 0;
unsigned long shim_seed = 1;
int shim_errno = EIO;
char shim_dir[4096] = "", shim_kinds[8] = "rw";

static int fails(int fd, char kind) {
    char link[64], path[4096];
    if (!shim_dir[0] || !strchr(shim_kinds, kind)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    if (strncmp(path, shim_dir, strlen(shim_dir))) return 0;
    long call = __sync_add_and_fetch(&shim_calls, 1);
    int bad = call == shim_at;
    if (shim_share) {
        unsigned long x = __sync_add_and_fetch(&shim_seed, 0x9E3779B97F4A7C15ul);
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ul;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBul;
        bad = (long)((x ^ (x >> 31)) % 1000000) < shim_share;
    }
    if (bad) { __sync_add_and_fetch(&shim_failed, 1); errno = shim_errno; }
    return bad;
}

#define REAL(name, type) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)
#define WRAP_AS(ret, failed, name, kind, params, args) \
    ret name params { \
        typedef ret (*call_t) params; \
        REAL(#name, call_t); \
        if (fails(fd, kind)) return failed; \
        return real args; \
    }

#define WRAP(ret, name, kind, params, args) WRAP_AS(ret, -1, name, kind, params, args)

WRAP_AS(int, shim_errno, posix_fallocate, 'w', (int fd, off_t o, off_t n), (fd, o, n))
WRAP_AS(int, shim_errno, posix_fallocate64, 'w', (int fd, off64_t o, off64_t n), (fd, o, n))
WRAP(ssize_t, read, 'r', (int fd, void *b, size_t n), (fd, b, n))
WRAP(ssize_t, pread, 'r', (int fd, void *b, size_t n, off_t o), (fd, b, n, o))
WRAP(ssize_t, pread64, 'r', (int fd, void *b, size_t n, off64_t o), (fd, b, n, o))
WRAP(ssize_t, preadv, 'r', (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))
WRAP(ssize_t, preadv64, 'r', (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
WRAP(ssize_t, write, 'w', (int fd, const void *b, size_t n), (fd, b, n))
WRAP(ssize_t, pwrite, 'w', (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
WRAP(ssize_t, pwrite64, 'w', (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o))
WRAP(ssize_t, pwritev, 'w', (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))
WRAP(ssize_t, pwritev64, 'w', (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
WRAP(int, ftruncate, 'w', (int fd, off_t n), (fd, n))
WRAP(int, ftruncate64, 'w', (int fd, off64_t n), (fd, n))
WRAP(int, fsync, 's', (int fd), (fd))
WRAP(int, fdatasync, 's', (int fd), (fd))
