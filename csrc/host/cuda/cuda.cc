#include "cuda/cuda.h"

namespace gdscache {
namespace {

// Values of cuda.h.
constexpr unsigned kNonBlocking = 1, kBlockingSync = 1, kNoTiming = 2;
constexpr int kSourceInStreamOrder = 1;
constexpr const char* kBatch13 = "batch_13";

struct Location {
    int type, id;
};
struct CopyAttributes {
    int source_order;
    Location source, target;
    unsigned flags;
};

using Batch13 = int (*)(uint64_t*, uint64_t*, size_t*, size_t, CopyAttributes*, size_t*, size_t, CudaStream);
using Batch12 = int (*)(uint64_t*, uint64_t*, size_t*, size_t, CopyAttributes*, size_t*, size_t, size_t*, CudaStream);

}  // namespace

void Cuda::check(const char* name, int code) const {
    if (code == 0) return;
    const char* text = nullptr;
    functions_->error_name(code, &text);
    throw CudaError(std::string(name) + " answered " + std::to_string(code) + " (" + (text ? text : "unknown") + ")");
}

Cuda::Cuda(const char* library, void* context)
    : context_(context), functions_(new CudaFunctions{{"CUDA driver", library}}) {
    if (!functions_->address) return;
    // the newer form has one argument less
    for (const auto& [name, version] : {std::pair{kBatch13, 13000}, std::pair{"batch_12_8", 12080}}) {
        void* found = nullptr;
        int status = 0;
        const int code = functions_->address("cuMemcpyBatchAsync", &found, version, 0, &status);
        if (code != 0 || found == nullptr || status != 0) continue;
        batch_ = found;
        api_ = name;
        break;
    }
}

CudaStream Cuda::open_stream(bool urgent) const {
    int least = 0, greatest = 0;
    check("cuCtxGetStreamPriorityRange", functions_->priorities(&least, &greatest));
    CudaStream stream = nullptr;
    check("cuStreamCreate", functions_->stream_create(&stream, kNonBlocking, urgent ? greatest : least));
    return stream;
}

CudaEvent Cuda::open_event(EventUse use) const {
    constexpr unsigned kFlags[] = {kNoTiming, kNoTiming | kBlockingSync, 0};
    CudaEvent event = nullptr;
    check("cuEventCreate", functions_->event_create(&event, kFlags[static_cast<int>(use)]));
    return event;
}

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
        api_ == kBatch13
            ? reinterpret_cast<Batch13>(batch_)(to, from, bytes, count, &attributes, &zero, 1, stream)
            : reinterpret_cast<Batch12>(batch_)(to, from, bytes, count, &attributes, &zero, 1, &failed, stream);
    check("cuMemcpyBatchAsync", code);
}

void Cuda::copy(const CopyRows& rows, CudaStream stream) const {
    CudaCopy2D copy;
    copy.from.address = rows.from, copy.from.pitch = rows.from_step;
    copy.to.address = rows.to, copy.to.pitch = rows.to_step;
    copy.width = rows.bytes, copy.height = rows.rows;
    check("cuMemcpy2DAsync", functions_->copy_rows(&copy, stream));
}

void Cuda::launch(CudaFunction kernel, uint32_t grid, uint32_t threads, const void* arguments, size_t size,
                  CudaStream stream) const {
    void* const buffer = reinterpret_cast<void*>(1);  // cuda.h's keys for the arguments' buffer and its size
    void* const length = reinterpret_cast<void*>(2);
    void* extra[] = {buffer, const_cast<void*>(arguments), length, &size, nullptr};
    check("cuLaunchKernel", functions_->launch(kernel, grid, 1, 1, threads, 1, 1, 0, stream, nullptr, extra));
}

}  // namespace gdscache
