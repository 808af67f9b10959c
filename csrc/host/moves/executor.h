// The executor of moves: `Moves` behind a lock, threads that copy and checksum, and one I/O thread a disk.
//
// Copies of foreign planes and memory are made by other threads: the lanes of a GPU (gpu_server.h). Of the executor's
// threads, only a disk of threads may wait for Python's lock. A thread that waits for such a disk, or destroys it, must
// not hold that lock (bind/handles.h).

#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "base/memory.h"
#include "disk/disk.h"
#include "moves/moves.h"
#include "moves/pages.h"

namespace gdscache {

// A space and the place of its bytes: an address, or open files over which the slots go in stretches.
struct Place : Space {
    uint8_t* memory = nullptr;
    std::vector<int> files;
    int64_t stretch = 0;  // consecutive slots of one file
    bool copied = false;  // the kernel copies reads and writes: no O_DIRECT, or a RAM disk
    int64_t slots = 0;  // of the memory, or of the files
    bool pinned = false;  // memory that a GPU's copy engines reach
    int64_t fence = 0;  // slots of each page-locked registration, which no copy leaves; 0: one
    uint64_t reached = 0;  // of memory: the disks that read into it and write from it, a bit each
};

// The work of a thread of ours, or of a GPU's streams, and its time. `kReady` takes no time: from then on the layers
// are in the planes, or their copies are queued.
struct Span {
    enum class Kind : int32_t {
        kRead,
        kWrite,
        kScatter,
        kGather,
        kDigest,
        kReady,
        kLoadCopies,
        kLoadKernels,
        kStoreCopies,
        kStoreKernels
    };
    Kind kind;
    int32_t first, last;  // layers
    int64_t move, pages, bytes;
    Nanoseconds begin, end;
};

// The executor was stopped: waits of other threads end.
struct Stopped : Error {
    Stopped() : Error(ECANCELED, "the executor was stopped", "wait before close") {}
};

class Executor {
public:
    // `pool`: planes in host memory, or null. `disks`: nothing is read from or written to a null disk. `threads`: the
    // number of threads that copy and see deadlines pass; 0: all spaces are foreign.
    Executor(const Limits& limits, std::vector<Place> places, int32_t reserve_space, Reserve reserve,
             const HostPlanes* pool, std::vector<std::unique_ptr<Disk>> disks, int32_t threads);
    ~Executor();

    // False if its number is taken.
    bool begin(MoveSpec spec);
    // Add ways to an open load. `last`: no more follow. False if the move is not open, or would have too many rows.
    bool extend(int64_t move, std::vector<Way> ways, bool last);
    bool knows(int64_t move) { return Held(*this)->knows(move); }
    bool cancel(int64_t move) { return Held(*this)->cancel(move); }
    void refuse(Status status) { Held(*this)->refuse(status); }
    // Wait until all copies of a group are done, or queued on a GPU, behind a point (Moves::ready); with `group` -1
    // until the move has ended. The point; 0 for an unknown move; none on timeout. Throws `Stopped`.
    std::optional<int64_t> wait(int64_t move, int32_t group, Nanoseconds until);
    // The outcome of an ended move; null before its end.
    const Outcome* outcome(int64_t move);
    bool forget(int64_t move) { return Held(*this)->forget(move); }

    // The next foreign job, of loads or of stores by `hands`. Waits for one until `until` or `stop`; null if none came.
    // The job is the caller's until its end is reported.
    const CopyJob* take_copy(Hands hands, Nanoseconds until);
    bool copy_queued(int64_t job, int64_t point) { return Held(*this)->copy_queued(job, point); }
    bool copy_ended(int64_t job, const uint64_t* found, const char* broken, const uint8_t* unfit = nullptr) {
        return Held(*this)->copy_ended(job, found, broken, unfit);
    }

    // Late pages that have ended since the last call. Waits for one until `until`. Throws `Stopped` after `stop`.
    std::vector<std::pair<int64_t, int32_t>> take_ended_late(Nanoseconds until, size_t most);
    int64_t held_slots() { return Held(*this)->held_slots(); }
    int64_t free_slots() { return Held(*this)->free_slots(); }

    // Keep spans from now on, until they are taken.
    void trace();
    std::vector<Span> take_spans(size_t most);
    void tell(const Span& span);

    // End the waits of other threads, present and future. I/O and copies under way go on.
    void stop();

    const Limits& limits() const { return limits_; }
    const std::vector<Place>& places() const { return places_; }
    // The memory of the reserve; -1: loads have none.
    int32_t reserve_space() const { return reserve_space_; }

private:
    friend class ExecutorHooks;  // of the tests' build
    struct Flight;
    struct Share;

    // The lock. Threads that wait for news of its holder are woken after its release: before it they would wait again.
    class Held {
    public:
        // `disk`: the calling disk's thread, which needs no wake.
        explicit Held(Executor& executor, int32_t disk = -1)
            : executor_(executor), own_(disk < 0 ? 0 : uint64_t{1} << disk), lock_(executor.lock_) {}
        ~Held() {
            if (lock_.owns_lock()) let_go();
        }
        Moves* operator->() const { return &executor_.moves_; }
        // Release the lock, unless there is no news and not `always`, and wake waiting threads. Returns whether it was.
        bool let_go(bool always = true);
        void take_again() { lock_.lock(); }
        // Whether a thread was woken. The lock was released for it, so the awaited state may have come.
        bool woke();
        void wait(std::condition_variable& condition, Nanoseconds time) {
            condition.wait_for(lock_, std::chrono::nanoseconds(time));
        }
        void wake_all() { all_ = true; }

    private:
        const MustNotFail reserve_;  // an operation that stops halfway leaves its state torn
        Executor& executor_;
        const uint64_t own_;
        std::unique_lock<std::mutex> lock_;
        bool all_ = false;
    };

    template <typename Ready>
    bool wait_for(Held& held, std::condition_variable& condition, Nanoseconds until, Ready ready);
    void end();
    void copy_loop();
    void disk_loop(int32_t number);
    void copy(const CopyJob& job, std::vector<uint64_t>* found, std::vector<uint8_t>* unfit) const;
    std::unique_ptr<Flight> flight(IoJob job, const Disk& disk) const;
    std::vector<Share> shares(const IoJob& job, int64_t limit) const;
    void add_looks(Flight& flight, const IoJob& job) const;
    void keep(const Span& span);  // with the lock held
    void keep_ready();

    const Limits limits_;
    const std::vector<Place> places_;
    const int32_t reserve_space_;
    const HostPlanes* const pool_;
    std::mutex lock_;
    // For ends of moves and groups, ends of late I/O, foreign copies of loads, foreign copies of stores, and copies of
    // ours. A needless notify costs its caller too: it may wait for notified threads that are not awake yet.
    std::condition_variable ended_, late_, loads_, stores_, copies_;
    int32_t idle_ = 0;  // threads of ours that wait for copies
    Moves moves_;
    bool stopped_ = false, closing_ = false;
    bool traced_ = false;
    std::deque<Span> kept_;
    std::vector<std::unique_ptr<Disk>> disks_;
    std::vector<std::thread> threads_;
};

}  // namespace gdscache
