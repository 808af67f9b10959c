// Ages at which watched pages of each class are used again: counted here, evaluated in policies/guarded.py.

#pragma once

#include "base/error.h"
#include "policies/keys.h"

namespace gdscache {

class ReuseSample {
public:
    static constexpr int64_t kAges = 54;  // ranges of ages: 0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, 12 to 15, ...

    // `most`: keys known at a time. `round`: the least number of pages stored between two conclusions.
    ReuseSample(int64_t classes, int64_t most, int64_t round) : most_(most), round_(round) {
        require(classes > 0 && classes <= 1 << 16, "no sound number of classes");
        arrived.resize(static_cast<size_t>(classes) + 1);
        hits.resize(static_cast<size_t>(classes * kAges));
    }
    ReuseSample(ReuseSample&&) = delete;

    int64_t classes() const { return static_cast<int64_t>(arrived.size()) - 1; }
    bool watches(uint64_t bits) const { return static_cast<int64_t>(bits >> 36 & 0xFFFF) < limit; }
    // The time of the next conclusion, in a tier of this many pages.
    int64_t due(int64_t pages) const { return last + std::max(round_, (pages + 3) / 4); }
    // Whether there is such a class, and the use is not before the last one.
    bool sound(uint64_t bits, int64_t number, int64_t now) const {
        const uint32_t id = rows_.find({bits});
        return number >= 0 && number < classes() && (id == Table<Seen>::kNone || now >= rows_[id].time);
    }
    // A page is used, or `stored`; the use is sound. `bits`: 64 of its key's, watched. `number`: its class from now on.
    void see(uint64_t bits, int64_t number, int64_t now, bool stored) {
        uint32_t id = rows_.find({bits});
        if (id == Table<Seen>::kNone) {
            id = rows_.add({bits});
        } else {
            const Seen& before = rows_[id];
            ++hits[static_cast<size_t>(before.number * kAges + range_of(now - before.time))];
            recent_.remove(rows_, id);
        }
        rows_[id].time = now;
        rows_[id].number = number;
        recent_.push_back(rows_, id);
        ++arrived[static_cast<size_t>(number)];
        if (stored) ++arrived.back();
        if (recent_.size() > most_) {
            const uint32_t oldest = recent_.first();
            recent_.remove(rows_, oldest);
            rows_.drop(oldest);
        }
    }
    int64_t known() const { return recent_.size(); }

    int64_t limit = 0;  // keys with 16 bits below this are watched
    int64_t last = 0;   // time of the last conclusion

    // Counts since then.
    std::vector<int64_t> arrived;  // uses that put a page into each class, and behind them the pages stored
    std::vector<int64_t> hits;     // (classes, kAges): uses of pages of a class

private:
    static int64_t range_of(int64_t age) {
        const auto bits = static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(age)));
        return bits < 2 ? age : std::min(2 * bits - 2 + (age >> (bits - 2) & 1), kAges - 1);
    }

    struct Bits {
        uint64_t word = 0;
        bool operator==(const Bits&) const = default;
        uint64_t hash() const { return word * 0x9E3779B97F4A7C15u; }
    };
    struct Seen {
        Bits key;
        uint32_t before = 0, after = 0;
        int64_t time = 0, number = 0;  // of the last use
    };

    const int64_t most_, round_;
    Table<Seen> rows_;
    List<Seen> recent_;
};

}  // namespace gdscache
