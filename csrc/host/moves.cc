#include "moves.h"

#include <algorithm>
#include <limits>

namespace gdscache {

namespace {

constexpr int32_t kReadsPerWrite = 8;  // in a row, while writes wait
constexpr int64_t kCopies = 64;        // a load into a GPU is copied with about so many, of reads that land
constexpr int64_t kLarge = 8 << 20;    // bytes of a move that nobody finds in a cache again
constexpr int64_t kRounds = 4;         // that share the reserve: while one is copied, the others are read

enum class Work : uint8_t { kLoad, kGather, kWrite };

// A group of a page's layers: to be copied, queued (where others copy), or copied, or not to be copied any more.
enum class Cell : uint8_t { kOpen, kQueued, kDone };

}  // namespace

// I/O under way: some pages of a way, for a group of layers.
struct Moves::Reading {
    int64_t id = 0;
    Move* move = nullptr;
    int32_t way = 0, group = 0;
    bool write = false, late = false;
    int64_t part = 0;  // bytes of a page
    std::vector<Transfer> pages;
    std::vector<bool> over;     // pages whose I/O has ended
    int32_t left = 0;           // pages whose I/O has not
    int32_t copies = 0;         // landed pages that are not copied yet
    int64_t slot = 0, slots = 0;  // of the reserve, which `pages` lie in
};

struct Moves::Copying {
    Move* move = nullptr;
    int32_t way = 0, group = 0;
    bool sums = false, gather = false, queued = false;
    std::vector<int32_t> rows;
    std::vector<Reading*> readings;  // that have to be kept until these pages are copied; null: none
};

struct Moves::Move {
    struct Landed {
        int32_t row;
        int64_t slot, at;  // as in a job
        Reading* reading;
    };
    // Pages of a way that may be copied, of one group.
    struct Copyable {
        int64_t resident = 0;  // the next page that has been in memory all along
        std::deque<Landed> landed;
    };
    // The next I/O of a way.
    struct Cursor {
        int32_t group = 0;
        int64_t page = 0;
    };

    int64_t id = 0;
    Order::key_type order;
    MoveSpec spec;
    Work work = Work::kLoad;
    Outcome outcome;
    std::vector<int32_t> first_row;  // of each way, and their number at the end
    std::vector<Cell> cells;         // (rows, groups)
    std::vector<uint8_t> there;      // (rows, groups): read
    std::vector<int32_t> next;       // of each row: the first group that is not there, or has one before it that is not
    std::vector<int32_t> left;       // of each row: groups that are not copied
    std::vector<int32_t> todo;       // of each group: rows that are not done, and one more while the move is open
    std::vector<int32_t> queued;     // of each group: rows whose copies are queued, and not done
    std::vector<int64_t> points;     // of each group: the greatest that a copy was queued with
    std::vector<int32_t> flying;     // of each group: copies that are queued, and not done
    std::vector<bool> announced;     // of each group: that it is ready
    std::vector<int32_t> unread;     // of each group: rows that are to be read, or are being read
    std::vector<Copyable> copyable;  // (ways, groups)
    std::vector<int32_t> late;       // of each row: late I/O
    std::vector<Cursor> cursors;     // of each way
    std::pair<int32_t, int32_t> turn{-1, -1};  // the group and way that others were called for
    int32_t ios = 0, late_ios = 0, copying = 0;
    bool cancelled = false, broken = false, expired = false, over = false, forgotten = false;

    int32_t rows() const { return first_row.back(); }
    int32_t groups() const { return static_cast<int32_t>(spec.groups.size()); }
    int32_t ways() const { return static_cast<int32_t>(spec.ways.size()); }
    bool pending(int32_t row) const { return outcome.statuses[row] == Status::kPending; }
    size_t cell(int32_t row, int32_t of) const { return static_cast<size_t>(row) * groups() + of; }
    Copyable& copies(int32_t of, int32_t by) { return copyable[static_cast<size_t>(by) * groups() + of]; }

    // The way that has the next I/O: the first of those that are at the least group. Their number where none has any.
    int32_t next_way() const {
        const auto behind = [](const Cursor& one, const Cursor& other) { return one.group < other.group; };
        const auto first = std::min_element(cursors.begin(), cursors.end(), behind);
        const bool any = first != cursors.end() && first->group < groups();
        return any ? static_cast<int32_t>(first - cursors.begin()) : ways();
    }
    bool all_issued() const { return next_way() == ways(); }
};

Moves::Moves(const Limits& limits, std::vector<Space> spaces, int32_t reserve_space, Reserve reserve)
    : limits_(limits), spaces_(std::move(spaces)), reserve_space_(reserve_space), reserve_(std::move(reserve)) {}

Moves::~Moves() = default;

// --- for who wants bytes moved

void Moves::begin(MoveSpec spec) {
    auto owned = std::make_unique<Move>();
    Move& move = *owned;
    move.id = spec.id;
    move.order = {spec.priority, begun_++};
    std::vector<Way> ways = std::exchange(spec.ways, {});
    move.spec = std::move(spec);
    move.first_row.push_back(0);
    if (!ways.empty()) {
        if (spaces_[ways.front().target].kind == Space::Kind::kFiles) move.work = Work::kWrite;
        if (spaces_[ways.front().source].kind == Space::Kind::kPlanes) move.work = Work::kGather;
    }
    if (move.work != Work::kLoad) move.spec.groups.resize(1);  // every layer at once
    const size_t groups = move.groups();
    move.todo.assign(groups, move.spec.open ? 1 : 0);
    move.queued.assign(groups, 0);
    move.points.assign(groups, 0);
    move.flying.assign(groups, 0);
    move.announced.assign(groups, false);
    move.unread.assign(groups, 0);
    add(move, std::move(ways));
    moves_.emplace(move.id, std::move(owned));
    open_.emplace(move.order, &move);
    settle(move);
}

bool Moves::extend(int64_t id, std::vector<Way> ways, bool last) {
    Move& move = at(id);
    if (!move.spec.open) return false;
    const int32_t before = move.ways();
    add(move, std::move(ways));
    for (int32_t way = before; move.cancelled && way < move.ways(); ++way) call_off(move, way);
    if (move.expired) {
        IoJob none;
        next_read(move, false, &none);  // which gives them their verdict
    }
    if (last) {
        move.spec.open = false;
        for (int32_t group = 0; group < move.groups(); ++group) {
            if (--move.todo[group] == 0) news_.ended = true;
            if (move.rows() != 0) announce(move, group);
        }
    }
    settle(move);
    return true;
}

// Rows for more ways. Without the memory for them the move is as it was, but for the room that it has.
void Moves::add(Move& move, std::vector<Way> ways) {
    const int32_t groups = move.groups();
    const size_t count = move.spec.ways.size() + ways.size();
    int64_t added = 0;
    for (const Way& way : ways) added += way.pages;
    const size_t rows = static_cast<size_t>(move.rows() + added);
    move.first_row.reserve(count + 1);
    move.cursors.reserve(count);
    move.spec.ways.reserve(count);
    move.copyable.resize(count * groups);
    move.cells.resize(rows * groups, Cell::kOpen);
    move.left.resize(rows, groups);
    move.late.resize(rows, 0);
    if (move.work == Work::kLoad) {
        move.there.resize(rows * groups, 0);
        move.next.resize(rows, 0);
    }
    move.outcome.statuses.resize(rows, Status::kPending);
    for (Way& way : ways) {
        const bool read = move.work == Work::kLoad && reads(way);
        move.first_row.push_back(move.rows() + static_cast<int32_t>(way.pages));
        move.cursors.push_back({read || move.work == Work::kWrite ? 0 : groups, 0});
        for (int32_t& todo : move.todo) todo += static_cast<int32_t>(way.pages);
        for (int32_t& unread : move.unread) unread += read ? static_cast<int32_t>(way.pages) : 0;
        move.spec.ways.push_back(std::move(way));
    }
    move.turn = {-1, -1};  // it may come again
    news_.copies += 1 + (move.work == Work::kWrite ? 0 : added * limits_.extent_bytes);
    if (move.work != Work::kGather) news_.io = true;
}

bool Moves::reads(const Way& way) const { return spaces_[way.source].kind == Space::Kind::kFiles; }

// Whether pages that are read pass through the reserve, and stay nowhere but in the planes.
bool Moves::passes(const Way& way) const {
    return reads(way) && way.places.empty() && spaces_[way.target].kind == Space::Kind::kPlanes;
}

void Moves::refuse(Status status) {
    refusal_ = status;
    news_.io = true;
}

void Moves::cancel(int64_t id) {
    Move& move = at(id);
    if (move.over || move.work != Work::kLoad) return;
    move.cancelled = news_.io = true;
    ++news_.copies;
    for (int32_t way = 0; way < move.ways(); ++way) call_off(move, way);
    settle(move);
}

// Pages of a cancelled load that would stay nowhere but in the planes are read for nothing.
void Moves::call_off(Move& move, int32_t way) {
    if (!passes(move.spec.ways[way])) return;
    for (int32_t row = move.first_row[way]; row < move.first_row[way + 1]; ++row) judge(move, row, Status::kCancelled);
}

bool Moves::ended(int64_t move) const { return at(move).over; }

int32_t Moves::groups(int64_t move) const { return at(move).groups(); }

int64_t Moves::rows(int64_t move) const { return at(move).rows(); }

bool Moves::ready(int64_t id, int32_t group, int64_t* point) const {
    const Move& move = at(id);
    *point = move.flying[group] == 0 ? 0 : move.points[group];  // of pages that are given up, too
    return move.over || (!move.cancelled && !move.broken && move.todo[group] == move.queued[group]);
}

const Outcome& Moves::outcome(int64_t move) const { return at(move).outcome; }

void Moves::forget(int64_t id) {
    at(id).forgotten = true;
    drop_forgotten(at(id));
}

std::vector<std::pair<int64_t, int32_t>> Moves::take_ended_late(size_t most) {
    const auto end = ended_late_.begin() + static_cast<ptrdiff_t>(std::min(most, ended_late_.size()));
    std::vector<std::pair<int64_t, int32_t>> taken(ended_late_.begin(), end);
    ended_late_.erase(ended_late_.begin(), end);
    return taken;
}

void Moves::drop_forgotten(Move& move) {
    if (move.forgotten && move.over && move.late_ios == 0) moves_.erase(move.id);
}

// --- I/O

bool Moves::take_io(bool foreign, IoJob* job) {
    crowded_[foreign] = owed_ = false;
    const bool writes_wait = std::any_of(open_.begin(), open_.end(), [](const auto& entry) {
        return entry.second->work == Work::kWrite && !entry.second->all_issued();
    });
    const bool write_first = writes_wait && reads_in_row_ >= kReadsPerWrite;
    if (write_first && take_write(foreign, job)) return true;
    owed_ = write_first && crowded_[foreign];
    if (take_read(foreign, job)) {
        reads_in_row_ = writes_wait ? reads_in_row_ + 1 : 0;
        return true;
    }
    return writes_wait && !write_first && take_write(foreign, job);
}

bool Moves::take_read(bool foreign, IoJob* job) {
    for (auto next = open_.begin(); next != open_.end();) {
        Move& move = *next++->second;  // which may be over behind this, and then is not in `open_` any more
        if (move.work == Work::kLoad && next_read(move, foreign, job)) return true;
    }
    return false;
}

bool Moves::take_write(bool foreign, IoJob* job) {
    for (auto& [order, move] : open_) {
        if (move->work == Work::kWrite && next_write(*move, foreign, job)) {
            reads_in_row_ = 0;
            return true;
        }
    }
    return false;
}

// The next part of a load that is to be read: groups in their order, of each the ways in theirs.
bool Moves::next_read(Move& move, bool foreign, IoJob* job) {
    const bool was_open = !move.all_issued();
    for (int32_t number; (number = move.next_way()) != move.ways();) {
        const Way& way = move.spec.ways[number];
        Move::Cursor& cursor = move.cursors[number];
        if (cursor.page == way.pages) {
            cursor = {cursor.group + 1, 0};
            continue;
        }
        const Status refusal = move.expired ? Status::kDeadline : refusal_;
        if (refusal != Status::kPending || move.broken) {
            for (; cursor.page < way.pages && !move.broken; ++cursor.page) {
                judge(move, move.first_row[number] + static_cast<int32_t>(cursor.page), refusal);
            }
            cursor.page = way.pages;
            continue;
        }
        const bool passes = this->passes(way);
        const Group& group = move.spec.groups[cursor.group];
        const int64_t part = group.bytes(passes);
        const int64_t bytes = spaces_[way.source].foreign ? limits_.foreign_io_bytes : limits_.io_bytes;
        // What passes through the reserve fills the slots that it takes.
        const int64_t extent = passes ? limits_.extent_bytes : 1, whole = (bytes + extent - 1) / extent * extent;
        const int64_t most = std::max<int64_t>(1, whole / std::max<int64_t>(1, part));
        auto reading = std::make_unique<Reading>();
        int64_t page = cursor.page;
        for (; page < way.pages && static_cast<int64_t>(reading->pages.size()) < most; ++page) {
            const int32_t row = move.first_row[number] + static_cast<int32_t>(page);
            if (move.pending(row)) reading->pages.push_back({row, way.sources[page], 0});
        }
        if (reading->pages.empty()) {
            cursor.page = page;
            continue;
        }
        reading->way = number;
        reading->group = cursor.group;
        reading->part = part;
        if (part == 0) {  // what there is of these layers came with the group before
            cursor.page = page;
            for (size_t i = 0; i < reading->pages.size(); ++i) landed(move, *reading, static_cast<int32_t>(i));
            continue;
        }
        if (others_turn(move, number, way.source, foreign)) return false;
        if (!fits(static_cast<int64_t>(reading->pages.size()) * part, foreign)) return false;
        if (passes) {
            const int64_t wanted = static_cast<int64_t>(reading->pages.size()) * part;
            const int64_t extents = (wanted + limits_.extent_bytes - 1) / limits_.extent_bytes;
            const int64_t share = std::max<int64_t>(1, reserve_.slots() / kRounds);
            reading->slots = reserve_.take(std::min(extents, share), &reading->slot);
            if (reading->slots == 0) {
                crowded_[foreign] = true;
                return false;
            }
            const size_t room = static_cast<size_t>(reading->slots * limits_.extent_bytes / part);
            if (room < reading->pages.size()) {
                reading->pages.resize(room);
                page = reading->pages.back().row - move.first_row[number] + 1;
            }
            for (size_t i = 0; i < reading->pages.size(); ++i) {
                reading->pages[i].at = reading->slot * limits_.extent_bytes + static_cast<int64_t>(i) * part;
            }
        } else {
            const std::vector<int64_t>& places = way.places.empty() ? way.targets : way.places;
            for (Transfer& one : reading->pages) {
                one.at = places[one.row - move.first_row[number]] * limits_.extent_bytes + group.start;
            }
        }
        cursor.page = page;
        job->write = false;
        job->memory = passes ? reserve_space_ : way.places.empty() ? way.target : way.through;
        job->files = way.source;
        job->start = passes ? group.alone_start : group.start;
        job->stop = passes ? group.alone_stop : group.stop;
        issue(move, std::move(reading), job);
        return true;
    }
    if (was_open) settle(move);
    return false;
}

// Whether so many bytes may be in flight, too. One job always may; a read not where the room is owed to a write.
bool Moves::fits(int64_t bytes, bool foreign) {
    const bool fits = flying_ == 0 || (!owed_ && flying_ + bytes <= limits_.flying_bytes);
    crowded_[foreign] = crowded_[foreign] || !fits;
    return fits;
}

// Whether the next I/O of a move is not for who asks: then it may be for those that found nothing before.
bool Moves::others_turn(Move& move, int32_t way, int32_t files, bool foreign) {
    if (spaces_[files].foreign == foreign) return false;
    const std::pair turn{move.cursors[way].group, way};
    if (std::exchange(move.turn, turn) != turn) news_.io = true;
    return true;
}

bool Moves::next_write(Move& move, bool foreign, IoJob* job) {
    for (int32_t number; (number = move.next_way()) != move.ways();) {
        const Way& way = move.spec.ways[number];
        Move::Cursor& cursor = move.cursors[number];
        if (cursor.page == way.pages) {
            cursor = {cursor.group + 1, 0};
            continue;
        }
        if (others_turn(move, number, way.target, foreign)) return false;
        const int64_t bytes = foreign ? limits_.foreign_io_bytes : limits_.io_bytes;
        const int64_t most = std::max<int64_t>(1, bytes / limits_.extent_bytes);
        const int64_t end = std::min(way.pages, cursor.page + most);
        if (!fits((end - cursor.page) * limits_.extent_bytes, foreign)) return false;
        auto reading = std::make_unique<Reading>();
        for (; cursor.page < end; ++cursor.page) {
            const int32_t row = move.first_row[number] + static_cast<int32_t>(cursor.page);
            reading->pages.push_back({row, way.targets[cursor.page], way.sources[cursor.page] * limits_.extent_bytes});
        }
        reading->way = number;
        reading->write = true;
        reading->part = limits_.extent_bytes;
        job->write = true;
        job->memory = way.source;
        job->files = way.target;
        job->start = 0;
        job->stop = limits_.extent_bytes;
        issue(move, std::move(reading), job);
        for (int32_t n; (n = move.next_way()) != move.ways();) {  // it waits no more where nothing is left
            if (move.cursors[n].page != move.spec.ways[n].pages) break;
            ++move.cursors[n].group;
        }
        return true;
    }
    return false;
}

void Moves::issue(Move& move, std::unique_ptr<Reading> reading, IoJob* job) {
    // The next may be for those that found nothing before: foreign, or not.
    if (move.cursors[reading->way].page == move.spec.ways[reading->way].pages) news_.io = news_.io || move.ways() > 1;
    reading->id = job->id = next_job_++;
    reading->move = &move;
    reading->left = static_cast<int32_t>(reading->pages.size());
    reading->over.assign(reading->pages.size(), false);
    job->move = move.id;
    job->first = reading->write ? 0 : move.spec.groups[reading->group].first;
    job->last = reading->write ? limits_.layers : move.spec.groups[reading->group].last;
    job->pages = reading->pages;
    flying_ += reading->part * reading->left;
    ++move.ios;
    readings_.emplace(reading->id, std::move(reading));
}

bool Moves::io_ended(int64_t job, const IoEnd* ends, int64_t count) {
    const auto found = readings_.find(job);
    if (found == readings_.end()) return false;
    Reading& reading = *found->second;
    Move& move = *reading.move;
    for (int64_t i = 0; i < count; ++i) {
        if (!reading.over[ends[i].page]) end_page(reading, ends[i].page, ends[i].error);
    }
    const bool all = reading.left == 0;
    if (all) {
        --(reading.late ? move.late_ios : move.ios);
        if (move.ios == 0) ++news_.copies;  // as few as there are
        let_go(reading);
    }
    settle(move);
    drop_forgotten(move);
    return all;
}

void Moves::end_page(Reading& reading, int32_t page, int32_t error) {
    Move& move = *reading.move;
    const int32_t row = reading.pages[page].row;
    reading.over[page] = true;
    --reading.left;
    if (reading.late) {
        if (--move.late[row] == 0) end_late(move, row);
        return;
    }
    flying_ -= reading.part;
    news_.room = true;
    if (reading.write) {
        if (error != 0) move.outcome.errors.emplace_back(row, error);
        --move.todo[0];
    } else if (error == 0) {
        landed(move, reading, page);
    } else {
        judge(move, row, error == kShort ? Status::kShortRead : Status::kIoError);
    }
}

void Moves::end_late(Move& move, int32_t row) {
    ended_late_.emplace_back(move.id, row);
    news_.late = true;
}

// A page's layers are in memory. Where it stays, they may be copied when those before them are there, too.
void Moves::landed(Move& move, Reading& reading, int32_t page) {
    const Transfer& one = reading.pages[page];
    if (!move.pending(one.row)) return;
    news_.copies += 1 + reading.part;
    move.there[move.cell(one.row, reading.group)] = 1;
    if (reading.slots != 0) {
        const Group& group = move.spec.groups[reading.group];
        --move.unread[reading.group];
        move.copies(reading.group, reading.way)
            .landed.push_back({one.row, page, one.at + group.begin - group.alone_start, &reading});
        ++reading.copies;
        return;
    }
    const Way& way = move.spec.ways[reading.way];
    const std::vector<int64_t>& places = way.places.empty() ? way.targets : way.places;
    const int64_t slot = places[one.row - move.first_row[reading.way]], extent = slot * limits_.extent_bytes;
    for (int32_t& next = move.next[one.row]; next < move.groups() && move.there[move.cell(one.row, next)]; ++next) {
        --move.unread[next];
        const int64_t at = extent + move.spec.groups[next].begin;
        move.copies(next, reading.way).landed.push_back({one.row, slot, at, nullptr});
    }
}

// Nothing needs what was read any more, where that is so: its slots are free, and the reading is gone.
void Moves::let_go(Reading& reading) {
    if (reading.left != 0 || reading.copies != 0) return;
    if (reading.slots != 0) {
        reserve_.give(reading.slot, reading.slots);
        news_.room = true;
        if (reading.late) held_slots_ -= reading.slots;
    }
    readings_.erase(reading.id);
}

// --- copies

bool Moves::take_copy(Hands hands, CopyJob* job) {
    for (auto next = open_.begin(); next != open_.end();) {
        Move& move = *next++->second;
        if (move.work == Work::kWrite || move.broken) continue;
        if (hands == (move.work == Work::kGather ? Hands::kForeignLoads : Hands::kForeignStores)) continue;
        if (next_copy(move, hands != Hands::kOurs, job)) return true;
    }
    return false;
}

bool Moves::next_copy(Move& move, bool foreign, CopyJob* job) {
    for (int32_t group = 0; group < move.groups(); ++group) {
        for (int32_t way = 0; way < move.ways(); ++way) {
            if (fill_copy(move, group, way, foreign, job)) return true;
            if (move.over) return false;  // the last verdicts needed no copy
        }
    }
    return false;
}

// Say, once, that a group is ready.
void Moves::announce(Move& move, int32_t group) {
    if (move.announced[group] || move.todo[group] != move.queued[group]) return;
    move.announced[group] = news_.ended = true;
    if (watched_ && move.work == Work::kLoad) {
        ready_.push_back({move.id, move.spec.groups[group].first, move.spec.groups[group].last});
    }
}

bool Moves::fill_copy(Move& move, int32_t group_number, int32_t way_number, bool foreign, CopyJob* job) {
    const Way& way = move.spec.ways[way_number];
    const Space& source = spaces_[way.source];
    const bool gather = source.kind == Space::Kind::kPlanes;
    const bool resident = source.kind != Space::Kind::kFiles;
    const bool moves = gather || (spaces_[way.target].kind == Space::Kind::kPlanes && !move.cancelled);
    const int32_t memory = gather     ? way.target
                           : resident ? way.source
                           : way.places.empty() && spaces_[way.target].kind == Space::Kind::kPlanes
                               ? reserve_space_
                           : way.places.empty() ? way.target
                                                : way.through;
    const int32_t planes = gather ? way.source : way.target;
    if ((spaces_[memory].foreign || (moves && spaces_[planes].foreign)) != foreign) return false;
    const Group& group = move.spec.groups[group_number];
    Move::Copyable& copyable = move.copies(group_number, way_number);
    std::erase_if(copyable.landed, [&](const Move::Landed& landed) {  // first: others may wait for its place
        if (move.pending(landed.row)) return false;
        if (landed.reading != nullptr) {
            --landed.reading->copies;
            let_go(*landed.reading);
        }
        return true;
    });
    const int32_t first_row = move.first_row[way_number];
    const bool known = !gather && way.sums.empty();
    if (known && !moves) {  // nothing to copy, and nothing to find out
        for (; resident && copyable.resident < way.pages; ++copyable.resident) {
            const int32_t row = first_row + static_cast<int32_t>(copyable.resident);
            if (move.pending(row)) copied(move, row, group_number);
        }
        // None of these lies in the reserve: what passes through it goes into planes, or nowhere.
        for (const Move::Landed& landed : std::exchange(copyable.landed, {})) copied(move, landed.row, group_number);
        settle(move);
        return false;
    }
    const int64_t part = gather ? limits_.extent_bytes : std::max<int64_t>(1, group.end - group.begin);
    const int64_t bytes = foreign ? limits_.foreign_copy_bytes : limits_.copy_bytes;
    const int64_t most = std::max<int64_t>(1, bytes / part);
    if (foreign && move.ios != 0 && !resident && move.unread[group_number] != 0) {  // few copies: each costs somebody
        const int64_t wanted = std::min<int64_t>(most, static_cast<int64_t>(move.rows()) * move.groups() / kCopies);
        if (static_cast<int64_t>(copyable.landed.size()) < std::max<int64_t>(1, wanted)) return false;
    }
    auto copying = std::make_unique<Copying>();
    *job = CopyJob{};
    auto add = [&](int32_t row, int64_t slot, int64_t at, Reading* reading) {
        job->pages.push_back({row, slot, at});
        copying->rows.push_back(row);
        copying->readings.push_back(reading);
    };
    if (resident) {
        const std::vector<int64_t>& slots = gather ? way.targets : way.sources;
        for (; copyable.resident < way.pages && static_cast<int64_t>(job->pages.size()) < most; ++copyable.resident) {
            const int32_t row = first_row + static_cast<int32_t>(copyable.resident);
            const int64_t slot = slots[copyable.resident];
            if (move.pending(row)) add(row, slot, slot * limits_.extent_bytes + group.begin, nullptr);
        }
    }
    while (!copyable.landed.empty() && static_cast<int64_t>(job->pages.size()) < most) {
        const Move::Landed& landed = copyable.landed.front();
        if (foreign && !job->pages.empty() && landed.reading != copying->readings.back()) break;  // one window a job
        if (landed.reading != nullptr) {
            job->window = landed.reading->slot;
            job->window_slots = landed.reading->slots;
        }
        add(landed.row, landed.slot, landed.at, landed.reading);
        copyable.landed.pop_front();
    }
    if (job->pages.empty()) return false;
    if (moves) {
        const std::vector<int64_t>& blocks = gather ? way.sources : way.targets;
        for (const int32_t row : copying->rows) {
            const int64_t at = static_cast<int64_t>(row - first_row) * limits_.page_blocks;
            job->blocks.insert(job->blocks.end(), blocks.begin() + at, blocks.begin() + at + limits_.page_blocks);
        }
    }
    copying->move = &move;
    copying->way = way_number;
    copying->group = group_number;
    copying->gather = gather;
    copying->sums = job->sums = gather || !known;
    job->id = next_job_++;
    job->move = move.id;
    job->large = static_cast<int64_t>(move.rows()) * limits_.extent_bytes > kLarge;
    job->copy = !moves ? Copy::kDigest : gather ? Copy::kGather : Copy::kScatter;
    job->memory = memory;
    job->first = gather ? 0 : group.first;
    job->last = gather ? limits_.layers : group.last;
    const bool part_only = job->window_slots != 0;
    job->stride = part_only ? group.bytes(true) : limits_.extent_bytes;
    job->origin = part_only ? group.alone_start : 0;
    job->route = job->sums ? group.summed_route : group.route;
    if (foreign) job->after = move.spec.after;
    ++move.copying;
    copies_.emplace(job->id, std::move(copying));
    return true;
}

void Moves::copy_queued(int64_t job, int64_t point) {
    const auto found = copies_.find(job);
    if (found == copies_.end()) return;
    Copying& copying = *found->second;
    Move& move = *copying.move;
    if (!std::exchange(copying.queued, true)) ++move.flying[copying.group];
    for (const int32_t row : copying.rows) {
        Cell& cell = move.cells[move.cell(row, copying.group)];
        if (cell != Cell::kOpen) continue;
        cell = Cell::kQueued;
        ++move.queued[copying.group];
    }
    move.points[copying.group] = std::max(move.points[copying.group], point);
    announce(move, copying.group);
}

void Moves::copy_ended(int64_t job, const uint64_t* found, const char* broken) {
    const auto node = copies_.extract(job);
    if (node.empty()) return;
    Copying& copying = *node.mapped();
    Move& move = *copying.move;
    const Way& way = move.spec.ways[copying.way];
    const Group& group = move.spec.groups[copying.group];
    const int32_t first = copying.gather ? 0 : group.first;
    const int32_t layers = (copying.gather ? limits_.layers : group.last) - first;
    if (broken && !move.broken) {
        move.broken = news_.io = news_.ended = true;
        move.outcome.why = broken;
    }
    for (size_t i = 0; i < copying.rows.size(); ++i) {
        const int32_t row = copying.rows[i];
        const int64_t page = row - move.first_row[copying.way];
        if (Reading* reading = copying.readings[i]) {
            --reading->copies;
            let_go(*reading);
        }
        if (broken) continue;
        const uint64_t* sums = copying.sums ? found + i * layers : nullptr;
        if (copying.gather) {
            uint64_t* kept = spaces_[way.target].sums + way.targets[page] * limits_.layers;
            std::copy(sums, sums + layers, kept);
        } else if (copying.sums && !std::equal(sums, sums + layers, way.sums.data() + page * limits_.layers + first)) {
            judge(move, row, Status::kChecksum);
            continue;
        }
        if (move.pending(row)) copied(move, row, copying.group);
    }
    --move.copying;
    if (copying.queued) --move.flying[copying.group];
    settle(move);
    drop_forgotten(move);
}

// --- what becomes of pages

// A group of a page's layers is where it goes, and right.
void Moves::copied(Move& move, int32_t row, int32_t group) {
    end_cell(move, row, group);
    if (--move.left[row] == 0) move.outcome.statuses[row] = Status::kLoaded;
}

void Moves::end_cell(Move& move, int32_t row, int32_t group) {
    Cell& cell = move.cells[move.cell(row, group)];
    if (cell == Cell::kQueued) --move.queued[group];
    cell = Cell::kDone;
    if (--move.todo[group] == 0) news_.ended = true;
    announce(move, group);
}

// The verdict on a page that has none and is not good: none of its layers is waited for any more.
void Moves::judge(Move& move, int32_t row, Status status) {
    if (!move.pending(row)) return;
    move.outcome.statuses[row] = status;
    if (move.turn.second >= 0) news_.io = true;  // it may have been what others were called for
    int32_t way = 0;
    while (row >= move.first_row[way + 1]) ++way;
    const Way& of = move.spec.ways[way];
    const bool read = reads(of), passes = this->passes(of);
    for (int32_t group = 0; group < move.groups(); ++group) {
        const size_t cell = move.cell(row, group);
        if (move.cells[cell] == Cell::kDone) continue;
        end_cell(move, row, group);
        if (!read || !(passes ? !move.there[cell] : group >= move.next[row])) continue;
        if (--move.unread[group] == 0) ++news_.copies;
    }
}

Nanoseconds Moves::deadline() const {
    Nanoseconds first = std::numeric_limits<Nanoseconds>::max();
    for (const auto& [order, move] : open_) {
        if (!move->expired && move->work != Work::kGather) first = std::min(first, move->spec.until);
    }
    return first;
}

void Moves::expire(Nanoseconds now) {
    for (auto next = open_.begin(); next != open_.end();) {
        Move& move = *next++->second;
        if (move.expired || move.spec.until > now || move.work == Work::kGather) continue;
        pass_deadline(move);
        settle(move);
    }
}

void Moves::pass_deadline(Move& move) {
    move.expired = news_.io = news_.room = true;
    ++news_.copies;
    for (auto& [id, reading] : readings_) {
        if (reading->move != &move || reading->left == 0 || reading->late) continue;
        reading->late = true;
        held_slots_ += reading->slots;
        --move.ios;
        ++move.late_ios;
        for (size_t page = 0; page < reading->pages.size(); ++page) {
            if (reading->over[page]) continue;
            const int32_t row = reading->pages[page].row;
            flying_ -= reading->part;
            if (move.late[row]++ == 0) move.outcome.late.push_back(row);
            if (reading->write) --move.todo[0];
            else judge(move, row, Status::kDeadline);
        }
    }
    if (move.work == Work::kLoad) {
        IoJob none;
        next_read(move, false, &none);  // which gives what is left its verdict
        return;
    }
    for (int32_t way = 0; way < move.ways(); ++way) {  // nothing touches what was never begun
        Move::Cursor& next = move.cursors[way];
        for (int64_t& page = next.page; next.group == 0 && page < move.spec.ways[way].pages; ++page) {
            const int32_t row = move.first_row[way] + static_cast<int32_t>(page);
            move.outcome.late.push_back(row);
            end_late(move, row);
            --move.todo[0];
        }
        next.group = move.groups();
    }
}

void Moves::settle(Move& move) {
    if (move.over || move.spec.open || move.ios != 0 || move.copying != 0) return;
    const bool all = std::all_of(move.todo.begin(), move.todo.end(), [](int32_t left) { return left == 0; });
    if (!all && !move.broken) return;
    for (Move::Copyable& copyable : move.copyable) {  // of a broken load
        for (const Move::Landed& landed : std::exchange(copyable.landed, {})) {
            if (landed.reading == nullptr) continue;
            --landed.reading->copies;
            let_go(*landed.reading);
        }
    }
    move.outcome.broken = move.broken;
    move.over = news_.ended = true;
    open_.erase(move.order);
}

}  // namespace gdscache
