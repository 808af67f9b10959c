// Reads and writes of moves: the next one, and its end.

#include "moves/moves_inside.h"

namespace gdscache {
namespace {

constexpr int32_t kReadsPerWrite = 8;  // reads in a row before a waiting write, while no write is in flight

Status verdict_on(int32_t error) {
    switch (error) {
        case kShort: return Status::kShortRead;
        case kGone: return Status::kGone;
        case kWrong: return Status::kChecksum;
        default: return Status::kIoError;
    }
}

}  // namespace

const IoJob* Moves::take_io(int32_t disk) {
    crowded_ &= ~(uint64_t{1} << disk);
    owed_to_write_ = false;
    Traffic& own = traffic_[disk];
    const bool writes_wait = std::ranges::any_of(
        open_, [](const auto& entry) { return entry.second->work == Work::kWrite && !entry.second->all_issued(); });
    const bool write_first = writes_wait && own.reads_in_row >= kReadsPerWrite && own.writing == 0;
    const IoJob* job = write_first ? next_of(Work::kWrite, disk) : nullptr;
    if (!job) {
        owed_to_write_ = write_first && (crowded_ >> disk & 1) != 0;
        job = next_of(Work::kLoad, disk);
    }
    if (!job && writes_wait && !write_first) job = next_of(Work::kWrite, disk);
    if (job) own.reads_in_row = writes_wait && !job->write ? own.reads_in_row + 1 : 0;
    return job;
}

const IoJob* Moves::next_of(Work work, int32_t disk) {
    for (auto next = open_.begin(); next != open_.end();) {
        Move& move = *next++->second;  // may end below, and leave `open_`
        if (move.work != work) continue;
        const IoJob* const job = work == Work::kLoad ? next_read(move, disk) : next_write(move, disk);
        if (job) return job;
    }
    return nullptr;
}

// Begin no further read of a load. Pages with unread layers get this verdict.
void Moves::read_no_further(Move& move, Status status) {
    for (int32_t way = 0; way < move.ways(); ++way) {
        const auto [group, page] = std::exchange(move.cursors[way], {move.groups(), 0});
        if (group == move.groups() || move.broken) continue;
        const int64_t first = move.first_row[way] + (group + 1 < move.groups() ? 0 : page);
        for (int64_t row = first; row < move.first_row[way + 1]; ++row) judge(move, static_cast<int32_t>(row), status);
    }
}

// The next part of a load to read: groups in order, and within a group the ways in order. Null if nothing is left to
// read, if the next part is another disk's, or if it finds no room.
const IoJob* Moves::next_read(Move& move, int32_t disk) {
    if (move.all_issued()) return nullptr;
    if (refusal_ != Status::kPending || move.broken) read_no_further(move, refusal_);
    for (int32_t number; (number = move.next_way()) != move.ways();) {
        const Way& way = move.spec.ways[number];
        const Move::Cursor& cursor = move.cursors[number];
        const bool passes = this->passes(way);
        const Group& group = move.spec.groups[cursor.group];
        const int64_t part = group.bytes(passes);
        // Reads that pass through the reserve fill their slots.
        const int64_t extent = passes ? limits_.extent_bytes : 1;
        const int64_t whole = (io_bytes(way.source) + extent - 1) / extent * extent;
        const int64_t most = std::max<int64_t>(1, whole / std::max<int64_t>(1, part));
        auto flight = std::make_unique<Flight>();
        IoJob& job = flight->job;
        int64_t page = cursor.page;
        for (; page < way.pages; ++page) {
            const int32_t row = move.first_row[number] + static_cast<int32_t>(page);
            if (!move.pending(row)) continue;  // behind the last read too: what follows may be another disk's turn
            if (static_cast<int64_t>(job.pages.size()) == most) break;
            job.pages.push_back({row, way.sources[page], 0});
        }
        flight->way = number;
        flight->group = cursor.group;
        flight->part = part;
        if (part == 0 || job.pages.empty()) {  // the bytes of these layers came with the group before
            move.go_on(number, page);
            for (size_t i = 0; i < job.pages.size(); ++i) landed(move, *flight, static_cast<int32_t>(i));
            continue;
        }
        if (others_turn(move, number, way.source, disk)) return nullptr;
        if (!fits(static_cast<int64_t>(job.pages.size()) * part, way.source, /*write=*/false)) return nullptr;
        if (passes) {
            const size_t wanted = job.pages.size();
            if (!take_slots(*flight, disk)) return nullptr;
            if (job.pages.size() < wanted) page = job.pages.back().row - move.first_row[number] + 1;
        } else {
            const std::vector<int64_t>& places = way.places.empty() ? way.targets : way.places;
            for (Transfer& one : job.pages) {
                one.at = places[one.row - move.first_row[number]] * limits_.extent_bytes + group.start;
            }
        }
        job.memory = memory(way);
        job.files = way.source;
        job.start = passes ? group.alone_start : group.start;
        job.stop = passes ? group.alone_stop : group.stop;
        job.sums = looked_at(move, way);
        move.go_on(number, page);
        return issue(move, std::move(flight));
    }
    end_if_done(move);
    return nullptr;
}

// Take slots of the reserve for the reads, or for as many pages as find room. False if no slot is free.
bool Moves::take_slots(Flight& flight, int32_t disk) {
    std::vector<Transfer>& pages = flight.job.pages;
    const int64_t wanted = static_cast<int64_t>(pages.size()) * flight.part;
    const int64_t extents = (wanted + limits_.extent_bytes - 1) / limits_.extent_bytes;
    flight.slots = reserve_.take(std::min({extents, round_slots(), room(disk)}), &flight.slot);
    if (flight.slots == 0) return crowds(disk);
    traffic_[disk].slots += flight.slots;
    pages.resize(std::min(pages.size(), static_cast<size_t>(flight.slots * limits_.extent_bytes / flight.part)));
    int64_t at = flight.slot * limits_.extent_bytes;
    for (Transfer& page : pages) page.at = std::exchange(at, at + flight.part);
    return true;
}

// Whether pages stay in the memory they are read into and have expected checksums: then the reader may compute theirs
// while it reads, and no copy job has to.
bool Moves::looked_at(const Move& move, const Way& way) const {
    const bool stays = spaces_[way.target].kind != Space::Kind::kPlanes;
    return stays && move.groups() == 1 && !way.sums.empty() && !foreign(move, way);
}

int64_t Moves::io_bytes(int32_t files) const {
    return spaces_[files].io_bytes ? spaces_[files].io_bytes : limits_.io_bytes;
}

// Whether `bytes` more may be in flight on a disk. One write always may, and one read beside any writes; further reads
// may not if the room is owed to a write. Writes leave room for reads: they take half of it, or the size of two jobs if
// that is more.
bool Moves::fits(int64_t bytes, int32_t files, bool write) {
    const Traffic& now = traffic_[spaces_[files].disk];
    const int64_t half = std::max(limits_.flying_bytes / 2, 2 * std::max(io_bytes(files), limits_.extent_bytes));
    const bool share = !write || now.writing == 0 || now.writing + bytes <= half;
    const bool only = now.flying == (write ? 0 : now.writing);
    const bool room = share && !owed_to_write_ && now.flying + bytes <= limits_.flying_bytes;
    return only || room || crowds(spaces_[files].disk);
}

// Note that a disk's I/O waits for room. Returns false, for its callers to return.
bool Moves::crowds(int32_t disk) {
    crowded_ |= uint64_t{1} << disk;
    return false;
}

// Whether a move's next I/O is for another disk, which is then woken once.
bool Moves::others_turn(Move& move, int32_t way, int32_t files, int32_t disk) {
    if (spaces_[files].disk == disk) return false;
    const std::pair turn{move.cursors[way].group, way};
    if (std::exchange(move.turn, turn) != turn) news_.io = true;
    return true;
}

const IoJob* Moves::next_write(Move& move, int32_t disk) {
    const int32_t number = move.next_way();
    if (number == move.ways()) return nullptr;
    const Way& way = move.spec.ways[number];
    if (others_turn(move, number, way.target, disk)) return nullptr;
    const int64_t most = std::max<int64_t>(1, io_bytes(way.target) / limits_.extent_bytes);
    int64_t page = move.cursors[number].page;
    const int64_t end = std::min(way.pages, page + most);
    if (!fits((end - page) * limits_.extent_bytes, way.target, /*write=*/true)) return nullptr;
    auto flight = std::make_unique<Flight>();
    IoJob& job = flight->job;
    for (; page < end; ++page) {
        const int32_t row = move.first_row[number] + static_cast<int32_t>(page);
        job.pages.push_back({row, way.targets[page], way.sources[page] * limits_.extent_bytes});
    }
    flight->way = number;
    flight->part = limits_.extent_bytes;
    job.write = true;
    job.memory = way.source;
    job.files = way.target;
    job.stop = limits_.extent_bytes;
    move.go_on(number, end);
    return issue(move, std::move(flight));
}

const IoJob* Moves::issue(Move& move, std::unique_ptr<Flight> flight) {
    // The next I/O may be for another disk, which found nothing before.
    if (move.cursors[flight->way].page == 0) news_.io = news_.io || move.ways() > 1;
    IoJob& job = flight->job;
    job.id = next_job_++;
    job.move = move.id;
    job.first = job.write ? 0 : move.spec.groups[flight->group].first;
    job.last = job.write ? limits_.layers : move.spec.groups[flight->group].last;
    flight->move = &move;
    flight->disk = spaces_[job.files].disk;
    flight->left = static_cast<int32_t>(job.pages.size());
    flight->over.assign(job.pages.size(), false);
    traffic_[flight->disk].flying += flight->part * flight->left;
    if (job.write) traffic_[flight->disk].writing += flight->part * flight->left;
    ++move.ios;
    flights_.emplace(job.id, std::move(flight));
    return &job;
}

bool Moves::io_ended(int64_t job, const IoEnd* ends, int64_t count, const uint64_t* sums) {
    const auto found = flights_.find(job);
    if (found == flights_.end()) return false;
    Flight& flight = *found->second;
    Move& move = *flight.move;
    const auto pages = static_cast<int32_t>(flight.over.size());
    const auto known = [&](const IoEnd& end) { return end.page >= 0 && end.page < pages; };
    if (!std::all_of(ends, ends + count, known)) return false;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t page = ends[i].page;
        if (!flight.over[page])
            end_page(flight, page, ends[i].error, sums ? sums + int64_t{page} * limits_.layers : nullptr);
    }
    if (flight.left == 0) {
        --(flight.late ? move.late_ios : move.ios);
        if (move.ios == 0) tell_all(move);  // no more pages will land
        else if (flight.copies != 0) may_be_copied(move, flight.group, flight.way);  // a window is whole
        let_go(flight);
    }
    end_if_done(move);
    drop_forgotten(move);
    return true;
}

void Moves::end_page(Flight& flight, int32_t page, int32_t error, const uint64_t* sums) {
    Move& move = *flight.move;
    const int32_t row = flight.job.pages[page].row;
    flight.over[page] = true;
    --flight.left;
    if (flight.late) {
        if (--move.row[row].late == 0) end_late(move, row);
        return;
    }
    traffic_[flight.disk].flying -= flight.part;
    news_.room = true;
    if (flight.job.write) {
        traffic_[flight.disk].writing -= flight.part;
        if (error != 0) move.outcome.errors.emplace_back(row, error);
        --move.group[0].todo;
    } else if (error == 0) {
        landed(move, flight, page, sums);
    } else {
        judge(move, row, verdict_on(error));
    }
}

void Moves::end_late(Move& move, int32_t row) {
    ended_late_.emplace_back(move.id, row);
    news_.late = true;
}

// A page's layers are in memory. A page that stays there may be copied once its groups before have landed too. With
// `sums` they are only compared: see `looked_at`.
void Moves::landed(Move& move, Flight& flight, int32_t page, const uint64_t* sums) {
    const Transfer& one = flight.job.pages[page];
    if (!move.pending(one.row)) return;
    move.there[move.cell(one.row, flight.group)] = 1;
    if (flight.slots != 0) {
        const Group& group = move.spec.groups[flight.group];
        --move.group[flight.group].unread;
        move.copies(flight.group, flight.way)
            .landed.push_back({one.row, page, one.at + group.begin - group.alone_start, &flight});
        ++flight.copies;
        may_be_copied(move, flight.group, flight.way);
        return;
    }
    const Way& way = move.spec.ways[flight.way];
    const std::vector<int64_t>& places = way.places.empty() ? way.targets : way.places;
    const int64_t number = one.row - move.first_row[flight.way];
    if (sums != nullptr) {
        move.row[one.row].next = move.groups();
        --move.group[0].unread;
        const bool right = std::equal(sums, sums + limits_.layers, way.sums.data() + number * limits_.layers);
        if (right) copied(move, one.row, 0);
        else judge(move, one.row, Status::kChecksum);
        return;
    }
    const int64_t slot = places[number], extent = slot * limits_.extent_bytes;
    if (const uint64_t* const came = spaces_[way.source].sums; way.sums.empty() && came != nullptr) {
        uint64_t* const kept = spaces_[memory(way)].sums + slot * limits_.layers;
        std::copy_n(came + one.slot * limits_.layers, limits_.layers, kept);
    }
    for (int32_t& next = move.row[one.row].next; next < move.groups() && move.there[move.cell(one.row, next)]; ++next) {
        --move.group[next].unread;
        const int64_t at = extent + move.spec.groups[next].begin;
        move.copies(next, flight.way).landed.push_back({one.row, slot, at, nullptr});
        may_be_copied(move, next, flight.way);
    }
}

// Free the slots of a flight, and drop it, if no read or copy needs it any more.
void Moves::let_go(Flight& flight) {
    if (flight.left != 0 || flight.copies != 0) return;
    if (flight.slots != 0) {
        reserve_.give(flight.slot, flight.slots);
        traffic_[flight.disk].slots -= flight.slots;
        news_.room = true;
        if (flight.late) held_slots_ -= flight.slots;
    }
    flights_.erase(flight.job.id);
}

}  // namespace gdscache
