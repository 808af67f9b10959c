#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>

#include "base/memory.h"
#include "base/quiet.h"
#include "disk/threads_disk.h"
#include "hash/xxh3.h"

namespace gdscache {
namespace {

constexpr int kMostThreads = 1024;
constexpr double kLongest = 1e9;  // seconds of a wait
constexpr size_t kRoom = 16;  // pieces a thread: one of 256 KiB takes a thread 0.1 ms, as long as its wake-up

class SystemCaller final : public Caller {
public:
    int64_t transfer(const Piece& piece, const Call& call) override { return system_call(piece, call); }
    bool in_turn(const Piece& piece) const override { return keeps_lock(piece); }
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

    // Throws std::system_error if the system has no more threads; the destructor joins running ones.
    void begin_threads() {
        for (size_t n = 0; n < wanted_; n++) start(threads_, "gds-disk", n, &ThreadsDisk::serve, this);
    }

    void submit(std::span<const Piece> pieces) override {
        {
            const std::lock_guard lock(mutex_);
            for (const Piece& piece : pieces) {
                pending_++;
                if (is_sound(piece)) {
                    queue_.push_back(piece);
                } else {
                    ended_.push_back({piece.tag, 0, piece.count, EINVAL, 0});
                    over_++;
                }
            }
        }
        if (pieces.size() == 1) work_.notify_one();
        else work_.notify_all();
    }

    int reap(std::vector<Ended>& ended, double seconds) override {
        const auto some = [&] { return !ended_.empty() || woken_; };
        std::unique_lock lock(mutex_);
        if (seconds < 0) told_.wait(lock, some);
        else told_.wait_for(lock, std::chrono::duration<double>(std::min(seconds, kLongest)), some);
        const int taken = static_cast<int>(ended_.size());
        ended.insert(ended.end(), ended_.begin(), ended_.end());
        ended_.clear();
        pending_ -= over_;
        over_ = 0;
        if (taken == 0) woken_ = false;
        return taken;
    }

    void wake() override {
        {
            const std::lock_guard lock(mutex_);
            woken_ = true;
        }
        told_.notify_one();
    }

    size_t pending() const override { return pending_; }
    size_t depth() const override { return wanted_; }
    size_t room() const override { return kRoom * wanted_; }
    uint32_t most_fragments() const override { return most_; }
    const char* name() const override { return name_; }

private:
    void serve() {
        give_way();
        const MustNotFail reserve;
        const std::unique_ptr<Caller> caller = make_();
        std::unique_lock lock(mutex_);
        for (;;) {
            auto next = queue_.end();
            work_.wait(lock, [&] { return (next = first_free(*caller)) != queue_.end() || closing_; });
            if (next == queue_.end()) return;
            const Piece piece = *next;
            queue_.erase(next);
            const bool in_turn = caller->in_turn(piece);
            if (in_turn) turns_.push_back(piece.fd);
            lock.unlock();
            carry_out(*caller, piece);
            lock.lock();
            if (!in_turn) continue;
            std::erase(turns_, piece.fd);
            if (!queue_.empty()) work_.notify_one();  // other pieces of the file may begin, in any thread
        }
    }

    // The first piece whose file's turn no thread has.
    std::deque<Piece>::iterator first_free(const Caller& caller) {
        return std::ranges::find_if(queue_, [&](const Piece& piece) {
            return !caller.in_turn(piece) || std::ranges::find(turns_, piece.fd) == turns_.end();
        });
    }

    void carry_out(Caller& caller, const Piece& piece) {
        std::vector<Part> parts;
        std::vector<Ended> ended;
        begin(piece, parts);
        while (!parts.empty()) {
            const Part part = parts.back();
            parts.pop_back();
            iovec one;
            const Call call = next_call(piece, part, one);
            const bool looks = caller.looks() && !piece.looks.empty() && part.count == piece.count && part.resume == 0;
            const int64_t answer = looks ? read_and_look(caller, piece) : caller.transfer(piece, call);
            advance(piece, part, answer, ended, parts);
            if (looks && answer == call.bytes) ended.back().looked = true;
            if (!parts.empty() && !ended.empty()) tell(ended, 0);
        }
        tell(ended, 1);
    }

    // Report ended fragments of a piece, and `over` pieces as ended.
    void tell(std::vector<Ended>& ended, size_t over) {
        bool first;
        {
            const std::lock_guard lock(mutex_);
            first = ended_.empty();
            ended_.insert(ended_.end(), ended.begin(), ended.end());
            over_ += over;
        }
        ended.clear();
        if (first) told_.notify_one();
    }

    const size_t wanted_;
    const uint32_t most_;
    const char* const name_;
    const MakeCaller make_;
    size_t pending_ = 0;  // the owner's
    std::mutex mutex_;  // guards the members below
    std::condition_variable work_, told_;
    bool woken_ = false;
    std::deque<Piece> queue_;
    std::vector<int32_t> turns_;  // files whose pieces one thread at a time carries out, with a piece under way
    std::vector<Ended> ended_;
    size_t over_ = 0;  // pieces that have ended and were not taken
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

int64_t system_call(const Piece& piece, const Call& call) {
    const auto system = piece.op == Op::kRead ? preadv : pwritev;
    const ssize_t moved = system(piece.fd, call.vectors, static_cast<int>(call.count), call.offset);
    return moved < 0 ? -errno : moved;
}

int64_t read_and_look(Caller& caller, const Piece& piece) {
    const size_t most = piece.copied ? kStride : SIZE_MAX;
    auto look = piece.looks.begin();
    std::vector<iovec> stride;
    int64_t moved = 0;
    size_t within = 0;  // bytes of fragment `next` that were read
    for (uint32_t next = 0; next < piece.count;) {
        const iovec* const fragments = piece.fragments + next;
        size_t bytes = 0;
        stride.clear();
        while (next < piece.count && bytes < most) {
            const iovec& fragment = piece.fragments[next];
            const size_t some = std::min(fragment.iov_len - within, most - bytes);
            stride.push_back({static_cast<uint8_t*>(fragment.iov_base) + within, some});
            bytes += some;
            within += some;
            if (within == fragment.iov_len) ++next, within = 0;
        }
        const Call call{stride.data(), static_cast<uint32_t>(stride.size()), piece.offset + moved,
                        static_cast<int64_t>(bytes)};
        const int64_t answer = caller.transfer(piece, call);
        if (answer < 0) return moved ? moved : answer;
        moved += answer;
        if (answer != call.bytes) return moved;
        for (size_t n = 0; n < stride.size(); ++n) {
            const auto* const begin = static_cast<const uint8_t*>(fragments[n].iov_base);
            const auto* const end = static_cast<const uint8_t*>(stride[n].iov_base) + stride[n].iov_len;
            for (; look != piece.looks.end() && begin <= look->memory && look->memory + look->bytes <= end; ++look) {
                *look->sum = xxh3(look->memory, look->bytes);
            }
        }
    }
    return moved;
}

std::unique_ptr<Disk> open_threads_disk(int threads) {
    return open_threads_disk(threads, "threads", [] { return std::make_unique<SystemCaller>(); });
}

std::unique_ptr<Disk> open_threads_disk(int threads, const char* name, MakeCaller make, uint32_t most) {
    require(threads >= 1 && threads <= kMostThreads, "no sound number of threads");
    auto disk = std::make_unique<ThreadsDisk>(threads, name, std::move(make), most);
    try {
        disk->begin_threads();
    } catch (const std::system_error& error) {
        throw Error(error.code().value(), "a thread cannot be had");
    }
    return disk;
}

}  // namespace gdscache
