// Files, and memory of a GPU, between which cuFile moves bytes: what a transport has told, for the disks that use it.

#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "cuda.h"
#include "cufile.h"

namespace gdscache {

// Thread-safe; nothing is under way on a file or a memory that is taken out.
class CuFiles {
public:
    // The driver's name and the context of the memory's device; the path of libcufile.
    CuFiles(const char* driver, void* context, const char* library) : cuda_(driver, context), cufile_(library) {}

    const Cuda& cuda() const { return cuda_; }
    const CuFile& cufile() const { return cufile_; }

    // These throw CuFileError or CudaError, and enter the context themselves. `open`: before all others, once.
    void open(const char* log_folder);
    void add_file(int fd);
    void remove_file(int fd);
    void add_memory(uint64_t address, size_t bytes);
    void remove_memory(uint64_t address);

    // Null for a file that was not added.
    CuFileHandle file(int fd) const;
    // Where the memory begins that has all of these bytes; none where they are the host's, or nobody's.
    std::optional<uint64_t> memory(uint64_t address, size_t bytes) const;

private:
    const Cuda cuda_;
    const CuFile cufile_;
    mutable std::mutex lock_;
    std::map<int, CuFileHandle> files_;
    std::map<uint64_t, size_t> memories_;  // bytes, by their first addresses
};

}  // namespace gdscache
