// LRU in the shadow of another order: what it would hold, and how many hits it is ahead.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "policies/keys.h"

namespace gdscache {

// The keys that LRU would hold after the same uses and stores, in as much room; no bytes.
//
// LRU gives up the least recently used page that no other page of it follows: tails before heads, as tiers do. Beside
// its own pages it knows which of them the tier lacks (`owed`: each may become a hit that only LRU has), and which
// pages of the tier it has given up (`left`, in that order). Both are as many while both are full, so there is always
// a page in `left` for one of `owed` that is stored again. Every operation is O(1), amortised; where pages were
// dropped, giving one up is O(log n) of those that nothing follows any more.
//
// `room` is the most pages that the tier had in a period, which is as many stores; a tier that grows has more at once.
// With `shift` it is shown a sample of the keys, one of 2^shift; then all its figures are the sample's. Keys that are
// not in the sample are passed over by each call.
class LruShadow {
public:
    struct New {
        Key key, parent;  // of none, where the page before is not known
    };

    // `keys`: pages that the tier has, the least recently used first; which follow others is not known.
    explicit LruShadow(std::span<const Key> keys = {}, int shift = 0);
    // That of a sample of this one's keys, one of 2^more, with what was counted so far in that proportion.
    LruShadow(const LruShadow& whole, int more);
    LruShadow(LruShadow&&) = delete;

    bool samples(const Key& key) const { return !(key.words[1] & ((uint64_t{1} << shift_) - 1)); }
    int shift() const { return shift_; }

    // The tier stores pages that it lacked: up to the first one behind which `room` is greater than `most`. How many,
    // and whether it is greater.
    std::pair<size_t, bool> insert(std::span<const New> all, int64_t most);
    // The tier uses pages that it has.
    void touch(std::span<const Key> keys);
    // The tier gives up pages for others.
    void evict(std::span<const Key> keys);
    // A page is gone for another reason: LRU would have it no more either.
    void drop(const Key& key);

    int64_t size() const { return recent_.size() + aside_.size(); }
    int64_t debt() const { return lost - gained; }  // hits of LRU's, less those of the tier
    int64_t hits() const { return used + debt(); }  // that LRU had
    int64_t left() const { return left_.size(); }
    int64_t owed() const { return owed_; }
    bool has_left(const Key& key) const { return place_of(key) == Place::kLeft; }
    bool owes(const Key& key) const;
    bool followed(const Key& key) const;  // whether pages of the shadow follow one
    // The pages of the tier, those that LRU has given up first; else by their last uses, about.
    std::vector<Key> recency() const;
    // The first of the pages of the tier, in the order in which LRU has given them up and would; null: there is none.
    // However often it is asked while the tier only gives up pages, each is looked at once.
    const Key* first();

    int64_t pages = 0, room = 0;  // `pages`: of the tier
    int64_t lost = 0;             // hits that only LRU had
    int64_t gained = 0;           // hits that it had not
    int64_t seen = 0;             // pages that were asked for: used, or stored
    int64_t used = 0;             // hits of the tier
    int64_t spared = 0;           // pages of `owed` that LRU gave up before any use

    size_t rows() const { return rows_.size(); }  // for tests, as this: pages that may be ready to go
    size_t ready() const { return ready_.size(); }

private:
    enum class Place : uint8_t { kNone, kRecent, kAside, kLeft };
    struct Page {
        Key key;
        uint32_t before = 0, after = 0;
        uint32_t parent = UINT32_MAX;
        uint32_t children = 0;  // pages of the shadow that follow it, whether it is there or not
        uint32_t behind = 0;    // ... and pages of `left`
        Place place = Place::kNone;
        bool owed = false;
        uint64_t number = 0;  // aside: the older its last use, the lower
    };
    static constexpr uint32_t kNone = Table<Page>::kNone;
    using Ready = std::pair<uint64_t, uint32_t>;  // number, id
    using Heap = std::vector<Ready>;              // the lowest number first; what is out of date is passed over
    static void push(Heap& heap, Ready one);
    static Ready pop(Heap& heap);

public:
    // Its pages as `first` says. It must not be asked behind a change of the shadow, but for `evict` if `all` is false:
    // then only those that LRU still has come.
    class Walk {
    public:
        explicit Walk(const LruShadow& shadow, bool all = true);
        const Key* next();

    private:
        const Key* next_of_lru();
        const uint64_t* number_of(uint32_t id) const;

        const LruShadow& shadow_;
        const uint64_t changes_;
        const bool all_;
        uint32_t left_, recent_, rest_;
        bool begun_ = false;
        size_t passed_at_ = 0;
        Heap ready_;
        std::unordered_map<uint32_t, uint32_t> gone_;  // children of a page that went before
        std::unordered_map<uint32_t, uint64_t> passed_;
        std::vector<uint32_t> passed_in_order_;
        std::unordered_set<uint32_t> out_;
    };

private:
    Place place_of(const Key& key) const;
    List<Page>& list_of(Place place) {
        return place == Place::kRecent ? recent_ : place == Place::kAside ? aside_ : left_;
    }
    void move(uint32_t id, Place to);
    void add(uint32_t id);
    void follow(uint32_t id);
    void give_up(int64_t n);
    void unfollow(uint32_t parent);
    void release(uint32_t id);
    void count();
    void changed() {
        ++changes_;
        coming_.reset();
    }

    Table<Page> rows_;
    List<Page> recent_;  // the oldest use first
    List<Page> aside_;   // older uses than those, and followed by pages of the shadow
    List<Page> left_;
    uint64_t passed_ = 0;  // numbers that were given
    Heap ready_;           // of `aside_`, perhaps, not followed any more
    int64_t owed_ = 0;
    int64_t peak_ = 0, stored_ = 0;  // in this period
    int shift_ = 0;
    uint64_t changes_ = 0, evictions_ = 0;
    std::optional<Walk> coming_;  // what LRU would give up next, the first ones taken ...
    uint32_t first_ = kNone;      // ... and the last of them, while only the tier gives up pages
};

}  // namespace gdscache
