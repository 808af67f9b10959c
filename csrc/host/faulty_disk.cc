// For tests: a disk that fails on order. See faulty_disk.h.

#include "faulty_disk.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
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
            if (!is_sound(piece) || found == faults_.end()) {
                pass_on(piece, nullptr);
            } else if (found->second.what == Failing::kError) {
                ready_.push_back({piece.tag, 0, piece.count, static_cast<int32_t>(found->second.value), 0});
            } else if (found->second.what == Failing::kHang && !released_) {
                hanging_.push_back(piece);
            } else {
                pass_on(piece, &found->second);
            }
        }
    }

    int reap(std::vector<Ended>& ended, double seconds) override {
        const size_t before = ended.size();
        const Clock::time_point until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                           std::chrono::duration<double>(std::min(seconds, 1e6)));
        for (;;) {
            if (released_) {
                for (const Piece& piece : hanging_) pass_on(piece, nullptr);
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

    void release() override {
        released_ = true;
        disk_->wake();
    }

    size_t pending() const override { return disk_->pending() + hanging_.size() + late_.size() + ready_.size(); }
    size_t depth() const override { return disk_->depth(); }
    const char* name() const override { return disk_->name(); }

private:
    struct Passed {
        Piece piece;
        const Fault* fault;
        uint32_t left;
        std::vector<iovec> torn;  // what is moved of it instead
    };

    void pass_on(const Piece& piece, const Fault* fault) {
        const uint64_t number = next_++;
        Passed& passed = passed_[number] = {piece, fault, piece.count, {}};
        Piece inner = piece;
        inner.tag = number;
        if (fault && fault->what == Failing::kTorn) {
            size_t left = static_cast<size_t>(std::max<int64_t>(fault->value, 1));
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
        const Piece& piece = passed.piece;
        passed.left -= answer.count;
        const bool over = passed.left == 0;
        const Failing what = passed.fault ? passed.fault->what : Failing{};
        const int64_t value = passed.fault ? passed.fault->value : 0;
        Ended told = answer;
        told.tag = piece.tag;
        if (what == Failing::kTorn) {
            if (over) tell_all(piece, INT64_MAX);
        } else if (what == Failing::kShort) {
            if (over) tell_all(piece, value);
        } else if (what == Failing::kLate) {
            late_.emplace_back(Clock::now() + std::chrono::milliseconds(value), told);
        } else {
            if (what == Failing::kFlip && over) flip(piece, value);
            ready_.push_back(told);
        }
        if (over) passed_.erase(answer.tag);
    }

    // Each fragment of a piece, as if only so many bytes of all had been moved.
    void tell_all(const Piece& piece, int64_t moved) {
        for (uint32_t n = 0; n < piece.count; n++) {
            const int64_t some = std::min(moved, static_cast<int64_t>(piece.fragments[n].iov_len));
            ready_.push_back({piece.tag, n, 1, 0, some});
            moved -= some;
        }
    }

    static void flip(const Piece& piece, int64_t at) {
        for (uint32_t n = 0; n < piece.count; n++) {
            const int64_t bytes = static_cast<int64_t>(piece.fragments[n].iov_len);
            if (at < bytes) {
                static_cast<uint8_t*>(piece.fragments[n].iov_base)[at] ^= 1;
                return;
            }
            at -= bytes;
        }
    }

    std::unique_ptr<Disk> disk_;
    std::unordered_map<uint64_t, Fault> faults_;
    std::unordered_map<uint64_t, Passed> passed_;
    uint64_t submitted_ = 0, next_ = 0;
    std::vector<Piece> hanging_;
    std::vector<std::pair<Clock::time_point, Ended>> late_;
    std::vector<Ended> ready_;
    std::atomic<bool> released_{false};
};

}  // namespace

std::unique_ptr<FaultyDisk> open_faulty_disk(std::unique_ptr<Disk> disk, std::vector<Fault> faults) {
    return std::make_unique<Faulty>(std::move(disk), std::move(faults));
}

}  // namespace gdscache
