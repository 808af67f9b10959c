// The bounce reserve of loads: adjacent extents that pages pass through.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gdscache {

// Slots [first, first + slots) of a memory. Not thread-safe.
class Reserve {
public:
    // `fence`: the memory is registered in pieces of `fence` slots, and no run crosses a border; 0: one piece.
    Reserve(int64_t first, int64_t slots, int64_t fence) : first_(first), fence_(fence), used_(slots, false) {}

    int64_t slots() const { return static_cast<int64_t>(used_.size()); }
    int64_t free() const { return std::count(used_.begin(), used_.end(), false); }

    // Take up to `most` free adjacent slots from `*slot` on: the first run of `most`, else the longest. Returns their
    // number; 0 if no slot is free. Taking the first run keeps the bytes in the processor's cache.
    int64_t take(int64_t most, int64_t* slot) {
        int64_t best = 0, best_at = 0;
        for (int64_t at = 0; at < slots() && best < most;) {
            int64_t end = at;
            while (end < slots() && !used_[end] && end - at < most && !(end > at && fenced(end))) ++end;
            if (end - at > best) best = end - at, best_at = at;
            at = std::max(end, at + 1);
        }
        std::fill_n(used_.begin() + best_at, best, true);
        *slot = first_ + best_at;
        return best;
    }

    void give(int64_t slot, int64_t count) { std::fill_n(used_.begin() + (slot - first_), count, false); }

private:
    bool fenced(int64_t at) const { return fence_ != 0 && (first_ + at) % fence_ == 0; }

    int64_t first_, fence_;
    std::vector<bool> used_;
};

}  // namespace gdscache
