// A CUDA driver for tests, as a library that `Cuda` opens. See fake_cuda.h.

#include "tests/fake_cuda.h"

#include <string>

#include "tests/fake_driver.h"

#define DRIVER extern "C" __attribute__((visibility("default")))
// Count the call, and fail if ordered. Most calls need a context.
#define CALLED(name)                                                                                                   \
    static Counter& counter_of = counter(name);                                                                        \
    if (const int code = counter_of.called()) return code
#define CALLED_WITHIN(name)                                                                                            \
    CALLED(name);                                                                                                      \
    if (contexts.empty()) return kNoContext

using namespace gdscache::test;

namespace {

constexpr int kInvalid = 1, kNoContext = 201, kNoHandle = 400, kNotFound = 500, kNotReady = 600, kBroken = 719;

struct Counter {
    std::string name;
    std::atomic<int64_t> calls = 0, left = -1;

    int called() {
        calls.fetch_add(1, std::memory_order_relaxed);
        if (left.load(std::memory_order_relaxed) < 0) return 0;
        return left.fetch_sub(1, std::memory_order_relaxed) == 0 ? kBroken : 0;
    }
};

Counter& counter(const std::string& name) {
    static std::mutex* const lock = new std::mutex;
    static auto* const all = new std::deque<Counter>;
    const std::lock_guard held(*lock);
    for (Counter& one : *all) {
        if (one.name == name) return one;
    }
    return all->emplace_back(name);
}

std::atomic<int64_t> living[kLiving];
std::atomic<bool> held_copies = false;
std::atomic<int64_t> slow_us = 0;
std::atomic<int32_t> batches = 13, widest = 16;
int context = 0;
thread_local std::vector<void*> contexts;

void await_copies() {
    while (held_copies.load(std::memory_order_relaxed)) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

struct Attributes {
    int source_order, source_type, source_id, target_type, target_id;
    unsigned flags;
};

// CUDA_MEMCPY2D.
struct Rows {
    struct End {
        size_t x, y;
        int type;
        void* host;
        uint64_t address;
        void* array;
        size_t pitch;
    };
    End from, to;
    size_t width, height;
};

int batch(uint64_t* to, uint64_t* from, size_t* bytes, size_t count, Attributes* attributes, size_t* starts,
          size_t n_attributes, void* handle) {
    CALLED_WITHIN("cuMemcpyBatchAsync");
    if (!count || !handle || n_attributes != 1 || *starts != 0 || attributes->source_order != 1) return kInvalid;
    struct Piece {
        uint64_t to, from;
        size_t bytes;
    };
    std::vector<Piece> pieces;
    for (size_t n = 0; n < count; ++n) {
        if (!bytes[n]) return kInvalid;
        memory().mapped(to[n], bytes[n]);
        memory().mapped(from[n], bytes[n]);
        pieces.insert(pieces.begin() + static_cast<ptrdiff_t>(to[n] / 64 % (n + 1)), {to[n], from[n], bytes[n]});
    }
    stream_at(handle)->push([pieces = std::move(pieces)] {  // in no order
        await_copies();
        for (const Piece& one : pieces) {
            std::memcpy(memory().mapped(one.to, one.bytes), memory().mapped(one.from, one.bytes), one.bytes);
        }
    });
    return 0;
}

int batch_12_8(uint64_t* to, uint64_t* from, size_t* bytes, size_t count, Attributes* attributes, size_t* starts,
               size_t n_attributes, size_t* failed, void* handle) {
    *failed = 0;
    return batch(to, from, bytes, count, attributes, starts, n_attributes, handle);
}

}  // namespace

// --- orders

DRIVER void fake_batches(int32_t form) { batches = form; }
DRIVER void fake_fail(const char* function, int64_t nth) { counter(function).left = nth; }
DRIVER int64_t fake_calls(const char* function) { return counter(function).calls; }
DRIVER void fake_delay(int64_t microseconds) { delay_us = microseconds; }
DRIVER void fake_hold(int32_t held) { held_all = held != 0; }
DRIVER void fake_slow(int64_t microseconds) { slow_us = microseconds; }
DRIVER int64_t fake_living(int32_t what) { return living[what]; }
DRIVER int64_t fake_entered_here() { return static_cast<int64_t>(contexts.size()); }
DRIVER void fake_hold_copies(int32_t held) { held_copies = held != 0; }
DRIVER void* fake_context() { return &context; }
DRIVER void fake_vector(int32_t bytes) { widest = bytes; }
DRIVER void fake_pin(void* address, size_t bytes) { memory().add(reinterpret_cast<uint64_t>(address), bytes, nullptr); }

DRIVER uint64_t fake_device(void* address, size_t bytes) {
    memory().add(reinterpret_cast<uint64_t>(address) | kDeviceBit, bytes, nullptr);
    return reinterpret_cast<uint64_t>(address) | kDeviceBit;
}

DRIVER void fake_forget(void* address) {
    uint8_t* own;
    const auto at = reinterpret_cast<uint64_t>(address);
    assert(memory().remove(at, &own) || memory().remove(at | kDeviceBit, &own));
}

DRIVER void* fake_kernel(int32_t which) {
    static int32_t kernels[] = {kGather, kScatter, kGatherSums, kScatterSums, kGatherPacked, kScatterPacked};
    return &kernels[which];
}

DRIVER void fake_call(void* stream, void (*function)(void*), void* argument) {
    stream_at(stream)->push([function, argument] { function(argument); });
}

// --- the driver

DRIVER int cuCtxPushCurrent_v2(void* pushed) {
    CALLED("cuCtxPushCurrent_v2");
    if (pushed != &context) return kNoContext;
    contexts.push_back(pushed);
    ++living[kEntered];
    return 0;
}

DRIVER int cuCtxPopCurrent_v2(void** popped) {
    CALLED_WITHIN("cuCtxPopCurrent_v2");
    *popped = contexts.back();
    contexts.pop_back();
    --living[kEntered];
    return 0;
}

DRIVER int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    CALLED_WITHIN("cuCtxGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return 0;
}

DRIVER int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
    CALLED_WITHIN("cuStreamCreateWithPriority");
    static std::atomic<uint64_t> seed = 1;
    if (flags != 1 || priority > 0 || priority < -5) return kInvalid;
    *stream = new Stream(seed++);
    ++living[kStreams];
    return 0;
}

DRIVER int cuStreamDestroy_v2(void* stream) {
    CALLED_WITHIN("cuStreamDestroy_v2");
    delete stream_at(stream);
    --living[kStreams];
    return 0;
}

DRIVER int cuStreamSynchronize(void* stream) {
    CALLED_WITHIN("cuStreamSynchronize");
    const auto mark = std::make_shared<Mark>();
    stream_at(stream)->push([mark] { mark->set(); });
    mark->wait();
    return 0;
}

DRIVER int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    CALLED_WITHIN("cuStreamWaitEvent");
    const std::shared_ptr<Mark> mark = event_at(event)->now();
    if (mark) stream_at(stream)->push([mark] { mark->wait(); });
    return 0;
}

DRIVER int cuEventCreate(void** event, unsigned flags) {
    CALLED_WITHIN("cuEventCreate");
    if (flags > 3) return kInvalid;
    *event = new Event(!(flags & 2));
    ++living[kEvents];
    return 0;
}

DRIVER int cuEventDestroy_v2(void* event) {
    CALLED_WITHIN("cuEventDestroy_v2");
    event_at(event)->magic = 0;
    delete static_cast<Event*>(event);
    --living[kEvents];
    return 0;
}

DRIVER int cuEventRecord(void* event, void* stream) {
    CALLED_WITHIN("cuEventRecord");
    const auto mark = std::make_shared<Mark>();
    Event* const of = event_at(event);
    const std::lock_guard held(of->lock);
    of->mark = mark;
    stream_at(stream)->push([mark] { mark->set(); });
    return 0;
}

DRIVER int cuEventQuery(void* event) {
    CALLED_WITHIN("cuEventQuery");
    const std::shared_ptr<Mark> mark = event_at(event)->now();
    return !mark || mark->is_done() ? 0 : kNotReady;
}

DRIVER int cuEventSynchronize(void* event) {
    CALLED_WITHIN("cuEventSynchronize");
    if (const std::shared_ptr<Mark> mark = event_at(event)->now()) mark->wait();
    return 0;
}

DRIVER int cuEventElapsedTime(float* milliseconds, void* from, void* to) {
    CALLED_WITHIN("cuEventElapsedTime");
    Event* const events[] = {event_at(from), event_at(to)};
    const std::shared_ptr<Mark> marks[] = {events[0]->now(), events[1]->now()};
    if (!events[0]->timed || !events[1]->timed || !marks[0] || !marks[1]) return kNoHandle;
    if (!marks[0]->is_done() || !marks[1]->is_done()) return kNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(marks[1]->time - marks[0]->time).count();
    return 0;
}

DRIVER int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    CALLED_WITHIN("cuMemAlloc_v2");
    if (!bytes || bytes > size_t{1} << 33) return 2;
    uint8_t* const own = Memory::allocate(bytes);
    *address = reinterpret_cast<uint64_t>(own + 4096) | kDeviceBit;
    memory().add(*address, bytes, own);
    ++living[kDeviceMemory];
    return 0;
}

DRIVER int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    CALLED_WITHIN("cuMemHostAlloc");
    if (!bytes || bytes > size_t{1} << 33) return 2;
    uint8_t* const own = Memory::allocate(bytes);
    *address = own + 4096;
    memory().add(reinterpret_cast<uint64_t>(*address), bytes, own);
    ++living[kHostMemory];
    return 0;
}

DRIVER int cuMemFree_v2(uint64_t address) {
    CALLED_WITHIN("cuMemFree_v2");
    uint8_t* own = nullptr;
    if (!memory().remove(address, &own) || !own) return kInvalid;
    std::free(own);
    --living[kDeviceMemory];
    return 0;
}

DRIVER int cuMemFreeHost(void* address) {
    CALLED_WITHIN("cuMemFreeHost");
    uint8_t* own = nullptr;
    if (!memory().remove(reinterpret_cast<uint64_t>(address), &own) || !own) return kInvalid;
    std::free(own);
    --living[kHostMemory];
    return 0;
}

DRIVER int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    CALLED_WITHIN("cuMemcpyAsync");
    memory().any(to, bytes);
    memory().any(from, bytes);
    stream_at(stream)->push([=] {
        await_copies();
        std::memcpy(memory().any(to, bytes), memory().any(from, bytes), bytes);
    });
    return 0;
}

DRIVER int cuMemcpy2DAsync_v2(const Rows* rows, void* stream) {
    CALLED_WITHIN("cuMemcpy2DAsync_v2");
    const auto at = [](const Rows::End& end, size_t row) { return end.address + row * end.pitch; };
    for (const Rows::End* const end : {&rows->from, &rows->to}) {
        if (end->x || end->y || end->type != 4 || end->host || end->array) return kInvalid;
        if (end->pitch < rows->width || end->pitch > INT32_MAX || !rows->width || !rows->height) return kInvalid;
        memory().mapped(end->address, (rows->height - 1) * end->pitch + rows->width);
    }
    stream_at(stream)->push([=, copy = *rows] {
        await_copies();
        for (size_t row = copy.height; row-- > 0;) {  // in no order
            std::memcpy(memory().mapped(at(copy.to, row), copy.width), memory().mapped(at(copy.from, row), copy.width),
                        copy.width);
        }
    });
    return 0;
}

DRIVER int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
    CALLED_WITHIN("cuMemcpyDtoH_v2");
    assert(from & kDeviceBit);
    std::memcpy(to, memory().mapped(from, bytes), bytes);
    return 0;
}

DRIVER int cuLaunchKernel(void* kernel, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                          unsigned, void* stream, void** parameters, void** extra) {
    CALLED_WITHIN("cuLaunchKernel");
    const int32_t which = *static_cast<int32_t*>(kernel);
    assert(grid > 0 && !parameters && extra[0] == reinterpret_cast<void*>(1) && extra[2] == reinterpret_cast<void*>(2));
    const size_t size = *static_cast<size_t*>(extra[3]);
    const size_t summed = offsetof(Arguments, unfit), plain = offsetof(Arguments, team);
    assert(!extra[4] && size == (which >= kGatherPacked ? sizeof(Arguments) : which >= kGatherSums ? summed : plain));
    const auto arguments = std::make_shared<Arguments>();
    std::memcpy(static_cast<void*>(arguments.get()), extra[1], size);
    const std::chrono::microseconds more(slow_us.exchange(0));
    stream_at(stream)->push([=] {
        KernelRun(which, *arguments, threads, widest.load()).run();
        std::this_thread::sleep_for(more);
    });
    return 0;
}

DRIVER int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t, int* status) {
    *found = nullptr;
    *status = 1;
    if (std::string(name) != "cuMemcpyBatchAsync") return kNotFound;
    const int32_t form = batches;
    if (version > 12999 && form == 12) return kInvalid;  // a driver knows no versions after its own
    if (form == 0) return 0;
    *found = version > 12999 ? reinterpret_cast<void*>(&batch) : reinterpret_cast<void*>(&batch_12_8);
    *status = 0;
    return 0;
}

DRIVER int cuThreadExchangeStreamCaptureMode(int* mode) {
    CALLED_WITHIN("cuThreadExchangeStreamCaptureMode");
    *mode = 0;
    return 0;
}

DRIVER int cuGetErrorName(int code, const char** text) {
    *text = code == kBroken ? "FAKE_ERROR" : "FAKE_REFUSAL";
    return 0;
}
