// A libcufile for tests, opened in place of the real one. See fake_cufile.h.

#include "tests/fake_cufile.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define CUFILE extern "C" __attribute__((visibility("default")))

using namespace gdscache::test;

namespace {

constexpr uint64_t kDeviceBit = uint64_t{1} << 56;  // fake_cuda.h
constexpr int kSuccess = 0, kNotInitialized = 5001, kNotSupported = 5002, kInvalid = 5022, kRegistered = 5023;

struct Status {
    int cufile, cuda;
};
struct Description {
    int type;
    union {
        int fd;
        void* other;
    } file;
    const void* operations;
};
struct Fault {
    int op, kind;
    long value, offset;
    int times;
};

// Never destroyed: threads may outlive static objects.
struct State {
    std::mutex lock;
    std::condition_variable changed;
    std::vector<Fault> faults;
    int refusals[kCuFileCalls] = {};
    long calls[kCuFileCalls] = {}, moves[2] = {};
    int waiting = 0;
    uint64_t releases = 0;
    std::string stats;
    std::multiset<int> files;
    std::map<uint64_t, size_t> memories;
    int64_t (*entered)() = nullptr;

    void wait(std::unique_lock<std::mutex>& held) {
        waiting++;
        changed.wait(held, [this, before = releases] { return releases != before; });
        waiting--;
    }
};

State& state() {
    static State* const made = new State;
    return *made;
}

Status answer(int code) { return {code, 0}; }

void check_context() { assert(!state().entered || state().entered() > 0); }

Status called(int call) {
    State& all = state();
    std::unique_lock held(all.lock);
    // cuFile opens its driver with the first call that needs it.
    const bool opens = call != kDriver && !all.calls[kDriver];
    for (const int one : {opens ? int{kDriver} : call, call}) {
        all.calls[one]++;
        const int code = all.refusals[one];
        if (code == kHang) {
            all.wait(held);
        } else if (code != kSuccess) {
            if (one == kDriver) all.calls[kDriver] = 0;
            return answer(code);
        }
        if (one == call) break;
    }
    return answer(kSuccess);
}

void count(int op) {
    State& all = state();
    const std::lock_guard held(all.lock);
    all.moves[op]++;
    std::FILE* const file = all.stats.empty() ? nullptr : std::fopen(all.stats.c_str(), "w");
    if (!file) return;
    std::fprintf(file, "Reads\t\t: n=%ld ok=%ld err=0\n", all.moves[0], all.moves[0]);
    std::fprintf(file, "Writes\t\t: n=%ld ok=%ld err=0\n", all.moves[1], all.moves[1]);
    std::fclose(file);
}

ssize_t everything(int op, int fd, char* memory, size_t bytes, off_t offset) {
    size_t done = 0;
    while (done < bytes) {
        const off_t at = offset + static_cast<off_t>(done);
        const ssize_t moved =
            op == 0 ? pread(fd, memory + done, bytes - done, at) : pwrite(fd, memory + done, bytes - done, at);
        if (moved < 0) return -1;
        if (moved == 0) break;
        done += static_cast<size_t>(moved);
    }
    return static_cast<ssize_t>(done);
}

// The host address of a call's bytes. Memory of the fake GPU is registered, and named by its base.
char* real(char* base, size_t bytes, off_t at) {
    const auto address = reinterpret_cast<uint64_t>(base);
    if (address & kDeviceBit) {
        const std::lock_guard held(state().lock);
        const auto found = state().memories.find(address);
        assert(found != state().memories.end() && at >= 0 && static_cast<size_t>(at) + bytes <= found->second);
    }
    return reinterpret_cast<char*>(address & ~kDeviceBit) + at;
}

ssize_t move(int op, void* file, char* base, size_t bytes, off_t offset, off_t at) {
    const int fd = static_cast<int>(reinterpret_cast<intptr_t>(file)) - 1;
    char* const memory = real(base, bytes, at);
    State& all = state();
    Fault fault{};
    {
        std::unique_lock held(all.lock);
        assert(all.files.contains(fd));
        for (Fault& one : all.faults) {
            const bool meets =
                one.offset < 0 || (offset <= one.offset && one.offset < offset + static_cast<off_t>(bytes));
            if (!one.times || one.op != op || !meets) continue;
            one.times--;
            fault = one;
            if (one.kind == kShort || one.kind == kLie) fault.value += std::max<long>(one.offset - offset, 0);
            break;
        }
        if (fault.kind == kWait) all.wait(held);
    }
    count(op);
    const auto some = static_cast<size_t>(fault.value);
    if (fault.kind == kError) return -fault.value;
    if (fault.kind == kErrno) return errno = static_cast<int>(fault.value), -1;
    if (fault.kind == kShort) return everything(op, fd, memory, some, offset);
    if (fault.kind == kLie) return everything(op, fd, memory, some, offset) < 0 ? -1 : static_cast<ssize_t>(bytes);
    const ssize_t moved = everything(op, fd, memory, bytes, offset);
    return fault.kind == kMore ? moved + fault.value : fault.kind == kFewer ? moved - fault.value : moved;
}

}  // namespace

// --- orders

CUFILE int fake_cufile_fault(int op, int kind, long value, long offset, int times) {
    const std::lock_guard held(state().lock);
    state().faults.push_back({op, kind, value, offset, times});
    return 0;
}

CUFILE void fake_cufile_release() {
    State& all = state();
    const std::lock_guard held(all.lock);
    all.faults.clear();
    std::fill(std::begin(all.refusals), std::end(all.refusals), kSuccess);
    all.releases++;
    all.changed.notify_all();
}

CUFILE void fake_cufile_refuse(int call, int code) {
    const std::lock_guard held(state().lock);
    state().refusals[call] = code;
}

CUFILE void fake_cufile_stats(const char* path) {
    const std::lock_guard held(state().lock);
    state().stats = path;
}

CUFILE void fake_cufile_forget() {
    const std::lock_guard held(state().lock);
    state().files.clear();
    state().memories.clear();
}

CUFILE void fake_cufile_contexts(int64_t (*entered)()) { state().entered = entered; }

CUFILE long fake_cufile_calls(int call) {
    const std::lock_guard held(state().lock);
    return state().calls[call];
}

CUFILE long fake_cufile_moves(int op) {
    const std::lock_guard held(state().lock);
    return state().moves[op];
}

CUFILE int fake_cufile_waiting() {
    const std::lock_guard held(state().lock);
    return state().waiting;
}

CUFILE long fake_cufile_living() {
    const std::lock_guard held(state().lock);
    return static_cast<long>(state().files.size() + state().memories.size());
}

// --- the library

CUFILE Status cuFileDriverOpen() {
    check_context();
    return called(kDriver);
}
CUFILE Status cuFileDriverClose() { return answer(kSuccess); }
CUFILE Status cuFileDriverClose_v2() { return answer(kSuccess); }
CUFILE long cuFileUseCount() { return 1; }
CUFILE Status cuFileGetVersion(int* version) { return *version = 1190, answer(kSuccess); }
CUFILE Status cuFileSetParameterString(int, const char*) { return answer(kSuccess); }
CUFILE Status cuFileDriverGetProperties(void*) { return answer(kNotInitialized); }
CUFILE Status cuFileDriverSetPollMode(bool, size_t) { return answer(kSuccess); }
CUFILE Status cuFileDriverSetMaxCacheSize(size_t) { return answer(kSuccess); }
CUFILE Status cuFileDriverSetMaxPinnedMemSize(size_t) { return answer(kSuccess); }
CUFILE Status cuFileDriverSetMaxDirectIOSize(size_t) { return answer(kSuccess); }

CUFILE Status cuFileHandleRegister(void** handle, Description* description) {
    check_context();
    if (const Status status = called(kHandle); status.cufile) return status;
    if (description->type != 1) return answer(kInvalid);
    const std::lock_guard held(state().lock);
    state().files.insert(description->file.fd);
    *handle = reinterpret_cast<void*>(static_cast<intptr_t>(description->file.fd) + 1);
    return answer(kSuccess);
}

CUFILE void cuFileHandleDeregister(void* handle) {
    const std::lock_guard held(state().lock);
    const auto found = state().files.find(static_cast<int>(reinterpret_cast<intptr_t>(handle)) - 1);
    assert(found != state().files.end());
    state().files.erase(found);
}

CUFILE Status cuFileBufRegister(const void* memory, size_t bytes, int) {
    check_context();
    if (!memory || !bytes) return answer(kInvalid);
    if (const Status status = called(kBuffer); status.cufile) return status;
    const std::lock_guard held(state().lock);
    const bool first = state().memories.emplace(reinterpret_cast<uint64_t>(memory), bytes).second;
    return answer(first ? kSuccess : kRegistered);
}

CUFILE Status cuFileBufDeregister(const void* memory) {
    const std::lock_guard held(state().lock);
    return answer(state().memories.erase(reinterpret_cast<uint64_t>(memory)) ? kSuccess : kInvalid);
}

CUFILE ssize_t cuFileRead(void* handle, void* base, size_t bytes, off_t offset, off_t at) {
    check_context();
    return move(0, handle, static_cast<char*>(base), bytes, offset, at);
}

CUFILE ssize_t cuFileWrite(void* handle, const void* base, size_t bytes, off_t offset, off_t at) {
    check_context();
    return move(1, handle, static_cast<char*>(const_cast<void*>(base)), bytes, offset, at);
}

// Looked up, but not used here.
CUFILE Status cuFileReadAsync() { return answer(kNotSupported); }
CUFILE Status cuFileWriteAsync() { return answer(kNotSupported); }
CUFILE Status cuFileStreamRegister() { return answer(kNotSupported); }
CUFILE Status cuFileStreamDeregister() { return answer(kNotSupported); }
CUFILE Status cuFileBatchIOSetUp() { return answer(kNotSupported); }
CUFILE Status cuFileBatchIOSubmit() { return answer(kNotSupported); }
CUFILE Status cuFileBatchIOGetStatus() { return answer(kNotSupported); }
CUFILE Status cuFileBatchIOCancel() { return answer(kNotSupported); }
CUFILE void cuFileBatchIODestroy() {}
