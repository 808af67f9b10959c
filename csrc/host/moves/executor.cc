#include "moves/executor.h"

#include <limits>

#include "base/quiet.h"
#include "hash/xxh3.h"

namespace gdscache {
namespace {

constexpr Nanoseconds kLongest = 1'000'000'000;  // of one wait
constexpr size_t kMostSpans = 1 << 16;           // kept until they are taken
constexpr Span::Kind kKinds[] = {Span::Kind::kScatter, Span::Kind::kGather, Span::Kind::kDigest};  // by `Copy`

}  // namespace

Executor::Held::Call Executor::Held::call() {
    News news = executor_.moves_.take_news();
    if (executor_.traced_ && news.ended) executor_.keep_ready();
    const int64_t job = executor_.limits_.copy_bytes, idle = executor_.idle_;
    news.copies = std::min((news.copies + job - 1) / job, idle);
    if (std::exchange(all_, false)) news = {true, true, idle, true, true, true, true};
    return {news, (news.io ? ~uint64_t{0} : news.room ? executor_.moves_.crowded() : 0) & ~own_};
}

void Executor::Held::wake(const Call& call) {
    if (call.news.ended) executor_.ended_.notify_all();
    if (call.news.late) executor_.late_.notify_all();
    if (call.news.loads) executor_.loads_.notify_all();
    if (call.news.stores) executor_.stores_.notify_all();
    for (int64_t n = 0; n < call.news.copies; ++n) executor_.copies_.notify_one();
    for (size_t n = 0; n < executor_.disks_.size(); ++n) {
        if (executor_.disks_[n] && (call.disks >> n & 1) != 0) executor_.disks_[n]->wake();
    }
}

void Executor::Held::let_go() {
    const Call some = call();
    lock_.unlock();
    wake(some);
}

bool Executor::Held::woke() {
    const Call some = call();
    const News& news = some.news;
    if (!news.ended && !news.late && !news.loads && !news.stores && !news.copies && !some.disks) return false;
    lock_.unlock();
    wake(some);
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
    const MayFail may_fail;
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
    int64_t point = 0;
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

// --- our threads

void Executor::copy_loop() {
    give_way();
    std::vector<uint64_t> found;
    std::vector<uint8_t> unfit;
    Held held(*this);
    while (!closing_) {
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
            moves_.copy_ended(job->id, found.data(), nullptr, unfit.data());
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

void Executor::copy(const CopyJob& job, std::vector<uint64_t>* found, std::vector<uint8_t>* unfit) const {
    const int32_t layers = job.last - job.first;
    found->resize(job.sums ? job.pages.size() * layers : 0);
    unfit->assign(job.pages.size(), 0);
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

}  // namespace gdscache
