// cuFile (GPUDirect Storage), loaded at run time: no toolkit is needed to build, and nothing of it is touched before
// somebody asks for it.
//
// Not ordered with any stream: a call touches the memory from its begin to its return, and at no other time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "cuda/cuda.h"

namespace gdscache {

// What cuFile refused; or that there is none.
struct CuFileError : Error {
    explicit CuFileError(const std::string& why) : Error(EIO, why, "see docs/gds.md") {}
};

constexpr int32_t kCuFileErrors = 5000;  // cuFile's own are greater; what is less is an errno

// What an error of `CuFile::move` means.
std::string cufile_text(int32_t error);

using CuFileHandle = void*;  // CUfileHandle_t
using CuFileBatch = void*;   // CUfileBatchHandle_t

// CUfileIOParams_t of cufile.h: one read or write of a batch.
struct CuFileEntry {
    int32_t mode;  // 1
    void* base;    // of registered memory
    int64_t offset, base_offset;
    size_t bytes;
    CuFileHandle file;
    int32_t op;  // 0: a read
    void* cookie;
};
static_assert(sizeof(CuFileEntry) == 64 && offsetof(CuFileEntry, file) == 40 && offsetof(CuFileEntry, cookie) == 56);

// CUfileIOEvents_t: what became of one. Only with `kComplete` is `result` bytes that were moved.
struct CuFileEvent {
    static constexpr int32_t kWaiting = 1, kPending = 2, kComplete = 16;
    void* cookie;
    int32_t status;
    int64_t result;
};
static_assert(sizeof(CuFileEvent) == 24 && offsetof(CuFileEvent, result) == 16);

// Files, and memory of a GPU, between which cuFile moves bytes: what a transport has told, for the disks that use it.
// Thread-safe; nothing is under way on a file or a memory that is taken out.
class CuFiles {
public:
    // The driver's name and the context of the memory's device. `library`: the path of libcufile; one that the process
    // has open already is taken in its place, since two of them would share a driver.
    CuFiles(const char* driver, void* context, const char* library);
    ~CuFiles();
    CuFiles(CuFiles&&) = delete;

    const Cuda& cuda() const { return cuda_; }

    // These throw CuFileError or CudaError, and enter the context themselves. `open`, before all others, opens the
    // driver, which can hang: without /proc/modules it does. It is not closed again, since it is the process's, and
    // others may use it (kvikio does). `log_folder`: where cuFile's log goes, or null: as its environment and its
    // configuration say.
    void open(const char* log_folder);
    void add_file(int fd);
    void remove_file(int fd);
    void add_memory(uint64_t address, size_t bytes);
    void remove_memory(uint64_t address);

    // Null for a file that was not added.
    CuFileHandle file(int fd) const;
    // Where the memory begins that has all of these bytes; none where they are the host's, or nobody's.
    std::optional<uint64_t> memory(uint64_t address, size_t bytes) const;

    // What follows is for threads that have entered the context. Bytes that were moved, or a negative error. `base`: of
    // registered memory.
    int64_t move(bool write, CuFileHandle file, uint64_t base, size_t bytes, int64_t offset, int64_t base_offset) const;

    bool has_batches() const;
    CuFileBatch open_batch(unsigned entries) const;
    void close_batch(CuFileBatch batch) const noexcept;
    // False where it is refused. The entries are read by the time it returns.
    bool submit(CuFileBatch batch, CuFileEntry* entries, unsigned count) const;
    void cancel(CuFileBatch batch) const noexcept;
    // Up to `room` events, and waits for the first. Below 0: nothing is known.
    int reap(CuFileBatch batch, CuFileEvent* events, unsigned room) const;
    // What an event says: bytes, or a negative error.
    static int64_t result(const CuFileEvent& event);

private:
    struct Functions;

    const Cuda cuda_;
    const std::unique_ptr<const Functions> functions_;
    mutable std::mutex lock_;
    std::map<int, CuFileHandle> files_;
    std::map<uint64_t, size_t> memories_;  // bytes, by their first addresses
};
using OwnBatch = Unique<CuFileBatch, CloseBy<CuFileBatch, CuFiles, &CuFiles::close_batch>>;

}  // namespace gdscache
