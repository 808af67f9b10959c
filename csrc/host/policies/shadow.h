// LRU in the shadow of another order: the pages it would hold, and its lead in hits.

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

// The keys that LRU would hold after the same uses and stores, in the same room; no bytes.
//
// LRU gives up the least recently used page without followers among its pages: tails before heads, as tiers do. The
// shadow also knows LRU's pages that the tier lacks (`owed`: each may become a hit for LRU only), and the tier's pages
// that LRU has given up (`left`, in that order). The two have equal counts while both sides are full, so there is
// always a page in `left` for one of `owed` that is stored again. Every operation is O(1), amortised; after dropped
// pages, giving one up is O(log n) of the pages without followers.
//
// `room` is the most pages of the tier in a period of `room` stores; it grows at once with the tier. With `shift` the
// shadow sees a sample of the keys, one of 2^shift, and all its figures are the sample's. Each call ignores other keys.
class LruShadow {
public:
    struct New {
        Key key, parent;  // none if the page before is unknown
    };

    // `keys`: pages of the tier, the least recently used first; their followers are unknown.
    explicit LruShadow(std::span<const Key> keys = {}, int shift = 0);
    // The shadow of a sample of this one's keys, one of 2^more, with its counts in that proportion.
    LruShadow(const LruShadow& whole, int more);
    LruShadow(LruShadow&&) = delete;

    bool samples(const Key& key) const { return !(key.words[1] & ((uint64_t{1} << shift_) - 1)); }
    int shift() const { return shift_; }

    // The tier stores pages that it lacked. Stops behind the first page at which `room` exceeds `most`. Returns the
    // number of pages taken, and whether it stopped so.
    std::pair<size_t, bool> insert(std::span<const New> all, int64_t most);
    // The tier uses pages that it has.
    void touch(std::span<const Key> keys);
    // The tier gives up pages for others.
    void evict(std::span<const Key> keys);
    // A page is gone for another reason, and LRU would lose it too.
    void drop(const Key& key);

    int64_t size() const { return recent_.size() + aside_.size(); }
    int64_t debt() const { return lost - gained; }  // LRU's lead in hits
    int64_t hits() const { return used + debt(); }  // LRU's hits
    int64_t left() const { return left_.size(); }
    int64_t owed() const { return owed_; }
    bool has_left(const Key& key) const { return place_of(key) == Place::kLeft; }
    bool owes(const Key& key) const;
    bool followed(const Key& key) const;  // whether pages of the shadow follow one
    // The pages of the tier: first those given up by LRU, then about by their last uses.
    std::vector<Key> recency() const;
    // The first page of the tier in the order in which LRU gave pages up and will; null if there is none. While the
    // tier only evicts, repeated calls look at each page once.
    const Key* first();

    int64_t pages = 0, room = 0;  // `pages`: of the tier
    int64_t lost = 0;             // hits that only LRU had
    int64_t gained = 0;           // hits that LRU lacked
    int64_t seen = 0;             // pages used or stored
    int64_t used = 0;             // hits of the tier
    int64_t spared = 0;           // pages of `owed` that LRU gave up before any use

    size_t rows() const { return rows_.size(); }  // for tests, like `ready`
    size_t ready() const { return ready_.size(); }

private:
    enum class Place : uint8_t { kNone, kRecent, kAside, kLeft };
    struct Page {
        Key key;
        uint32_t before = 0, after = 0;
        uint32_t parent = UINT32_MAX;
        uint32_t children = 0;  // pages of the shadow that follow it, even if it is absent
        uint32_t behind = 0;    // the same, and pages of `left`
        Place place = Place::kNone;
        bool owed = false;
        uint64_t number = 0;  // aside: the older its last use, the lower
    };
    static constexpr uint32_t kNone = Table<Page>::kNone;
    using Ready = std::pair<uint64_t, uint32_t>;  // number, id
    using Heap = std::vector<Ready>;              // the lowest number first; stale entries are skipped
    static void push(Heap& heap, Ready one);
    static Ready pop(Heap& heap);

public:
    // The pages of `first`, in order. Not usable after a change of the shadow, except for `evict` if `all` is false:
    // then it has only pages that LRU still holds.
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
        std::unordered_map<uint32_t, uint32_t> gone_;  // children of a page that were given up before it
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
    List<Page> aside_;   // older uses than those, with followers in the shadow
    List<Page> left_;
    uint64_t passed_ = 0;  // numbers given out
    Heap ready_;           // pages of `aside_` that may have lost their followers
    int64_t owed_ = 0;
    int64_t peak_ = 0, stored_ = 0;  // in this period
    int shift_ = 0;
    uint64_t changes_ = 0, evictions_ = 0;
    std::optional<Walk> coming_;  // the next pages of LRU to give up, without those taken
    uint32_t first_ = kNone;      // the last taken one, while the tier only evicts
};

}  // namespace gdscache
