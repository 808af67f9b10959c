// The books of `Model`: the state of each move, page and group, and its consequences.

#pragma once

#include <limits>
#include <set>

#include "moves/moves.h"
#include "tests/check.h"

namespace gdscache::test {

using Kind = Space::Kind;

struct World {
    Limits limits;
    std::vector<Space> spaces;
    std::vector<std::vector<uint64_t>> sums;  // of each space
    int32_t reserve_space = 0;
    int64_t first = 0, slots = 0, fence = 0;  // of the reserve
};

enum class Reading { kNone, kFlying, kThere, kFailed };
enum class Copying { kNone, kFlying, kDone, kLost };  // lost: of no use, wrong or broken

struct Cell {
    Reading read = Reading::kNone;
    Copying copy = Copying::kNone;
    bool queued = false;
    int64_t at = 0, slot = 0, io = 0;  // the place of the first read byte, and the job
};

struct Row {
    int32_t way = 0;
    int64_t page = 0;
    std::vector<Cell> cells;
    Status verdict = Status::kPending;
    std::set<Status> maybe;
    int32_t error = 0, late = 0;  // its late I/O
    bool was_late = false, told = false, ended = false;  // `ended`: a write
};

struct Booked {
    int64_t id = 0;
    MoveSpec spec;
    int64_t order = 0;
    bool store = false, gather = false;
    std::vector<Row> rows;
    std::map<int32_t, int64_t> points;  // of each group: the greatest of a queued copy
    std::set<int32_t> said;             // groups reported by `take_ready`
    std::string why;
    bool cancelled = false, broken = false, expired = false, over = false, forgotten = false;
    int32_t ios = 0, late_ios = 0, copies = 0;

    std::pair<Priority, int64_t> key() const { return {spec.priority, order}; }
    bool load() const { return !store && !gather; }
};

struct Flying {
    IoJob job;
    int32_t group;
    std::set<int32_t> left;  // pages
    bool late = false;
};

struct CopyUnderWay {
    CopyJob job;
    int32_t group;
    bool queued = false;
};

class Books {
public:
    Books(World& of, Moves& under) : world(of), moves(under) {}

    World& world;
    Moves& moves;
    std::map<int64_t, Booked> books;
    std::map<int64_t, Flying> ios;
    std::map<int64_t, CopyUnderWay> copies;
    Status refusal = Status::kPending;

protected:
    static void judge(Row& row, Status status) {
        if (row.verdict == Status::kPending) row.verdict = status;
    }

    const Way& way(const Booked& book, const Row& row) const { return book.spec.ways[row.way]; }
    bool from_files(const Way& of) const { return world.spaces[of.source].kind == Kind::kFiles; }
    bool into_planes(const Way& of) const { return world.spaces[of.target].kind == Kind::kPlanes; }
    bool passes(const Way& of) const { return from_files(of) && into_planes(of) && of.places.empty(); }
    static const std::vector<int64_t>& lying(const Way& of) { return of.places.empty() ? of.targets : of.places; }
    static bool sure(const Row& row) { return row.verdict == Status::kPending && row.maybe.empty(); }

    int64_t part_of(const Booked& book, const Row& row, int32_t group) const {
        return book.spec.groups[group].bytes(passes(way(book, row)));
    }

    int32_t memory_of(const Booked& book, const Way& of) const {
        if (book.gather) return of.target;
        if (!from_files(of)) return of.source;
        return passes(of) ? world.reserve_space : of.places.empty() ? of.target : of.through;
    }

    bool moves_layers(const Booked& book, const Way& of) const {
        return book.gather || (into_planes(of) && !book.cancelled);
    }

    bool is_foreign(const Booked& book, const Way& of) const {
        const int32_t planes = book.gather ? of.source : of.target;
        return world.spaces[memory_of(book, of)].foreign || (moves_layers(book, of) && world.spaces[planes].foreign);
    }

    static int32_t groups(const Booked& book) { return static_cast<int32_t>(book.spec.groups.size()); }

    static int32_t group_of(const Booked& book, int32_t first) {
        int32_t group = 0;
        while (book.spec.groups.at(group).first != first) group++;
        return group;
    }

    std::vector<int64_t> slots_of(int64_t at, int64_t bytes) const {
        std::vector<int64_t> slots;
        for (int64_t slot = at / world.limits.extent_bytes; slot * world.limits.extent_bytes < at + bytes; slot++) {
            slots.push_back(slot);
        }
        return slots;
    }

    // Slots of the reserve that reads or copies still use.
    std::set<int64_t> needed_slots() const {
        std::set<int64_t> needed;
        const auto need = [&](int64_t at, int64_t bytes) {
            for (const int64_t slot : slots_of(at, bytes)) needed.insert(slot);
        };
        for (const auto& [id, flight] : ios) {
            const Booked& book = books.at(flight.job.move);
            for (const int32_t page : flight.left) {
                const Row& row = book.rows[flight.job.pages[page].row];
                if (book.store || !passes(way(book, row))) continue;
                need(flight.job.pages[page].at, flight.job.stop - flight.job.start);
            }
        }
        for (const auto& [id, book] : books) {
            for (const Row& row : book.rows) {
                for (int32_t group = 0; passes(way(book, row)) && group < groups(book); group++) {
                    const Cell& cell = row.cells[group];
                    const bool waits = cell.copy == Copying::kNone && sure(row) && !book.over && !book.broken;
                    if (cell.read != Reading::kThere || !(waits || cell.copy == Copying::kFlying)) continue;
                    need(cell.at, part_of(book, row, group));
                }
            }
        }
        return needed;
    }

    // Reads that have not begun never will.
    void never_read(Booked& book, Status status) {
        for (Row& row : book.rows) {
            bool unread = false, unknown = false;
            for (int32_t group = 0; from_files(way(book, row)) && group < groups(book); group++) {
                if (row.cells[group].read != Reading::kNone) continue;
                (part_of(book, row, group) ? unread : unknown) = true;
            }
            if (book.broken) continue;
            if (unread) judge(row, status);
            if (unknown && row.verdict == Status::kPending) row.maybe.insert(status);
        }
    }

    bool fits(int64_t bytes) const { return flying_ == 0 || flying_ + bytes <= world.limits.flying_bytes; }

    int64_t io_bytes(int32_t files) const {
        return world.spaces[files].io_bytes ? world.spaces[files].io_bytes : world.limits.io_bytes;
    }

    // The same for a write, beside others.
    bool fits_write(int64_t bytes, int32_t files) const {
        const int64_t job = std::max(io_bytes(files), world.limits.extent_bytes);
        return fits(bytes) && (writing_ == 0 || writing_ + bytes <= std::max(world.limits.flying_bytes / 2, 2 * job));
    }

    // Whether a move's next read could begin now, as far as is known.
    bool can_read(const Booked& book, int32_t disk) const {
        if (!book.load() || book.over || book.broken || book.expired || refusal != Status::kPending) return false;
        const int64_t extent = world.limits.extent_bytes;
        for (int32_t group = 0; group < groups(book); group++) {
            int64_t bytes = 0, limit = 0;
            const Row* first = nullptr;
            for (const Row& row : book.rows) {
                const int64_t part = part_of(book, row, group);
                if (!from_files(way(book, row)) || part == 0) continue;
                if (row.verdict != Status::kPending || row.cells[group].read != Reading::kNone) continue;
                if (!row.maybe.empty()) return false;
                if (first && (row.way != first->way || bytes + part > limit)) break;
                const int64_t usual = io_bytes(way(book, row).source);
                if (!first) first = &row, limit = usual;
                if (passes(way(book, row))) limit = (usual + extent - 1) / extent * extent;  // slots are filled
                bytes += part;
            }
            if (!first) continue;
            const Way& of = way(book, *first);
            return world.spaces[of.source].disk == disk && fits(bytes) && (!passes(of) || moves.free_slots() > 0);
        }
        return false;
    }

    // Whether a store has a write to begin. `room`: and it could.
    bool can_write(const Booked& book, int32_t disk, bool room) const {
        if (!book.store || book.over || book.expired) return false;
        const int64_t extent = world.limits.extent_bytes;
        int64_t bytes = 0;
        const Row* first = nullptr;
        for (const Row& row : book.rows) {
            if (row.cells[0].read != Reading::kNone) continue;
            if (first && (row.way != first->way || bytes + extent > io_bytes(way(book, row).target))) break;
            if (!first) first = &row;
            bytes += extent;
        }
        if (!first || world.spaces[way(book, *first).target].disk != disk) return false;
        return !room || fits_write(bytes, way(book, *first).target);
    }

    // Whether reads have had their turns, and the next is a write's.
    bool write_due() const { return reads_in_row_ >= 8 && writing_ == 0; }

    bool unwritten() const {
        return std::any_of(books.begin(), books.end(), [&](const auto& entry) {
            return can_write(entry.second, 0, false) || can_write(entry.second, 1, false);
        });
    }

    bool is_there(const Booked& book, const Row& row, int32_t group) const {
        const Way& of = way(book, row);
        if (!from_files(of)) return true;
        if (passes(of)) return row.cells[group].read == Reading::kThere;
        for (int32_t n = 0; n <= group; n++) {
            if (row.cells[n].read != Reading::kThere && part_of(book, row, n)) return false;
        }
        return true;
    }

    // Whether a group came with the one before, without a job of its own.
    bool unseen(const Booked& book, const Row& row, int32_t group) const {
        for (int32_t n = 0; n <= group; n++) {
            if (from_files(way(book, row)) && !part_of(book, row, n)) return true;
        }
        return false;
    }

    // No copy of a move could be taken.
    void all_copied(const Booked& book, bool foreign) const {
        if (book.over || book.broken || book.store || moves.ended(book.id)) return;
        for (int32_t group = 0; group < groups(book); group++) {
            for (const Row& row : book.rows) {
                const Way& of = way(book, row);
                if (!sure(row) || row.cells[group].copy != Copying::kNone || is_foreign(book, of) != foreign) continue;
                if (!book.gather && of.sums.empty() && !moves_layers(book, of)) continue;
                if (!is_there(book, row, group) || unseen(book, row, group)) continue;
                CHECK(foreign && from_files(of) && book.ios != 0);  // it waits for more: few copies
            }
        }
    }

    // Pages with known bytes and no target are good; `certain`: all moves were looked at.
    void settle_quiet(Booked& book, bool foreign, bool certain) {
        if (!book.load() || book.over || book.broken) return;
        for (Row& row : book.rows) {
            const Way& of = way(book, row);
            if (!of.sums.empty() || moves_layers(book, of) || is_foreign(book, of) != foreign) continue;
            for (int32_t group = 0; group < groups(book); group++) {
                if (row.cells[group].copy != Copying::kNone || !is_there(book, row, group)) continue;
                if (row.verdict == Status::kPending) row.maybe.insert(Status::kLoaded);
                if (certain && !unseen(book, row, group)) row.cells[group].copy = Copying::kDone;
            }
            if (all_done(row)) judge(row, Status::kLoaded);
        }
    }

    static bool all_done(const Row& row) {
        const auto done = [](const Cell& cell) { return cell.copy == Copying::kDone; };
        return std::all_of(row.cells.begin(), row.cells.end(), done);
    }

    static bool answered(const Booked& book, bool perhaps) {
        return std::all_of(book.rows.begin(), book.rows.end(), [&](const Row& row) {
            return book.store ? row.ended : row.verdict != Status::kPending || (perhaps && !row.maybe.empty());
        });
    }

    // Whether nothing of a group is left to be queued or copied.
    static bool group_done(const Booked& book, int32_t group, bool perhaps) {
        if (book.spec.open) return false;
        return std::all_of(book.rows.begin(), book.rows.end(), [&](const Row& row) {
            if (book.store) return row.ended;
            const Cell& cell = row.cells[group];
            if (row.verdict != Status::kPending || cell.queued || cell.copy == Copying::kDone) return true;
            return perhaps && !row.maybe.empty();
        });
    }

    // The point of a ready group: of all its queued copies, while one of them is under way.
    int64_t point_of(const Booked& book, int32_t group) const {
        const bool any = std::any_of(copies.begin(), copies.end(), [&](const auto& entry) {
            const CopyUnderWay& copy = entry.second;
            return copy.queued && copy.job.move == book.id && copy.group == group;
        });
        return any ? book.points.at(group) : 0;
    }

    // Whether copies of a move are for these hands.
    static bool is_for(Hands hands, const Booked& book) {
        return hands != (book.gather ? Hands::kForeignLoads : Hands::kForeignStores);
    }

    int64_t flying_ = 0;        // bytes of I/O that is not late
    int64_t writing_ = 0;       // ... of writes
    int32_t reads_in_row_ = 0;  // while a write waits
    int32_t reads_beside_ = 0;  // while a move of the same kind of files waits
};

}  // namespace gdscache::test
