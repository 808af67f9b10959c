#include "moves/executor.h"

#include <limits>
#include <unordered_map>

#include "base/quiet.h"
#include "hash/xxh3.h"

namespace gdscache {
namespace {

constexpr Nanoseconds kLongest = 1'000'000'000;  // of one wait
constexpr size_t kMostSpans = 1 << 16;           // that wait to be taken; later ones are dropped
constexpr Span::Kind kKinds[] = {Span::Kind::kScatter, Span::Kind::kGather, Span::Kind::kDigest};  // by `Copy`

}  // namespace

bool Executor::Held::let_go(bool always) {
    News news = executor_.moves_.take_news();
    if (executor_.traced_ && news.ended) executor_.keep_ready();
    const int64_t job_bytes = executor_.limits_.copy_bytes, idle = executor_.idle_;
    news.copies = std::min((news.copies + job_bytes - 1) / job_bytes, idle);  // from bytes to threads that are woken
    if (std::exchange(all_, false)) news = {true, true, idle, true, true, true, true};  // of every kind
    const uint64_t disks = (news.io ? ~uint64_t{0} : news.room ? executor_.moves_.crowded() : 0) & ~own_;
    const bool some = news.ended || news.late || news.loads || news.stores || news.copies != 0 || disks != 0;
    if (!some && !always) return false;
    lock_.unlock();
    if (news.ended) executor_.ended_.notify_all();
    if (news.late) executor_.late_.notify_all();
    if (news.loads) executor_.loads_.notify_all();
    if (news.stores) executor_.stores_.notify_all();
    for (int64_t n = 0; n < news.copies; ++n) executor_.copies_.notify_one();
    for (size_t n = 0; n < executor_.disks_.size(); ++n) {
        if (executor_.disks_[n] && (disks >> n & 1) != 0) executor_.disks_[n]->wake();
    }
    return true;
}

bool Executor::Held::woke() {
    if (!let_go(false)) return false;
    lock_.lock();
    return true;
}

Executor::Executor(const Limits& limits, std::vector<Place> places, int32_t reserve_space, Reserve reserve,
                   const HostPlanes* pool, std::vector<std::unique_ptr<Disk>> disks, int32_t threads)
    : limits_(limits),
      places_(std::move(places)),
      reserve_space_(reserve.slots() ? reserve_space : -1),
      pool_(pool),
      moves_(limits, {places_.begin(), places_.end()}, reserve_space, std::move(reserve)),
      disks_(std::move(disks)) {
    try {
        for (int32_t n = 0; n < threads; ++n) start(threads_, "gds-copy", n, &Executor::copy_loop, this);
        for (size_t n = 0; n < disks_.size(); ++n) {
            if (disks_[n]) start(threads_, "gds-io", n, &Executor::disk_loop, this, static_cast<int32_t>(n));
        }
    } catch (...) {
        end();
        throw;
    }
}

Executor::~Executor() { end(); }

void Executor::end() {
    stop();
    {
        Held held(*this);
        closing_ = true;
        held.wake_all();
    }
    for (std::thread& thread : threads_) thread.join();
}

// --- calls of other threads

bool Executor::begin(MoveSpec spec) {
    const Held held(*this);
    const MayFail may_fail;  // without memory for the move this throws
    if (moves_.knows(spec.id)) return false;
    moves_.begin(std::move(spec));
    return true;
}

bool Executor::extend(int64_t move, std::vector<Way> ways, bool last) {
    const Held held(*this);
    const MayFail may_fail;
    if (!moves_.knows(move)) return false;
    int64_t rows = moves_.rows(move);
    for (const Way& way : ways) rows += way.pages;
    return rows <= std::numeric_limits<int32_t>::max() && moves_.extend(move, std::move(ways), last);
}

std::optional<int64_t> Executor::wait(int64_t move, int32_t group, Nanoseconds until) {
    Held held(*this);
    int64_t point = 0;  // of the group's last queued copy that is under way
    const bool happened = wait_for(held, ended_, until, [&] {
        if (!moves_.knows(move) || group >= moves_.groups(move)) return true;
        return group < 0 ? moves_.ended(move) : moves_.ready(move, group, &point);
    });
    if (happened) return point;
    if (stopped_) throw Stopped();
    return std::nullopt;
}

const Outcome* Executor::outcome(int64_t move) {
    const Held held(*this);
    return moves_.knows(move) && moves_.ended(move) ? &moves_.outcome(move) : nullptr;
}

const CopyJob* Executor::take_copy(Hands hands, Nanoseconds until) {
    Held held(*this);
    const CopyJob* job = nullptr;
    std::condition_variable& called = hands == Hands::kForeignStores ? stores_ : loads_;
    wait_for(held, called, until, [&] { return (job = moves_.take_copy(hands)) != nullptr; });
    return job;
}

std::vector<std::pair<int64_t, int32_t>> Executor::take_ended_late(Nanoseconds until, size_t most) {
    Held held(*this);
    if (!wait_for(held, late_, until, [&] { return moves_.has_ended_late(); }) && stopped_) throw Stopped();
    return moves_.take_ended_late(most);
}

void Executor::trace() {
    const Held held(*this);
    traced_ = true;
    moves_.watch();
}

std::vector<Span> Executor::take_spans(size_t most) {
    const Held held(*this);
    const auto end = kept_.begin() + static_cast<ptrdiff_t>(std::min(most, kept_.size()));
    std::vector<Span> taken(kept_.begin(), end);
    kept_.erase(kept_.begin(), end);
    return taken;
}

void Executor::tell(const Span& span) {
    const Held held(*this);
    keep(span);
}

void Executor::keep(const Span& span) {
    if (traced_ && kept_.size() < kMostSpans) kept_.push_back(span);
}

void Executor::stop() {
    Held held(*this);
    stopped_ = true;
    held.wake_all();
}

void Executor::keep_ready() {
    const Nanoseconds time = now();
    for (const ReadyGroup& group : moves_.take_ready()) {
        keep({Span::Kind::kReady, group.first, group.last, group.move, 0, 0, time, time});
    }
}

// Whether `ready` came true; false after the time, or when the executor was stopped.
template <typename Ready>
bool Executor::wait_for(Held& held, std::condition_variable& condition, Nanoseconds until, Ready ready) {
    while (!ready()) {
        if (stopped_) return false;
        if (held.woke()) continue;
        const Nanoseconds time = now();
        if (time >= until) return false;
        held.wait(condition, std::min(until - time, kLongest));
    }
    return true;
}

// --- our threads: they see deadlines pass, and copy

void Executor::copy_loop() {
    give_way();
    std::vector<uint64_t> found;
    std::vector<uint8_t> unfit;
    Held held(*this);
    while (!closing_) {
        const Nanoseconds time = now();
        if (moves_.deadline() <= time) moves_.expire(time);
        if (const CopyJob* const job = moves_.take_copy(Hands::kOurs)) {
            held.let_go();
            const Nanoseconds begin = now();
            copy(*job, &found, &unfit);
            const Nanoseconds end = now();
            held.take_again();
            const auto pages = static_cast<int64_t>(job->pages.size());
            const int64_t bytes = limits_.bounds[job->last] - limits_.bounds[job->first];
            keep({kKinds[static_cast<size_t>(job->copy)], job->first, job->last, job->move, pages, pages * bytes, begin,
                  end});
            moves_.copy_ended(job->id, found.data(), /*broken=*/nullptr, unfit.data());
            continue;
        }
        if (held.woke()) continue;
        ++idle_;
        held.wait(copies_, std::min(moves_.deadline() - time, kLongest));
        --idle_;
    }
}

void Executor::copy(const CopyJob& job, std::vector<uint64_t>* found, std::vector<uint8_t>* unfit) const {
    const int32_t layers = job.last - job.first;
    found->resize(job.sums ? job.pages.size() * layers : 0);
    unfit->assign(job.pages.size(), 0);  // 1: the page does not fit into a packed extent
    uint8_t* const memory = places_[job.memory].memory;
    const Store store = job.large ? Store::kStreamed : Store::kCached;
    for (size_t page = 0; page < job.pages.size(); ++page) {
        uint8_t* const part = memory + job.pages[page].at;
        uint64_t* const sums = job.sums ? found->data() + page * layers : nullptr;
        const int64_t* const blocks = job.blocks.empty() ? nullptr : &job.blocks[page * limits_.page_blocks];
        if (job.copy == Copy::kGather) {
            (*unfit)[page] = !gather(*pool_, blocks, job.first, job.last, part, sums, store);
        }
        if (job.copy == Copy::kScatter) scatter(*pool_, blocks, job.first, job.last, part, sums, store);
        for (int32_t layer = job.first; sums && job.copy == Copy::kDigest && layer < job.last; ++layer) {
            const int64_t at = limits_.bounds[layer], end = limits_.bounds[layer + 1];
            sums[layer - job.first] = xxh3(part + (at - limits_.bounds[job.first]), static_cast<size_t>(end - at));
        }
    }
    if (store == Store::kStreamed) stream_fence();
}

// --- the I/O threads: jobs become pieces of files, and the pieces' answers become ends of pages

// A part of each page of a job: bytes of the extent, and the layers that lie wholly in it.
struct Executor::Share {
    int64_t start, stop;
    int32_t first, last;
};

// A job on its way through the disk.
struct Executor::Flight {
    IoJob job;
    std::vector<Share> shares;
    Runs runs;                     // a request for each share of each page, page by page
    struct Page {
        uint32_t left = 0;  // fragments under way
        int32_t error = 0;
        int32_t summed = 0;  // layers whose checksums the disk took
    };
    std::vector<Page> pages;
    std::vector<Look> looks;       // checksums for the disk to take, in the order of fragments
    std::vector<size_t> looks_at;  // the first look of each run, and behind them the number of looks
    std::vector<uint64_t> sums;    // (pages, layers)
    size_t open = 0;               // pages under way
    Nanoseconds begin = 0;

    uint32_t page_of(uint32_t fragment) const { return runs.requests[fragment] / static_cast<uint32_t>(shares.size()); }
    const Share& share_of(uint32_t fragment) const { return shares[runs.requests[fragment] % shares.size()]; }
};

std::unique_ptr<Executor::Flight> Executor::flight(IoJob job, const Disk& disk) const {
    auto flight = std::make_unique<Flight>();
    const Place& files = places_[job.files];
    uint8_t* const memory = places_[job.memory].memory;
    const int64_t count = std::ssize(files.files);
    const int64_t total = (job.stop - job.start) * static_cast<int64_t>(job.pages.size());
    // A transport of Python's gets jobs of the size of its calls, which are cut no further.
    const int64_t limit = files.io_bytes ? total : run_bytes(total, static_cast<int>(disk.depth()));
    flight->shares = shares(job, limit);
    std::vector<Request> requests;
    requests.reserve(job.pages.size() * flight->shares.size());
    for (const Transfer& page : job.pages) {
        const int64_t number = page.slot / files.stretch, within = page.slot % files.stretch;
        const int64_t extent = (number / count * files.stretch + within) * limits_.extent_bytes;
        for (const Share& share : flight->shares) {
            const auto address = reinterpret_cast<uint64_t>(memory + page.at + (share.start - job.start));
            requests.push_back({files.files[number % count], extent + share.start, address, share.stop - share.start});
        }
    }
    flight->runs = cut_and_merge(requests, limit, disk.most_fragments());
    flight->pages.resize(job.pages.size());
    flight->open = job.pages.size();
    for (uint32_t n = 0; n < flight->runs.requests.size(); ++n) ++flight->pages[flight->page_of(n)].left;
    if (job.sums) add_looks(*flight, job);
    flight->job = std::move(job);
    flight->begin = now();
    return flight;
}

// One share for the whole job. With checksums: shares of up to `limit` bytes that end with a layer and on a sector,
// where the layers allow it. A larger share is cut later, and its checksums are not taken while it is read.
std::vector<Executor::Share> Executor::shares(const IoJob& job, int64_t limit) const {
    if (!job.sums) return {{job.start, job.stop, job.first, job.last}};
    std::vector<Share> made{{job.start, job.start, job.first, job.first}};
    for (int32_t layer = job.first; layer < job.last; ++layer) {
        const int64_t stop = layer + 1 == job.last ? job.stop : limits_.bounds[layer + 1];
        if (layer + 1 != job.last && stop % kAlignment != 0) continue;
        if (stop - made.back().start > limit && made.back().stop != made.back().start) {
            made.push_back({made.back().stop, made.back().stop, made.back().last, made.back().last});
        }
        made.back().stop = stop;
        made.back().last = layer + 1;
    }
    return made;
}

// The disk takes the checksum of each layer of each share that is one fragment.
void Executor::add_looks(Flight& flight, const IoJob& job) const {
    const Runs& runs = flight.runs;
    flight.sums.resize(job.pages.size() * limits_.layers);
    for (const Run& run : runs.runs) {
        flight.looks_at.push_back(flight.looks.size());
        for (uint32_t n = run.first; n < run.first + run.count; ++n) {
            const Share& share = flight.share_of(n);
            if (static_cast<int64_t>(runs.fragments[n].iov_len) != share.stop - share.start) continue;
            const auto* const memory = static_cast<const uint8_t*>(runs.fragments[n].iov_base) - share.start;
            uint64_t* const sums = flight.sums.data() + flight.page_of(n) * static_cast<size_t>(limits_.layers);
            for (int32_t layer = share.first; layer < share.last; ++layer) {
                const int64_t at = limits_.bounds[layer], bytes = limits_.bounds[layer + 1] - at;
                flight.looks.push_back({memory + at, static_cast<size_t>(bytes), sums + layer});
            }
        }
    }
    flight.looks_at.push_back(flight.looks.size());
}

void Executor::disk_loop(int32_t number) {
    Disk& disk = *disks_[number];
    std::unordered_map<uint32_t, std::unique_ptr<Flight>> flights;
    uint32_t next_flight = 0;
    std::vector<Piece> pieces;
    std::vector<Ended> ended;
    std::vector<IoEnd> unsummed, summed;
    Held held(*this, number);
    while (!closing_ || !flights.empty()) {
        pieces.clear();
        const auto room = [&] { return disk.pending() + pieces.size() < disk.room(); };
        while (const IoJob* const job = !closing_ && room() ? moves_.take_io(number) : nullptr) {
            held.let_go();  // the job stays until its pages have ended
            auto made = flight(*job, disk);
            const Place& files = places_[made->job.files];
            for (size_t n = 0; n < made->runs.runs.size(); ++n) {
                const Run& run = made->runs.runs[n];
                const uint64_t tag = uint64_t{next_flight} << 32 | n;
                pieces.push_back({tag, made->runs.fragments.data() + run.first, run.count, run.fd, run.offset,
                                  made->job.write ? Op::kWrite : Op::kRead, files.copied});
                if (made->looks.empty()) continue;
                const size_t at = made->looks_at[n];
                pieces.back().looks = std::span(made->looks).subspan(at, made->looks_at[n + 1] - at);
            }
            flights.emplace(next_flight++, std::move(made));
            held.take_again();
        }
        held.let_go();
        if (!pieces.empty()) disk.submit(pieces);
        ended.clear();
        if (disk.reap(ended, 1.0) < 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // broken
        held.take_again();
        for (const Ended& answer : ended) {
            const auto flight_number = static_cast<uint32_t>(answer.tag >> 32);
            Flight* const owner = flights.at(flight_number).get();
            const uint32_t first = owner->runs.runs[static_cast<uint32_t>(answer.tag)].first;
            unsummed.clear(), summed.clear();
            int64_t moved = answer.moved;
            for (uint32_t n = 0; n < answer.count; ++n) {
                const uint32_t fragment = first + answer.first + n;
                const uint32_t place = owner->page_of(fragment);
                Flight::Page& page = owner->pages[place];
                const int64_t wanted = static_cast<int64_t>(owner->runs.fragments[fragment].iov_len);
                const int32_t error = answer.error == 0 && moved < wanted ? kShort : answer.error;
                moved -= std::min(moved, wanted);
                if (page.error == 0) page.error = error;
                const Share& share = owner->share_of(fragment);
                if (answer.looked && wanted == share.stop - share.start) page.summed += share.last - share.first;
                if (--page.left != 0) continue;
                const bool all = page.summed == limits_.layers;
                (all ? summed : unsummed).push_back({static_cast<int32_t>(place), page.error});
            }
            const auto report = [&](const std::vector<IoEnd>& pages, const uint64_t* sums) {
                owner->open -= pages.size();
                if (!pages.empty()) moves_.io_ended(owner->job.id, pages.data(), std::ssize(pages), sums);
            };
            report(unsummed, nullptr);
            report(summed, owner->sums.data());
            if (owner->open == 0) {
                const IoJob& done = owner->job;
                const auto pages = static_cast<int64_t>(done.pages.size());
                keep({done.write ? Span::Kind::kWrite : Span::Kind::kRead, done.first, done.last, done.move, pages,
                      pages * (done.stop - done.start), owner->begin, now()});
                flights.erase(flight_number);
            }
        }
    }
}

}  // namespace gdscache
