// For tests: a disk that fails on order. See faulty_disk.h.

#include "tests/faulty_disk.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <unordered_map>

namespace gdscache {

namespace {

using Clock = std::chrono::steady_clock;

class Faulty final : public FaultyDisk {
public:
    Faulty(std::unique_ptr<Disk> disk, std::vector<Fault> faults) : disk_(std::move(disk)) {
        for (const Fault& fault : faults) faults_.emplace(fault.at, fault);
    }

    void submit(std::span<const Piece> pieces) override {
        for (const Piece& piece : pieces) {
            const auto found = faults_.find(submitted_++);
            if (!is_sound(piece)) {
                pass_on({piece, 0}, {});
            } else if (found != faults_.end()) {
                begin({piece, 0}, found->second);
            } else if (!submit_by_place(piece)) {
                pass_on({piece, 0}, {});
            }
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

    void fail(std::vector<PlaceFault> faults) override {
        const std::lock_guard<std::mutex> lock(lock_);
        places_ = std::move(faults);
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
    struct Passed {
        Some some;
        Fault fault;  // of no kind without a fault
        uint32_t left;
        std::vector<iovec> torn;  // the bytes moved instead
    };

    // Submit the fragments of a piece one by one, if a fault meets one of them.
    bool submit_by_place(const Piece& piece) {
        std::vector<std::pair<Some, Fault>> apart;
        {
            const std::lock_guard<std::mutex> lock(lock_);
            bool met = false;
            int64_t at = piece.offset;
            for (uint32_t n = 0; n < piece.count && !places_.empty(); n++) {
                const int64_t stop = at + static_cast<int64_t>(piece.fragments[n].iov_len);
                Piece one = piece;
                one.fragments += n;
                one.count = 1;
                one.looks = {};
                one.offset = at;
                Fault fault{};
                const auto place = std::find_if(places_.begin(), places_.end(), [&](const PlaceFault& some) {
                    return (some.fd == -1 || some.fd == piece.fd) && some.begin < stop && at < some.end;
                });
                if (place != places_.end()) {
                    const bool counts = place->what == Failing::kShortMove || place->what == Failing::kTorn ||
                                        place->what == Failing::kFlip;
                    fault = {0, place->what, counts ? std::max<int64_t>(0, place->begin - at) : place->value};
                    met = true;
                }
                apart.push_back({{one, n}, fault});
                at = stop;
            }
            if (!met) return false;
        }
        for (const auto& [some, fault] : apart) begin(some, fault);
        return true;
    }

    void begin(const Some& some, const Fault& fault) {
        if (fault.what == Failing::kError) {
            ready_.push_back({some.piece.tag, some.first, some.piece.count, static_cast<int32_t>(fault.value), 0});
        } else if (fault.what == Failing::kHang && !released_) {
            hanging_.push_back(some);
        } else if (fault.what == Failing::kTorn && fault.value == 0) {
            tell_all(some, INT64_MAX);
        } else {
            pass_on(some, fault);
        }
    }

    void pass_on(const Some& given, const Fault& fault) {
        const Piece& piece = given.piece;
        const uint64_t number = next_++;
        Passed& passed = passed_[number] = {given, fault, piece.count, {}};
        Piece inner = piece;
        inner.tag = number;
        if (fault.what != Failing{}) inner.looks = {};  // the fault comes between the disk and its looks
        if (fault.what == Failing::kTorn) {
            size_t left = static_cast<size_t>(fault.value);
            for (uint32_t n = 0; n < piece.count && left; n++) {
                const size_t some = std::min(left, piece.fragments[n].iov_len);
                passed.torn.push_back({piece.fragments[n].iov_base, some});
                left -= some;
            }
            inner.fragments = passed.torn.data();
            inner.count = passed.left = static_cast<uint32_t>(passed.torn.size());
        }
        disk_->submit({&inner, 1});
    }

    void answered(const Ended& answer) {
        Passed& passed = passed_.at(answer.tag);
        const Piece& piece = passed.some.piece;
        passed.left -= answer.count;
        const bool over = passed.left == 0;
        const Failing what = passed.fault.what;
        const int64_t value = passed.fault.value;
        Ended told = answer;
        told.tag = piece.tag;
        told.first += passed.some.first;
        if (what == Failing::kTorn) {
            if (over) tell_all(passed.some, INT64_MAX);
        } else if (what == Failing::kShortMove) {
            if (over) tell_all(passed.some, value);
        } else if (what == Failing::kLate) {
            late_.emplace_back(Clock::now() + std::chrono::milliseconds(value), told);
        } else {
            if (what == Failing::kFlip && over) flip(piece, value);
            ready_.push_back(told);
        }
        if (over) passed_.erase(answer.tag);
    }

    // Report each fragment of a piece as if only `moved` bytes of all had been moved.
    void tell_all(const Some& of, int64_t moved) {
        for (uint32_t n = 0; n < of.piece.count; n++) {
            const int64_t some = std::min(moved, static_cast<int64_t>(of.piece.fragments[n].iov_len));
            ready_.push_back({of.piece.tag, of.first + n, 1, 0, some});
            moved -= some;
        }
    }

    // GPU memory of tests (fake_cuda.h) is the host's, at addresses with one more bit.
    static uint8_t* real(void* address) {
        return reinterpret_cast<uint8_t*>(reinterpret_cast<uint64_t>(address) & ~(uint64_t{1} << 56));
    }

    static void flip(const Piece& piece, int64_t at) {
        for (uint32_t n = 0; n < piece.count; n++) {
            const int64_t bytes = static_cast<int64_t>(piece.fragments[n].iov_len);
            if (at < bytes) {
                real(piece.fragments[n].iov_base)[at] ^= 1;
                return;
            }
            at -= bytes;
        }
    }

    std::unique_ptr<Disk> disk_;
    std::unordered_map<uint64_t, Fault> faults_;
    std::unordered_map<uint64_t, Passed> passed_;
    uint64_t submitted_ = 0, next_ = 0;
    std::vector<Some> hanging_;
    std::vector<std::pair<Clock::time_point, Ended>> late_;
    std::vector<Ended> ready_;
    std::atomic<bool> released_{false};
    std::mutex lock_;
    std::vector<PlaceFault> places_;
};

}  // namespace

std::unique_ptr<FaultyDisk> open_faulty_disk(std::unique_ptr<Disk> disk, std::vector<Fault> faults) {
    return std::make_unique<Faulty>(std::move(disk), std::move(faults));
}

}  // namespace gdscache
