#include "executor.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <unordered_map>

#include "quiet.h"
#include "xxh3.h"

namespace gdscache {

namespace {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC


constexpr Nanoseconds kLongest = 1'000'000'000;  // of one wait: then it looks around
constexpr size_t kMostSpans = 1 << 16;           // that are kept until somebody takes them

Span::Kind kind_of(Copy copy) {
    return copy == Copy::kScatter  ? Span::Kind::kScatter
           : copy == Copy::kGather ? Span::Kind::kGather
                                   : Span::Kind::kDigest;
}

}  // namespace

Nanoseconds now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// The lock. Those that wait for what its holder has brought about are woken when it is let go, and not before: a thread
// that is woken while another holds the lock that it needs only costs both a turn.
class Executor::Held {
public:
    // `disk`: of the thread that reads and writes, which nobody has to wake.
    explicit Held(Executor& executor, bool disk = false) : executor_(executor), disk_(disk), lock_(executor.lock_) {}
    ~Held() {
        if (lock_.owns_lock()) let_go();
    }
    void let_go();
    void take_again() { lock_.lock(); }
    // Whether somebody had to be woken; then what is waited for may have come meanwhile.
    bool woke();
    void wait(std::condition_variable& condition, Nanoseconds time) {
        condition.wait_for(lock_, std::chrono::nanoseconds(time));
    }
    void wake_all() { all_ = true; }

private:
    struct Call {
        bool ended, late, foreign_io, loads, stores, disk;
        int64_t copies;  // threads
        bool any() const { return ended || late || foreign_io || loads || stores || disk || copies != 0; }
    };
    Call call();
    void wake(const Call& call);

    Executor& executor_;
    const bool disk_;
    std::unique_lock<std::mutex> lock_;
    bool all_ = false;
};

Executor::Held::Call Executor::Held::call() {
    Moves& moves = executor_.moves_;
    const News news = moves.take_news();
    if (executor_.traced_ && news.ended) executor_.keep_ready();
    const bool all = std::exchange(all_, false);
    const int64_t job = executor_.limits_.copy_bytes, jobs = all ? executor_.idle_ : (news.copies + job - 1) / job;
    return {all || news.ended,
            all || news.late,
            all || news.io || news.room,
            all || news.loads,
            all || news.stores,
            executor_.disk_ && !disk_ && (all || news.io || (news.room && moves.crowded())),
            std::min<int64_t>(jobs, executor_.idle_)};
}

void Executor::Held::wake(const Call& call) {
    if (call.ended) executor_.ended_.notify_all();
    if (call.late) executor_.late_.notify_all();
    if (call.foreign_io) executor_.foreign_io_.notify_all();
    if (call.loads) executor_.loads_.notify_all();
    if (call.stores) executor_.stores_.notify_all();
    if (call.loads || call.stores) executor_.foreign_copies_.notify_all();
    for (int64_t n = 0; n < call.copies; ++n) executor_.copies_.notify_one();
    if (call.disk) executor_.disk_->wake();
}

void Executor::Held::let_go() {
    const Call some = call();
    lock_.unlock();
    wake(some);
}

bool Executor::Held::woke() {
    const Call some = call();
    if (!some.any()) return false;
    lock_.unlock();
    wake(some);
    lock_.lock();
    return true;
}

// A part of each page of a job: bytes of the extent, and the layers that lie wholly in it.
struct Executor::Share {
    int64_t start, stop;
    int32_t first, last;
};

// A job of ours on its way through the disk.
struct Executor::Flight {
    IoJob job;
    std::vector<Share> shares;
    Runs runs;                     // requests are numbered page by page, and by share
    std::vector<uint32_t> left;    // fragments of each page that have not ended
    std::vector<int32_t> errors;   // of each page
    std::vector<Look> looks;       // in the order of fragments
    std::vector<size_t> looks_at;  // of each run, and their number at the end
    std::vector<uint64_t> sums;    // (pages, layers)
    std::vector<int32_t> summed;   // of each page: layers
    uint32_t open = 0;             // pages that have not ended
    Nanoseconds begin = 0;

    uint32_t page_of(uint32_t fragment) const {
        return runs.requests[fragment] / static_cast<uint32_t>(shares.size());
    }
    const Share& share_of(uint32_t fragment) const { return shares[runs.requests[fragment] % shares.size()]; }
};

Executor::Executor(const Limits& limits, std::vector<Space> spaces, std::vector<Place> places, int32_t reserve_space,
                   Reserve reserve, const Pool* pool, std::unique_ptr<Disk> disk, int32_t threads)
    : limits_(limits),
      spaces_(spaces),
      places_(std::move(places)),
      reserve_space_(reserve.slots() ? reserve_space : -1),
      pool_(pool),
      moves_(limits, std::move(spaces), reserve_space, std::move(reserve)),
      disk_(std::move(disk)) {
    try {
        const SignalsBlocked blocked;
        for (int32_t n = 0; n < threads; ++n) {
            threads_.emplace_back(&Executor::copy_loop, this);
            set_name(threads_.back(), "gds-copy", static_cast<size_t>(n));
        }
        if (disk_) {
            threads_.emplace_back(&Executor::disk_loop, this);
            set_name(threads_.back(), "gds-io", 0);
        }
    } catch (...) {
        stop();
        {
            Held held(*this);
            closing_ = true;
            held.wake_all();
        }
        for (std::thread& thread : threads_) thread.join();
        throw;
    }
}

Executor::~Executor() {
    stop();
    {
        Held held(*this);
        closing_ = true;
        held.wake_all();
    }
    for (std::thread& thread : threads_) thread.join();
}

// --- what others ask for

bool Executor::begin(MoveSpec spec) {
    const Held held(*this);
    if (moves_.knows(spec.id)) return false;
    moves_.begin(std::move(spec));
    return true;
}

bool Executor::extend(int64_t move, std::vector<Way> ways, bool last) {
    const Held held(*this);
    if (!moves_.knows(move)) return false;
    int64_t rows = moves_.rows(move);
    for (const Way& way : ways) rows += way.pages;
    return rows <= std::numeric_limits<int32_t>::max() && moves_.extend(move, std::move(ways), last);
}

bool Executor::knows(int64_t move) {
    const Held held(*this);
    return moves_.knows(move);
}

bool Executor::cancel(int64_t move) {
    const Held held(*this);
    if (!moves_.knows(move)) return false;
    moves_.cancel(move);
    return true;
}

void Executor::refuse(Status status) {
    const Held held(*this);
    moves_.refuse(status);
}

bool Executor::wait(int64_t move, int32_t group, Nanoseconds until, Waited* waited, int64_t* point) {
    Held held(*this);
    *point = 0;
    if (!moves_.knows(move) || group >= moves_.groups(move)) return false;
    *waited = wait_for(held, ended_, until, [&] {
        return !moves_.knows(move) || (group < 0 ? moves_.ended(move) : moves_.ready(move, group, point));
    });
    return true;
}

const Outcome* Executor::outcome(int64_t move) {
    const Held held(*this);
    return moves_.knows(move) && moves_.ended(move) ? &moves_.outcome(move) : nullptr;
}

bool Executor::forget(int64_t move) {
    const Held held(*this);
    if (!moves_.knows(move) || !moves_.ended(move)) return false;
    moves_.forget(move);
    return true;
}

const IoJob* Executor::take_io(Nanoseconds until, Waited* waited) {
    Held held(*this);
    IoJob job;
    *waited = wait_for(held, foreign_io_, until, [&] { return moves_.take_io(true, &job); });
    if (*waited != Waited::kHappened) return nullptr;
    return &ios_.emplace(job.id, std::move(job)).first->second;
}

const CopyJob* Executor::take_copy(Hands hands, Nanoseconds until, Waited* waited) {
    Held held(*this);
    CopyJob job;
    std::condition_variable& called = hands == Hands::kForeignLoads    ? loads_
                                      : hands == Hands::kForeignStores ? stores_
                                                                       : foreign_copies_;
    *waited = wait_for(held, called, until, [&] { return moves_.take_copy(hands, &job); });
    if (*waited != Waited::kHappened) return nullptr;
    return &copying_.emplace(job.id, std::move(job)).first->second;
}

bool Executor::io_ended(int64_t job, const IoEnd* ends, int64_t count) {
    const Held held(*this);
    const auto found = ios_.find(job);
    if (found == ios_.end()) return false;
    const int64_t pages = static_cast<int64_t>(found->second.pages.size());
    if (std::any_of(ends, ends + count, [&](const IoEnd& end) { return end.page < 0 || end.page >= pages; })) {
        return false;
    }
    if (moves_.io_ended(job, ends, count)) ios_.erase(found);
    return true;
}

bool Executor::copy_queued(int64_t job, int64_t point) {
    const Held held(*this);
    if (!copying_.contains(job)) return false;
    moves_.copy_queued(job, point);
    return true;
}

bool Executor::copy_ended(int64_t job, const uint64_t* found, const char* broken) {
    const Held held(*this);
    const auto ended = copying_.find(job);
    if (ended == copying_.end() || (!broken && ended->second.sums && found == nullptr)) return false;
    copying_.erase(ended);
    moves_.copy_ended(job, found, broken);
    return true;
}

void Executor::expire(Nanoseconds time) {
    const Held held(*this);
    moves_.expire(time);
}

std::vector<std::pair<int64_t, int32_t>> Executor::take_ended_late(Nanoseconds until, size_t most,
                                                                      Waited* waited) {
    Held held(*this);
    *waited = wait_for(held, late_, until, [&] { return moves_.has_ended_late(); });
    return moves_.take_ended_late(most);
}

int64_t Executor::held_slots() {
    const Held held(*this);
    return moves_.held_slots();
}

int64_t Executor::free_slots() {
    const Held held(*this);
    return moves_.free_slots();
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

template <typename Ready>
Waited Executor::wait_for(Held& held, std::condition_variable& condition, Nanoseconds until, Ready ready) {
    while (true) {
        if (ready()) return Waited::kHappened;
        if (stopped_) return Waited::kClosed;
        if (held.woke()) continue;
        const Nanoseconds time = now();
        if (time >= until) return Waited::kTimeout;
        held.wait(condition, std::min(until - time, kLongest));
    }
}

// --- our threads

void Executor::copy_loop() {
    give_way();
    std::vector<uint64_t> found;
    CopyJob job;
    Held held(*this);
    while (!closing_) {
        if (moves_.take_copy(Hands::kOurs, &job)) {
            held.let_go();
            const Nanoseconds begin = now();
            copy(job, &found);
            const Nanoseconds end = now();
            held.take_again();
            const auto pages = static_cast<int64_t>(job.pages.size());
            const int64_t bytes = limits_.bounds[job.last] - limits_.bounds[job.first];
            keep({kind_of(job.copy), job.first, job.last, job.move, pages, pages * bytes, begin, end});
            moves_.copy_ended(job.id, found.data(), nullptr);
            continue;
        }
        const Nanoseconds time = now(), until = moves_.deadline();
        if (until <= time) {
            moves_.expire(time);
        } else if (!held.woke()) {
            ++idle_;
            held.wait(copies_, std::min(until - time, kLongest));
            --idle_;
        }
    }
}

void Executor::copy(const CopyJob& job, std::vector<uint64_t>* found) const {
    const int32_t layers = job.last - job.first;
    found->resize(job.sums ? job.pages.size() * layers : 0);
    uint8_t* const memory = places_[job.memory].memory;
    const Store store = job.large ? Store::kStreamed : Store::kCached;
    for (size_t page = 0; page < job.pages.size(); ++page) {
        uint8_t* const part = memory + job.pages[page].at;
        uint64_t* const sums = job.sums ? found->data() + page * layers : nullptr;
        const int64_t* const blocks = job.blocks.empty() ? nullptr : &job.blocks[page * limits_.page_blocks];
        if (job.copy == Copy::kGather) gather(*pool_, blocks, job.first, job.last, part, sums, store);
        if (job.copy == Copy::kScatter) scatter(*pool_, blocks, job.first, job.last, part, sums, store);
        for (int32_t layer = job.first; sums && job.copy == Copy::kDigest && layer < job.last; ++layer) {
            const int64_t at = limits_.bounds[layer], end = limits_.bounds[layer + 1];
            sums[layer - job.first] = xxh3(part + (at - limits_.bounds[job.first]), static_cast<size_t>(end - at));
        }
    }
    if (store == Store::kStreamed) stream_fence();
}

std::unique_ptr<Executor::Flight> Executor::flight(IoJob job) const {
    auto flight = std::make_unique<Flight>();
    const Place& files = places_[job.files];
    uint8_t* const memory = places_[job.memory].memory;
    const int64_t count = static_cast<int64_t>(files.files.size());
    const int64_t total = (job.stop - job.start) * static_cast<int64_t>(job.pages.size());
    const int64_t limit = run_bytes(total, static_cast<int>(disk_->depth()));
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
    flight->runs = cut_and_merge(requests, limit);
    flight->left.assign(job.pages.size(), 0);
    flight->errors.assign(job.pages.size(), 0);
    for (uint32_t n = 0; n < flight->runs.requests.size(); ++n) ++flight->left[flight->page_of(n)];
    if (job.sums) add_looks(*flight, job);
    flight->open = static_cast<uint32_t>(job.pages.size());
    flight->job = std::move(job);
    flight->begin = now();
    return flight;
}

// One share of the whole, or where checksums are wanted parts of up to `limit` bytes that end with a layer and a sector, as
// far as there are such. What is larger is cut on, and nobody looks at it then.
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

// A look for each layer of each share that is one fragment.
void Executor::add_looks(Flight& flight, const IoJob& job) const {
    const Runs& runs = flight.runs;
    flight.sums.resize(job.pages.size() * limits_.layers);
    flight.summed.assign(job.pages.size(), 0);
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

void Executor::disk_loop() {
    std::unordered_map<int64_t, std::unique_ptr<Flight>> flights;
    std::vector<Piece> pieces;
    std::vector<Ended> ended;
    std::vector<IoEnd> ends, looked;
    struct Sent {
        Flight* flight;
        uint32_t first, left;  // fragments
    };
    std::unordered_map<uint64_t, Sent> runs;  // by tag
    uint64_t next_tag = 1;
    Held held(*this, true);
    while (!closing_ || !flights.empty()) {
        pieces.clear();
        IoJob job;
        const auto room = [&] { return disk_->pending() + pieces.size() < disk_->room(); };
        while (!closing_ && room() && moves_.take_io(false, &job)) {
            held.let_go();
            auto made = flight(std::move(job));
            const Place& files = places_[made->job.files];
            for (size_t n = 0; n < made->runs.runs.size(); ++n) {
                const Run& run = made->runs.runs[n];
                runs.emplace(next_tag, Sent{made.get(), run.first, run.count});
                pieces.push_back({next_tag++, made->runs.fragments.data() + run.first, run.count, run.fd, run.offset,
                                  made->job.write ? Op::kWrite : Op::kRead, files.copied});
                if (made->looks.empty()) continue;
                pieces.back().looks = made->looks.data() + made->looks_at[n];
                pieces.back().n_looks = static_cast<uint32_t>(made->looks_at[n + 1] - made->looks_at[n]);
            }
            flights.emplace(made->job.id, std::move(made));
            held.take_again();
        }
        held.let_go();
        if (!pieces.empty()) disk_->submit(pieces);
        ended.clear();
        if (disk_->reap(ended, 1.0) < 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // all is late
        held.take_again();
        for (const Ended& some : ended) {
            Sent& sent = runs.at(some.tag);
            Flight* const owner = sent.flight;
            const uint32_t first = sent.first;
            sent.left -= some.count;
            if (sent.left == 0) runs.erase(some.tag);
            ends.clear(), looked.clear();
            int64_t moved = some.moved;
            for (uint32_t n = 0; n < some.count; ++n) {
                const uint32_t fragment = first + some.first + n;
                const uint32_t page = owner->page_of(fragment);
                const int64_t wanted = static_cast<int64_t>(owner->runs.fragments[fragment].iov_len);
                int32_t error = some.error;
                if (error == 0 && moved < wanted) error = kShort;
                moved -= std::min(moved, wanted);
                if (owner->errors[page] == 0) owner->errors[page] = error;
                if (some.looked) {
                    const Share& share = owner->share_of(fragment);
                    if (wanted == share.stop - share.start) owner->summed[page] += share.last - share.first;
                }
                if (--owner->left[page] != 0) continue;
                const bool all = !owner->summed.empty() && owner->summed[page] == limits_.layers;
                (all ? looked : ends).push_back({static_cast<int32_t>(page), owner->errors[page]});
            }
            const auto end = [&](const std::vector<IoEnd>& pages, const uint64_t* sums) {
                owner->open -= static_cast<uint32_t>(pages.size());
                if (!pages.empty()) moves_.io_ended(owner->job.id, pages.data(), static_cast<int64_t>(pages.size()), sums);
            };
            end(ends, nullptr);
            end(looked, owner->sums.data());
            if (owner->open == 0) {
                const IoJob& done = owner->job;
                const auto pages = static_cast<int64_t>(done.pages.size());
                keep({done.write ? Span::Kind::kWrite : Span::Kind::kRead, done.first, done.last, done.move, pages,
                      pages * (done.stop - done.start), owner->begin, now()});
                flights.erase(done.id);
            }
        }
    }
}

}  // namespace gdscache
