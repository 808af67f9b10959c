// Reads and writes of moves: which is next, and what came of it.

#include "moves_inside.h"

namespace gdscache {
namespace {

constexpr int32_t kReadsPerWrite = 8;  // in a row, while writes wait and none is in flight
constexpr int64_t kRounds = 4;         // that share the reserve: while one is copied, the others are read

Status verdict_on(int32_t error) {
    switch (error) {
        case kShort: return Status::kShortRead;
        case kGone: return Status::kGone;
        case kWrong: return Status::kChecksum;
        default: return Status::kIoError;
    }
}

}  // namespace

bool Moves::take_io(int32_t disk, IoJob* job) {
    *job = IoJob{};
    crowded_ &= ~(uint64_t{1} << disk);
    owed_ = false;
    const bool writes_wait = std::any_of(open_.begin(), open_.end(), [](const auto& entry) {
        return entry.second->work == Work::kWrite && !entry.second->all_issued();
    });
    const bool write_first = writes_wait && reads_in_row_ >= kReadsPerWrite && writing_ == 0;
    if (write_first && take_write(disk, job)) return true;
    owed_ = write_first && (crowded_ >> disk & 1) != 0;
    if (take_read(disk, job)) {
        reads_in_row_ = writes_wait ? reads_in_row_ + 1 : 0;
        return true;
    }
    return writes_wait && !write_first && take_write(disk, job);
}

bool Moves::take_read(int32_t disk, IoJob* job) {
    for (auto next = open_.begin(); next != open_.end();) {
        Move& move = *next++->second;  // which may be over behind this, and then is not in `open_` any more
        if (move.work == Work::kLoad && next_read(move, disk, job)) return true;
    }
    return false;
}

bool Moves::take_write(int32_t disk, IoJob* job) {
    for (auto& [order, move] : open_) {
        if (move->work == Work::kWrite && next_write(*move, disk, job)) {
            reads_in_row_ = 0;
            return true;
        }
    }
    return false;
}

// The next part of a load that is to be read: groups in their order, of each the ways in theirs.
bool Moves::next_read(Move& move, int32_t disk, IoJob* job) {
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
        // What passes through the reserve fills the slots that it takes.
        const int64_t extent = passes ? limits_.extent_bytes : 1, whole = (io_bytes(way.source) + extent - 1) / extent * extent;
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
        if (others_turn(move, number, way.source, disk)) return false;
        if (!fits(static_cast<int64_t>(reading->pages.size()) * part, disk)) return false;
        if (passes) {
            const int64_t wanted = static_cast<int64_t>(reading->pages.size()) * part;
            const int64_t extents = (wanted + limits_.extent_bytes - 1) / limits_.extent_bytes;
            const int64_t share = std::max<int64_t>(1, reserve_.slots() / kRounds);
            reading->slots = reserve_.take(std::min(extents, share), &reading->slot);
            if (reading->slots == 0) return crowds(disk);
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
        job->memory = passes ? reserve_space_ : way.places.empty() ? way.target : way.through;
        job->files = way.source;
        job->start = passes ? group.alone_start : group.start;
        job->stop = passes ? group.alone_stop : group.stop;
        job->sums = looked_at(move, way);
        issue(move, std::move(reading), job);
        return true;
    }
    if (was_open) settle(move);
    return false;
}

// Whether pages that were read go no further, and only their checksums are wanted: then who reads them may take these.
bool Moves::looked_at(const Move& move, const Way& way) const {
    const bool stays = spaces_[way.target].kind != Space::Kind::kPlanes;
    return stays && move.groups() == 1 && !way.sums.empty() && !foreign(move, way);
}

// Whether so many bytes may be in flight, too. One job always may; a read not where the room is owed to a write.
bool Moves::fits(int64_t bytes, int32_t disk) {
    return flying_ == 0 || (!owed_ && flying_ + bytes <= limits_.flying_bytes) || crowds(disk);
}

// The I/O of a disk waits for room: false.
bool Moves::crowds(int32_t disk) {
    crowded_ |= uint64_t{1} << disk;
    return false;
}

// The same for a write. Who reads is waited for, and finds half of the room, unless two writes need more than the rest.
bool Moves::fits_write(int64_t bytes, int32_t files) {
    const int64_t job = std::max(io_bytes(files), limits_.extent_bytes);
    const bool share = writing_ == 0 || writing_ + bytes <= std::max(limits_.flying_bytes / 2, 2 * job);
    return share ? fits(bytes, spaces_[files].disk) : crowds(spaces_[files].disk);
}

// Whether the next I/O of a move is not for the disk that asks: then it may be for one that found nothing before.
bool Moves::others_turn(Move& move, int32_t way, int32_t files, int32_t disk) {
    if (spaces_[files].disk == disk) return false;
    const std::pair turn{move.cursors[way].group, way};
    if (std::exchange(move.turn, turn) != turn) news_.io = true;
    return true;
}

bool Moves::next_write(Move& move, int32_t disk, IoJob* job) {
    for (int32_t number; (number = move.next_way()) != move.ways();) {
        const Way& way = move.spec.ways[number];
        Move::Cursor& cursor = move.cursors[number];
        if (cursor.page == way.pages) {
            cursor = {cursor.group + 1, 0};
            continue;
        }
        if (others_turn(move, number, way.target, disk)) return false;
        const int64_t most = std::max<int64_t>(1, io_bytes(way.target) / limits_.extent_bytes);
        const int64_t end = std::min(way.pages, cursor.page + most);
        if (!fits_write((end - cursor.page) * limits_.extent_bytes, way.target)) return false;
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
    // The next may be for another disk, which found nothing before.
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
    if (reading->write) writing_ += reading->part * reading->left;
    ++move.ios;
    readings_.emplace(reading->id, std::move(reading));
}

bool Moves::io_ended(int64_t job, const IoEnd* ends, int64_t count, const uint64_t* sums) {
    const auto found = readings_.find(job);
    if (found == readings_.end()) return false;
    Reading& reading = *found->second;
    Move& move = *reading.move;
    const auto pages = static_cast<int32_t>(reading.pages.size());
    if (std::any_of(ends, ends + count, [&](const IoEnd& end) { return end.page < 0 || end.page >= pages; })) return false;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t page = ends[i].page;
        if (!reading.over[page]) end_page(reading, page, ends[i].error, sums ? sums + page * limits_.layers : nullptr);
    }
    if (reading.left == 0) {
        --(reading.late ? move.late_ios : move.ios);
        if (move.ios == 0) tell_all(move);  // as few as there are
        else if (reading.copies != 0) may_be_copied(move, reading.group, reading.way);  // a window is whole
        let_go(reading);
    }
    settle(move);
    drop_forgotten(move);
    return true;
}

void Moves::end_page(Reading& reading, int32_t page, int32_t error, const uint64_t* sums) {
    Move& move = *reading.move;
    const int32_t row = reading.pages[page].row;
    reading.over[page] = true;
    --reading.left;
    if (reading.late) {
        if (--move.row[row].late == 0) end_late(move, row);
        return;
    }
    flying_ -= reading.part;
    news_.room = true;
    if (reading.write) {
        writing_ -= reading.part;
        if (error != 0) move.outcome.errors.emplace_back(row, error);
        --move.group[0].todo;
    } else if (error == 0) {
        landed(move, reading, page, sums);
    } else {
        judge(move, row, verdict_on(error));
    }
}

void Moves::end_late(Move& move, int32_t row) {
    ended_late_.emplace_back(move.id, row);
    news_.late = true;
}

// A page's layers are in memory. Where it stays, they may be copied when those before them are there, too. With `sums`
// nothing is left to do but to compare them: see `looked_at`.
void Moves::landed(Move& move, Reading& reading, int32_t page, const uint64_t* sums) {
    const Transfer& one = reading.pages[page];
    if (!move.pending(one.row)) return;
    move.there[move.cell(one.row, reading.group)] = 1;
    if (reading.slots != 0) {
        const Group& group = move.spec.groups[reading.group];
        --move.group[reading.group].unread;
        move.copies(reading.group, reading.way)
            .landed.push_back({one.row, page, one.at + group.begin - group.alone_start, &reading});
        ++reading.copies;
        may_be_copied(move, reading.group, reading.way);
        return;
    }
    const Way& way = move.spec.ways[reading.way];
    const std::vector<int64_t>& places = way.places.empty() ? way.targets : way.places;
    const int64_t number = one.row - move.first_row[reading.way];
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
        move.copies(next, reading.way).landed.push_back({one.row, slot, at, nullptr});
        may_be_copied(move, next, reading.way);
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

}  // namespace gdscache
