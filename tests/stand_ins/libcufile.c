/* A stand-in for libcufile.so.0: the calls that kvikio and NIXL make, done with pread and pwrite, and faults on order.
 *
 * stand_in_fault() says what happens to the next reads or writes at an offset, stand_in_refuse() which calls that open
 * or register fail, stand_in_stats() where to count as the nvidia-fs driver does. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int cufile;
    int cuda;
} Status;

typedef struct {
    int type; /* 1: a file descriptor */
    union {
        int fd;
        void *other;
    } handle;
    const void *operations;
} Description;

enum { SUCCESS = 0, NOT_INITIALIZED = 5001, NOT_SUPPORTED = 5002, INVALID_VALUE = 5004, NO_BATCH = 5028 };
enum { DRIVER = 0, HANDLE = 1, BUFFER = 2, CALLS = 3 }; /* what stand_in_refuse() is about */
enum { HANG = -1 };                                     /* in place of a code: the call does not return */
enum { READ = 0, WRITE = 1 };

/* `value`: of an ERROR the code, of an ERRNO the number, else bytes. */
enum {
    NONE = 0,
    ERROR = 1,   /* answers the code, moves nothing */
    ERRNO = 2,   /* answers -1 with errno, moves nothing */
    SHORT = 3,   /* moves fewer bytes, and says so */
    MORE = 4,    /* moves all, and says that it moved more */
    LIE = 5,     /* moves fewer bytes, and says that it moved all */
    WAIT = 6,    /* moves nothing before stand_in_release() */
    FEWER = 7,   /* moves all, and says that it moved fewer */
};

enum { FAULTS = 32 };
static struct {
    int op, kind;
    long value;
    off_t offset;
    int times;
} faults[FAULTS];
static int refusals[CALLS];
static long calls[CALLS], moves[2];
static int held = 0, released = 0;
static char stats[4096];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* The next `times` reads or writes that begin at `offset` (any, where it is negative); the answer is 0 unless full. */
int stand_in_fault(int op, int kind, long value, long offset, int times)
{
    int full = -1;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < FAULTS && full; at++)
        if (!faults[at].times) {
            faults[at].op = op, faults[at].kind = kind, faults[at].value = value;
            faults[at].offset = offset, faults[at].times = times;
            full = 0;
        }
    released = 0;
    pthread_mutex_unlock(&lock);
    return full;
}

/* No faults any more; what waits goes on. */
void stand_in_release(void)
{
    pthread_mutex_lock(&lock);
    memset(faults, 0, sizeof faults);
    memset(refusals, 0, sizeof refusals);
    released = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void stand_in_refuse(int call, int code)
{
    pthread_mutex_lock(&lock);
    refusals[call] = code;
    released = 0;
    pthread_mutex_unlock(&lock);
}

void stand_in_stats(const char *path)
{
    snprintf(stats, sizeof stats, "%s", path);
}

long stand_in_calls(int call) { return calls[call]; }
long stand_in_moves(int op) { return moves[op]; }
int stand_in_waiting(void) { return held; }

static void wait_for_release(void) /* with the lock */
{
    held++;
    while (!released)
        pthread_cond_wait(&changed, &lock);
    held--;
}

static Status answer(int code)
{
    Status status = {code, 0};
    return status;
}

static Status registration(int call)
{
    if (call != DRIVER && !calls[DRIVER]) { /* cuFile opens its driver with the first call that needs it */
        Status status = registration(DRIVER);
        if (status.cufile != SUCCESS) {
            calls[DRIVER] = 0;
            return status;
        }
    }
    pthread_mutex_lock(&lock);
    calls[call]++;
    int code = refusals[call];
    if (code == HANG) {
        wait_for_release();
        code = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return answer(code);
}

static void count(int op)
{
    pthread_mutex_lock(&lock);
    moves[op]++;
    FILE *file = stats[0] ? fopen(stats, "w") : NULL;
    if (file) {
        fprintf(file, "Reads\t\t: n=%ld ok=%ld err=0\n", moves[READ], moves[READ]);
        fprintf(file, "Writes\t\t: n=%ld ok=%ld err=0\n", moves[WRITE], moves[WRITE]);
        fclose(file);
    }
    pthread_mutex_unlock(&lock);
}

static ssize_t all(int op, int fd, char *memory, size_t bytes, off_t offset)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t moved = op == READ ? pread(fd, memory + done, bytes - done, offset + done)
                                   : pwrite(fd, memory + done, bytes - done, offset + done);
        if (moved < 0)
            return -1;
        if (moved == 0)
            break;
        done += moved;
    }
    return done;
}

static ssize_t move(int op, void *handle, void *base, size_t bytes, off_t offset, off_t at)
{
    int fd = (int)(long)handle - 1;
    char *memory = (char *)base + at;
    int kind = NONE;
    long value = 0;
    pthread_mutex_lock(&lock);
    for (int n = 0; n < FAULTS && kind == NONE; n++)
        if (faults[n].times && faults[n].op == op && (faults[n].offset < 0 || faults[n].offset == offset)) {
            kind = faults[n].kind, value = faults[n].value;
            faults[n].times--;
        }
    if (kind == WAIT)
        wait_for_release();
    pthread_mutex_unlock(&lock);
    count(op);
    if (kind == ERROR)
        return -value;
    if (kind == ERRNO) {
        errno = value;
        return -1;
    }
    if (kind == SHORT)
        return all(op, fd, memory, value, offset);
    if (kind == LIE)
        return all(op, fd, memory, value, offset) < 0 ? -1 : (ssize_t)bytes;
    ssize_t moved = all(op, fd, memory, bytes, offset);
    return kind == MORE ? moved + value : kind == FEWER ? moved - value : moved;
}

Status cuFileDriverOpen(void) { return registration(DRIVER); }
Status cuFileDriverClose(void) { return answer(SUCCESS); }
Status cuFileDriverClose_v2(void) { return answer(SUCCESS); }
long cuFileUseCount(void) { return 1; }
Status cuFileGetVersion(int *version) { return *version = 1190, answer(SUCCESS); }
Status cuFileDriverGetProperties(void *properties) { return (void)properties, answer(NOT_INITIALIZED); }
Status cuFileDriverSetPollMode(_Bool poll, size_t kib) { return (void)poll, (void)kib, answer(SUCCESS); }
Status cuFileDriverSetMaxCacheSize(size_t kib) { return (void)kib, answer(SUCCESS); }
Status cuFileDriverSetMaxPinnedMemSize(size_t kib) { return (void)kib, answer(SUCCESS); }
Status cuFileDriverSetMaxDirectIOSize(size_t kib) { return (void)kib, answer(SUCCESS); }

Status cuFileHandleRegister(void **handle, Description *file)
{
    Status status = registration(HANDLE);
    if (status.cufile == SUCCESS && file->type != 1)
        status = answer(INVALID_VALUE);
    if (status.cufile == SUCCESS)
        *handle = (void *)(long)(file->handle.fd + 1);
    return status;
}

void cuFileHandleDeregister(void *handle) { (void)handle; }

Status cuFileBufRegister(const void *memory, size_t bytes, int flags)
{
    (void)flags;
    return memory && bytes ? registration(BUFFER) : answer(INVALID_VALUE);
}

Status cuFileBufDeregister(const void *memory) { return (void)memory, answer(SUCCESS); }

ssize_t cuFileRead(void *handle, void *base, size_t bytes, off_t offset, off_t at)
{
    return move(READ, handle, base, bytes, offset, at);
}

ssize_t cuFileWrite(void *handle, const void *base, size_t bytes, off_t offset, off_t at)
{
    return move(WRITE, handle, (void *)base, bytes, offset, at);
}

/* Looked up, and not used by anything here. */
Status cuFileBatchIOSetUp(void) { return answer(NO_BATCH); }
Status cuFileBatchIOSubmit(void) { return answer(NO_BATCH); }
Status cuFileBatchIOGetStatus(void) { return answer(NO_BATCH); }
Status cuFileBatchIOCancel(void) { return answer(NO_BATCH); }
void cuFileBatchIODestroy(void) {}
Status cuFileReadAsync(void) { return answer(NOT_SUPPORTED); }
Status cuFileWriteAsync(void) { return answer(NOT_SUPPORTED); }
Status cuFileStreamRegister(void) { return answer(NOT_SUPPORTED); }
Status cuFileStreamDeregister(void) { return answer(NOT_SUPPORTED); }
