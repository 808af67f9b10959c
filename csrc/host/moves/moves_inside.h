// The state of a move, of I/O and of copies under way, for moves*.cc alone.

#pragma once

#include <deque>

#include "moves/moves.h"

namespace gdscache {

enum class Moves::Work : uint8_t { kLoad, kGather, kWrite };

// A group of a page's layers: to be copied, queued by a foreign copier, or done (copied or given up).
enum class Moves::Cell : uint8_t { kOpen, kQueued, kDone };

// I/O under way: some pages of a way, for a group of layers.
struct Moves::Flight {
    IoJob job;
    Move* move = nullptr;
    int32_t way = 0, group = 0, disk = 0;
    bool late = false;
    int64_t part = 0;           // bytes of a page
    std::vector<bool> over;     // pages whose I/O has ended
    int32_t left = 0;           // pages whose I/O has not ended
    int32_t copies = 0;         // landed pages that are not copied yet
    int64_t slot = 0, slots = 0;  // of the reserve, in which the pages lie
};

struct Moves::Copying {
    CopyJob job;
    Move* move = nullptr;
    int32_t way = 0, group = 0;
    bool queued = false;
    std::vector<Flight*> flights;  // the flights that these pages' copies keep; null: none
};

struct Moves::Move {
    struct Landed {
        int32_t row;
        int64_t slot, at;  // as in a job
        Flight* flight;
        bool is_whole() const { return flight->left == 0; }  // whether all of its window's reads have ended
    };
    // Pages of a way that may be copied, of one group.
    struct Copyable {
        int64_t resident = 0;  // the next of the pages that are in memory from the start
        std::deque<Landed> landed;
        void gather_window();
    };
    // The next I/O of a way: a page, or a group behind the last.
    struct Cursor {
        int32_t group;
        int64_t page;
    };

    struct Row {
        int32_t left;      // groups that are not copied
        int32_t next = 0;  // the first group that has not landed, or has one before it that has not
        int32_t late = 0;  // late I/O
    };
    struct Layers {
        int32_t todo;        // rows that are not done, and one more while the move is open
        int32_t queued = 0;  // rows whose copies are queued and not done
        int32_t flying = 0;  // copies that are queued and not done
        int32_t unread = 0;  // rows whose reads have not ended
        int64_t point = 0;   // the greatest point of a queued copy
        bool announced = false;  // reported as ready
    };

    int64_t id = 0;
    Order::key_type order;
    MoveSpec spec;
    Work work = Work::kLoad;
    Outcome outcome;
    std::vector<int32_t> first_row;  // of each way, and behind them the number of rows
    std::vector<Row> row;
    std::vector<Layers> group;
    std::vector<Cell> cells;         // (rows, groups)
    std::vector<uint8_t> there;      // (rows, groups): read
    std::vector<Copyable> copyable;  // (ways, groups)
    std::vector<Cursor> cursors;     // of each way
    std::pair<int32_t, int32_t> turn{-1, -1};  // the group and way for which other disks were last woken
    int32_t ios = 0, late_ios = 0, copying = 0;
    bool cancelled = false, broken = false, expired = false, over = false, forgotten = false;

    int32_t rows() const { return first_row.back(); }
    int32_t groups() const { return static_cast<int32_t>(spec.groups.size()); }
    int32_t ways() const { return static_cast<int32_t>(spec.ways.size()); }
    bool pending(int32_t number) const { return outcome.statuses[number] == Status::kPending; }
    size_t cell(int32_t number, int32_t of) const { return static_cast<size_t>(number) * groups() + of; }
    Copyable& copies(int32_t of, int32_t by) { return copyable[static_cast<size_t>(by) * groups() + of]; }

    // The way with the next I/O: the first of those at the least group. The number of ways if none has any.
    int32_t next_way() const {
        const auto first = std::ranges::min_element(cursors, {}, &Cursor::group);
        const bool any = first != cursors.end() && first->group < groups();
        return any ? static_cast<int32_t>(first - cursors.begin()) : ways();
    }
    bool all_issued() const { return next_way() == ways(); }
    // A way's next I/O begins with this page of its group, or with the next group if there is no such page.
    void go_on(int32_t way, int64_t page) {
        Cursor& next = cursors[way];
        next = page < spec.ways[way].pages ? Cursor{next.group, page} : Cursor{next.group + 1, 0};
    }
};

}  // namespace gdscache
