// The moves of an executor: the next reads, writes and copies, and the verdict on each page.
//
// A monitor without threads, clock or I/O. A thread takes a job, does it, and reports its end; other threads ask for
// the state of a move. So the same code runs under threads in an engine, and under a test that tries every order of
// events. Not thread-safe: `Executor` holds a lock around each call.

#pragma once

#include <algorithm>
#include <map>

#include "disk/disk.h"
#include "moves/move.h"

namespace gdscache {

// How one page of an I/O job ended: 0, an errno, or one of these.
constexpr int32_t kShort = kMostErrno + 1;
constexpr int32_t kGone = kMostErrno + 2;   // the files do not keep the page
constexpr int32_t kWrong = kMostErrno + 3;  // the bytes are not the stored ones

struct IoEnd {
    int32_t page;  // the page's place in the job
    int32_t error;
};

// Events that other threads may wait for. `take_io` and `take_copy` may cause some too, even if they return null.
struct News {
    bool io = false;      // files: a new move, one that reads no further, or one whose next I/O is another disk's
    bool room = false;    // files: fewer bytes are in flight, or more slots of the reserve are free
    int64_t copies = 0;   // about the bytes that threads of ours may copy; at least 1 if a thread has to look
    bool loads = false;   // foreign copies into planes
    bool stores = false;  // foreign copies out of planes
    bool ended = false;   // a group of layers is ready, or a move has ended
    bool late = false;    // late I/O has ended
};

// A group of layers that is ready, or never will be.
struct ReadyGroup {
    int64_t move;
    int32_t first, last;
};

// The result of a move.
struct Outcome {
    std::vector<Status> statuses;              // of loads and prefetches, by row
    std::vector<std::pair<int32_t, int32_t>> errors;  // rows whose I/O failed, and their errors
    std::vector<int32_t> late;                 // rows whose I/O had not ended
    bool broken = false;                       // a copy failed: pages may have no verdict
    std::string why;                           // the failed copy's error
};

// The bounce reserve of loads, which pages pass through: slots [first, first + slots) of a memory.
class Reserve {
public:
    // `fence`: the memory is registered in pieces of `fence` slots, and no run crosses a border; 0: one piece.
    Reserve(int64_t first, int64_t slots, int64_t fence) : first_(first), fence_(fence), used_(slots, false) {}

    int64_t slots() const { return static_cast<int64_t>(used_.size()); }
    int64_t free() const { return std::count(used_.begin(), used_.end(), false); }

    // Take up to `most` free adjacent slots from `*slot` on: the first run of `most`, else the longest. Returns their
    // number; 0 if no slot is free. Taking the first run keeps the bytes in the processor's cache.
    int64_t take(int64_t most, int64_t* slot) {
        int64_t best = 0, best_at = 0;
        for (int64_t at = 0; at < slots() && best < most;) {
            int64_t end = at;
            while (end < slots() && !used_[end] && end - at < most && !(end > at && fenced(end))) ++end;
            if (end - at > best) best = end - at, best_at = at;
            at = std::max(end, at + 1);
        }
        std::fill_n(used_.begin() + best_at, best, true);
        *slot = first_ + best_at;
        return best;
    }

    void give(int64_t slot, int64_t count) { std::fill_n(used_.begin() + (slot - first_), count, false); }

private:
    bool fenced(int64_t at) const { return fence_ != 0 && (first_ + at) % fence_ == 0; }

    int64_t first_, fence_;
    std::vector<bool> used_;
};

class Moves {
public:
    Moves(const Limits& limits, std::vector<Space> spaces, int32_t reserve_space, Reserve reserve);
    ~Moves();

    // --- for callers that want bytes moved

    void begin(MoveSpec spec);
    // Add ways to a load that was begun open; their rows follow the move's. Before the `last` ways no group is ready
    // and the move does not end. False if the move is not open.
    bool extend(int64_t id, std::vector<Way> ways, bool last);
    // Copy no further into the planes; reads under way come to their ends. False for an unknown move.
    bool cancel(int64_t id);
    // From now on no read begins: its pages get this verdict. `kPending`: reads may begin again.
    void refuse(Status status);
    bool knows(int64_t move) const { return moves_.contains(move); }
    int32_t groups(int64_t move) const;
    int64_t rows(int64_t move) const;
    bool ended(int64_t move) const;
    // Whether all copies of a group are done, or queued on a GPU. `point`: the last of the group's queued copies that
    // are under way, else 0. All groups of an ended move are ready.
    bool ready(int64_t id, int32_t group, int64_t* point) const;
    // Groups of loads without copies left, since the last call. Kept after `watch`.
    void watch() { watched_ = true; }
    std::vector<ReadyGroup> take_ready() { return std::exchange(ready_, {}); }
    const Outcome& outcome(int64_t move) const;
    // Drop a move whose outcome was read. Late I/O keeps its memory, and `take_ended_late` reports its end. False if
    // the move has not ended, or is unknown.
    bool forget(int64_t id);
    // Late pages whose I/O has ended: (move, row).
    std::vector<std::pair<int64_t, int32_t>> take_ended_late(size_t most);
    bool has_ended_late() const { return !ended_late_.empty(); }
    // Slots of the reserve that late reads hold.
    int64_t held_slots() const { return held_slots_; }
    int64_t free_slots() const { return reserve_.free(); }
    // Slots that a disk's reads may take, if they are free. Slow or hanging reads leave each other disk its share.
    int64_t room(int32_t disk) const {
        int64_t left = reserve_.slots();
        for (int32_t of = 0; of < disks_; ++of) left -= std::max(of == disk ? 0 : share_, traffic_[of].slots);
        return left;
    }

    // --- for threads that move them

    // The next I/O of a disk, kept until all of its pages have ended; null if none may begin now.
    const IoJob* take_io(int32_t disk);
    // The disks, a bit each, whose I/O waits for the end of other I/O or of copies.
    uint64_t crowded() const { return crowded_; }
    // Some pages of a job have ended. `sums`: (pages of the job, layers), of the ended pages' bytes; null: not taken.
    // False, without effect, if the job is not under way or lacks such a page.
    bool io_ended(int64_t job, const IoEnd* ends, int64_t count, const uint64_t* sums = nullptr);
    // The next copy into or out of planes, or check of memory, for `hands`. Kept until its end; null if there is none.
    const CopyJob* take_copy(Hands hands);
    // A copy is queued on a GPU, which works in order. `point`: its place in that order; later copies have greater
    // ones. False if the copy is not under way.
    bool copy_queued(int64_t job, int64_t point);
    // `found`: (pages, layers) of the job, if it asked for sums. `broken`: the error of a failed copy, or null. False,
    // without effect, if the copy is not under way or its sums are missing. `unfit`: by page of the job, not 0 for a page
    // that does not fit into a packed extent; null if each fits.
    bool copy_ended(int64_t number, const uint64_t* found, const char* broken, const uint8_t* unfit = nullptr);
    // Since the last call.
    News take_news() { return std::exchange(news_, {}); }
    // The next time at which `expire` has work; the largest number if there is none.
    Nanoseconds deadline() const;
    // I/O that has not ended by its deadline is late.
    void expire(Nanoseconds now);

private:
    enum class Work : uint8_t;
    enum class Cell : uint8_t;
    struct Move;
    struct Flight;
    struct Copying;
    struct Traffic {
        int64_t flying = 0;        // bytes of I/O that is not late
        int64_t writing = 0;       // of these, bytes of writes
        int32_t reads_in_row = 0;  // while writes wait
        int64_t slots = 0;         // of the reserve, in which its reads lie
    };

    using Order = std::map<std::pair<Priority, int64_t>, Move*>;  // by priority, then in the order of `begin`

    Move& at(int64_t move) const { return *moves_.at(move); }
    void add(Move& move, std::vector<Way> ways);
    bool goes_on(const Move& move, const Way& way) const;
    bool reads(const Way& way) const;
    bool passes(const Way& way) const;
    void call_off(Move& move, int32_t way);
    const IoJob* next_of(Work work, int32_t disk);
    const IoJob* next_read(Move& move, int32_t disk);
    const IoJob* next_write(Move& move, int32_t disk);
    void read_no_further(Move& move, Status status);
    // Most slots of a read: while a round is copied, the others are read.
    int64_t round_slots() const { return std::max<int64_t>(1, reserve_.slots() / 4); }
    bool take_slots(Flight& flight, int32_t disk);
    bool others_turn(Move& move, int32_t way, int32_t files, int32_t disk);
    bool crowds(int32_t disk);
    int64_t io_bytes(int32_t files) const;
    const IoJob* issue(Move& move, std::unique_ptr<Flight> flight);
    bool looked_at(const Move& move, const Way& way) const;
    bool fits(int64_t bytes, int32_t files, bool write);
    int32_t memory(const Way& way) const;
    bool foreign(const Move& move, const Way& way) const;
    void tell(const Move& move, const Way& way, int64_t bytes);
    void tell_all(const Move& move);
    void landed(Move& move, Flight& flight, int32_t page, const uint64_t* sums = nullptr);
    void may_be_copied(Move& move, int32_t group, int32_t way);
    bool too_few(Move& move, int32_t group, int32_t way) const;
    void announce(Move& move, int32_t group);
    const CopyJob* fill_copy(Move& move, int32_t group, int32_t way, bool foreign);
    void judge(Move& move, int32_t row, Status status);
    void copied(Move& move, int32_t row, int32_t group);
    void end_cell(Move& move, int32_t row, int32_t group);
    void end_page(Flight& flight, int32_t page, int32_t error, const uint64_t* sums);
    void end_late(Move& move, int32_t row);
    void let_go(Flight& flight);
    void pass_deadline(Move& move);
    void end_if_done(Move& move);
    void drop_forgotten(Move& move);

    Limits limits_;
    std::vector<Space> spaces_;
    int32_t reserve_space_, disks_ = 1;
    Reserve reserve_;
    int64_t share_ = 0;  // slots of the reserve that each disk finds free, whatever the others do
    Status refusal_ = Status::kPending;
    int64_t begun_ = 0, next_job_ = 1;
    Traffic traffic_[kMostDisks];
    int64_t held_slots_ = 0;
    uint64_t crowded_ = 0;      // see `crowded`
    bool owed_to_write_ = false;         // the next room in flight is for a write
    bool watched_ = false;
    News news_;
    std::map<int64_t, std::unique_ptr<Move>> moves_;
    Order open_;                // moves that have not ended, in the order of service
    std::map<int64_t, std::unique_ptr<Flight>> flights_;  // I/O under way, by job
    std::map<int64_t, std::unique_ptr<Copying>> copies_;
    std::vector<std::pair<int64_t, int32_t>> ended_late_;
    std::vector<ReadyGroup> ready_;
};

}  // namespace gdscache
