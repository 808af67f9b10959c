// The executor of moves: `Moves` behind a lock, with threads of its own that copy and sum, and one a disk.
//
// Threads of others take what is foreign: the lanes of a GPU (gpu_server.h). Of ours, only a disk of threads may wait
// for Python's lock, which nobody keeps who waits for them or ends them (bind/disk.h).

#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "disk/disk.h"
#include "moves/moves.h"
#include "moves/pages.h"

namespace gdscache {

// A space, and where its bytes are: an address, or open files over which the slots go in stretches.
struct Place : Space {
    uint8_t* memory = nullptr;
    std::vector<int> files;
    int64_t stretch = 0;  // slots of one file that follow each other
    bool copied = false;  // the kernel copies what is read and written: no O_DIRECT, or a RAM disk
    int64_t slots = 0;    // of a memory, or of files
    bool pinned = false;  // a memory that a GPU's copy engines reach
    int64_t fence = 0;    // slots of each of its page-locked registrations, which no copy may leave; 0: there is one
    uint64_t reached = 0; // of a memory: the disks, a bit each, that read into it and write from it
};

// What a thread of ours did, and when; or streams of a GPU. `kReady` took no time: from then on the layers were in the
// planes, or their copies were queued.
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
        kStoreKernels,
    };
    Kind kind;
    int32_t first, last;  // layers
    int64_t move, pages, bytes;
    Nanoseconds begin, end;
};

// No thread of others may wait any more.
struct Stopped : Error {
    Stopped() : Error(ECANCELED, "the executor was stopped", "wait before close") {}
};

class Executor {
public:
    // `pool`: planes in host memory, or null. `disks`: of one that is null nothing is read or written. `threads`: that
    // copy, and see deadlines pass; none: all is foreign.
    Executor(const Limits& limits, std::vector<Place> places, int32_t reserve_space, Reserve reserve, const Pool* pool,
             std::vector<std::unique_ptr<Disk>> disks, int32_t threads);
    ~Executor();

    // False where its number is taken.
    bool begin(MoveSpec spec);
    // More ways of a load that was begun open, perhaps the last. False where it is not open, or has too many rows then.
    bool extend(int64_t move, std::vector<Way> ways, bool last);
    bool knows(int64_t move) { return Held(*this)->knows(move); }
    bool cancel(int64_t move) { return Held(*this)->cancel(move); }
    void refuse(Status status) { Held(*this)->refuse(status); }
    // Wait until all copies of a group are done, or queued on a GPU, behind a point (Moves::ready); or with `group` -1
    // until the move has ended. The point, or 0, also of a move that nobody knows any more; none where it takes longer.
    // Throws `Stopped`.
    std::optional<int64_t> wait(int64_t move, int32_t group, Nanoseconds until);
    // The outcome of a move that has ended; null before.
    const Outcome* outcome(int64_t move);
    bool forget(int64_t move) { return Held(*this)->forget(move); }

    // The next foreign job, which is the caller's until its end is said; waits for one until then, or until `stop`, and
    // is null where none has come. Who waits asks for those of loads, or those of stores.
    const CopyJob* take_copy(Hands hands, Nanoseconds until);
    bool copy_queued(int64_t job, int64_t point) { return Held(*this)->copy_queued(job, point); }
    bool copy_ended(int64_t job, const uint64_t* found, const char* broken) {
        return Held(*this)->copy_ended(job, found, broken);
    }

    // Late pages that have ended since the last call; waits for one until then. Throws `Stopped` where there is none.
    std::vector<std::pair<int64_t, int32_t>> take_ended_late(Nanoseconds until, size_t most);
    int64_t held_slots() { return Held(*this)->held_slots(); }
    int64_t free_slots() { return Held(*this)->free_slots(); }

    // Keep spans from now on, until they are taken.
    void trace();
    std::vector<Span> take_spans(size_t most);
    void tell(const Span& span);

    // No thread of others waits here any more, and none will. What is under way goes on.
    void stop();

    const Limits& limits() const { return limits_; }
    const std::vector<Place>& places() const { return places_; }
    // The memory of the reserve, or -1 where loads have none.
    int32_t reserve_space() const { return reserve_space_; }

private:
    friend class ExecutorHooks;  // of the tests' build
    struct Flight;
    struct Share;

    // The lock. Those that wait for what its holder has brought about are woken when it is let go, and not before: a
    // thread that is woken while another holds the lock that it needs only costs both a turn.
    class Held {
    public:
        // `disk`: of the thread of that one, which nobody has to wake.
        explicit Held(Executor& executor, int32_t disk = -1)
            : executor_(executor), own_(disk < 0 ? 0 : uint64_t{1} << disk), lock_(executor.lock_) {}
        ~Held() {
            if (lock_.owns_lock()) let_go();
        }
        Moves* operator->() const { return &executor_.moves_; }
        void let_go();
        void take_again() { lock_.lock(); }
        // Whether somebody had to be woken; then what is waited for may have come meanwhile.
        bool woke();
        void wait(std::condition_variable& condition, Nanoseconds time) {
            condition.wait_for(lock_, std::chrono::nanoseconds(time));
        }
        void wake_all() { all_ = true; }

    private:
        struct Call {
            News news;       // `copies`: threads
            uint64_t disks;  // a bit each
        };
        Call call();
        void wake(const Call& call);

        const MustNotFail reserve_;  // else what changes halfway stays so
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
    void copy(const CopyJob& job, std::vector<uint64_t>* found) const;
    std::unique_ptr<Flight> flight(IoJob job, const Disk& disk) const;
    std::vector<Share> shares(const IoJob& job, int64_t limit) const;
    void add_looks(Flight& flight, const IoJob& job) const;
    void keep(const Span& span);  // with the lock held
    void keep_ready();

    const Limits limits_;
    const std::vector<Place> places_;
    const int32_t reserve_space_;
    const Pool* const pool_;
    std::mutex lock_;
    // For ends of moves and groups, ends of what was late, foreign copies of loads, those of stores, and copies of
    // ours. A call for nothing costs its caller, too: to signal a condition may wait for threads that were called
    // before and are not awake yet.
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
