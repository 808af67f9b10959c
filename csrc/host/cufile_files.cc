#include "cufile_files.h"

#include <utility>

namespace gdscache {

void CuFiles::open(const char* log_folder) {
    const Cuda::Entered entered(cuda_);
    cufile_.open(log_folder);
}

void CuFiles::add_file(int fd) {
    const Cuda::Entered entered(cuda_);
    const CuFileHandle file = cufile_.add_file(fd);
    const std::lock_guard held(lock_);
    files_[fd] = file;
}

void CuFiles::remove_file(int fd) {
    std::unique_lock held(lock_);
    auto node = files_.extract(fd);
    held.unlock();
    if (node.empty()) return;
    const Cuda::Entered entered(cuda_);
    cufile_.remove_file(node.mapped());
}

void CuFiles::add_memory(uint64_t address, size_t bytes) {
    const Cuda::Entered entered(cuda_);
    {
        const std::lock_guard held(lock_);
        const auto next = memories_.lower_bound(address);
        const bool before = next != memories_.begin() && std::prev(next)->first + std::prev(next)->second > address;
        if (before || (next != memories_.end() && next->first < address + bytes)) {
            throw CuFileError("some of the memory was added before");
        }
        memories_.emplace(address, bytes);
    }
    try {
        cufile_.add_memory(address, bytes);
    } catch (const CuFileError&) {
        const std::lock_guard held(lock_);
        memories_.erase(address);
        throw;
    }
}

void CuFiles::remove_memory(uint64_t address) {
    std::unique_lock held(lock_);
    auto node = memories_.extract(address);
    held.unlock();
    if (node.empty()) return;
    const Cuda::Entered entered(cuda_);
    cufile_.remove_memory(address);
}

CuFileHandle CuFiles::file(int fd) const {
    const std::lock_guard held(lock_);
    const auto found = files_.find(fd);
    return found == files_.end() ? nullptr : found->second;
}

std::optional<uint64_t> CuFiles::memory(uint64_t address, size_t bytes) const {
    const std::lock_guard held(lock_);
    auto next = memories_.upper_bound(address);
    if (next == memories_.begin()) return std::nullopt;
    const auto [begin, size] = *--next;
    if (address - begin > size || size - (address - begin) < bytes) return std::nullopt;
    return begin;
}

}  // namespace gdscache
