#include "cuda/cufile.h"

#include <sys/types.h>

#include <cstring>

namespace gdscache {
namespace {

constexpr const char* kName = "libcufile.so.0";
constexpr int kFileDescriptor = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD
constexpr int kLogFolder = 2;       // CUFILE_PARAM_LOG_DIR
constexpr int32_t kDriverAlreadyOpen = 5026, kCudaError = 5011;

// CUfileError_t
struct Answer {
    int32_t cufile, cuda;
};
static_assert(sizeof(Answer) == 8);

// CUfileDescr_t
struct Description {
    int32_t type;
    union {
        int fd;
        void* other;
    } file;
    const void* operations;
};
static_assert(sizeof(Description) == 24 && offsetof(Description, file) == 8);

static_assert(sizeof(off_t) == 8);

constexpr std::pair<int32_t, const char*> kMeanings[] = {
    {5001, "its driver is not initialized (nvidia-fs is not loaded, and compat mode is not allowed)"},
    {5004, "nvidia-fs has another version"},
    {5007, "the platform is not supported"},
    {5008, "the file is not supported"},
    {5009, "the GPU is not supported"},
    {5010, "nvidia-fs answers an error"},
    {5011, "a call of the CUDA driver failed"},
    {5012, "no pointer to memory of a GPU"},
    {5014, "the memory leaves its allocation"},
    {5015, "another CUDA context"},
    {5016, "more memory than may be pinned"},
    {5018, "the type of the file is not supported"},
    {5019, "the file is open in a way that is not supported"},
    {5020, "the file is not open with O_DIRECT"},
    {5022, "invalid arguments"},
    {5023, "the memory is registered already"},
    {5024, "the memory is not registered"},
    {5025, "no permission"},
    {5027, "the file cannot be registered (without /run/udev no file can)"},
    {5028, "the file is registered already"},
    {5030, "an internal error"},
    {5034, "switched off for this file by cuFile's configuration"},
    {5036, "memory of the GPU cannot be pinned"},
    {5044, "an I/O error"},
};

void check(const char* name, Answer answer) {
    if (answer.cufile == 0) return;
    std::string why = std::string(name) + ": " + cufile_text(answer.cufile);
    if (answer.cufile == kCudaError) why += " (" + std::to_string(answer.cuda) + ")";
    throw CuFileError(why);
}

}  // namespace

std::string cufile_text(int32_t error) {
    if (error <= kCuFileErrors) return std::strerror(error);
    std::string number = "cuFile answers " + std::to_string(error);
    for (const auto& [known, text] : kMeanings) {
        if (known == error) return number + ": " + text;
    }
    return number;
}

struct CuFiles::Functions {
    const Library<CuFileError> library;
    Answer (*open)() = library["cuFileDriverOpen"];
    Answer (*add_file)(CuFileHandle*, Description*) = library["cuFileHandleRegister"];
    void (*remove_file)(CuFileHandle) = library["cuFileHandleDeregister"];
    Answer (*add_memory)(const void*, size_t, int) = library["cuFileBufRegister"];
    Answer (*remove_memory)(const void*) = library["cuFileBufDeregister"];
    ssize_t (*read)(CuFileHandle, void*, size_t, off_t, off_t) = library["cuFileRead"];
    ssize_t (*write)(CuFileHandle, const void*, size_t, off_t, off_t) = library["cuFileWrite"];
    Answer (*set_text)(int, const char*) = library.find("cuFileSetParameterString");  // since 1.14
};

CuFiles::CuFiles(const char* driver, void* context, const char* library)
    : cuda_(driver, context), functions_(new Functions{{"libcufile", library, kName}}) {}

CuFiles::~CuFiles() = default;

void CuFiles::open(const char* log_folder) {
    const Cuda::Entered entered(cuda_);
    // Refused if the driver is open already: its log then stays where it was.
    if (log_folder && functions_->set_text) functions_->set_text(kLogFolder, log_folder);
    const Answer answer = functions_->open();
    if (answer.cufile != kDriverAlreadyOpen) check("cuFileDriverOpen", answer);
}

void CuFiles::add_file(int fd) {
    const Cuda::Entered entered(cuda_);
    Description description{};
    description.type = kFileDescriptor;
    description.file.fd = fd;
    CuFileHandle file = nullptr;
    check("cuFileHandleRegister", functions_->add_file(&file, &description));
    const std::lock_guard held(lock_);
    files_[fd] = file;
}

void CuFiles::remove_file(int fd) {
    std::unique_lock held(lock_);
    auto node = files_.extract(fd);
    held.unlock();
    if (node.empty()) return;
    const Cuda::Entered entered(cuda_);
    functions_->remove_file(node.mapped());
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
        check("cuFileBufRegister", functions_->add_memory(reinterpret_cast<void*>(address), bytes, 0));
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
    functions_->remove_memory(reinterpret_cast<void*>(address));
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

int64_t CuFiles::move(bool write, CuFileHandle file, uint64_t base, size_t bytes, int64_t offset,
                      int64_t base_offset) const {
    errno = 0;
    void* const at = reinterpret_cast<void*>(base);
    const ssize_t moved = write ? functions_->write(file, at, bytes, offset, base_offset)
                                : functions_->read(file, at, bytes, offset, base_offset);
    if (moved == -1) return errno ? -errno : -EIO;
    if (moved > static_cast<ssize_t>(bytes)) return -EIO;  // its surplus would hide another call's lack
    return moved;
}

}  // namespace gdscache
