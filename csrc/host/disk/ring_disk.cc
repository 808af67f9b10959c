// A disk by io_uring's system calls. Needs Linux 5.15, for timeouts of waits and a limit of the kernel's threads.

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <optional>

#include "disk/disk.h"

namespace gdscache {
namespace {

uint32_t acquire(const uint32_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void release(uint32_t* at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

[[noreturn]] void refuse(const char* what, int error) {
    throw Error(error, std::string(what) + " answers " + std::strerror(error));
}

// The rings shared with the kernel. One thread uses them at a time, and nothing may be in flight at their end.
class Ring {
public:
    // For `entries` requests in flight, with at most `workers` threads of the kernel for files and as many for all else.
    // Reads a page of memory through the kernel. Throws `Error`.
    Ring(unsigned entries, unsigned workers) {
        io_uring_params params{};
        params.flags = IORING_SETUP_CLAMP;
        fd_ = Descriptor(static_cast<int>(syscall(SYS_io_uring_setup, entries, &params)));
        if (!fd_) refuse("io_uring_setup", errno);
        if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_EXT_ARG) ||
            params.sq_entries < entries) {
            throw Error(EINVAL, "this kernel's io_uring is too old, or too small");
        }
        unsigned limits[2] = {workers, workers};
        if (syscall(SYS_io_uring_register, fd_.get(), IORING_REGISTER_IOWQ_MAX_WORKERS, limits, 2) < 0)
            refuse("io_uring_register", errno);
        map(params);
        try_it();
    }
    Ring(Ring&&) = delete;

    // Queue a request; there must be room. `length`: bytes, or vectors. `worker`: a kernel thread does the request from
    // the start; else `enter` begins it, and copies the bytes itself if no device is needed.
    void put(uint8_t code, int fd, int64_t offset, const void* address, uint32_t length, uint64_t data, bool worker) {
        const uint32_t tail = *submit_tail_;  // only this thread writes it
        io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_.get())[tail & submit_mask_];
        entry = {};
        entry.opcode = code;
        entry.flags = worker ? IOSQE_ASYNC : 0;
        entry.fd = fd;
        entry.off = static_cast<uint64_t>(offset);
        entry.addr = reinterpret_cast<uint64_t>(address);
        entry.len = length;
        entry.user_data = data;
        release(submit_tail_, tail + 1);
        queued_++;
    }

    // Submit the queued requests, and wait up to `seconds` (below 0: for ever) for `wait` completions. 0, or a negative
    // errno: -ETIME after the time, -EBUSY or -EAGAIN if completions must be taken first.
    int enter(unsigned wait, double seconds) {
        timespec until{};
        io_uring_getevents_arg patience{};
        unsigned flags = IORING_ENTER_GETEVENTS;
        const bool bounded = wait && seconds >= 0;
        if (bounded) {
            const double whole = std::floor(std::min(seconds, 1e9));
            until = {static_cast<time_t>(whole), static_cast<long>((std::min(seconds, 1e9) - whole) * 1e9)};
            patience.ts = reinterpret_cast<uint64_t>(&until);
            flags |= IORING_ENTER_EXT_ARG;
        }
        for (;;) {
            const long taken = syscall(SYS_io_uring_enter, fd_.get(), queued_, wait, flags,
                                       bounded ? &patience : nullptr, bounded ? sizeof patience : size_t{0});
            if (taken < 0) return -errno;
            queued_ -= static_cast<unsigned>(taken);
            if (!queued_) return 0;
            if (!taken) return -EAGAIN;
        }
    }

    // The oldest completion, or null. `pop` it before the next.
    const io_uring_cqe* front() const {
        const uint32_t head = *complete_head_;  // only this thread writes it
        return head == acquire(complete_tail_) ? nullptr : completions_ + (head & complete_mask_);
    }
    void pop() { release(complete_head_, *complete_head_ + 1); }

    bool has_queued() const { return queued_ != 0; }

    // Take back the last queued request, unless the kernel has it. Its `data`, or none.
    std::optional<uint64_t> take_back() {
        if (!queued_) return std::nullopt;
        queued_--;
        const uint32_t tail = *submit_tail_ - 1;
        release(submit_tail_, tail);
        return static_cast<const io_uring_sqe*>(entries_.get())[tail & submit_mask_].user_data;
    }

private:
    struct Unmap {
        void operator()(void* at) const { munmap(at, bytes); }
        size_t bytes = 0;
    };
    using Mapped = Unique<void*, Unmap>;

    void map(const io_uring_params& params) {
        const uint32_t array = params.sq_off.array, completions = params.cq_off.cqes;
        const size_t words = std::max<size_t>(array + sizeof(uint32_t) * params.sq_entries,
                                              completions + sizeof(io_uring_cqe) * params.cq_entries);
        const auto mapped = [&](size_t bytes, off_t offset) {
            void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), offset);
            if (at == MAP_FAILED) refuse("mmap of an io_uring", errno);
            madvise(at, bytes, MADV_DONTFORK);  // a child has no use for it
            return Mapped(at, {bytes});
        };
        rings_ = mapped(words, 0);
        entries_ = mapped(sizeof(io_uring_sqe) * params.sq_entries, IORING_OFF_SQES);
        uint8_t* const base = static_cast<uint8_t*>(rings_.get());
        const auto word = [&](uint32_t offset) { return reinterpret_cast<uint32_t*>(base + offset); };
        submit_tail_ = word(params.sq_off.tail);
        submit_mask_ = *word(params.sq_off.ring_mask);
        complete_head_ = word(params.cq_off.head);
        complete_tail_ = word(params.cq_off.tail);
        complete_mask_ = *word(params.cq_off.ring_mask);
        completions_ = reinterpret_cast<const io_uring_cqe*>(base + completions);
        for (uint32_t n = 0; n < params.sq_entries; n++) word(array)[n] = n;
    }

    // A kernel may take requests and still block them by a rule, or give wrong answers.
    void try_it() {
        const Descriptor file(static_cast<int>(syscall(SYS_memfd_create, "gdscache-ring", 1u /* MFD_CLOEXEC */)));
        if (!file) refuse("memfd_create", errno);
        std::vector<uint8_t> page(kAlignment), got(kAlignment);
        for (size_t n = 0; n < page.size(); n++) page[n] = static_cast<uint8_t>(n * 7 + n / 256);
        bool good = write(file.get(), page.data(), page.size()) == kAlignment;
        if (good) {
            put(IORING_OP_READ, file.get(), 0, got.data(), kAlignment, 1, true);
            int answer;
            do answer = enter(1, -1);
            while (answer == -EINTR || answer == -EAGAIN || answer == -EBUSY);
            if (answer < 0) refuse("io_uring_enter", -answer);
            const io_uring_cqe* const ended = front();
            good = ended && ended->user_data == 1 && ended->res == kAlignment && page == got;
            if (ended) pop();
        }
        if (!good) throw Error(EIO, "io_uring reads other bytes than were written");
    }

    Descriptor fd_;
    Mapped rings_, entries_;
    // Indices that both sides read and one side writes: the entries they cover are written before, and read after.
    uint32_t *submit_tail_ = nullptr, *complete_head_ = nullptr, *complete_tail_ = nullptr;
    uint32_t submit_mask_ = 0, complete_mask_ = 0;
    const io_uring_cqe* completions_ = nullptr;
    unsigned queued_ = 0;
};

// --- the disk

using Clock = std::chrono::steady_clock;

constexpr uint64_t kWake = ~uint64_t{0};
constexpr int kMostDepth = 16384;
constexpr int kTries = 16;  // of an unexpected error: the kernel may be short of memory
constexpr timespec kPause{0, 200'000};
constexpr auto kOpenAgain = std::chrono::milliseconds(100);
constexpr double kLook = 0.001;  // seconds between looks at a failed ring's requests
constexpr auto kLastWait = std::chrono::seconds(5);

class RingDisk final : public Disk {
public:
    RingDisk(int workers, int depth)
        : workers_(static_cast<unsigned>(workers)), flights_(static_cast<size_t>(depth)), ring_(open_ring()) {
        free_.reserve(flights_.size());
        for (size_t n = flights_.size(); n-- > 0;) free_.push_back(static_cast<uint32_t>(n));
    }

    ~RingDisk() override {
        // Requests of the kernel may write to memory until they end, so they are waited for. Queued ones are dropped.
        std::vector<Ended> ended;
        const Clock::time_point until = Clock::now() + kLastWait;
        while (free_.size() < flights_.size() && (old_.empty() || Clock::now() < until)) {
            queue_.clear();
            again_.clear();
            if (reap(ended, old_.empty() ? -1 : kLook) < 0) nanosleep(&kPause, nullptr);
            ended.clear();
        }
        // A ring with requests that have not ended stays, so that none of its memory is reused.
        for (Old& old : old_) (void)old.ring.release();
        while (ring_ && listening_) {
            wake();
            if (enter(1, -1) < 0) break;
            take(*ring_, false, ended);
        }
    }

    void submit(std::span<const Piece> pieces) override {
        for (const Piece& piece : pieces) {
            pending_++;
            if (!is_sound(piece)) {
                refused_.push_back({piece.tag, 0, piece.count, EINVAL, 0});
                continue;
            }
            const auto left = std::make_shared<uint32_t>(piece.count);
            parts_.clear();
            begin(piece, parts_);
            for (const Part& part : parts_) queue_.push_back({piece, part, left});
        }
        fill();
        if (ring_ && ring_->has_queued()) ring_->enter(0, 0);  // the next `reap` sees its answer too
    }

    int reap(std::vector<Ended>& ended, double seconds) override {
        const size_t before = ended.size();
        const Clock::time_point began = Clock::now();
        for (;;) {
            pending_ -= refused_.size();
            ended.insert(ended.end(), refused_.begin(), refused_.end());
            refused_.clear();
            take(ended);
            if (!open_again()) {
                give_up(ended);
                if (ended.size() == before) return -error_;
                break;
            }
            fill();
            if (!listening_) listen();
            double left = seconds;
            if (seconds > 0) {
                left = std::max(0.0, seconds - std::chrono::duration<double>(Clock::now() - began).count());
            }
            const bool over = ended.size() > before || woken_ || left == 0;
            if (!over || ring_->has_queued()) {
                const double wait = old_.empty() || (left >= 0 && left < kLook) ? left : kLook;
                if (const int answer = enter(over ? 0 : 1, wait); answer < 0) {
                    failed(-answer);
                    continue;
                }
            }
            if (over) break;
        }
        if (ended.size() == before) take(ended);
        if (ended.size() == before) woken_ = false;
        return static_cast<int>(ended.size() - before);
    }

    void wake() override { event_.signal(); }
    size_t pending() const override { return pending_; }
    size_t depth() const override { return flights_.size(); }
    size_t room() const override { return 2 * flights_.size(); }
    const char* name() const override { return error_ ? "ring (failed)" : "ring"; }

private:
    struct Waiting {
        Piece piece;
        Part part;
        std::shared_ptr<uint32_t> left;  // fragments of the piece that have not ended
    };
    struct Flight : Waiting {
        iovec one{};
    };

    // A failed ring, while the kernel has requests of it.
    struct Old {
        std::unique_ptr<Ring> ring;
        size_t flights;
    };

    std::unique_ptr<Ring> open_ring() const {
        return std::make_unique<Ring>(static_cast<unsigned>(flights_.size()) + 1, workers_);
    }

    void listen() {
        ring_->put(IORING_OP_READ, event_.get(), 0, &signal_, sizeof signal_, kWake, false);
        listening_ = true;
    }

    // Begin waiting parts while there is room: repeated ones first.
    void fill() {
        while (ring_ && !free_.empty() && (!again_.empty() || !queue_.empty())) {
            std::deque<Waiting>& from = again_.empty() ? queue_ : again_;
            begin_one(from.front());
            from.pop_front();
        }
    }

    void begin_one(const Waiting& next) {
        const uint32_t slot = free_.back();
        free_.pop_back();
        Flight& flight = flights_[slot];
        flight = {next, {}};
        const Call call = next_call(flight.piece, flight.part, flight.one);
        const bool reads = flight.piece.op == Op::kRead;
        // A part that would have blocked is not tried again on this thread.
        const bool worker = flight.piece.copied || flight.part.tries;
        const int fd = flight.piece.fd;
        if (call.count == 1) {
            ring_->put(reads ? IORING_OP_READ : IORING_OP_WRITE, fd, call.offset, call.vectors->iov_base,
                       static_cast<uint32_t>(call.bytes), slot, worker);
        } else {
            const uint8_t code = reads ? IORING_OP_READV : IORING_OP_WRITEV;
            ring_->put(code, fd, call.offset, call.vectors, call.count, slot, worker);
        }
    }

    void take(std::vector<Ended>& ended) {
        if (ring_) take(*ring_, false, ended);
        for (Old& old : old_) old.flights -= take(*old.ring, true, ended);
        std::erase_if(old_, [](const Old& old) { return old.flights == 0; });
    }

    // Returns the number of completions that were flights.
    size_t take(Ring& ring, bool old, std::vector<Ended>& ended) {
        size_t flights = 0;
        while (const io_uring_cqe* const completion = ring.front()) {
            const io_uring_cqe got = *completion;
            ring.pop();
            if (got.user_data == kWake) {
                if (!old) listening_ = false;
                woken_ = true;
                continue;
            }
            flights++;
            const Flight flight = flights_[got.user_data];
            free_.push_back(static_cast<uint32_t>(got.user_data));
            const size_t from = ended.size();
            parts_.clear();
            advance(flight.piece, flight.part, got.res, ended, parts_);
            for (const Part& part : parts_) again_.push_back({flight.piece, part, flight.left});
            answered(*flight.left, ended, from);
        }
        return flights;
    }

    void answered(uint32_t& left, const std::vector<Ended>& ended, size_t from) {
        for (size_t n = from; n < ended.size(); n++) left -= ended[n].count;
        if (!left && from != ended.size()) pending_--;
    }

    // The ring failed. Requests that the kernel does not have begin again, on another ring.
    void failed(int error) {
        size_t flights = flights_.size() - free_.size();
        for (const Old& old : old_) flights -= old.flights;
        while (const std::optional<uint64_t> data = ring_->take_back()) {
            if (*data == kWake) continue;
            const Flight& flight = flights_[*data];
            again_.push_front(flight);
            free_.push_back(static_cast<uint32_t>(*data));
            flights--;
        }
        old_.push_back({std::move(ring_), flights});
        listening_ = false;
        woken_ = true;  // a wake may have been lost with the ring
        error_ = error;
        next_try_ = {};
    }

    // Open another ring if possible.
    bool open_again() {
        if (ring_) return true;
        const Clock::time_point now = Clock::now();
        if (now < next_try_) return false;
        next_try_ = now + kOpenAgain;
        try {
            const Event event;  // the old ring still reads the other event
            auto ring = open_ring();
            if (dup3(event.get(), event_.get(), O_CLOEXEC) < 0) return false;
            ring_ = std::move(ring);
        } catch (const Error&) {
            return false;
        }
        error_ = 0;
        return true;
    }

    // No ring can be had: waiting parts fail.
    void give_up(std::vector<Ended>& ended) {
        for (std::deque<Waiting>* const from : {&again_, &queue_}) {
            for (const Waiting& next : *from) {
                const size_t at = ended.size();
                ended.push_back({next.piece.tag, next.part.first, next.part.count, error_, 0});
                answered(*next.left, ended, at);
            }
            from->clear();
        }
    }

    // Submit and wait. An unexpected error may pass soon; if it stays, it is the ring's.
    int enter(unsigned wait, double seconds) {
        for (int tries = 0;; tries++) {
            const int answer = ring_->enter(wait, seconds);
            if (answer == -EAGAIN && !ring_->front()) {
                nanosleep(&kPause, nullptr);  // the kernel is short of memory
                return 0;
            }
            if (answer >= 0 || answer == -ETIME || answer == -EINTR || answer == -EBUSY || answer == -EAGAIN) return 0;
            if (tries == kTries) return answer;
            nanosleep(&kPause, nullptr);
            if (ring_->front()) return 0;
        }
    }

    const Event event_;
    const unsigned workers_;
    std::vector<Flight> flights_;
    std::unique_ptr<Ring> ring_;  // null: it failed, and no other can be had
    std::vector<Old> old_;
    uint64_t signal_ = 0;  // the target of `event_`'s read
    bool listening_ = false, woken_ = false;
    std::atomic<int> error_{0};  // why there is no ring
    Clock::time_point next_try_;
    std::vector<uint32_t> free_;  // of `flights_`
    std::deque<Waiting> queue_, again_;
    size_t pending_ = 0;
    std::vector<Ended> refused_;  // unsound pieces
    std::vector<Part> parts_;
};

}  // namespace

std::unique_ptr<Disk> open_ring_disk(int workers, int depth) {
    require(workers >= 1 && depth >= 1 && depth <= kMostDepth, "no sound number of workers, or of requests");
    return std::make_unique<RingDisk>(workers, depth);
}

}  // namespace gdscache
