#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "memory.h"
#include "quiet.h"
#include "threads_disk.h"

namespace gdscache {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostThreads = 1024;
constexpr size_t kRoom = 16;  // pieces a thread: one of 256 KiB takes a thread 0.1 ms, and to be called takes as long

class SystemCaller final : public Caller {
public:
    int64_t transfer(const Piece& piece, const Call& call) override { return system_call(piece, call); }
    bool in_turn(const Piece& piece) const override { return keeps_lock(piece); }
};

// A part of one of some pieces that is to be tried again.
struct Again {
    size_t piece;
    Part part;
};

class ThreadsDisk final : public Disk {
public:
    ThreadsDisk(int threads, const char* name, MakeCaller make, uint32_t most)
        : wanted_(static_cast<size_t>(threads)), most_(most), name_(name), make_(std::move(make)) {
        threads_.reserve(wanted_);
    }

    ~ThreadsDisk() override {
        {
            const std::lock_guard lock(mutex_);
            closing_ = true;
            queue_.clear();
        }
        work_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    // Throws std::system_error where the system has no more threads; those that run are joined by the destructor.
    void start() {
        const SignalsBlocked blocked;
        for (size_t n = 0; n < wanted_; n++) {
            threads_.emplace_back([this] { serve(); });
            set_name(threads_.back(), "gds-disk", n);
        }
    }

    void submit(std::span<const Piece> pieces) override {
        bool refused = false;
        {
            const std::lock_guard lock(mutex_);
            for (const Piece& piece : pieces) {
                pending_++;
                if (is_sound(piece)) {
                    queue_.push_back(piece);
                } else {
                    ended_.push_back({piece.tag, 0, piece.count, EINVAL, 0});
                    over_++;
                    refused = true;
                }
            }
        }
        if (refused) event_.signal();
        if (pieces.size() == 1) {
            work_.notify_one();
        } else {
            work_.notify_all();
        }
    }

    int reap(std::vector<Ended>& ended, double seconds) override {
        const Clock::time_point began = Clock::now();
        for (;;) {
            if (const int count = take(ended); count || woken_.exchange(false)) return count;
            double left = seconds;
            if (seconds > 0) {
                left = std::max(0.0, seconds - std::chrono::duration<double>(Clock::now() - began).count());
            }
            if (left == 0) return 0;
            wait(left);
        }
    }

    void wake() override {
        woken_.store(true);
        event_.signal();
    }

    size_t pending() const override { return pending_; }
    size_t depth() const override { return wanted_; }
    size_t room() const override { return kRoom * wanted_; }
    uint32_t most_fragments() const override { return most_; }
    const char* name() const override { return name_; }

private:
    // What has ended, without a wait. The event says no more than that it is worth looking, so it is drained first.
    int take(std::vector<Ended>& ended) {
        uint64_t count;
        while (read(event_.fd, &count, sizeof count) < 0 && errno == EINTR) {
        }
        const std::lock_guard lock(mutex_);
        ended.insert(ended.end(), ended_.begin(), ended_.end());
        const int taken = static_cast<int>(ended_.size());
        ended_.clear();
        pending_ -= over_;
        over_ = 0;
        return taken;
    }

    void wait(double seconds) {
        pollfd polled{event_.fd, POLLIN, 0};
        const double bounded = std::min(seconds, 1e9);
        const timespec until{static_cast<time_t>(bounded),
                             static_cast<long>((bounded - static_cast<double>(static_cast<time_t>(bounded))) * 1e9)};
        ppoll(&polled, 1, seconds < 0 ? nullptr : &until, nullptr);
    }

    void serve() {
        give_way();
        const MustNotFail reserve;
        const std::unique_ptr<Caller> caller = make_();
        std::vector<Piece> pieces;
        std::vector<Part> parts;
        std::vector<Ended> ended;
        std::vector<Again> again;
        std::vector<int32_t> turns;
        std::unique_lock lock(mutex_);
        for (;;) {
            auto next = queue_.end();
            work_.wait(lock, [&] { return (next = first_free(*caller)) != queue_.end() || closing_; });
            if (next == queue_.end()) return;
            take_from(*caller, next, pieces, turns);
            lock.unlock();
            if (pieces.size() == 1) {
                begin(pieces[0], parts);
                finish(*caller, pieces[0], parts, ended);
            } else {
                caller->transfer_all(pieces, [&](size_t n, int64_t answer) {
                    begin(pieces[n], parts);
                    const Part part = parts.back();
                    parts.pop_back();
                    advance(pieces[n], part, answer, ended, parts);
                    for (const Part& one : parts) again.push_back({n, one});
                    tell(ended, parts.empty() ? 1 : 0);
                    parts.clear();
                });
                for (size_t n = 0; n < again.size(); n++) {  // those of a piece follow each other
                    parts.push_back(again[n].part);
                    if (n + 1 < again.size() && again[n + 1].piece == again[n].piece) continue;
                    finish(*caller, pieces[again[n].piece], parts, ended);
                }
                again.clear();
            }
            lock.lock();
            end_turns(turns);
        }
    }

    // Whether a thread has the turn of a piece's file.
    bool waits(const Caller& caller, const Piece& piece) const {
        return caller.in_turn(piece) && std::find(turns_.begin(), turns_.end(), piece.fd) != turns_.end();
    }

    // The first piece that need not wait for its turn.
    std::deque<Piece>::iterator first_free(const Caller& caller) {
        return std::find_if(queue_.begin(), queue_.end(), [&](const Piece& piece) { return !waits(caller, piece); });
    }

    // A piece, and behind it this thread's share of those that may go together with it. `turns`: of these files.
    void take_from(const Caller& caller, std::deque<Piece>::iterator next, std::vector<Piece>& pieces,
                   std::vector<int32_t>& turns) {
        pieces.clear();
        const size_t share = 1 + (queue_.size() - 1) / wanted_;
        do {
            pieces.push_back(*next);
            next = queue_.erase(next);
        } while (next != queue_.end() && pieces.size() < share && caller.small(pieces[0]) && caller.small(*next) &&
                 !waits(caller, *next));
        for (const Piece& piece : pieces) {
            if (!caller.in_turn(piece) || std::find(turns.begin(), turns.end(), piece.fd) != turns.end()) continue;
            turns.push_back(piece.fd);
        }
        turns_.insert(turns_.end(), turns.begin(), turns.end());
    }

    // Other pieces of these files may begin, by this thread or another.
    void end_turns(std::vector<int32_t>& turns) {
        for (const int32_t file : turns) std::erase(turns_, file);
        if (!turns.empty() && !queue_.empty()) work_.notify_one();
        turns.clear();
    }

    // Everything that is left of a piece.
    void finish(Caller& caller, const Piece& piece, std::vector<Part>& parts, std::vector<Ended>& ended) {
        while (!parts.empty()) {
            const Part part = parts.back();
            parts.pop_back();
            iovec one;
            const Call call = next_call(piece, part, one);
            const bool looks = caller.looks() && piece.n_looks != 0 && part.count == piece.count && part.resume == 0;
            const int64_t answer = looks ? read_and_look(caller, piece) : caller.transfer(piece, call);
            advance(piece, part, answer, ended, parts);
            if (looks && answer == call.bytes) ended.back().looked = true;
            if (!parts.empty() && !ended.empty()) tell(ended, 0);
        }
        tell(ended, 1);
    }

    // Answers of a piece, and whether it is over.
    void tell(std::vector<Ended>& ended, size_t over) {
        bool first;
        {
            const std::lock_guard lock(mutex_);
            first = ended_.empty();
            ended_.insert(ended_.end(), ended.begin(), ended.end());
            over_ += over;
        }
        ended.clear();
        if (first) event_.signal();
    }

    const Event event_{EFD_NONBLOCK};  // that there may be something to take
    const size_t wanted_;
    const uint32_t most_;
    const char* const name_;
    const MakeCaller make_;
    std::atomic<bool> woken_{false};
    size_t pending_ = 0;  // the owner's
    std::mutex mutex_;    // guards what follows
    std::condition_variable work_;
    std::deque<Piece> queue_;
    std::vector<int32_t> turns_;  // files of pieces under way that one thread at a time carries out
    std::vector<Ended> ended_;
    size_t over_ = 0;  // pieces of which all has ended, and that were not taken
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

int64_t system_call(const Piece& piece, const Call& call) {
    const auto system = piece.op == Op::kRead ? preadv : pwritev;
    const ssize_t moved = system(piece.fd, call.vectors, static_cast<int>(call.count), call.offset);
    return moved < 0 ? -errno : moved;
}

std::unique_ptr<Disk> open_threads_disk(int threads) {
    return open_threads_disk(threads, "threads", [] { return std::make_unique<SystemCaller>(); });
}

std::unique_ptr<Disk> open_threads_disk(int threads, const char* name, MakeCaller make, uint32_t most) {
    if (threads < 1 || threads > kMostThreads) throw Error(EINVAL, "no sound number of threads");
    auto disk = std::make_unique<ThreadsDisk>(threads, name, std::move(make), most);
    try {
        disk->start();
    } catch (const std::system_error& error) {
        throw Error(error.code().value(), "a thread cannot be had");
    }
    return disk;
}

}  // namespace gdscache
