// Copies of moves: the next one, and its end. The caller holds the monitor's lock, and carries the job out without it.
//
// A copy is foreign if a thread of a foreign space, such as a GPU's, has to do it (`Hands`). A window is the run of
// slots of the reserve that one read, a `Flight`, fills; they are free when the flight's last copy has ended.

#include "moves/moves_inside.h"

namespace gdscache {
namespace {

constexpr int64_t kLarge = 8 << 20;  // bytes of a move that no processor's cache keeps until they are used

}  // namespace

// Put the pages of one window first, in the order of its slots: they are one copy. A whole window goes before others.
void Moves::Move::Copyable::gather_window() {
    const auto whole = std::ranges::find_if(landed, &Landed::is_whole);
    const Flight* const of = (whole == landed.end() ? landed.begin() : whole)->flight;
    const auto in_it = [of](const Landed& one) { return one.flight == of; };
    const auto others = std::ranges::stable_partition(landed, in_it);
    std::ranges::sort(landed.begin(), others.begin(), {}, &Landed::slot);
}

const CopyJob* Moves::take_copy(Hands hands) {
    for (auto next = open_.begin(); next != open_.end();) {
        Move& move = *next++->second;
        if (move.work == Work::kWrite || move.broken) continue;
        if (hands == (move.work == Work::kGather ? Hands::kForeignLoads : Hands::kForeignStores)) continue;
        for (int32_t group = 0; group < move.groups() && !move.over; ++group) {
            for (int32_t way = 0; way < move.ways() && !move.over; ++way) {  // the last verdicts may need no copy
                if (const CopyJob* const job = fill_copy(move, group, way, hands != Hands::kOurs)) return job;
            }
        }
    }
    return nullptr;
}

int32_t Moves::memory(const Way& way) const {
    return memory_of(way, spaces_[way.source].kind, spaces_[way.target].kind, reserve_space_);
}

// Whether foreign threads copy a way's pages.
bool Moves::foreign(const Move& move, const Way& way) const {
    if (const int32_t where = memory(way); where >= 0 && spaces_[where].foreign) return true;
    if (spaces_[way.source].kind == Space::Kind::kPlanes) return spaces_[way.source].foreign;
    return spaces_[way.target].kind == Space::Kind::kPlanes && !move.cancelled && spaces_[way.target].foreign;
}

// Note a copy or a check for the threads that copy a way's pages. `bytes`: for threads of ours; 1 if it may be none.
void Moves::tell(const Move& move, const Way& way, int64_t bytes) {
    if (!foreign(move, way)) news_.copies += bytes;
    else if (move.work == Work::kGather) news_.stores = true;
    else news_.loads = true;
}

void Moves::tell_all(const Move& move) {
    for (const Way& way : move.spec.ways) tell(move, way, 1);
}

// Pages of a group have landed. The copying threads are woken when a job is worth it, not for each page.
void Moves::may_be_copied(Move& move, int32_t group, int32_t way) {
    if (move.group[group].unread == 0) tell_all(move);
    else if (!too_few(move, group, way)) tell(move, move.spec.ways[way], 1 + move.spec.groups[group].bytes(false));
}

// Whether a group's foreign copy of read pages should wait for more to land: each copy has a cost. Pages that pass
// through the reserve wait until one window is whole, and no longer: the next reads need its slots.
bool Moves::too_few(Move& move, int32_t group, int32_t way) const {
    const Way& of = move.spec.ways[way];
    if (!reads(of) || move.ios == 0 || move.group[group].unread == 0 || !foreign(move, of)) return false;
    if (passes(of)) return std::ranges::none_of(move.copies(group, way).landed, &Move::Landed::is_whole);
    const Group& some = move.spec.groups[group];
    const int64_t part = std::max<int64_t>(1, some.end - some.begin);
    const int64_t most = std::max<int64_t>(1, limits_.foreign_copy_bytes / part);
    const int64_t wanted = std::min<int64_t>(most, static_cast<int64_t>(move.rows()) * move.groups() / limits_.copies);
    return static_cast<int64_t>(move.copies(group, way).landed.size()) < std::max<int64_t>(1, wanted);
}

// Report, once, that a group is ready.
void Moves::announce(Move& move, int32_t group) {
    if (move.group[group].announced || move.group[group].todo != move.group[group].queued) return;
    move.group[group].announced = news_.ended = true;
    if (watched_ && move.work == Work::kLoad) {
        ready_.push_back({move.id, move.spec.groups[group].first, move.spec.groups[group].last});
    }
}

// The next job of a group's pages of one way, or null: there is none, too few pages have landed, or other hands copy
// them. Frees the slots of pages with a verdict. Pages that need neither a copy nor a checksum end here, and with the
// last one perhaps the move (`move.over`).
const CopyJob* Moves::fill_copy(Move& move, int32_t group_number, int32_t way_number, bool foreign) {
    const Way& way = move.spec.ways[way_number];
    const Space& source = spaces_[way.source];
    const bool gather = source.kind == Space::Kind::kPlanes;
    const bool resident = source.kind != Space::Kind::kFiles;
    const bool moves = gather || (spaces_[way.target].kind == Space::Kind::kPlanes && !move.cancelled);
    if (this->foreign(move, way) != foreign) return nullptr;
    const Group& group = move.spec.groups[group_number];
    Move::Copyable& copyable = move.copies(group_number, way_number);
    std::erase_if(copyable.landed, [&](const Move::Landed& landed) {  // first: other reads may wait for their slots
        if (move.pending(landed.row)) return false;
        if (landed.flight != nullptr) {
            --landed.flight->copies;
            let_go(*landed.flight);
        }
        return true;
    });
    const int32_t first_row = move.first_row[way_number];
    const bool known = !gather && way.sums.empty();  // no checksum is to be compared
    if (known && !moves) {
        for (; resident && copyable.resident < way.pages; ++copyable.resident) {
            const int32_t row = first_row + static_cast<int32_t>(copyable.resident);
            if (move.pending(row)) copied(move, row, group_number);
        }
        // None lies in the reserve: its pages go into planes, and a cancelled move has a verdict on each of them.
        for (const Move::Landed& landed : std::exchange(copyable.landed, {})) copied(move, landed.row, group_number);
        end_if_done(move);
        return nullptr;
    }
    const int64_t part = gather ? limits_.extent_bytes : std::max<int64_t>(1, group.end - group.begin);
    const int64_t bytes = foreign ? limits_.foreign_copy_bytes : limits_.copy_bytes;
    const int64_t most = std::max<int64_t>(1, bytes / part);
    if (too_few(move, group_number, way_number)) return nullptr;
    auto copying = std::make_unique<Copying>();
    CopyJob& job = copying->job;
    const auto full = [&] { return static_cast<int64_t>(job.pages.size()) == most; };
    const auto add = [&](const Transfer& page, Flight* flight) {
        job.pages.push_back(page);
        copying->flights.push_back(flight);
    };
    if (resident) {
        const std::vector<int64_t>& slots = gather ? way.targets : way.sources;
        for (; copyable.resident < way.pages && !full(); ++copyable.resident) {
            const int32_t row = first_row + static_cast<int32_t>(copyable.resident);
            const int64_t slot = slots[copyable.resident];
            if (move.pending(row)) add({row, slot, slot * limits_.extent_bytes + group.begin}, nullptr);
        }
    }
    if (foreign && passes(way) && !copyable.landed.empty()) copyable.gather_window();
    while (!copyable.landed.empty() && !full()) {
        const auto [row, slot, at, flight] = copyable.landed.front();
        if (foreign && !job.pages.empty() && flight != copying->flights.back()) break;  // one window a job
        if (flight != nullptr) {
            job.window = flight->slot;
            job.window_slots = flight->slots;
        }
        add({row, slot, at}, flight);
        copyable.landed.pop_front();
    }
    if (job.pages.empty()) return nullptr;
    if (moves) {
        const std::vector<int64_t>& blocks = gather ? way.sources : way.targets;
        for (const Transfer& page : job.pages) {
            const auto first = blocks.begin() + static_cast<int64_t>(page.row - first_row) * limits_.page_blocks;
            job.blocks.insert(job.blocks.end(), first, first + limits_.page_blocks);
        }
    }
    copying->move = &move;
    copying->way = way_number;
    copying->group = group_number;
    job.id = next_job_++;
    job.move = move.id;
    job.large = static_cast<int64_t>(move.rows()) * limits_.extent_bytes > kLarge;
    job.copy = !moves ? Copy::kDigest : gather ? Copy::kGather : Copy::kScatter;
    job.memory = memory(way);
    job.first = gather ? 0 : group.first;
    job.last = gather ? limits_.layers : group.last;
    job.sums = !known;
    const bool part_only = job.window_slots != 0;
    job.stride = part_only ? group.bytes(true) : limits_.extent_bytes;
    job.origin = part_only ? group.alone_start : 0;
    job.route = job.sums ? group.summed_route : group.route;
    if (foreign) job.after = move.spec.after;
    ++move.copying;
    copies_.emplace(job.id, std::move(copying));
    return &job;
}

bool Moves::copy_queued(int64_t job, int64_t point) {
    const auto found = copies_.find(job);
    if (found == copies_.end()) return false;
    Copying& copying = *found->second;
    Move& move = *copying.move;
    if (!std::exchange(copying.queued, true)) ++move.group[copying.group].flying;
    for (const Transfer& page : copying.job.pages) {
        Cell& cell = move.cells[move.cell(page.row, copying.group)];
        if (cell != Cell::kOpen) continue;
        cell = Cell::kQueued;
        ++move.group[copying.group].queued;
    }
    move.group[copying.group].point = std::max(move.group[copying.group].point, point);
    announce(move, copying.group);
    return true;
}

bool Moves::copy_ended(int64_t number, const uint64_t* found, const char* broken, const uint8_t* unfit) {
    const auto ended = copies_.find(number);
    if (ended == copies_.end() || (!broken && ended->second->job.sums && !found)) return false;
    const auto node = copies_.extract(ended);
    const Copying& copying = *node.mapped();
    const CopyJob& job = copying.job;
    Move& move = *copying.move;
    const Way& way = move.spec.ways[copying.way];
    const int32_t layers = job.last - job.first;
    if (broken && !move.broken) {
        move.broken = news_.io = news_.ended = true;
        move.outcome.why = broken;
    }
    for (size_t i = 0; i < job.pages.size(); ++i) {
        const int32_t row = job.pages[i].row;
        const int64_t page = row - move.first_row[copying.way];
        if (Flight* flight = copying.flights[i]) {
            --flight->copies;
            let_go(*flight);
        }
        if (broken) continue;
        const uint64_t* const sums = job.sums ? found + i * layers : nullptr;
        const int64_t first = page * limits_.layers + job.first;
        if (unfit && unfit[i]) {
            judge(move, row, Status::kUnfit);
            continue;
        }
        if (job.copy == Copy::kGather) {
            std::copy_n(sums, layers, spaces_[way.target].sums + way.targets[page] * limits_.layers);
        } else if (job.sums && !std::equal(sums, sums + layers, way.sums.data() + first)) {
            judge(move, row, Status::kChecksum);
            continue;
        }
        if (move.pending(row)) copied(move, row, copying.group);
    }
    --move.copying;
    if (copying.queued) --move.group[copying.group].flying;
    end_if_done(move);
    drop_forgotten(move);
    return true;
}

}  // namespace gdscache
