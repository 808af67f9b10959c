#include "moves/moves.h"

#include <limits>

#include "base/memory.h"
#include "moves/moves_inside.h"

namespace gdscache {
namespace {

// Append pages to a way. Without the memory for them the way is unchanged.
void append(Way* way, const Way& more) {
    const auto join = [](auto* to, const auto& from) { to->insert(to->end(), from.begin(), from.end()); };
    way->sources.reserve(way->sources.size() + more.sources.size());
    way->targets.reserve(way->targets.size() + more.targets.size());
    way->sums.reserve(way->sums.size() + more.sums.size());
    join(&way->sources, more.sources), join(&way->targets, more.targets), join(&way->sums, more.sums);
    way->pages += more.pages;
}

}  // namespace

Moves::Moves(const Limits& limits, std::vector<Space> spaces, int32_t reserve_space, Reserve reserve)
    : limits_(limits), spaces_(std::move(spaces)), reserve_space_(reserve_space), reserve_(std::move(reserve)) {
    for (const Space& space : spaces_) disks_ = std::max(disks_, space.disk + 1);
    if (disks_ > 1 && reserve_.slots() >= disks_) share_ = std::max<int64_t>(1, round_slots() / (disks_ - 1));
}

Moves::~Moves() = default;

// --- for callers that want bytes moved

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
    move.group.assign(move.spec.groups.size(), {move.spec.open ? 1 : 0});
    add(move, std::move(ways));
    const MustNotFail reserve;
    moves_.emplace(move.id, std::move(owned));
    open_.emplace(move.order, &move);
    end_if_done(move);
}

bool Moves::extend(int64_t id, std::vector<Way> ways, bool last) {
    Move& move = at(id);
    if (!move.spec.open) return false;
    const int32_t before = move.ways();
    add(move, std::move(ways));
    const MustNotFail reserve;
    for (int32_t way = before; move.cancelled && way < move.ways(); ++way) call_off(move, way);
    if (move.expired) read_no_further(move, Status::kDeadline);
    if (last) {
        move.spec.open = false;
        for (int32_t group = 0; group < move.groups(); ++group) {
            if (--move.group[group].todo == 0) news_.ended = true;
            if (move.rows() != 0) announce(move, group);
        }
    }
    end_if_done(move);
    return true;
}

// Rows for more ways. Without the memory for them the move is unchanged, except for reserved room.
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
    move.row.resize(rows, {groups});
    if (move.work == Work::kLoad) move.there.resize(rows * groups, 0);
    move.outcome.statuses.resize(rows, Status::kPending);
    const bool joined = !ways.empty() && move.ways() != 0 && goes_on(move, ways.front());
    if (joined) append(&move.spec.ways.back(), ways.front());
    for (Way& way : ways) {
        const bool read = move.work == Work::kLoad && reads(way);
        const auto pages = static_cast<int32_t>(way.pages);
        for (Move::Layers& group : move.group) group.todo += pages, group.unread += read ? pages : 0;
        if (joined && &way == &ways.front()) {
            move.first_row.back() += pages;
        } else {
            move.first_row.push_back(move.rows() + pages);
            const bool has_io = pages != 0 && (read || move.work == Work::kWrite);
            move.cursors.push_back({has_io ? 0 : groups, 0});
            move.spec.ways.push_back(std::move(way));
        }
        if (move.work != Work::kWrite) tell(move, move.spec.ways.back(), read ? 1 : pages * limits_.extent_bytes);
    }
    move.turn = {-1, -1};  // the turn may come again
    ++news_.copies;        // a thread looks: the move's deadline may be the next
    if (move.work != Work::kGather) news_.io = true;
}

// Whether pages lie in the memory of the load's last ones and go to the same target, so that copies take both together.
bool Moves::goes_on(const Move& move, const Way& way) const {
    const Way& last = move.spec.ways.back();
    if (move.work != Work::kLoad || reads(way) || way.pages == 0) return false;
    const bool alike = way.source == last.source && way.target == last.target && way.through == last.through;
    return alike && way.sums.empty() == last.sums.empty();
}

bool Moves::reads(const Way& way) const { return spaces_[way.source].kind == Space::Kind::kFiles; }

// Whether reads pass through the reserve, and stay nowhere but in the planes.
bool Moves::passes(const Way& way) const {
    return reads(way) && way.places.empty() && spaces_[way.target].kind == Space::Kind::kPlanes;
}

void Moves::refuse(Status status) {
    refusal_ = status;
    news_.io = true;
}

bool Moves::cancel(int64_t id) {
    if (!knows(id)) return false;
    Move& move = at(id);
    if (move.over || move.work != Work::kLoad) return true;
    move.cancelled = news_.io = true;
    tell_all(move);
    for (int32_t way = 0; way < move.ways(); ++way) call_off(move, way);
    end_if_done(move);
    return true;
}

// The reads of a cancelled load that pass through the reserve are useless: their pages end.
void Moves::call_off(Move& move, int32_t way) {
    if (!passes(move.spec.ways[way])) return;
    for (int32_t row = move.first_row[way]; row < move.first_row[way + 1]; ++row) judge(move, row, Status::kCancelled);
}

bool Moves::ended(int64_t move) const { return at(move).over; }
int32_t Moves::groups(int64_t move) const { return at(move).groups(); }
int64_t Moves::rows(int64_t move) const { return at(move).rows(); }
const Outcome& Moves::outcome(int64_t move) const { return at(move).outcome; }

bool Moves::ready(int64_t id, int32_t group, int64_t* point) const {
    const Move& move = at(id);
    *point = move.group[group].flying == 0 ? 0 : move.group[group].point;  // of given-up pages too
    return move.over || (!move.cancelled && !move.broken && move.group[group].todo == move.group[group].queued);
}

bool Moves::forget(int64_t id) {
    if (!knows(id) || !ended(id)) return false;
    at(id).forgotten = true;
    drop_forgotten(at(id));
    return true;
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

// --- the ends of pages

// A group of a page's layers is at its target, and right.
void Moves::copied(Move& move, int32_t row, int32_t group) {
    end_cell(move, row, group);
    if (--move.row[row].left == 0) move.outcome.statuses[row] = Status::kLoaded;
}

void Moves::end_cell(Move& move, int32_t row, int32_t group) {
    Cell& cell = move.cells[move.cell(row, group)];
    if (cell == Cell::kQueued) --move.group[group].queued;
    cell = Cell::kDone;
    if (--move.group[group].todo == 0) news_.ended = true;
    announce(move, group);
}

// The verdict on a pending page that is not good: none of its layers is waited for any more.
void Moves::judge(Move& move, int32_t row, Status status) {
    if (!move.pending(row)) return;
    move.outcome.statuses[row] = status;
    if (move.turn.second >= 0) news_.io = true;  // other disks may have been woken for this page
    int32_t way = 0;
    while (row >= move.first_row[way + 1]) ++way;
    const Way& of = move.spec.ways[way];
    const bool read = reads(of), passes = this->passes(of);
    for (int32_t group = 0; group < move.groups(); ++group) {
        const size_t cell = move.cell(row, group);
        if (move.cells[cell] == Cell::kDone) continue;
        end_cell(move, row, group);
        if (!read || !(passes ? !move.there[cell] : group >= move.row[row].next)) continue;
        if (--move.group[group].unread == 0) tell_all(move);
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
        end_if_done(move);
    }
}

void Moves::pass_deadline(Move& move) {
    move.expired = news_.io = news_.room = true;
    tell_all(move);
    for (auto& [id, flight] : flights_) {
        if (flight->move != &move || flight->left == 0 || flight->late) continue;
        flight->late = true;
        held_slots_ += flight->slots;
        --move.ios;
        ++move.late_ios;
        for (size_t page = 0; page < flight->over.size(); ++page) {
            if (flight->over[page]) continue;
            const int32_t row = flight->job.pages[page].row;
            traffic_[flight->disk].flying -= flight->part;
            if (move.row[row].late++ == 0) move.outcome.late.push_back(row);
            if (flight->job.write) {
                traffic_[flight->disk].writing -= flight->part;
                --move.group[0].todo;
            } else {
                judge(move, row, Status::kDeadline);
            }
        }
    }
    if (move.work == Work::kLoad) return read_no_further(move, Status::kDeadline);
    for (int32_t way = 0; way < move.ways(); ++way) {  // I/O that has not begun touches nothing: it ends at once
        Move::Cursor& next = move.cursors[way];
        for (int64_t& page = next.page; next.group == 0 && page < move.spec.ways[way].pages; ++page) {
            const int32_t row = move.first_row[way] + static_cast<int32_t>(page);
            move.outcome.late.push_back(row);
            end_late(move, row);
            --move.group[0].todo;
        }
        next.group = move.groups();
    }
}

void Moves::end_if_done(Move& move) {
    if (move.over || move.spec.open || move.ios != 0 || move.copying != 0) return;
    const bool all = std::ranges::all_of(move.group, [](const Move::Layers& group) { return group.todo == 0; });
    if (!all && !move.broken) return;
    for (Move::Copyable& copyable : move.copyable) {  // of a broken load
        for (const Move::Landed& landed : std::exchange(copyable.landed, {})) {
            if (landed.flight == nullptr) continue;
            --landed.flight->copies;
            let_go(*landed.flight);
        }
    }
    move.outcome.broken = move.broken;
    move.over = news_.ended = true;
    open_.erase(move.order);
}

}  // namespace gdscache
