// The monitor of moves against plain books (moves_model.h): moves, spaces and limits at random, events in any order.

#include <optional>

#include "tests/moves_model.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

constexpr int64_t kSlots = 40;   // of each space
constexpr int64_t kSector = 16;  // the unit of reads
enum : int32_t { kPlanes, kForeignPlanes, kCpu, kForeignCpu, kBounce, kSsd, kOtherSsd, kSpaces };

constexpr Hands kHands[] = {Hands::kOurs, Hands::kForeignLoads, Hands::kForeignStores, Hands::kForeign};

int64_t rounded_up(int64_t bytes) { return (bytes + kSector - 1) / kSector * kSector; }

World drawn_world(Random& random) {
    World world;
    Limits& limits = world.limits;
    limits.layers = static_cast<int32_t>(random.between(1, 5));
    limits.page_blocks = static_cast<int32_t>(random.between(1, 3));
    const int64_t least = random.below(3) ? kSector : 1;  // layers below a sector may have no read of their own
    limits.bounds.push_back(0);
    for (int32_t n = 0; n < limits.layers; n++) {
        limits.bounds.push_back(limits.bounds.back() + random.between(least, 40));
    }
    limits.extent_bytes = rounded_up(limits.bounds.back());
    for (int64_t* limit : {&limits.io_bytes, &limits.copy_bytes, &limits.foreign_copy_bytes}) {
        *limit = random.between(1, 6 * limits.extent_bytes);
    }
    limits.flying_bytes = random.between(1, 12 * limits.extent_bytes);
    if (random.below(2)) limits.copies = random.between(1, 20);
    for (int32_t space = 0; space < kSpaces; space++) {
        world.spaces.push_back({space < kCpu ? Kind::kPlanes : space < kSsd ? Kind::kMemory : Kind::kFiles});
        world.sums.emplace_back(kSlots * limits.layers);
    }
    for (const int32_t space : {kForeignPlanes, kForeignCpu}) world.spaces[space].foreign = true;
    world.spaces[kOtherSsd].disk = 1;
    if (random.below(2)) world.spaces[kOtherSsd].io_bytes = random.between(1, 6 * limits.extent_bytes);
    for (const int32_t space : {kSsd, kOtherSsd}) {
        for (uint64_t& sum : world.sums[space]) sum = random.next();
    }
    world.spaces[kBounce].foreign = random.below(3) == 0;
    for (int32_t n = 0; n < kSpaces; n++) world.spaces[n].sums = world.sums[n].data();
    world.reserve_space = kBounce;
    world.first = random.between(0, 9);
    world.slots = random.between(1, random.below(2) ? 4 : 20);
    world.fence = random.below(2) ? 0 : random.between(1, 6);
    return world;
}

class Fuzz {
public:
    explicit Fuzz(uint64_t seed)
        : random_(seed),
          world_(drawn_world(random_)),
          moves_(world_.limits, world_.spaces, world_.reserve_space, Reserve(world_.first, world_.slots, world_.fence)),
          model_(world_, moves_) {
        moves_.watch();
    }

    void run() {
        const uint64_t most = 1 + random_.below(14);
        const bool calm = random_.below(3) == 0;  // nothing fails, and nothing is cancelled
        for (uint64_t step = 0; step < 400; step++) {
            event(most, calm);
            hear();
            model_.look();
        }
        if (model_.refusal != Status::kPending) refuse(Status::kPending);
        for (auto& [id, book] : model_.books) {
            if (book.spec.open) extend(book, true);
        }
        while (progress()) model_.look();
        model_.look();
        for (auto& [id, book] : model_.books) forget(book);
        take_late(1000);
        model_.look();
        model_.check_rest();
    }

    int64_t joined = 0;  // copies of pages that came by several calls
    size_t looked = 0;   // pages whose checksums came with their bytes

private:
    bool coin(uint64_t of) { return random_.below(of) == 0; }

    template <typename Map>
    auto any(Map& map) {
        return std::next(map.begin(), static_cast<ptrdiff_t>(random_.below(map.size())));
    }

    // `count` places of a space, each once.
    std::vector<int64_t> places(int64_t count) {
        std::vector<int64_t> drawn;
        while (static_cast<int64_t>(drawn.size()) < count) {
            const int64_t place = random_.between(0, kSlots - 1);
            if (std::find(drawn.begin(), drawn.end(), place) == drawn.end()) drawn.push_back(place);
        }
        return drawn;
    }

    Way drawn_way(int work) {
        constexpr int32_t kAnyPlanes[] = {kPlanes, kForeignPlanes}, kAnyCpu[] = {kCpu, kForeignCpu};
        constexpr int32_t kAnySsd[] = {kSsd, kOtherSsd};
        Way way;
        const int64_t blocks = world_.limits.page_blocks;
        way.pages = random_.between(coin(5) ? 0 : 1, 9);
        const bool out_of_memory = work == 2 || coin(4);
        way.source = random_.pick(work == 1 ? kAnyPlanes : out_of_memory ? kAnyCpu : kAnySsd);
        const bool file = way.source >= kSsd;
        const bool into_memory = work == 1 || (work == 0 && file && coin(4));
        way.target = random_.pick(work == 2 ? kAnySsd : into_memory ? kAnyCpu : kAnyPlanes);
        way.sources = places(way.pages * (work == 1 ? blocks : 1));
        way.targets = places(way.pages * (way.target <= kForeignPlanes ? blocks : 1));
        if (file && way.target <= kForeignPlanes && coin(2)) {
            way.through = random_.pick(kAnyCpu);
            way.places = places(way.pages);
        }
        const bool known = work != 0 || coin(4);
        for (int64_t n = known ? 0 : way.pages * world_.limits.layers; n-- > 0;) way.sums.push_back(random_.next());
        return way;
    }

    void begin() {
        const Limits& limits = world_.limits;
        MoveSpec spec;
        spec.id = static_cast<int64_t>(model_.books.size() + 1) * 7;
        spec.priority = static_cast<Priority>(random_.below(kPriorities));
        spec.until = coin(3) ? std::numeric_limits<Nanoseconds>::max() : now_ + random_.between(1, 60);
        const int work = static_cast<int>(random_.below(5)) - 2;  // 1 gathers, 2 writes, else loads
        for (int64_t n = random_.between(coin(9) ? 0 : 1, 3); n-- > 0;) {
            Way way = drawn_way(std::max(work, 0));
            spec.ways.push_back(std::move(way));
        }
        for (uint64_t n = random_.below(3); n-- > 0;) spec.after.push_back(random_.next());
        for (int32_t first = 0; first < limits.layers;) {
            const int32_t last = static_cast<int32_t>(random_.between(first + 1, limits.layers));
            const int64_t at = limits.bounds[first], end = limits.bounds[last];
            const int64_t stop = rounded_up(end);
            const auto route = [&] { return static_cast<int32_t>(random_.below(3)); };
            spec.groups.push_back(
                {first, last, at, end, rounded_up(at), stop, at / kSector * kSector, stop, route(), route()});
            first = last;
        }
        spec.open = work != 1 && work != 2 && coin(3);
        model_.begin(spec);
        moves_.begin(std::move(spec));
    }

    // More ways of a move, perhaps the last of them.
    void extend(const Booked& book, bool last) {
        std::vector<Way> ways;
        for (int64_t n = random_.between(0, 2); n-- > 0;) ways.push_back(drawn_way(0));
        model_.extend(book.id, ways, last);
        REQUIRE_FAST(moves_.extend(book.id, std::move(ways), last));
        REQUIRE_FAST(last || moves_.rows(book.id) == static_cast<int64_t>(book.rows.size()));
    }

    void extend_any() {
        const auto found = any(model_.books);
        if (found->second.spec.open) extend(found->second, coin(3));
        else if (moves_.knows(found->first)) REQUIRE_FAST(!moves_.extend(found->first, {}, true));
    }

    // Takers without a job sleep until news for them, as in an `Executor`; other events are in the news too.
    void hear() {
        const News news = moves_.take_news();
        for (int32_t disk = 0; disk < 2; disk++) {
            if (news.io || (news.room && crowded(disk))) asleep_io_[disk] = false;
        }
        const std::pair<Hands, bool> called[] = {{Hands::kOurs, news.copies != 0},
                                                 {Hands::kForeign, news.loads || news.stores},
                                                 {Hands::kForeignLoads, news.loads},
                                                 {Hands::kForeignStores, news.stores}};
        for (const auto& [hands, some] : called) {
            if (some) asleep_copies_[static_cast<size_t>(hands)] = false;
        }
        std::set<std::pair<int64_t, int32_t>> ends;
        for (const auto& [id, book] : model_.books) {
            if (!moves_.knows(id)) continue;
            if (moves_.ended(id)) ends.emplace(id, -1);
            for (int32_t group = 0; group < moves_.groups(id); group++) {
                int64_t point = 0;
                if (moves_.ready(id, group, &point)) ends.emplace(id, group);
            }
        }
        REQUIRE_FAST(news.ended || std::includes(ends_.begin(), ends_.end(), ends.begin(), ends.end()));
        ends_ = std::move(ends);
        REQUIRE_FAST(news.late || late_ || !moves_.has_ended_late());
        late_ = moves_.has_ended_late();
    }

    bool crowded(int32_t disk) const { return (moves_.crowded() >> disk & 1) != 0; }

    bool take_io(int32_t disk) {
        hear();
        // Ends of I/O will wake it again: it had to leave room for other moves' writes.
        const bool asleep = asleep_io_[disk] && !(model_.flying(disk) && crowded(disk));
        asleep_io_[disk] = true;
        while (const IoJob* const job = moves_.take_io(disk)) {
            REQUIRE_FAST(!asleep);
            asleep_io_[disk] = false;
            model_.took_io(disk, *job);
            if (model_.refusal == Status::kPending) return true;  // otherwise refused moves have to be met now
        }
        model_.took_no_io(disk);
        return false;
    }

    bool take_copy(Hands hands) {
        hear();
        bool& asleep = asleep_copies_[static_cast<size_t>(hands)];
        const CopyJob* const job = moves_.take_copy(hands);
        if (!job) {
            asleep = true;
            model_.took_no_copy(hands);
            return false;
        }
        REQUIRE_FAST(!asleep);
        model_.took_copy(hands, *job);
        return true;
    }

    void end_io(bool calm) {
        const auto found = any(model_.ios);
        const int64_t id = found->first, pages = static_cast<int64_t>(found->second.job.pages.size());
        std::vector<IoEnd> ends;
        const bool all = coin(2);
        for (int32_t page = 0; page < pages; page++) {
            if (!all && coin(2)) continue;
            const int32_t error = calm || !coin(6) ? 0 : coin(2) ? kShort + static_cast<int32_t>(random_.below(3)) : 5;
            ends.push_back({page, error});
            if (coin(20)) ends.push_back({page, 28});  // a repeated end changes nothing
        }
        const std::vector<uint64_t> sums =
            found->second.job.sums && coin(2) ? sums_of(found->second.job, calm) : std::vector<uint64_t>();
        const uint64_t* const all_sums = sums.empty() ? nullptr : sums.data();
        const IoEnd none{static_cast<int32_t>(pages), 0};
        REQUIRE_FAST(!moves_.io_ended(id, &none, 1) && !moves_.io_ended(id + 1000000, ends.data(), 0));
        REQUIRE_FAST(moves_.io_ended(id, ends.data(), static_cast<int64_t>(ends.size()), all_sums));
        for (const IoEnd& end : ends) {
            if (!model_.ios.contains(id)) break;
            const uint64_t* const some = all_sums ? all_sums + end.page * world_.limits.layers : nullptr;
            model_.io_ended(id, end.page, end.error, some);
        }
    }

    // The checksums of a job's pages; some bytes are not the stored ones.
    std::vector<uint64_t> sums_of(const IoJob& job, bool calm) {
        std::vector<uint64_t> sums;
        const Booked& book = model_.books.at(job.move);
        for (const Transfer& page : job.pages) {
            const Row& row = book.rows[page.row];
            const auto stored = book.spec.ways[row.way].sums.begin() + row.page * world_.limits.layers;
            sums.insert(sums.end(), stored, stored + world_.limits.layers);
            if (!calm && coin(8))
                sums[sums.size() - 1 - random_.below(static_cast<uint64_t>(world_.limits.layers))] ^= 1;
        }
        looked += job.pages.size();
        return sums;
    }

    void end_copy(bool calm) {
        const auto found = any(model_.copies);
        const CopyJob job = found->second.job;
        if (!found->second.queued && coin(2)) {
            point_ += random_.between(1, 4);
            REQUIRE_FAST(moves_.copy_queued(job.id, point_) && !moves_.copy_queued(job.id + 1000000, point_));
            model_.copy_queued(job.id, point_);
            return;
        }
        std::vector<uint64_t> sums;
        const Booked& book = model_.books.at(job.move);
        joined += book.rows[job.pages.front().row].way != book.rows[job.pages.back().row].way;
        for (const Transfer& page : job.pages) {
            const Row& row = book.rows[page.row];
            const Way& way = book.spec.ways[row.way];
            for (int32_t layer = job.first; job.sums && layer < job.last; layer++) {
                const size_t at = static_cast<size_t>(row.page * world_.limits.layers + layer);
                sums.push_back(job.copy == Copy::kGather ? random_.next() : way.sums[at]);
                if (!calm && coin(30)) sums.back() ^= uint64_t{1} << random_.below(64);
            }
        }
        constexpr const char* kCauses[] = {"a broken copy", "another cause"};
        const char* const broken = !calm && coin(25) ? random_.pick(kCauses) : nullptr;
        REQUIRE_FAST(broken || !job.sums || !moves_.copy_ended(job.id, nullptr, nullptr));
        REQUIRE_FAST(moves_.copy_ended(job.id, broken ? nullptr : sums.data(), broken));
        REQUIRE_FAST(!moves_.copy_ended(job.id, sums.data(), "again"));
        model_.copy_ended(job.id, sums, broken);
    }

    void refuse(Status status) {
        moves_.refuse(status);
        model_.refusal = status;
        if (status != Status::kPending) take_io(coin(2) ? 1 : 0);
    }

    void take_late(size_t most) {
        for (const auto& [move, row] : moves_.take_ended_late(most)) model_.told_late(move, row);
    }

    void forget(Booked& book) {
        if (!book.over || book.forgotten) return;
        moves_.forget(book.id);
        book.forgotten = true;
    }

    void event(uint64_t most, bool calm) {
        const uint64_t drawn = random_.below(calm ? 13 : 17);
        if (drawn < 2 && model_.books.size() < most) begin();
        if (drawn >= 2 && drawn < 5) take_io(coin(2) ? 1 : 0);
        if (drawn >= 5 && drawn < 7 && !model_.ios.empty()) end_io(calm);
        if (drawn >= 7 && drawn < 9) take_copy(random_.pick(kHands));
        if (drawn >= 9 && drawn < 11 && !model_.copies.empty()) end_copy(calm);
        if (drawn == 11 && !model_.books.empty()) forget(any(model_.books)->second);
        if (drawn == 12 && !model_.books.empty()) extend_any();
        if (drawn == 13 && !model_.books.empty()) {
            const int64_t id = any(model_.books)->first;
            if (moves_.knows(id) && coin(4)) moves_.cancel(id), model_.cancel(id);
        }
        if (drawn == 14 && coin(6)) {
            refuse(coin(2) ? Status::kPending : coin(2) ? Status::kSwitchedOff : Status::kLockLost);
        }
        if (drawn == 15) {
            now_ += random_.between(0, 12);
            moves_.expire(now_);
            model_.expire(now_);
        }
        if (drawn == 16) take_late(1 + random_.below(3));
    }

    // Any step that may happen, until none may.
    bool progress() {
        bool some = take_io(0);
        some = take_io(1) || some;
        for (const Hands hands : kHands) some = take_copy(hands) || some;
        if (!model_.ios.empty()) end_io(true);
        else if (!model_.copies.empty()) end_copy(true);
        else return some;
        return true;
    }

    Random random_;
    World world_;
    Moves moves_;
    Model model_;
    Nanoseconds now_ = 0;
    int64_t point_ = 0;
    bool asleep_io_[2] = {}, asleep_copies_[4] = {}, late_ = false;
    std::set<std::pair<int64_t, int32_t>> ends_;  // ended moves, and ready groups, as found by their waiters
};

// An executor of a memory, and files of two disks (spaces 1 and 2) or three (5), whose second one's calls have 32 MiB;
// of planes, and a reserve.
struct Disks {
    explicit Disks(int64_t extent_bytes, int32_t disks = 2, int64_t slots = 8) {
        limits.extent_bytes = extent_bytes;
        limits.layers = 1;
        limits.bounds = {0, extent_bytes};
        std::vector<Space> spaces(6, {Kind::kFiles});
        spaces[0].kind = spaces[4].kind = Kind::kMemory;
        spaces[0].sums = spaces[4].sums = sums;
        spaces[3].kind = Kind::kPlanes;
        spaces[2].disk = 1;
        spaces[5].disk = disks - 1;
        spaces[2].io_bytes = 32 << 20;
        moves.emplace(limits, spaces, 4, Reserve(0, slots, 0));
    }

    void begin(int64_t id, Priority priority, int32_t source, int32_t target, int64_t pages) {
        MoveSpec spec;
        spec.id = id;
        spec.priority = priority;
        spec.until = std::numeric_limits<Nanoseconds>::max();
        Way way;
        way.source = source;
        way.target = target;
        way.pages = pages;
        for (int64_t n = 0; n < pages; n++) way.sources.push_back(n % 32);
        way.targets = way.sources;
        spec.ways.push_back(way);
        const int64_t extent = limits.extent_bytes;
        spec.groups.push_back({0, 1, 0, extent, 0, extent, 0, extent});
        moves->begin(spec);
    }

    // Begin all that a disk may. Returns its bytes.
    int64_t take_all(int32_t disk) {
        int64_t bytes = 0;
        while (const IoJob* const job = moves->take_io(disk)) bytes += std::ssize(job->pages) * limits.extent_bytes;
        return bytes;
    }

    uint64_t sums[32] = {};
    Limits limits;
    std::optional<Moves> moves;
};

}  // namespace

TEST_CASE("a load waits for no write, and no disk for another") {
    for (const int64_t extent : {4 << 20, 64 << 20}) {  // the larger one's writes are two
        for (const int32_t files : {1, 2}) {
            Disks rig(extent);
            rig.begin(1, Priority::kDemotion, 0, files, 64);
            REQUIRE(rig.take_all(files - 1) >= std::min<int64_t>(extent * 2, 32 << 20));
            for (const int32_t from : {1, 2}) {
                rig.begin(1 + from, Priority::kLoad, from, 0, 1);
                REQUIRE(rig.take_all(from - 1) == extent);
            }
        }
        for (const int32_t files : {1, 2}) {
            Disks rig(extent);
            rig.begin(1, Priority::kPrefetch, files, 0, 1000);
            REQUIRE(rig.take_all(files - 1) == 64 << 20);
            rig.begin(2, Priority::kDemotion, 0, 3 - files, 1);
            REQUIRE(rig.take_all(2 - files) == extent);
        }
    }
}

TEST_CASE("reads of one disk leave other disks a round of the reserve") {
    for (const int32_t slow : {1, 2}) {
        Disks rig(4 << 20);
        rig.begin(1, Priority::kLoad, slow, 3, 32);
        REQUIRE(rig.take_all(slow - 1) == int64_t{6} * (4 << 20));
        rig.begin(2, Priority::kLoad, 3 - slow, 3, 32);
        REQUIRE(rig.take_all(2 - slow) == int64_t{2} * (4 << 20));
        REQUIRE(rig.moves->free_slots() == 0);
        rig.moves->expire(std::numeric_limits<Nanoseconds>::max());  // late reads keep their slots
        REQUIRE(rig.moves->room(slow - 1) == 0);
    }
}

TEST_CASE("two slow disks leave a third one slots of the reserve") {
    for (const int64_t slots : {3, 8, 16}) {
        Disks rig(4 << 20, 3, slots);
        int64_t taken = 0;
        for (const int32_t slow : {1, 2}) {
            rig.begin(slow, Priority::kLoad, slow, 3, 100);
            taken += rig.take_all(slow - 1);
        }
        rig.begin(3, Priority::kLoad, 5, 3, 100);
        const int64_t left = rig.take_all(2);
        REQUIRE(left >= std::max<int64_t>(1, slots / 8) * (4 << 20));
        REQUIRE((taken + left == slots * (4 << 20) && rig.moves->free_slots() == 0));
    }
}

TEST_CASE("a disk is woken for its turn also where the pages before it had failed") { Fuzz(2606).run(); }

TEST_CASE("moves of any kind against plain books") {
    const uint64_t count = setting("ROUNDS", 1000), from = setting("FIRST_SEED", 0);
    int64_t joined = 0;
    size_t looked = 0;
    for (uint64_t seed = from; seed < from + count; seed++) {
        CAPTURE(seed);
        Fuzz fuzz(seed);
        fuzz.run();
        joined += fuzz.joined;
        looked += fuzz.looked;
    }
    if (from != 0 || count < 100) return;
    CHECK((joined > 0 && looked > 0));
}
