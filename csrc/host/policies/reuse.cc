#include "policies/reuse.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace gdscache {
namespace {

int64_t range_of(int64_t age) {
    const auto bits = static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(age)));
    return bits < 2 ? age : std::min(2 * bits - 2 + (age >> (bits - 2) & 1), ReuseSample::kAges - 1);
}

}  // namespace

ReuseSample::ReuseSample(int64_t classes, int64_t most, int64_t round) : most_(most), round_(round) {
    require(classes > 0 && classes <= 1 << 16, "no sound number of classes");
    arrived.resize(static_cast<size_t>(classes) + 1);
    hits.resize(static_cast<size_t>(classes * kAges));
}

int64_t ReuseSample::due(int64_t pages) const { return last + std::max(round_, (pages + 3) / 4); }

void ReuseSample::see(uint64_t bits, int64_t number, int64_t now, bool stored) {
    require(number >= 0 && number < classes(), "a class that is not one of the classes");
    uint32_t id = rows_.find({bits});
    if (id == Table<Seen>::kNone) {
        id = rows_.add({bits});
    } else {
        const Seen& before = rows_[id];
        require(now >= before.time, "a use before the last one");
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

void ReuseSample::clear() {
    std::ranges::fill(arrived, 0);
    std::ranges::fill(hits, 0);
}

}  // namespace gdscache
