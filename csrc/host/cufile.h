// cuFile (GPUDirect Storage), loaded at run time: no toolkit is needed to build, and nothing of it is touched before
// somebody asks for it.
//
// Not ordered with any stream: a call touches the memory from its begin to its return, and at no other time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace gdscache {

// What cuFile refused; or that there is none.
class CuFileError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
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

// The library's calls. Those that answer nothing throw `CuFileError`. The memory's context is the calling thread's
// current one.
class CuFile {
public:
    // `library`: the path of libcufile; one that the process has open already is taken in its place, since two of them
    // would share a driver.
    explicit CuFile(const char* library);
    ~CuFile();
    CuFile(const CuFile&) = delete;
    CuFile& operator=(const CuFile&) = delete;

    // Open the driver, which can hang: without /proc/modules it does. It is not closed again, since it is the process's,
    // and others may use it (kvikio does). `log_folder`: where cuFile's log goes, or null: as its environment and its
    // configuration say.
    void open(const char* log_folder) const;

    CuFileHandle add_file(int fd) const;
    void remove_file(CuFileHandle file) const noexcept;
    void add_memory(uint64_t address, size_t bytes) const;
    void remove_memory(uint64_t address) const noexcept;

    // Bytes that were moved, or a negative error. `base`: of registered memory.
    int64_t move(bool write, CuFileHandle file, uint64_t base, size_t bytes, int64_t offset, int64_t base_offset) const;

    bool has_batches() const { return batches_; }
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

    void* library_ = nullptr;
    Functions* functions_;
    bool batches_ = false;
};

}  // namespace gdscache
