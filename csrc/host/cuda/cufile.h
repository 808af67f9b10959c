// cuFile (GPUDirect Storage), loaded at its first use: no toolkit is needed to build.
//
// Not ordered with any stream: a call touches the memory only between its begin and its return.

#pragma once

#include <map>
#include <mutex>
#include <optional>

#include "cuda/cuda.h"

namespace gdscache {

// cuFile refused a call, or is missing.
struct CuFileError : Error {
    explicit CuFileError(const std::string& why) : Error(EIO, why, "see docs/gds.md") {}
};

constexpr int32_t kCuFileErrors = 5000;  // greater numbers are cuFile's, smaller ones errnos

// The text of an error of `CuFiles::move`.
std::string cufile_text(int32_t error);

using CuFileHandle = void*;  // CUfileHandle_t

// Files and memory of a GPU that a transport has added, for the disks that move bytes between them by cuFile.
// Thread-safe; nothing is under way on a file or memory that is removed.
class CuFiles {
public:
    // The driver's name, and the context of the memory's device. `library`: the path of libcufile. A libcufile that the
    // process has open is taken instead, since two would share a driver.
    CuFiles(const char* driver, void* context, const char* library);
    ~CuFiles();
    CuFiles(CuFiles&&) = delete;

    const Cuda& cuda() const { return cuda_; }

    // These throw CuFileError or CudaError, and enter the context themselves. `open` comes first and opens the driver,
    // which hangs without /proc/modules. The driver stays open: it is the process's, and other users (kvikio) may need
    // it. `log_folder`: the folder of cuFile's log; null: as its environment and configuration say.
    void open(const char* log_folder);
    void add_file(int fd);
    void remove_file(int fd);
    void add_memory(uint64_t address, size_t bytes);
    void remove_memory(uint64_t address);

    // Null for a file that was not added.
    CuFileHandle file(int fd) const;
    // The first address of the added memory that contains all of these bytes; none if there is no such memory.
    std::optional<uint64_t> memory(uint64_t address, size_t bytes) const;

    // For threads that have entered the context. Moved bytes, or a negative error. `base`: where added memory begins.
    int64_t move(bool write, CuFileHandle file, uint64_t base, size_t bytes, int64_t offset, int64_t base_offset) const;

private:
    struct Functions;

    const Cuda cuda_;
    const std::unique_ptr<const Functions> functions_;
    mutable std::mutex lock_;
    std::map<int, CuFileHandle> files_;
    std::map<uint64_t, size_t> memories_;  // bytes, by first address
};

}  // namespace gdscache
