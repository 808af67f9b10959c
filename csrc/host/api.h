// The plain C interface of the native library, which Python loads by ctypes (gdscache/native/library.py).
//
// Addresses and counts are the caller's word; what can be checked of them is, and a call that refuses changes nothing.
// Functions answer 0 or a count, or a negative errno: -EINVAL for what makes no sense, -ENOMEM. None calls into
// Python.

#pragma once

#include <stddef.h>
#include <stdint.h>

#define GDSCACHE_API extern "C" __attribute__((visibility("default")))

// Raised whenever a function below changes. The Python side compares it with its own (library.ABI).
#define GDSCACHE_ABI 10

GDSCACHE_API int32_t gdscache_abi();

// --- XXH3-64. `arm`: "scalar", "avx2", "avx512" or "neon"; null: the fastest here

// The name of the arm that is used here.
GDSCACHE_API const char* gdscache_best_arm();

// 1 where this processor has the arm, else 0.
GDSCACHE_API int32_t gdscache_has_arm(const char* arm);

GDSCACHE_API int32_t gdscache_xxh3(const char* arm, const void* data, int64_t size, uint64_t* sum);

// The same of `count` chunks that follow each other, `sizes` bytes each, through the stream. `out`: where they are
// copied to on the way, or null; `stream`: past the caches.
GDSCACHE_API int32_t gdscache_xxh3_chunks(const char* arm, const void* data, const int64_t* sizes, int64_t count,
                                          void* out, int32_t stream, uint64_t* sum);

// The same of each layer of extents in host memory. `extents`: their addresses; `bounds`: int64 (layers, 2), where a
// layer begins in an extent, and where it ends; `sums`: uint64 (pages, layers).
GDSCACHE_API int32_t gdscache_layer_sums(const uint64_t* extents, int64_t pages, const int64_t* bounds, int64_t layers,
                                         uint64_t* sums);

// --- pages (pages.h)

struct gdscache_pool;

// A pool of planes. `planes`: int64 (planes, 4): address, block stride, token stride, row bytes, layer after layer;
// `first_plane`: int32 (layers + 1). Both are copied. `why`: where a refusal is said, `why_size` bytes, or null.
GDSCACHE_API int32_t gdscache_pool_open(const int64_t* planes, int64_t n_planes, const int32_t* first_plane,
                                        int64_t n_layers, int64_t blocks, int64_t block_tokens, int64_t page_blocks,
                                        struct gdscache_pool** pool, char* why, int64_t why_size);
GDSCACHE_API void gdscache_pool_close(struct gdscache_pool* pool);

// Copy layers [first, last) of pages out of the planes, and back. `blocks`: int64 (pages, page_blocks); `parts`: the
// address of layer `first` of each page's extent; `sums`: uint64 (pages, last - first), or null; `stream`: past the
// caches. -EINVAL before the first byte where a block is not the pool's.
GDSCACHE_API int32_t gdscache_gather(const struct gdscache_pool* pool, const int64_t* blocks, int64_t pages,
                                     int64_t first, int64_t last, const uint64_t* parts, uint64_t* sums,
                                     int32_t stream);
GDSCACHE_API int32_t gdscache_scatter(const struct gdscache_pool* pool, const int64_t* blocks, int64_t pages,
                                      int64_t first, int64_t last, const uint64_t* parts, uint64_t* sums,
                                      int32_t stream);

// --- disks (disk.h). One thread owns a disk, and outlives what it has submitted; others may wake it

struct gdscache_disk;

// `kind`: "ring", "threads", or null: the first of them that can be had. The negative errno is the system's answer.
GDSCACHE_API int32_t gdscache_disk_open(const char* kind, int32_t workers, int32_t depth,
                                        struct gdscache_disk** disk, char* why, int64_t why_size);

// Waits for what is under way.
GDSCACHE_API void gdscache_disk_close(struct gdscache_disk* disk);

GDSCACHE_API const char* gdscache_disk_name(const struct gdscache_disk* disk);
GDSCACHE_API int64_t gdscache_disk_pending(const struct gdscache_disk* disk);

// `pieces`: int64 (pieces, 7): tag, op (0 read, 1 write), fd, offset, first fragment, fragments, copied. `fragments`:
// uint64 (n_fragments, 2): address, bytes; it stays where it is until all has ended.
GDSCACHE_API int32_t gdscache_disk_submit(struct gdscache_disk* disk, const int64_t* pieces, int64_t n_pieces,
                                          const uint64_t* fragments, int64_t n_fragments);

// `ended`: int64 (room, 5): tag, first fragment of the piece, fragments, errno, bytes. How many there are.
GDSCACHE_API int64_t gdscache_disk_reap(struct gdscache_disk* disk, int64_t* ended, int64_t room, double seconds);
GDSCACHE_API int32_t gdscache_disk_wake(struct gdscache_disk* disk);

// For tests, before the first submit: int64 (faults, 3): which piece, what (faulty_disk.h), value. And letting go.
GDSCACHE_API int32_t gdscache_disk_fail(struct gdscache_disk* disk, const int64_t* faults, int64_t n_faults);
GDSCACHE_API int32_t gdscache_disk_release(struct gdscache_disk* disk);

// Requests, int64 (n, 4): fd, offset, address, bytes; cut and merged into runs. `fragments`: int64 (most_fragments, 3):
// address, bytes, request; `runs`: int64 (most_runs, 5): fd, offset, first fragment, fragments, bytes. `counts`: how
// many of both there are. -ERANGE, with the counts, where there is too little room.
GDSCACHE_API int32_t gdscache_cut_and_merge(const int64_t* requests, int64_t n_requests, int64_t limit,
                                            int64_t most_a_run, int64_t* fragments, int64_t most_fragments,
                                            int64_t* runs, int64_t most_runs, int64_t counts[2]);

// The bare loop (bare.h). `write`: 0 reads, 1 writes. `planes` may be null. `driver`: the name of CUDA's, and `context`
// its primary context, where what is read goes on to `device`; else null. What the driver refuses is -EIO, said in `why`.
struct gdscache_bare_loop {
    uint64_t memory, planes, driver, context, device;
    int64_t bytes, piece_bytes, memory_bytes, sum_bytes;
    int32_t fd, write, threads, reserved;
};
GDSCACHE_API int32_t gdscache_bare(const struct gdscache_bare_loop* loop, double* seconds, char* why, int64_t why_size);

// --- tables (tables.h)

// What is wrong with block numbers: 0 nothing, 1 not all are within [0, limit), 2 one is there twice.
GDSCACHE_API int32_t gdscache_blocks_fault(const int64_t* blocks, int64_t count, int64_t limit);

// Token ids as uint32: 1, or 0 where one does not fit.
GDSCACHE_API int32_t gdscache_narrow_tokens(const int64_t* tokens, int64_t count, uint32_t* out);

// Copy `count` rows of `row_bytes` each out of a table, or into it. -EINVAL before the first byte where it has no such
// row.
GDSCACHE_API int32_t gdscache_take_rows(const void* table, int64_t table_rows, int64_t row_bytes, const int64_t* rows,
                                        int64_t count, void* out);
GDSCACHE_API int32_t gdscache_put_rows(void* table, int64_t table_rows, int64_t row_bytes, const int64_t* rows,
                                       int64_t count, const void* in);

// Rows of checksums as a catalogue stores them, uint64 (table_rows, sums), without what follows from the keys of their
// pages (docs/format.md), `count` of 32 bytes: what the bytes of the pages have to give.
GDSCACHE_API int32_t gdscache_take_unbound(const uint64_t* table, int64_t table_rows, int64_t sums,
                                           const int64_t* rows, int64_t count, const void* keys, uint64_t* out);
