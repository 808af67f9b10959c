#include "cuda.h"

namespace gdscache {
namespace {

// Values of cuda.h.
constexpr int kNotReady = 600;
constexpr unsigned kNonBlocking = 1, kBlockingSync = 1, kNoTiming = 2, kPortable = 1;
constexpr int kSourceInStreamOrder = 1;
constexpr int kRelaxedCapture = 2;
constexpr int kUnified = 4;

struct Location {
    int type, id;
};
struct CopyAttributes {
    int source_order;
    Location source, target;
    unsigned flags;
};

// CUDA_MEMCPY2D; the driver finds out what an address is of.
struct Copy2D {
    struct End {
        size_t x = 0, y = 0;
        int type = kUnified;
        void* host = nullptr;
        uint64_t address = 0;
        void* array = nullptr;
        size_t pitch = 0;
    };
    End from, to;
    size_t width = 0, height = 0;
};

using Batch13 = int (*)(uint64_t*, uint64_t*, size_t*, size_t, CopyAttributes*, size_t*, size_t, CudaStream);
using Batch12 = int (*)(uint64_t*, uint64_t*, size_t*, size_t, CopyAttributes*, size_t*, size_t, size_t*, CudaStream);

}  // namespace

struct Cuda::Functions {
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
    int (*copy_rows)(const Copy2D*, CudaStream) = driver["cuMemcpy2DAsync_v2"];
    int (*copy_to_host)(void*, uint64_t, size_t) = driver["cuMemcpyDtoH_v2"];
    int (*launch)(CudaFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CudaStream, void**,
                  void**) = driver["cuLaunchKernel"];
    int (*address)(const char*, void**, int, uint64_t, int*) = driver.find("cuGetProcAddress_v2");  // since CUDA 12
    int (*error_name)(int, const char**) = driver["cuGetErrorName"];
    int (*capture_mode)(int*) = driver["cuThreadExchangeStreamCaptureMode"];
};

Cuda::Cuda(const char* library, void* context)
    : context_(context), functions_(new Functions{{"CUDA driver", library}}) {
    const struct {
        const char* name;
        int version;
    } forms[] = {{"batch_13", 13000}, {"batch_12_8", 12080}};  // the newer one lacks an argument
    for (const auto& form : forms) {
        void* found = nullptr;
        int status = 0;
        if (!functions_->address || functions_->address("cuMemcpyBatchAsync", &found, form.version, 0, &status) != 0) continue;
        if (found == nullptr || status != 0) continue;
        batch_ = found;
        api_ = form.name;
        break;
    }
}

Cuda::~Cuda() = default;

void Cuda::check(const char* name, int code) const {
    if (code == 0) return;
    const char* text = nullptr;
    functions_->error_name(code, &text);
    throw CudaError(std::string(name) + " answered " + std::to_string(code) + " (" + (text ? text : "unknown") + ")");
}

Cuda::Entered::Entered(const Cuda& cuda) : cuda_(cuda) {
    cuda.check("cuCtxPushCurrent", cuda.functions_->push(cuda.context_));
}

Cuda::Entered::~Entered() {
    void* popped = nullptr;
    cuda_.functions_->pop(&popped);
}

void Cuda::leave_captures_alone() const {
    int mode = kRelaxedCapture;
    check("cuThreadExchangeStreamCaptureMode", functions_->capture_mode(&mode));
}

CudaStream Cuda::open_stream(bool urgent) const {
    int least = 0, greatest = 0;
    check("cuCtxGetStreamPriorityRange", functions_->priorities(&least, &greatest));
    CudaStream stream = nullptr;
    check("cuStreamCreate", functions_->stream_create(&stream, kNonBlocking, urgent ? greatest : least));
    return stream;
}

// What a broken context does not give back goes with the process.
void Cuda::close_stream(CudaStream stream) const noexcept { functions_->stream_destroy(stream); }

void Cuda::synchronize(CudaStream stream) const {
    check("cuStreamSynchronize", functions_->stream_synchronize(stream));
}

CudaEvent Cuda::open_event(EventUse use) const {
    constexpr unsigned kFlags[] = {kNoTiming, kNoTiming | kBlockingSync, 0};
    CudaEvent event = nullptr;
    check("cuEventCreate", functions_->event_create(&event, kFlags[static_cast<int>(use)]));
    return event;
}

void Cuda::close_event(CudaEvent event) const noexcept { functions_->event_destroy(event); }

void Cuda::record(CudaEvent event, CudaStream stream) const {
    check("cuEventRecord", functions_->event_record(event, stream));
}

void Cuda::follow(CudaStream stream, CudaEvent event) const {
    check("cuStreamWaitEvent", functions_->stream_wait(stream, event, 0));
}

bool Cuda::happened(CudaEvent event) const {
    const int code = functions_->event_query(event);
    if (code != kNotReady) check("cuEventQuery", code);
    return code == 0;
}

void Cuda::await(CudaEvent event) const { check("cuEventSynchronize", functions_->event_synchronize(event)); }

double Cuda::seconds(CudaEvent from, CudaEvent to) const {
    float milliseconds = 0;
    check("cuEventElapsedTime", functions_->event_elapsed(&milliseconds, from, to));
    return static_cast<double>(milliseconds) / 1e3;
}

uint64_t Cuda::allocate(size_t bytes) const {
    uint64_t address = 0;
    check("cuMemAlloc", functions_->allocate(&address, bytes));
    return address;
}

void Cuda::free(uint64_t address) const noexcept { functions_->free(address); }

void* Cuda::allocate_host(size_t bytes) const {
    void* memory = nullptr;
    check("cuMemHostAlloc", functions_->host_allocate(&memory, bytes, kPortable));
    return memory;
}

void Cuda::free_host(void* memory) const noexcept { functions_->host_free(memory); }

void Cuda::copy(const CopyList& list, size_t first, size_t last, CudaStream stream, bool pinned) const {
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
        api_[6] == '1' && api_[7] == '3'
            ? reinterpret_cast<Batch13>(batch_)(to, from, bytes, count, &attributes, &zero, 1, stream)
            : reinterpret_cast<Batch12>(batch_)(to, from, bytes, count, &attributes, &zero, 1, &failed, stream);
    check("cuMemcpyBatchAsync", code);
}

void Cuda::copy(const CopyRows& rows, CudaStream stream) const {
    Copy2D copy;
    copy.from.address = rows.from, copy.from.pitch = rows.from_step;
    copy.to.address = rows.to, copy.to.pitch = rows.to_step;
    copy.width = rows.bytes, copy.height = rows.rows;
    check("cuMemcpy2DAsync", functions_->copy_rows(&copy, stream));
}

void Cuda::copy_to_host(void* to, uint64_t from, size_t bytes) const {
    check("cuMemcpyDtoH", functions_->copy_to_host(to, from, bytes));
}

void Cuda::launch(CudaFunction kernel, uint32_t grid, uint32_t threads, const void* arguments, size_t size,
                  CudaStream stream) const {
    void* extra[] = {reinterpret_cast<void*>(1), const_cast<void*>(arguments), reinterpret_cast<void*>(2), &size, nullptr};
    check("cuLaunchKernel", functions_->launch(kernel, grid, 1, 1, threads, 1, 1, 0, stream, nullptr, extra));
}

}  // namespace gdscache
