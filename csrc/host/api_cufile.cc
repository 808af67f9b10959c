// Calls about cuFile, behind checks of what comes from outside. See api_cufile.h.

#include "api_cufile.h"

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>

#include "bare_cufile.h"
#include "cufile_handle.h"
#include "memory.h"

using namespace gdscache;

namespace {

thread_local std::string why, text;

int32_t refused(const char* cause, int32_t error) {
    const MustNotFail reserve;  // also called where memory has run out
    why = cause;
    return -error;
}

// What `work` answers, or the errno of what it throws.
template <typename Work>
int32_t guarded(Work work) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return refused("no memory", ENOMEM);
    } catch (const std::runtime_error& error) {  // CudaError, CuFileError
        return refused(error.what(), EIO);
    }
}

}  // namespace

const char* gdscache_cufile_why() { return why.c_str(); }

const char* gdscache_cufile_text(int32_t error) {
    const MustNotFail reserve;
    text = cufile_text(error);
    return text.c_str();
}

int32_t gdscache_cufile_open(const char* driver, uint64_t context, const char* library, const char* log_folder,
                             int64_t batched, struct gdscache_cufile** cufile) {
    if (!driver || !context || !library || !cufile) return refused("an address is null", EINVAL);
    return guarded([&] {
        auto files = std::make_shared<CuFiles>(driver, reinterpret_cast<void*>(context), library);
        files->open(log_folder);
        *cufile = new gdscache_cufile{std::move(files), batched < 0 ? kBatchedBytes : batched};
        return 0;
    });
}

void gdscache_cufile_close(struct gdscache_cufile* cufile) { delete cufile; }

int32_t gdscache_cufile_add_file(struct gdscache_cufile* cufile, int32_t fd) {
    if (!cufile || fd < 0) return refused("no file", EINVAL);
    return guarded([&] { return cufile->files->add_file(fd), 0; });
}

int32_t gdscache_cufile_remove_file(struct gdscache_cufile* cufile, int32_t fd) {
    if (!cufile) return refused("no file", EINVAL);
    return guarded([&] { return cufile->files->remove_file(fd), 0; });
}

int32_t gdscache_cufile_add_memory(struct gdscache_cufile* cufile, uint64_t address, int64_t bytes) {
    if (!cufile || !address || bytes < 1 || address > UINT64_MAX - static_cast<uint64_t>(bytes)) {
        return refused("no memory that there could be", EINVAL);
    }
    return guarded([&] { return cufile->files->add_memory(address, static_cast<size_t>(bytes)), 0; });
}

int32_t gdscache_cufile_remove_memory(struct gdscache_cufile* cufile, uint64_t address) {
    if (!cufile) return refused("no memory", EINVAL);
    return guarded([&] { return cufile->files->remove_memory(address), 0; });
}

int32_t gdscache_cufile_bare(struct gdscache_cufile* cufile, int32_t fd, int32_t write, int64_t bytes,
                             int64_t piece_bytes, int32_t threads, uint64_t memory, double* seconds) {
    if (!cufile || !seconds || bytes < 1) return refused("nothing to measure", EINVAL);
    return guarded([&] {
        const Op op = write ? Op::kWrite : Op::kRead;
        const int answer = run({cufile->files.get(), fd, op, bytes, piece_bytes, threads, memory}, *seconds);
        return answer < 0 ? refused(cufile_text(-answer).c_str(), -answer) : 0;
    });
}
