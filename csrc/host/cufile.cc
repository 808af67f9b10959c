#include "cufile.h"

#include <dlfcn.h>
#include <sys/types.h>
#include <time.h>

#include <cerrno>
#include <cstring>
#include <memory>

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

static_assert(sizeof(off_t) == 8 && sizeof(timespec) == 16);

struct Meaning {
    int32_t error;
    const char* text;
};
constexpr Meaning kMeanings[] = {
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

}  // namespace

std::string cufile_text(int32_t error) {
    if (error <= kCuFileErrors) return std::strerror(error);
    const std::string number = "cuFile answers " + std::to_string(error);
    for (const Meaning& meaning : kMeanings) {
        if (meaning.error == error) return number + ": " + meaning.text;
    }
    return number;
}

struct CuFile::Functions {
    Answer (*open)();
    Answer (*add_file)(CuFileHandle*, Description*);
    void (*remove_file)(CuFileHandle);
    Answer (*add_memory)(const void*, size_t, int);
    Answer (*remove_memory)(const void*);
    ssize_t (*read)(CuFileHandle, void*, size_t, off_t, off_t);
    ssize_t (*write)(CuFileHandle, const void*, size_t, off_t, off_t);
    Answer (*set_text)(int, const char*);  // since 1.14
    Answer (*open_batch)(CuFileBatch*, unsigned);
    Answer (*submit)(CuFileBatch, unsigned, CuFileEntry*, unsigned);
    Answer (*status)(CuFileBatch, unsigned, unsigned*, CuFileEvent*, timespec*);
    Answer (*cancel)(CuFileBatch);
    void (*close_batch)(CuFileBatch);
};

namespace {

void check(const char* name, Answer answer) {
    if (answer.cufile == 0) return;
    std::string why = std::string(name) + ": " + cufile_text(answer.cufile);
    if (answer.cufile == kCudaError) why += " (" + std::to_string(answer.cuda) + ")";
    throw CuFileError(why);
}

}  // namespace

CuFile::CuFile(const char* library) {
    library_ = dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library_ == nullptr) library_ = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw CuFileError(std::string("libcufile cannot be loaded: ") + dlerror());
    auto made = std::make_unique<Functions>();
    const auto look = [&](auto* function, const char* name) {
        *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library_, name));
        return *function != nullptr;
    };
    const auto find = [&](auto* function, const char* name) {
        if (!look(function, name)) throw CuFileError(std::string("libcufile has no function ") + name);
    };
    find(&made->open, "cuFileDriverOpen");
    find(&made->add_file, "cuFileHandleRegister");
    find(&made->remove_file, "cuFileHandleDeregister");
    find(&made->add_memory, "cuFileBufRegister");
    find(&made->remove_memory, "cuFileBufDeregister");
    find(&made->read, "cuFileRead");
    find(&made->write, "cuFileWrite");
    look(&made->set_text, "cuFileSetParameterString");
    batches_ = look(&made->open_batch, "cuFileBatchIOSetUp") && look(&made->submit, "cuFileBatchIOSubmit") &&
               look(&made->status, "cuFileBatchIOGetStatus") && look(&made->cancel, "cuFileBatchIOCancel") &&
               look(&made->close_batch, "cuFileBatchIODestroy");
    functions_ = made.release();
}

CuFile::~CuFile() { delete functions_; }  // the library stays loaded: it is everybody's

void CuFile::open(const char* log_folder) const {
    // Refused when the driver is open already: then its log is where somebody else had it.
    if (log_folder && functions_->set_text) functions_->set_text(kLogFolder, log_folder);
    const Answer answer = functions_->open();
    if (answer.cufile != kDriverAlreadyOpen) check("cuFileDriverOpen", answer);
}

CuFileHandle CuFile::add_file(int fd) const {
    Description description{};
    description.type = kFileDescriptor;
    description.file.fd = fd;
    CuFileHandle file = nullptr;
    check("cuFileHandleRegister", functions_->add_file(&file, &description));
    return file;
}

void CuFile::remove_file(CuFileHandle file) const noexcept { functions_->remove_file(file); }

void CuFile::add_memory(uint64_t address, size_t bytes) const {
    check("cuFileBufRegister", functions_->add_memory(reinterpret_cast<void*>(address), bytes, 0));
}

void CuFile::remove_memory(uint64_t address) const noexcept {
    functions_->remove_memory(reinterpret_cast<void*>(address));
}

int64_t CuFile::move(bool write, CuFileHandle file, uint64_t base, size_t bytes, int64_t offset,
                     int64_t base_offset) const {
    errno = 0;
    void* const at = reinterpret_cast<void*>(base);
    const ssize_t moved = write ? functions_->write(file, at, bytes, offset, base_offset)
                                : functions_->read(file, at, bytes, offset, base_offset);
    if (moved == -1) return errno ? -errno : -EIO;
    if (moved > static_cast<ssize_t>(bytes)) return -EIO;  // else it would make up for what another call lacks
    return moved;
}

CuFileBatch CuFile::open_batch(unsigned entries) const {
    CuFileBatch batch = nullptr;
    check("cuFileBatchIOSetUp", functions_->open_batch(&batch, entries));
    return batch;
}

void CuFile::close_batch(CuFileBatch batch) const noexcept { functions_->close_batch(batch); }

bool CuFile::submit(CuFileBatch batch, CuFileEntry* entries, unsigned count) const {
    return functions_->submit(batch, count, entries, 0).cufile == 0;
}

void CuFile::cancel(CuFileBatch batch) const noexcept { functions_->cancel(batch); }

int CuFile::reap(CuFileBatch batch, CuFileEvent* events, unsigned room) const {
    unsigned found = room;
    if (functions_->status(batch, 1, &found, events, nullptr).cufile != 0) return -1;
    return found <= room ? static_cast<int>(found) : -1;
}

int64_t CuFile::result(const CuFileEvent& event) {
    if (event.status == CuFileEvent::kComplete) return event.result == -1 ? -EIO : event.result;
    return event.result < -1 ? event.result : -EIO;
}

}  // namespace gdscache
