// The executor in the plain C interface. See api.h, and executor.h for what these stand for.

#pragma once

#include "api.h"

struct gdscache_cufile;
struct gdscache_executor;
struct gdscache_gpu;

// A space of moves, by its number. `kind`: 0 planes, 1 a memory, 2 files. `foreign`: of a GPU, or files of a transport of
// the caller's.
struct gdscache_space {
    int32_t kind, foreign;
    int64_t slots;       // of a memory or of files; blocks of planes
    uint64_t memory;     // address of a memory's first byte; 0 where a caller moves what is foreign
    uint64_t sums;       // address of its checksums, uint64 (slots, layers), or 0
    uint64_t files;      // address of `n_files` descriptors, int32
    int32_t n_files, pinned;  // `pinned`: copy engines of a GPU reach a memory
    int64_t stretch;     // slots of one file that follow each other
    int64_t fence;       // slots of each page-locked registration of a memory; 0: there is one
};

struct gdscache_limits {
    uint64_t bounds;  // address of int64 (layers + 1): where layers begin in an extent, and where the last one ends
    int64_t extent_bytes;
    int32_t layers, page_blocks;
    int64_t flying_bytes, io_bytes, copy_bytes, foreign_io_bytes, foreign_copy_bytes;
};

struct gdscache_way {
    int32_t source, target, through, reserved;
    int64_t pages;
    uint64_t sources, targets, places, sums;  // addresses; `places` and `sums` may be 0
};

struct gdscache_group {
    int32_t first, last;
    int64_t begin, end, start, stop, alone_start, alone_stop;
    int32_t route, summed_route;  // of copies of a GPU, without checksums and with: 0 staged, 1 zero copy, 2 copy engine
};

// A job of foreign I/O. `pages`: address of `count` structs of int32 row, int64 slot, int64 at.
struct gdscache_io {
    int64_t id, move;
    int32_t write, files, memory, first, last, reserved;  // layers [first, last)
    int64_t start, stop, count;
    uint64_t pages;
};

struct gdscache_copy {
    int64_t id;
    int32_t kind, memory, first, last, sums, reserved;  // kind: 0 scatter, 1 gather, 2 digest (move.h)
    int64_t move, window, window_slots, count;
    uint64_t pages, blocks;
};

// What a thread of ours did. `kind`: 0 read, 1 write, 2 scatter, 3 gather, 4 look at what is in memory, 5 the layers
// were in the planes, or their copies queued, which took no time; of a GPU's streams: 6 copies and 7 kernels of loads,
// 8 and 9 of stores. Nanoseconds of CLOCK_MONOTONIC.
struct gdscache_span {
    int32_t kind, first, last, reserved;
    int64_t move, pages, bytes, begin, end;
};

// `reserve_space`: the memory of the bounce reserve, or -1, and the slots of it that loads have. `workers`, `depth`: of
// the disk, threads of ours with a depth of 0; no workers: all files are foreign. `threads`: that copy; 0: everything
// is foreign, and `expire` is called. `gpu`: whose the foreign planes and memories are (api_gpu.h), and which outlives
// the executor; null: the caller takes their copies. `cufile`: what files that are not foreign are read and written by
// (api_cufile.h), in memory of the GPU, too, that it has; null: memory of the host alone. Then `depth` counts for nothing.
GDSCACHE_API int32_t gdscache_executor_open(const struct gdscache_limits* limits, const struct gdscache_space* spaces,
                                            int64_t n_spaces, int32_t reserve_space, int64_t reserve_first,
                                            int64_t reserve_slots, int64_t fence, const struct gdscache_pool* pool,
                                            struct gdscache_gpu* gpu, struct gdscache_cufile* cufile,
                                            int32_t workers, int32_t depth, int32_t threads,
                                            struct gdscache_executor** executor, char* why, int64_t why_size);
// Waits for what is under way.
GDSCACHE_API void gdscache_executor_close(struct gdscache_executor* executor);
GDSCACHE_API void gdscache_executor_stop(struct gdscache_executor* executor);
GDSCACHE_API const char* gdscache_executor_disk(struct gdscache_executor* executor);

// `move`: its number, which is the caller's; -EEXIST where another move has it. `after`: CUevents that copies of a GPU
// come behind. `open`: of a load, to which more ways come by `move_extend`; it does not end, and no group of it is ready,
// before the last of them. -ENOENT for a move that nobody knows, -EINVAL for one that is not open.
GDSCACHE_API int32_t gdscache_move_begin(struct gdscache_executor* executor, int64_t move, int32_t priority,
                                         int64_t until, const struct gdscache_way* ways, int64_t n_ways,
                                         const struct gdscache_group* groups, int64_t n_groups, const uint64_t* after,
                                         int64_t n_after, int32_t open);
GDSCACHE_API int32_t gdscache_move_extend(struct gdscache_executor* executor, int64_t move,
                                          const struct gdscache_way* ways, int64_t n_ways, int32_t last);
GDSCACHE_API int32_t gdscache_move_cancel(struct gdscache_executor* executor, int64_t move);
// 1: all copies of the group are done, or queued on a GPU up to `point`, else 0; or with -1 the move has ended. 0: not
// until then (ns of CLOCK_MONOTONIC); -ECANCELED behind `stop`; -ENOENT for a move that nobody knows.
GDSCACHE_API int32_t gdscache_move_wait(struct gdscache_executor* executor, int64_t move, int32_t group,
                                        int64_t until, int64_t* point);
// How a move has ended: `statuses`, uint8 (rows); up to `room` rows each in `errors`, int32 (n, 2), and `late`. 1 where
// a copy was broken, as `why` says, else 0; -EAGAIN before its end.
GDSCACHE_API int32_t gdscache_move_outcome(struct gdscache_executor* executor, int64_t move, uint8_t* statuses,
                                           int64_t rows, int32_t* errors, int64_t* n_errors, int32_t* late,
                                           int64_t* n_late, int64_t room, char* why, int64_t why_size);
GDSCACHE_API int32_t gdscache_move_forget(struct gdscache_executor* executor, int64_t move);
// `status`: of move.h, but none that says that bytes are there.
GDSCACHE_API int32_t gdscache_refuse(struct gdscache_executor* executor, int32_t status);

// The next foreign job: 1; 0 where none came until then; -ECANCELED behind `stop`. What it points to is there until its
// end was said.
GDSCACHE_API int32_t gdscache_take_io(struct gdscache_executor* executor, int64_t until, struct gdscache_io* job);
GDSCACHE_API int32_t gdscache_take_copy(struct gdscache_executor* executor, int64_t until, struct gdscache_copy* job);
// Pages of a job that have ended: int32 (count, 2), the page's place in the job, and 0, -1 (short) or an errno.
GDSCACHE_API int32_t gdscache_io_ended(struct gdscache_executor* executor, int64_t job, const int32_t* ends,
                                       int64_t count);
// A copy is queued on a GPU up to a point. It is done: `broken` says why it is not, or is null.
GDSCACHE_API int32_t gdscache_copy_queued(struct gdscache_executor* executor, int64_t job, int64_t point);
GDSCACHE_API int32_t gdscache_copy_ended(struct gdscache_executor* executor, int64_t job, const uint64_t* sums,
                                         const char* broken);
GDSCACHE_API int32_t gdscache_expire(struct gdscache_executor* executor, int64_t now);
// Late pages that have ended at last, int64 (n, 2): move and row. How many, of `room` at most; else as take_io.
GDSCACHE_API int32_t gdscache_take_late(struct gdscache_executor* executor, int64_t until, int64_t* late,
                                        int64_t room);
// Slots of the reserve that late reads hold; and those that nobody has.
GDSCACHE_API int64_t gdscache_held_slots(struct gdscache_executor* executor);
GDSCACHE_API int64_t gdscache_free_slots(struct gdscache_executor* executor);
// Keep spans from now on; and take those that were kept: how many, of `room` at most.
GDSCACHE_API int32_t gdscache_trace(struct gdscache_executor* executor);
GDSCACHE_API int64_t gdscache_take_spans(struct gdscache_executor* executor, struct gdscache_span* spans, int64_t room);

// --- for tests: a disk that fails on order (faulty_disk.h)

// Whether the disks of executors that are opened from now on do.
GDSCACHE_API void gdscache_executor_faulty(int32_t faulty);
// What fails from now on: int64 (n, 5) of a descriptor (-1: any), first byte, last byte + 1, what, value.
GDSCACHE_API int32_t gdscache_executor_fail(struct gdscache_executor* executor, const int64_t* faults,
                                            int64_t n_faults);
// Let go of everything that hangs, now and later.
GDSCACHE_API int32_t gdscache_executor_release(struct gdscache_executor* executor);
