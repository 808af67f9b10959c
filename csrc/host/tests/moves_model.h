// The permitted behaviour of `Moves`, as plain books: for each page and group whether it is read, and copied, and the
// resulting verdict. It checks each job, and that no possible job was held back.
//
// Unobservable states are left open. A group whose bytes came with another's has no read, so the model does not know
// whether a deadline still found it unread, nor when a page is good that needs neither copy nor look. `maybe` holds
// such verdicts.

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

class Model {
public:
    Model(World& of, Moves& under) : world(of), moves(under) {}

    World& world;
    Moves& moves;
    std::map<int64_t, Booked> books;
    std::map<int64_t, Flying> ios;
    std::map<int64_t, CopyUnderWay> copies;
    Status refusal = Status::kPending;

    // --- requests

    // Whether I/O of a disk is under way whose end leaves room for other I/O of it.
    bool flying(int32_t disk) const { return traffic_[disk].flying > 0; }

    void begin(const MoveSpec& spec) {
        Booked& book = books[spec.id];
        book.id = spec.id;
        book.spec = spec;
        book.order = static_cast<int64_t>(books.size());
        book.store = !spec.ways.empty() && world.spaces[spec.ways[0].target].kind == Kind::kFiles;
        book.gather = !spec.ways.empty() && world.spaces[spec.ways[0].source].kind == Kind::kPlanes;
        if (!book.load()) {
            const int64_t extent = world.limits.extent_bytes;
            const Group& asked = spec.groups.front();
            book.spec.groups = {
                {0, world.limits.layers, 0, extent, 0, extent, 0, extent, asked.route, asked.summed_route}};
        }
        for (size_t w = 0; w < spec.ways.size(); w++) add_rows(book, w);
    }

    void extend(int64_t id, const std::vector<Way>& ways, bool last) {
        Booked& book = books.at(id);
        REQUIRE_FAST(book.spec.open && !book.over);
        for (const Way& more : ways) {
            book.spec.ways.push_back(more);
            add_rows(book, book.spec.ways.size() - 1);
        }
        if (book.cancelled) give_up_passing(book);
        if (book.expired) never_read(book, Status::kDeadline);
        book.spec.open = !last;
    }

    void cancel(int64_t id) {
        Booked& book = books.at(id);
        if (book.over || !book.load()) return;
        book.cancelled = true;
        give_up_passing(book);
    }

    void expire(Nanoseconds now) {
        for (auto& [id, book] : books) {
            if (book.over || book.expired || book.gather || book.spec.until > now) continue;
            book.expired = true;
            for (auto& [job, flight] : ios) {
                if (flight.job.move != id || flight.late) continue;
                flight.late = true;
                --book.ios;
                ++book.late_ios;
                for (const int32_t page : flight.left) {
                    Row& row = book.rows[flight.job.pages[page].row];
                    fly(flight.job, -1);
                    row.late++;
                    row.was_late = row.ended = true;
                    if (book.load()) judge(row, Status::kDeadline);
                }
            }
            if (book.load()) never_read(book, Status::kDeadline);
            for (Row& row : book.rows) {
                if (book.store && row.cells[0].read == Reading::kNone) row.was_late = row.ended = true;
            }
        }
    }

    // --- I/O

    void took_io(int32_t disk, const IoJob& job) {
        Booked& book = books.at(job.move);
        REQUIRE_FAST(!book.over && !book.expired && !book.gather && job.write == book.store && !job.pages.empty());
        const int32_t group = book.store ? 0 : group_of(book, job.first);
        const Group& layers = book.spec.groups[group];
        REQUIRE_FAST(job.first == layers.first && job.last == layers.last && world.spaces[job.files].disk == disk);
        const int64_t part = job.stop - job.start, bytes = part * static_cast<int64_t>(job.pages.size());
        const int64_t extent = world.limits.extent_bytes, usual = io_bytes(job.files);
        const bool fills =
            !book.store && passes(way(book, book.rows.at(job.pages.front().row)));  // slots that it takes
        REQUIRE_FAST(job.pages.size() == 1 || bytes <= (fills ? (usual + extent - 1) / extent * extent : usual));
        REQUIRE_FAST(job.write ? fits_write(bytes, job.files) : fits(bytes, disk));
        for (const auto& [id, other] : books) {  // moves before it could not go
            if (!(other.key() < book.key())) continue;
            REQUIRE_FAST(book.store ? !can_write(other, disk, true) : !can_read(other, disk));
        }
        const auto any = [&](const auto& may) {
            return std::ranges::any_of(books, [&](const auto& entry) { return may(entry.second); });
        };
        const bool write_waits = any([&](const Booked& one) { return can_write(one, disk, false); });
        const bool write_could = any([&](const Booked& one) { return can_write(one, disk, true); });
        const bool read_could = any([&](const Booked& one) { return can_read(one, disk); });
        Traffic& own = traffic_[disk];
        if (book.store) {
            REQUIRE_FAST(!read_could || write_due(disk));
            own.reads_in_row = own.reads_beside = 0;
        } else {
            REQUIRE_FAST(refusal == Status::kPending && !book.broken);
            REQUIRE_FAST(!write_due(disk) || !write_could);
            own.reads_in_row = unwritten() ? own.reads_in_row + 1 : 0;
            own.reads_beside = unwritten() ? own.reads_beside + (write_waits && own.writing == 0 ? 1 : 0) : 0;
            REQUIRE_FAST(own.reads_beside <= 8);
        }
        std::set<int64_t> taken;  // of the reserve
        const std::set<int64_t> needed = needed_slots();
        for (size_t n = 0; n < job.pages.size(); n++) {
            const Transfer& page = job.pages[n];
            Row& row = book.rows.at(page.row);
            const Way& of = way(book, row);
            Cell& cell = row.cells[group];
            REQUIRE_FAST(cell.read == Reading::kNone && row.verdict == Status::kPending);
            REQUIRE_FAST(n == 0 || page.row > job.pages[n - 1].row);
            REQUIRE_FAST(job.files == (book.store ? of.target : of.source));
            const bool looks = !book.store && !into_planes(of) && groups(book) == 1 && !of.sums.empty();
            REQUIRE_FAST(job.sums == (looks && !is_foreign(book, of)));
            REQUIRE_FAST(page.slot == (book.store ? of.targets : of.sources)[row.page]);
            for (int32_t before = 0; before < group; before++) {
                REQUIRE_FAST(row.cells[before].read != Reading::kNone || !part_of(book, row, before));
            }
            if (passes(of)) {
                REQUIRE_FAST(job.memory == world.reserve_space);
                REQUIRE_FAST(job.start == layers.alone_start && job.stop == layers.alone_stop);
                for (const int64_t slot : slots_of(page.at, part)) {
                    REQUIRE_FAST(slot >= world.first && slot < world.first + world.slots && !needed.contains(slot));
                    taken.insert(slot);
                }
                REQUIRE_FAST(n == 0 || page.at == job.pages[n - 1].at + part);
                cell.slot = static_cast<int64_t>(n);
            } else {
                const int64_t place = book.store ? of.sources[row.page] : lying(of)[row.page];
                REQUIRE_FAST(job.memory == (book.store ? of.source : of.places.empty() ? of.target : of.through));
                REQUIRE_FAST(job.start == layers.start && job.stop == layers.stop);
                REQUIRE_FAST(page.at == place * world.limits.extent_bytes + job.start);
                cell.slot = place;
            }
            cell.read = Reading::kFlying;
            cell.at = page.at;
            cell.io = job.id;
        }
        for (const int64_t slot : taken) REQUIRE_FAST(!world.fence || slot == *taken.begin() || slot % world.fence);
        fly(job, std::ssize(job.pages));
        ++book.ios;
        Flying& flight = ios[job.id] = {job, group, {}};
        for (size_t n = 0; n < job.pages.size(); n++) flight.left.insert(static_cast<int32_t>(n));
    }

    void took_no_io(int32_t disk) {
        bool owed = false;  // a write waits for room, which reads may leave it
        for (auto& [id, book] : books) {
            REQUIRE_FAST(!can_write(book, disk, true));
            owed = owed || can_write(book, disk, false);
        }
        for (auto& [id, book] : books) {
            REQUIRE_FAST((owed && flying(disk) && write_due(disk)) || !can_read(book, disk));
            if (refusal != Status::kPending && book.load() && !book.over) never_read(book, refusal);
        }
    }

    // A page has ended. `sums`: of its bytes, or null.
    void io_ended(int64_t id, int32_t page, int32_t error, const uint64_t* sums) {
        Flying& flight = ios.at(id);
        Booked& book = books.at(flight.job.move);
        Row& row = book.rows[flight.job.pages[page].row];
        if (flight.left.erase(page) == 0) return;
        if (flight.late) {
            --row.late;
        } else {
            fly(flight.job, -1);
            row.cells[flight.group].read = error ? Reading::kFailed : Reading::kThere;
            if (book.store) {
                row.ended = true;
                row.error = error;
            } else if (error) {
                judge(row, error == kShort   ? Status::kShortRead
                           : error == kGone  ? Status::kGone
                           : error == kWrong ? Status::kChecksum
                                             : Status::kIoError);
            } else if (sure(row) && way(book, row).sums.empty() && !passes(way(book, row))) {  // they came with it
                const Way& of = way(book, row);
                const auto at = [&](int32_t space, int64_t slot) {
                    return world.sums[space].data() + slot * world.limits.layers;
                };
                const uint64_t* const came = at(of.source, of.sources[row.page]);
                const int32_t memory = of.places.empty() ? of.target : of.through;
                REQUIRE_FAST(std::equal(came, came + world.limits.layers, at(memory, lying(of)[row.page])));
            } else if (sums && row.verdict == Status::kPending) {
                const uint64_t* const stored = way(book, row).sums.data() + row.page * world.limits.layers;
                const bool right = std::equal(sums, sums + world.limits.layers, stored);
                row.cells[0].copy = right ? Copying::kDone : Copying::kLost;
                judge(row, right ? Status::kLoaded : Status::kChecksum);
            }
        }
        if (!flight.left.empty()) return;
        --(flight.late ? book.late_ios : book.ios);
        ios.erase(id);
    }

    void told_late(int64_t id, int32_t number) {
        Row& row = books.at(id).rows.at(number);
        REQUIRE_FAST(row.was_late && row.late == 0 && !row.told);
        row.told = true;
    }

    // --- copies

    void took_copy(Hands hands, const CopyJob& job) {
        const bool foreign = hands != Hands::kOurs;
        Booked& book = books.at(job.move);
        REQUIRE_FAST(!book.over && !book.broken && !book.store && is_for(hands, book));
        for (auto& [id, other] : books) {
            if (!is_for(hands, other)) continue;
            if (other.key() < book.key() && !other.over) all_copied(other, foreign);
            settle_quiet(other, foreign, false);
        }
        const int32_t group = book.gather ? 0 : group_of(book, job.first);
        const Group& layers = book.spec.groups[group];
        REQUIRE_FAST(job.first == layers.first && job.last == layers.last);
        REQUIRE_FAST(job.route == (job.sums ? book.spec.groups[group].summed_route : book.spec.groups[group].route));
        REQUIRE_FAST(job.after == (foreign ? book.spec.after : std::vector<uint64_t>()));
        const int64_t part = book.gather ? world.limits.extent_bytes : std::max<int64_t>(1, layers.end - layers.begin);
        const int64_t most = foreign ? world.limits.foreign_copy_bytes : world.limits.copy_bytes;
        REQUIRE_FAST(job.pages.size() == 1 || part * static_cast<int64_t>(job.pages.size()) <= most);
        std::vector<int64_t> blocks;
        for (const Transfer& page : job.pages) {
            Row& row = book.rows.at(page.row);
            const Way& of = way(book, row);
            Cell& cell = row.cells[group];
            const bool scatter = into_planes(of) && !book.cancelled;
            REQUIRE_FAST(row.verdict == Status::kPending && cell.copy == Copying::kNone &&
                         is_foreign(book, of) == foreign);
            REQUIRE_FAST(book.gather || scatter || !of.sums.empty());
            REQUIRE_FAST(job.copy == (book.gather ? Copy::kGather : scatter ? Copy::kScatter : Copy::kDigest));
            REQUIRE_FAST(job.sums == (book.gather || !of.sums.empty()) && job.memory == memory_of(book, of));
            if (passes(of)) {
                REQUIRE_FAST(cell.read == Reading::kThere && page.slot == cell.slot);
                REQUIRE_FAST(page.at == cell.at + layers.begin - layers.alone_start);
                REQUIRE_FAST(job.stride == layers.alone_stop - layers.alone_start && job.origin == layers.alone_start);
                if (foreign) {
                    REQUIRE_FAST(page.at == job.window * world.limits.extent_bytes + page.slot * job.stride +
                                                (layers.begin - job.origin));
                    REQUIRE_FAST(cell.io == book.rows[job.pages[0].row].cells[group].io);
                    REQUIRE_FAST(cell.at >= job.window * world.limits.extent_bytes);
                    REQUIRE_FAST(cell.at + layers.alone_stop - layers.alone_start <=
                                 (job.window + job.window_slots) * world.limits.extent_bytes);
                }
            } else {
                for (int32_t n = 0; from_files(of) && n <= group; n++) {
                    REQUIRE_FAST(row.cells[n].read == Reading::kThere || !part_of(book, row, n));
                }
                const int64_t slot = (book.gather ? of.targets : from_files(of) ? lying(of) : of.sources)[row.page];
                REQUIRE_FAST(page.slot == slot && page.at == slot * world.limits.extent_bytes + layers.begin);
                REQUIRE_FAST(job.window_slots == 0 && job.stride == world.limits.extent_bytes && job.origin == 0);
            }
            cell.copy = Copying::kFlying;
            const std::vector<int64_t>& all = book.gather ? of.sources : of.targets;
            for (int64_t n = 0; job.copy != Copy::kDigest && n < world.limits.page_blocks; n++) {
                blocks.push_back(all[row.page * world.limits.page_blocks + n]);
            }
        }
        REQUIRE_FAST(!job.pages.empty() && job.blocks == blocks);
        const auto behind = [](const Transfer& one, const Transfer& other) { return one.slot >= other.slot; };
        const bool window = foreign && job.window_slots != 0;  // its pages are copied in their order there
        REQUIRE_FAST(!window || std::ranges::adjacent_find(job.pages, behind) == job.pages.end());
        const bool more = book.ios != 0 && std::ranges::any_of(book.rows, [&](const Row& row) {
            return from_files(way(book, row)) && sure(row) && row.cells[group].read != Reading::kThere;
        });
        REQUIRE_FAST(!window || !more ||
                     !ios.contains(book.rows[job.pages[0].row].cells[group].io));  // all have landed
        ++book.copies;
        copies[job.id] = {job, group};
    }

    void took_no_copy(Hands hands) {
        const bool foreign = hands != Hands::kOurs;
        for (auto& [id, book] : books) {
            if (!is_for(hands, book)) continue;
            all_copied(book, foreign);
            settle_quiet(book, foreign, true);
        }
    }

    void copy_queued(int64_t id, int64_t point) {
        CopyUnderWay& copy = copies.at(id);
        Booked& book = books.at(copy.job.move);
        copy.queued = true;
        book.points[copy.group] = std::max(book.points[copy.group], point);
        for (const Transfer& page : copy.job.pages) book.rows[page.row].cells[copy.group].queued = true;
    }

    void copy_ended(int64_t id, const std::vector<uint64_t>& found, const char* broken) {
        const CopyUnderWay copy = copies.extract(id).mapped();
        Booked& book = books.at(copy.job.move);
        const int32_t layers = copy.job.last - copy.job.first;
        --book.copies;
        if (broken && !book.broken) book.why = broken;
        book.broken = book.broken || broken;
        for (size_t n = 0; n < copy.job.pages.size(); n++) {
            Row& row = book.rows[copy.job.pages[n].row];
            const Way& of = way(book, row);
            bool right = !broken;
            for (int32_t layer = 0; right && copy.job.sums && layer < layers; layer++) {
                const uint64_t sum = found[n * layers + layer];
                if (book.gather) {
                    REQUIRE_FAST(world.sums[of.target][of.targets[row.page] * world.limits.layers + layer] == sum);
                } else if (of.sums[row.page * world.limits.layers + copy.job.first + layer] != sum) {
                    judge(row, Status::kChecksum);
                    right = false;
                }
            }
            row.cells[copy.group].copy = right ? Copying::kDone : Copying::kLost;
            if (all_done(row)) judge(row, Status::kLoaded);
        }
    }

    // --- questions for all moves

    void look() {
        Nanoseconds first = std::numeric_limits<Nanoseconds>::max();
        for (auto& [id, book] : books) {
            REQUIRE_FAST(moves.knows(id) == !(book.forgotten && book.late_ios == 0));
            if (book.forgotten) continue;
            if (!book.over) {
                const bool idle = book.ios == 0 && book.copies == 0, ended = moves.ended(id);
                REQUIRE_FAST(!ended || (idle && !book.spec.open && (book.broken || answered(book, true))));
                REQUIRE_FAST(ended || book.spec.open || !(idle && (book.broken || answered(book, false))));
                book.over = ended;
                if (ended) check_outcome(book);
            }
            if (!book.over && !book.expired && !book.gather) first = std::min(first, book.spec.until);
            for (int32_t group = 0; group < groups(book); group++) {
                int64_t point = -1;
                const bool never = !book.over && (book.cancelled || book.broken);
                const bool ready = moves.ready(id, group, &point);
                REQUIRE_FAST(!ready || book.over || (!never && group_done(book, group, true)));
                REQUIRE_FAST(ready || !(book.over || (!never && group_done(book, group, false))));
                REQUIRE_FAST(!ready || point == (book.over ? 0 : point_of(book, group)));
            }
        }
        for (const ReadyGroup& ready : moves.take_ready()) {
            Booked& book = books.at(ready.move);
            const int32_t group = group_of(book, ready.first);
            REQUIRE_FAST(book.load() && book.spec.groups[group].last == ready.last && book.said.insert(group).second);
            REQUIRE_FAST(group_done(book, group, true));
        }
        REQUIRE_FAST(moves.deadline() == first);
        REQUIRE_FAST(moves.free_slots() <= world.slots - static_cast<int64_t>(needed_slots().size()));
        REQUIRE_FAST(moves.held_slots() >= 0 && moves.held_slots() <= world.slots - moves.free_slots());
    }

    // Nothing is under way any more, and no question is open.
    void check_rest() {
        for (const Traffic& own : traffic_) REQUIRE_FAST(own.flying == 0 && own.writing == 0);
        REQUIRE_FAST(ios.empty() && copies.empty() && !moves.has_ended_late());
        REQUIRE_FAST(moves.free_slots() == world.slots && moves.held_slots() == 0);
        for (const auto& [id, book] : books) {
            REQUIRE_FAST(book.over && book.forgotten && !moves.knows(id));
            for (const Row& row : book.rows) REQUIRE_FAST(row.told == row.was_late);
            const bool all = book.load() && !book.rows.empty();
            REQUIRE_FAST(book.broken || book.said.size() == (all ? book.spec.groups.size() : 0));
        }
    }

private:
    // --- the books

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

    // A job of `pages` pages begins, or -`pages` pages of it have ended or are late.
    void fly(const IoJob& job, int64_t pages) {
        Traffic& own = traffic_[world.spaces[job.files].disk];
        own.flying += pages * (job.stop - job.start);
        if (job.write) own.writing += pages * (job.stop - job.start);
    }

    // Each disk has its own room, and a read beside writes alone always fits.
    bool fits(int64_t bytes, int32_t disk, bool write = false) const {
        const Traffic& own = traffic_[disk];
        return own.flying == (write ? 0 : own.writing) || own.flying + bytes <= world.limits.flying_bytes;
    }

    int64_t io_bytes(int32_t files) const {
        return world.spaces[files].io_bytes ? world.spaces[files].io_bytes : world.limits.io_bytes;
    }

    // The same for a write, beside others.
    bool fits_write(int64_t bytes, int32_t files) const {
        const int64_t job = std::max(io_bytes(files), world.limits.extent_bytes);
        const int32_t disk = world.spaces[files].disk;
        const int64_t writing = traffic_[disk].writing;
        const bool share = writing == 0 || writing + bytes <= std::max(world.limits.flying_bytes / 2, 2 * job);
        return share && fits(bytes, disk, true);
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
            return world.spaces[of.source].disk == disk && fits(bytes, disk) &&
                   (!passes(of) || (moves.free_slots() > 0 && moves.room(disk) > 0));
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

    // Whether reads have had their turns on a disk, and the next is a write's.
    bool write_due(int32_t disk) const { return traffic_[disk].reads_in_row >= 8 && traffic_[disk].writing == 0; }

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
                REQUIRE_FAST(foreign && from_files(of) && book.ios != 0);  // it waits for more: few copies
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

    // --- their changes

    static void add_rows(Booked& book, size_t way) {
        for (int64_t page = 0; page < book.spec.ways[way].pages; page++) {
            Row& row = book.rows.emplace_back();
            row.way = static_cast<int32_t>(way);
            row.page = page;
            row.cells.resize(book.spec.groups.size());
        }
    }

    void give_up_passing(Booked& book) {
        for (Row& row : book.rows) {
            if (passes(way(book, row))) judge(row, Status::kCancelled);
        }
    }

    void check_outcome(const Booked& book) const {
        const Outcome& outcome = moves.outcome(book.id);
        REQUIRE_FAST(outcome.statuses.size() == book.rows.size() && outcome.broken == book.broken);
        REQUIRE_FAST(outcome.why == book.why);
        std::vector<std::pair<int32_t, int32_t>> errors;
        std::vector<int32_t> late, told = outcome.late;
        for (size_t n = 0; n < book.rows.size(); n++) {
            const Row& row = book.rows[n];
            const Status status = outcome.statuses[n];
            if (status == Status::kPending && !book.store) REQUIRE_FAST(book.broken && row.verdict == Status::kPending);
            REQUIRE_FAST(status == row.verdict || row.maybe.contains(status));
            for (const Cell& cell : row.cells) REQUIRE_FAST(status != Status::kLoaded || cell.read != Reading::kFailed);
            if (row.error) errors.emplace_back(n, row.error);
            if (row.was_late) late.push_back(static_cast<int32_t>(n));
        }
        auto failed = outcome.errors;
        std::sort(failed.begin(), failed.end());
        std::sort(told.begin(), told.end());
        REQUIRE_FAST(failed == errors && told == late);
    }

    struct Traffic {
        int64_t flying = 0;        // bytes of I/O that is not late
        int64_t writing = 0;       // ... of writes
        int32_t reads_in_row = 0;  // while a write waits
        int32_t reads_beside = 0;  // while a write of the same disk waits
    };
    Traffic traffic_[2];  // by disk
};

}  // namespace gdscache::test
