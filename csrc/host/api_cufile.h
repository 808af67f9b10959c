// cuFile in the plain C interface. See cufile_files.h.

#pragma once

#include "api.h"

struct gdscache_cufile;

// Why the last of these calls that this thread made was refused.
GDSCACHE_API const char* gdscache_cufile_why();
// What an error of a disk means: an errno, or one of cuFile's (above 5000).
GDSCACHE_API const char* gdscache_cufile_text(int32_t error);

// `driver`: the name of CUDA's; `context`: the CUcontext of the device whose memory it is; `library`: the path of
// libcufile; `log_folder`: of cuFile's log, or null. `batched`: bytes of what goes through batches at most; below 0: as
// measured (cufile_disk.h). Opens cuFile's driver, which may never answer. What a library refuses is -EIO.
GDSCACHE_API int32_t gdscache_cufile_open(const char* driver, uint64_t context, const char* library,
                                          const char* log_folder, int64_t batched, struct gdscache_cufile** cufile);
// What disks and executors have of it is theirs.
GDSCACHE_API void gdscache_cufile_close(struct gdscache_cufile* cufile);

// Files and memory, by their descriptors and first addresses. To add may never return, too. Nothing is under way on what
// is removed.
GDSCACHE_API int32_t gdscache_cufile_add_file(struct gdscache_cufile* cufile, int32_t fd);
GDSCACHE_API int32_t gdscache_cufile_remove_file(struct gdscache_cufile* cufile, int32_t fd);
GDSCACHE_API int32_t gdscache_cufile_add_memory(struct gdscache_cufile* cufile, uint64_t address, int64_t bytes);
GDSCACHE_API int32_t gdscache_cufile_remove_memory(struct gdscache_cufile* cufile, uint64_t address);

// A disk (api.h) that reaches these files and memories, and memory of the host; `workers` threads of ours.
GDSCACHE_API int32_t gdscache_cufile_disk(struct gdscache_cufile* cufile, int32_t workers, struct gdscache_disk** disk,
                                          char* why, int64_t why_size);

// The bare loop (bare_cufile.h).
GDSCACHE_API int32_t gdscache_cufile_bare(struct gdscache_cufile* cufile, int32_t fd, int32_t write, int64_t bytes,
                                          int64_t piece_bytes, int32_t threads, uint64_t memory, double* seconds);
