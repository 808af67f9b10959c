// The CUDA driver, loaded at run time: no toolkit is needed to build, and no GPU to load the library.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/error.h"

namespace gdscache {

// The driver refused a call, or is missing.
struct CudaError : Error {
    explicit CudaError(const std::string& why) : Error(EIO, why, "see the CUDA driver's message") {}
};

using CudaStream = void*;    // CUstream
using CudaEvent = void*;     // CUevent
using CudaFunction = void*;  // CUfunction

// The use of an event besides the order of streams: `kSleep` lets a waiting thread sleep, so that it keeps no core
// busy; `kTime` keeps the time, for `seconds`.
enum class EventUse { kOrder, kSleep, kTime };

// A list of copies: entry i goes from `from[i]` to `to[i]`, with at most `most` bytes.
struct CopyList {
    std::vector<uint64_t> to, from;
    std::vector<size_t> bytes;
    size_t most = SIZE_MAX;

    // `apart`: not joined with the entry before, even if adjacent on both sides.
    void add(uint64_t target, uint64_t source, size_t size, bool apart) {
        const bool follows = !to.empty() && to.back() + bytes.back() == target && from.back() + bytes.back() == source;
        if (!apart && follows && size <= most - bytes.back()) {
            bytes.back() += size;
            return;
        }
        for (size_t at = 0; at < size; at += bytes.back()) {
            to.push_back(target + at);
            from.push_back(source + at);
            bytes.push_back(std::min(most, size - at));
        }
    }
    size_t size() const { return to.size(); }
    void clear() { to.clear(), from.clear(), bytes.clear(); }
};

// Rows of `bytes` each, `to_step` and `from_step` bytes apart; steps are at least `bytes`.
struct CopyRows {
    uint64_t to, from;
    size_t bytes, to_step, from_step, rows;
};

// CUDA_MEMCPY2D; the driver finds out the memory of an address.
struct CudaCopy2D {
    struct End {
        size_t x = 0, y = 0;
        int type = 4;  // unified
        void* host = nullptr;
        uint64_t address = 0;
        void* array = nullptr;
        size_t pitch = 0;
    };
    End from, to;
    size_t width = 0, height = 0;
};

struct CudaFunctions {
    const Library<CudaError> driver;
    int (*push)(void*) = driver["cuCtxPushCurrent_v2"];
    int (*pop)(void**) = driver["cuCtxPopCurrent_v2"];
    int (*priorities)(int*, int*) = driver["cuCtxGetStreamPriorityRange"];
    int (*stream_create)(CudaStream*, unsigned, int) = driver["cuStreamCreateWithPriority"];
    int (*stream_destroy)(CudaStream) = driver["cuStreamDestroy_v2"];
    int (*stream_synchronize)(CudaStream) = driver["cuStreamSynchronize"];
    int (*stream_wait)(CudaStream, CudaEvent, unsigned) = driver["cuStreamWaitEvent"];
    int (*event_create)(CudaEvent*, unsigned) = driver["cuEventCreate"];
    int (*event_destroy)(CudaEvent) = driver["cuEventDestroy_v2"];
    int (*event_record)(CudaEvent, CudaStream) = driver["cuEventRecord"];
    int (*event_query)(CudaEvent) = driver["cuEventQuery"];
    int (*event_synchronize)(CudaEvent) = driver["cuEventSynchronize"];
    int (*event_elapsed)(float*, CudaEvent, CudaEvent) = driver["cuEventElapsedTime"];
    int (*allocate)(uint64_t*, size_t) = driver["cuMemAlloc_v2"];
    int (*free)(uint64_t) = driver["cuMemFree_v2"];
    int (*host_allocate)(void**, size_t, unsigned) = driver["cuMemHostAlloc"];
    int (*host_free)(void*) = driver["cuMemFreeHost"];
    int (*copy)(uint64_t, uint64_t, size_t, CudaStream) = driver["cuMemcpyAsync"];
    int (*copy_rows)(const CudaCopy2D*, CudaStream) = driver["cuMemcpy2DAsync_v2"];
    int (*copy_to_host)(void*, uint64_t, size_t) = driver["cuMemcpyDtoH_v2"];
    int (*launch)(CudaFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CudaStream,
                  void**, void**) = driver["cuLaunchKernel"];
    int (*address)(const char*, void**, int, uint64_t, int*) = driver.find("cuGetProcAddress_v2");  // since CUDA 12
    int (*error_name)(int, const char**) = driver["cuGetErrorName"];
    int (*capture_mode)(int*) = driver["cuThreadExchangeStreamCaptureMode"];
};

// Calls for one device. They need its context to be current, and throw `CudaError`, except for closing calls.
class Cuda {
public:
    // `library`: the driver's. `context`: the device's primary one, owned by the caller.
    Cuda(const char* library, void* context)
        : context_(context), functions_(new CudaFunctions{{"CUDA driver", library}}) {
        if (!functions_->address) return;
        // the newer form has one argument less
        for (const int version : {13000, 12080}) {
            void* found = nullptr;
            int status = 0;
            const int code = functions_->address("cuMemcpyBatchAsync", &found, version, 0, &status);
            if (code != 0 || found == nullptr || status != 0) continue;
            batch_ = found;
            version_ = version;
            break;
        }
    }
    Cuda(Cuda&&) = delete;

    // While this lives, the context is current in the calling thread.
    class Entered {
    public:
        explicit Entered(const Cuda& cuda) : cuda_(cuda) {
            cuda.check("cuCtxPushCurrent", cuda.functions_->push(cuda.context_));
        }
        ~Entered() {
            void* popped = nullptr;
            cuda_.functions_->pop(&popped);
        }
        Entered(Entered&&) = delete;

    private:
        const Cuda& cuda_;
    };

    // Calls of this thread do not break graphs that other threads capture.
    void leave_captures_alone() const {
        int mode = 2;  // relaxed
        check("cuThreadExchangeStreamCaptureMode", functions_->capture_mode(&mode));
    }

    // A stream without implicit waits for others. `urgent`: its kernels go before those of other streams.
    CudaStream open_stream(bool urgent) const {
        int least = 0, greatest = 0;
        check("cuCtxGetStreamPriorityRange", functions_->priorities(&least, &greatest));
        CudaStream stream = nullptr;
        check("cuStreamCreate", functions_->stream_create(&stream, kNonBlocking, urgent ? greatest : least));
        return stream;
    }
    // Resources that a broken context does not release end with the process.
    void close_stream(CudaStream stream) const noexcept { functions_->stream_destroy(stream); }
    void synchronize(CudaStream stream) const { check("cuStreamSynchronize", functions_->stream_synchronize(stream)); }

    // An event that was never recorded counts as happened.
    CudaEvent open_event(EventUse use) const {
        constexpr unsigned kFlags[] = {kNoTiming, kNoTiming | kBlockingSync, 0};
        CudaEvent event = nullptr;
        check("cuEventCreate", functions_->event_create(&event, kFlags[static_cast<int>(use)]));
        return event;
    }
    void close_event(CudaEvent event) const noexcept { functions_->event_destroy(event); }
    void record(CudaEvent event, CudaStream stream) const {
        check("cuEventRecord", functions_->event_record(event, stream));
    }
    void follow(CudaStream stream, CudaEvent event) const {
        check("cuStreamWaitEvent", functions_->stream_wait(stream, event, 0));
    }
    bool happened(CudaEvent event) const {
        constexpr int kNotReady = 600;
        const int code = functions_->event_query(event);
        if (code != kNotReady) check("cuEventQuery", code);
        return code == 0;
    }
    void await(CudaEvent event) const { check("cuEventSynchronize", functions_->event_synchronize(event)); }
    double seconds(CudaEvent from, CudaEvent to) const {
        float milliseconds = 0;
        check("cuEventElapsedTime", functions_->event_elapsed(&milliseconds, from, to));
        return static_cast<double>(milliseconds) / 1e3;
    }

    uint64_t allocate(size_t bytes) const {  // on the device
        uint64_t address = 0;
        check("cuMemAlloc", functions_->allocate(&address, bytes));
        return address;
    }
    void free(uint64_t address) const noexcept { functions_->free(address); }
    void* allocate_host(size_t bytes) const {  // page-locked, for every context
        void* memory = nullptr;
        check("cuMemHostAlloc", functions_->host_allocate(&memory, bytes, 1));
        return memory;
    }
    void free_host(void* memory) const noexcept { functions_->host_free(memory); }

    // Queue entries [first, last) of a list: one call if the driver has batches, and host memory is page-locked (`pinned`).
    void copy(const CopyList& list, size_t first, size_t last, CudaStream stream, bool pinned) const {
        if (first == last) return;
        if (batch_ == nullptr || !pinned) {
            for (; first < last; ++first) {
                check("cuMemcpyAsync", functions_->copy(list.to[first], list.from[first], list.bytes[first], stream));
            }
            return;
        }
        CopyAttributes attributes{kSourceInStreamOrder, {0, 0}, {0, 0}, 0};
        size_t zero = 0, failed = 0;
        auto* const to = const_cast<uint64_t*>(list.to.data()) + first;
        auto* const from = const_cast<uint64_t*>(list.from.data()) + first;
        auto* const bytes = const_cast<size_t*>(list.bytes.data()) + first;
        const size_t count = last - first;
        const int code =
            version_ == 13000
                ? reinterpret_cast<Batch13>(batch_)(to, from, bytes, count, &attributes, &zero, 1, stream)
                : reinterpret_cast<Batch12>(batch_)(to, from, bytes, count, &attributes, &zero, 1, &failed, stream);
        check("cuMemcpyBatchAsync", code);
    }
    // Between page-locked memory and the GPU's, or within the GPU's: one call for any number of rows.
    void copy(const CopyRows& rows, CudaStream stream) const {
        CudaCopy2D copy;
        copy.from.address = rows.from, copy.from.pitch = rows.from_step;
        copy.to.address = rows.to, copy.to.pitch = rows.to_step;
        copy.width = rows.bytes, copy.height = rows.rows;
        check("cuMemcpy2DAsync", functions_->copy_rows(&copy, stream));
    }
    void copy_to_host(void* to, uint64_t from, size_t bytes) const {  // waits for the copy
        check("cuMemcpyDtoH", functions_->copy_to_host(to, from, bytes));
    }
    void launch(CudaFunction kernel, uint32_t grid, uint32_t threads, const void* arguments, size_t size,
                CudaStream stream) const {
        void* const buffer = reinterpret_cast<void*>(1);  // cuda.h's keys for the arguments' buffer and its size
        void* const length = reinterpret_cast<void*>(2);
        void* extra[] = {buffer, const_cast<void*>(arguments), length, &size, nullptr};
        check("cuLaunchKernel", functions_->launch(kernel, grid, 1, 1, threads, 1, 1, 0, stream, nullptr, extra));
    }

    // The form of batches in `copy`: "batch_13", "batch_12_8" or "single".
    const char* api() const { return version_ == 13000 ? "batch_13" : version_ ? "batch_12_8" : "single"; }

private:
    // Values of cuda.h.
    static constexpr unsigned kNonBlocking = 1, kBlockingSync = 1, kNoTiming = 2;
    static constexpr int kSourceInStreamOrder = 1;

    struct Location {
        int type, id;
    };
    struct CopyAttributes {
        int source_order;
        Location source, target;
        unsigned flags;
    };

    using Batch13 = int (*)(uint64_t*, uint64_t*, size_t*, size_t, CopyAttributes*, size_t*, size_t, CudaStream);
    using Batch12 = int (*)(uint64_t*, uint64_t*, size_t*, size_t, CopyAttributes*, size_t*, size_t, size_t*,
                            CudaStream);

    // Not inlined: every call of the driver has it.
    [[gnu::noinline]] void check(const char* name, int code) const {
        if (code == 0) return;
        const char* text = nullptr;
        functions_->error_name(code, &text);
        throw CudaError(std::string(name) + " answered " + std::to_string(code) + " (" + (text ? text : "unknown") +
                        ")");
    }

    void* const context_;
    std::unique_ptr<const CudaFunctions> functions_;
    void* batch_ = nullptr;
    int version_ = 0;  // the form of `batch_`
};

// Closes a resource by its owner; within the context.
template <typename T, typename Owner, void (Owner::*kClose)(T) const noexcept>
struct CloseBy {
    void operator()(T one) const noexcept { (owner->*kClose)(one); }
    const Owner* owner = nullptr;
};
template <typename T, void (Cuda::*kClose)(T) const noexcept>
using OfCuda = Unique<T, CloseBy<T, Cuda, kClose>>;
using OwnStream = OfCuda<CudaStream, &Cuda::close_stream>;
using OwnEvent = OfCuda<CudaEvent, &Cuda::close_event>;
using OwnHostMemory = OfCuda<void*, &Cuda::free_host>;
using OwnMemory = OfCuda<uint64_t, &Cuda::free>;

inline OwnStream own_stream(const Cuda& cuda, bool urgent) { return OwnStream(cuda.open_stream(urgent), {&cuda}); }
inline OwnEvent own_event(const Cuda& cuda, EventUse use) { return OwnEvent(cuda.open_event(use), {&cuda}); }

}  // namespace gdscache
