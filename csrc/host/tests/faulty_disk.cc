// For tests: a disk that fails on order. See faulty_disk.h.

#include "tests/faulty_disk.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <tuple>
#include <unordered_map>

namespace gdscache {

namespace {

using Clock = std::chrono::steady_clock;

class Faulty final : public FaultyDisk {
public:
    Faulty(std::unique_ptr<Disk> disk, std::vector<Fault> faults)
        : disk_(std::move(disk)), faults_(std::move(faults)) {}

    void submit(std::span<const Piece> pieces) override {
        for (const Piece& piece : pieces) {
            if (!is_sound(piece) || !submit_apart(piece)) pass_on({piece, 0}, {});
        }
    }

    int reap(std::vector<Ended>& ended, double seconds) override {
        const size_t before = ended.size();
        const Clock::time_point until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                           std::chrono::duration<double>(std::min(seconds, 1e6)));
        for (;;) {
            if (released_) {
                for (const Some& some : hanging_) pass_on(some, {});
                hanging_.clear();
            }
            const Clock::time_point now = Clock::now();
            std::erase_if(late_, [&](const auto& late) {
                if (late.first <= now) ready_.push_back(late.second);
                return late.first <= now;
            });
            double wait = seconds < 0 ? 1e6 : std::max(0.0, std::chrono::duration<double>(until - now).count());
            for (const auto& late : late_) {
                wait = std::min(wait, std::chrono::duration<double>(late.first - now).count());
            }
            std::vector<Ended> inner;
            const int count = disk_->reap(inner, ready_.empty() ? wait : 0);
            if (count < 0) return count;
            for (const Ended& answer : inner) answered(answer);
            ended.insert(ended.end(), ready_.begin(), ready_.end());
            ready_.clear();
            const bool waits = !late_.empty() && (seconds < 0 || Clock::now() < until);
            if (ended.size() > before || !waits) break;
        }
        return static_cast<int>(ended.size() - before);
    }

    void wake() override { disk_->wake(); }

    void fail(std::vector<Fault> faults) override {
        const std::lock_guard<std::mutex> lock(lock_);
        faults_ = std::move(faults);
    }

    void release() override {
        released_ = true;
        disk_->wake();
    }

    size_t pending() const override { return disk_->pending() + hanging_.size() + late_.size() + ready_.size(); }
    size_t depth() const override { return disk_->depth(); }
    size_t room() const override { return disk_->room(); }
    uint32_t most_fragments() const override { return disk_->most_fragments(); }
    const char* name() const override { return disk_->name(); }

private:
    // A piece, or its fragment `first` alone.
    struct Some {
        Piece piece;
        uint32_t first;
    };
    // `what`: of no kind without a fault.
    struct Passed {
        Some some;
        Failing what;
        int64_t value;
        uint32_t left;
        iovec torn;  // the bytes moved instead
    };

    // Submit the fragments of a piece one by one, if a fault meets one of them.
    bool submit_apart(const Piece& piece) {
        std::vector<std::tuple<Some, Failing, int64_t>> apart;
        {
            const std::lock_guard<std::mutex> lock(lock_);
            bool met = false;
            int64_t at = piece.offset;
            for (uint32_t n = 0; n < piece.count && !faults_.empty(); n++) {
                const int64_t stop = at + static_cast<int64_t>(piece.fragments[n].iov_len);
                Piece one = piece;
                one.fragments += n;
                one.count = 1;
                one.looks = {};
                one.offset = at;
                const auto fault = std::ranges::find_if(faults_, [&](const Fault& some) {
                    return (some.fd == -1 || some.fd == piece.fd) && some.begin < stop && at < some.end;
                });
                if (fault == faults_.end()) {
                    apart.push_back({{one, n}, {}, 0});
                } else {
                    const bool counts = fault->what == Failing::kShortMove || fault->what == Failing::kTorn ||
                                        fault->what == Failing::kFlip;
                    const int64_t value = counts ? std::max<int64_t>(0, fault->begin - at) : fault->value;
                    apart.push_back({{one, n}, fault->what, value});
                    met = true;
                }
                at = stop;
            }
            if (!met) return false;
        }
        for (const auto& [some, what, value] : apart) {
            if (what == Failing::kError) tell(some, static_cast<int32_t>(value), 0);
            else if (what == Failing::kHang && !released_) hanging_.push_back(some);
            else if (what == Failing::kTorn && value == 0) tell(some, 0, bytes(some));
            else pass_on(some, what, value);
        }
        return true;
    }

    // A whole piece without a fault, or a fragment.
    void pass_on(const Some& given, Failing what, int64_t value = 0) {
        const uint64_t number = next_++;
        Passed& passed = passed_[number] = {given, what, value, given.piece.count, {}};
        Piece inner = given.piece;
        inner.tag = number;
        if (what == Failing::kTorn) {
            passed.torn = {inner.fragments->iov_base, static_cast<size_t>(std::min(value, bytes(given)))};
            inner.fragments = &passed.torn;
        }
        disk_->submit({&inner, 1});
    }

    void answered(const Ended& answer) {
        Passed& passed = passed_.at(answer.tag);
        const Some& some = passed.some;
        Ended told = answer;
        told.tag = some.piece.tag;
        told.first += some.first;
        passed.left -= answer.count;
        switch (passed.what) {
            case Failing::kTorn: tell(some, 0, bytes(some)); break;
            case Failing::kShortMove: tell(some, 0, std::min(passed.value, bytes(some))); break;
            case Failing::kLate:
                late_.emplace_back(Clock::now() + std::chrono::milliseconds(passed.value), told);
                break;
            case Failing::kFlip:
                if (passed.value < bytes(some)) real(some.piece.fragments->iov_base)[passed.value] ^= 1;
                [[fallthrough]];
            default: ready_.push_back(told);
        }
        if (passed.left == 0) passed_.erase(answer.tag);
    }

    static int64_t bytes(const Some& of) { return static_cast<int64_t>(of.piece.fragments->iov_len); }
    void tell(const Some& of, int32_t error, int64_t moved) {
        ready_.push_back({of.piece.tag, of.first, 1, error, moved});
    }

    // GPU memory of tests (fake_cuda.h) is the host's, at addresses with one more bit.
    static uint8_t* real(void* address) {
        return reinterpret_cast<uint8_t*>(reinterpret_cast<uint64_t>(address) & ~(uint64_t{1} << 56));
    }

    std::unique_ptr<Disk> disk_;
    std::unordered_map<uint64_t, Passed> passed_;
    uint64_t next_ = 0;
    std::vector<Some> hanging_;
    std::vector<std::pair<Clock::time_point, Ended>> late_;
    std::vector<Ended> ready_;
    std::atomic<bool> released_{false};
    std::mutex lock_;
    std::vector<Fault> faults_;
};

}  // namespace

std::unique_ptr<FaultyDisk> open_faulty_disk(std::unique_ptr<Disk> disk, std::vector<Fault> faults) {
    return std::make_unique<Faulty>(std::move(disk), std::move(faults));
}

}  // namespace gdscache
