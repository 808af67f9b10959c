// What `Moves` knows of a move, of I/O and of copies under way: for moves*.cc alone.

#pragma once

#include <algorithm>
#include <deque>

#include "moves/moves.h"

namespace gdscache {

enum class Moves::Work : uint8_t { kLoad, kGather, kWrite };

// A group of a page's layers: to be copied, queued (where others copy), or copied, or not to be copied any more.
enum class Moves::Cell : uint8_t { kOpen, kQueued, kDone };

// I/O under way: some pages of a way, for a group of layers.
struct Moves::Flight {
    IoJob job;
    Move* move = nullptr;
    int32_t way = 0, group = 0;
    bool late = false;
    int64_t part = 0;           // bytes of a page
    std::vector<bool> over;     // pages whose I/O has ended
    int32_t left = 0;           // pages whose I/O has not
    int32_t copies = 0;         // landed pages that are not copied yet
    int64_t slot = 0, slots = 0;  // of the reserve, which the pages lie in
};

struct Moves::Copying {
    CopyJob job;
    Move* move = nullptr;
    int32_t way = 0, group = 0;
    bool queued = false;
    std::vector<Flight*> flights;  // that have to be kept until these pages are copied; null: none
};

struct Moves::Move {
    struct Landed {
        int32_t row;
        int64_t slot, at;  // as in a job
        Flight* flight;
        bool is_whole() const { return flight->left == 0; }  // the window that it is in
    };
    // Pages of a way that may be copied, of one group.
    struct Copyable {
        int64_t resident = 0;  // the next page that has been in memory all along
        std::deque<Landed> landed;
        void gather_window();
    };
    // The next I/O of a way: a page that it has, or the group behind the last.
    struct Cursor {
        int32_t group;
        int64_t page;
    };

    struct Row {
        int32_t left;      // groups that are not copied
        int32_t next = 0;  // the first group that is not there, or has one before it that is not
        int32_t late = 0;  // late I/O
    };
    struct Layers {
        int32_t todo;        // rows that are not done, and one more while the move is open
        int32_t queued = 0;  // rows whose copies are queued, and not done
        int32_t flying = 0;  // copies that are queued, and not done
        int32_t unread = 0;  // rows that are to be read, or are being read
        int64_t point = 0;   // the greatest that a copy was queued with
        bool announced = false;  // that they are ready
    };

    int64_t id = 0;
    Order::key_type order;
    MoveSpec spec;
    Work work = Work::kLoad;
    Outcome outcome;
    std::vector<int32_t> first_row;  // of each way, and their number at the end
    std::vector<Row> row;
    std::vector<Layers> group;
    std::vector<Cell> cells;         // (rows, groups)
    std::vector<uint8_t> there;      // (rows, groups): read
    std::vector<Copyable> copyable;  // (ways, groups)
    std::vector<Cursor> cursors;     // of each way
    std::pair<int32_t, int32_t> turn{-1, -1};  // the group and way that others were called for
    int32_t ios = 0, late_ios = 0, copying = 0;
    bool cancelled = false, broken = false, expired = false, over = false, forgotten = false;

    int32_t rows() const { return first_row.back(); }
    int32_t groups() const { return static_cast<int32_t>(spec.groups.size()); }
    int32_t ways() const { return static_cast<int32_t>(spec.ways.size()); }
    bool pending(int32_t number) const { return outcome.statuses[number] == Status::kPending; }
    size_t cell(int32_t number, int32_t of) const { return static_cast<size_t>(number) * groups() + of; }
    Copyable& copies(int32_t of, int32_t by) { return copyable[static_cast<size_t>(by) * groups() + of]; }
    const Copyable& copies(int32_t of, int32_t by) const { return copyable[static_cast<size_t>(by) * groups() + of]; }

    // The way that has the next I/O: the first of those that are at the least group. Their number where none has any.
    int32_t next_way() const {
        const auto first = std::ranges::min_element(cursors, {}, &Cursor::group);
        const bool any = first != cursors.end() && first->group < groups();
        return any ? static_cast<int32_t>(first - cursors.begin()) : ways();
    }
    bool all_issued() const { return next_way() == ways(); }
    // A way's next I/O begins with this page of the same group, or with the next group where it has no more pages.
    void go_on(int32_t way, int64_t page) {
        Cursor& next = cursors[way];
        next = page < spec.ways[way].pages ? Cursor{next.group, page} : Cursor{next.group + 1, 0};
    }
};

}  // namespace gdscache
