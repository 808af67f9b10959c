// LRU in the shadow of another order: the pages it would hold, and its lead in hits.

#pragma once

#include <functional>
#include <optional>
#include <ranges>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
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
    explicit LruShadow(std::span<const Key> keys = {}, int shift = 0) : shift_(shift) {
        require(shift >= 0 && shift < 32, "no sound sample");
        for (const Key& key : keys) {
            if (!samples(key)) continue;
            require(rows_.find(key) == kNone, "a page that is restored twice");
            move(rows_.add(key), Place::kRecent);
        }
        pages = room = peak_ = size();
    }
    // The shadow of a sample of this one's keys, one of 2^more, with its counts in that proportion.
    LruShadow(const LruShadow& whole, int more) : shift_(whole.shift_ + more) {
        require(more >= 0 && shift_ < 32, "no sound sample");
        const auto copy = [&](const List<Page>& list, Place to) {
            for (uint32_t id = list.first(); id != kNone; id = whole.rows_[id].after) {
                const Page& page = whole.rows_[id];
                if (!samples(page.key)) continue;
                const uint32_t own = rows_.add(page.key);
                move(own, to);
                rows_[own].owed = page.owed;
                owed_ += page.owed;
            }
        };
        copy(whole.aside_, Place::kRecent);
        copy(whole.recent_, Place::kRecent);
        copy(whole.left_, Place::kLeft);
        pages = size() - owed_ + left();
        room = peak_ = std::max(whole.room >> more, pages);
        stored_ = whole.stored_ >> more;
        lost = whole.lost >> more;
        gained = whole.gained >> more;
        seen = whole.seen >> more;
        used = whole.used >> more;
        spared = whole.spared >> more;
    }
    LruShadow(LruShadow&&) = delete;

    bool samples(const Key& key) const { return !(key.words[1] & ((uint64_t{1} << shift_) - 1)); }
    int shift() const { return shift_; }

    // The tier stores pages that it lacked. Stops behind the first page at which `room` exceeds `most`. Returns the
    // number of pages taken, and whether it stopped so.
    std::pair<size_t, bool> insert(std::span<const New> all, int64_t most) {
        const auto has = [&](const New& page) { return samples(page.key) && this->has(rows_.find(page.key)); };
        require(std::ranges::none_of(all, has), "a page that the tier has already");
        changed();
        for (size_t n = 0; n < all.size(); ++n) {
            const Key& key = all[n].key;
            if (!samples(key)) continue;
            const Key parent = shift_ ? Key() : all[n].parent;
            uint32_t id = rows_.find(key);
            require(!this->has(id), "a page that comes twice");
            count();
            if (id != kNone && rows_[id].owed) {
                rows_[id].owed = false;
                --owed_;
                ++lost;
                move(id, Place::kRecent);
            } else {
                if (id == kNone) id = rows_.add(key);
                move(id, Place::kRecent);
                if (!parent.none()) {
                    uint32_t above = rows_.find(parent);
                    if (above == kNone) above = rows_.add(parent);
                    rows_[id].parent = above;
                    ++rows_[above].children;
                    ++rows_[above].behind;
                }
            }
            if (size() > room) give_up(size() - room);  // also after `room` has shrunk
            if (!parent.none()) {
                const uint32_t above = rows_.find(parent);
                if (above != kNone) follow(above);
            }
            if (room > most) return {n + 1, true};
        }
        return {all.size(), false};
    }
    // The tier uses pages that it has.
    void touch(std::span<const Key> keys) {
        for (const uint32_t id : ids_of(keys, /*once=*/false)) {
            ++seen;
            ++used;
            if (rows_[id].place == Place::kLeft) {
                ++gained;
                add(id);
            } else {
                move(id, Place::kRecent);
            }
        }
        changed();
    }
    // The tier gives up pages for others.
    void evict(std::span<const Key> keys) {
        for (const uint32_t id : ids_of(keys, /*once=*/true)) {
            --pages;
            if (rows_[id].place == Place::kLeft) {
                release(id);
            } else {
                rows_[id].owed = true;
                ++owed_;
            }
        }
        ++evictions_;
    }
    // A page is gone for another reason, and LRU would lose it too.
    void drop(const Key& key) {
        if (!samples(key)) return;
        const uint32_t id = ids_of({&key, 1}, /*once=*/true)[0];
        changed();
        --pages;
        if (rows_[id].place != Place::kLeft && rows_[id].parent != kNone) unfollow(rows_[id].parent);
        release(id);
    }

    int64_t size() const { return recent_.size() + aside_.size(); }
    int64_t debt() const { return lost - gained; }  // LRU's lead in hits
    int64_t hits() const { return used + debt(); }  // LRU's hits
    int64_t left() const { return left_.size(); }
    int64_t owed() const { return owed_; }
    bool has_left(const Key& key) const {
        const uint32_t id = rows_.find(key);
        return id != kNone && rows_[id].place == Place::kLeft;
    }
    // Whether pages of the shadow follow one.
    bool followed(const Key& key) const {
        const uint32_t id = rows_.find(key);
        return id != kNone && rows_[id].children;
    }
    // The pages of the tier: first those given up by LRU, then about by their last uses.
    std::vector<Key> recency() const {
        std::vector<Key> found;
        for (const List<Page>* list : {&left_, &aside_, &recent_}) {
            for (uint32_t id = list->first(); id != kNone; id = rows_[id].after) {
                if (!rows_[id].owed) found.push_back(rows_[id].key);
            }
        }
        return found;
    }
    // The first page of the tier in the order in which LRU gave pages up and will; null if there is none. While the
    // tier only evicts, repeated calls look at each page once.
    const Key* first() {
        if (left_.size()) return &rows_[left_.first()].key;
        if (!coming_) {
            coming_.emplace(*this, false);
            first_ = kNone;
        }
        while (first_ == kNone || rows_[first_].owed) {
            const Key* const key = coming_->next();
            if (!key) return nullptr;
            first_ = rows_.find(*key);
        }
        return &rows_[first_].key;
    }

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
        bool owed = false, named = false;
        uint64_t number = 0;  // aside: the older its last use, the lower
    };
    static constexpr uint32_t kNone = Table<Page>::kNone;
    using Ready = std::pair<uint64_t, uint32_t>;  // number, id
    using Heap = std::vector<Ready>;              // the lowest number first; stale entries are skipped
    static void push(Heap& heap, Ready one) {
        heap.push_back(one);
        std::ranges::push_heap(heap, std::greater<>());
    }
    static Ready pop(Heap& heap) {
        std::ranges::pop_heap(heap, std::greater<>());
        const Ready one = heap.back();
        heap.pop_back();
        return one;
    }

public:
    // The pages of `first`, in order. Not usable after a change of the shadow, except for `evict` if `all` is false:
    // then it has only pages that LRU still holds.
    class Walk {
    public:
        explicit Walk(const LruShadow& shadow, bool all = true)
            : shadow_(shadow),
              changes_(shadow.changes_ + (all ? shadow.evictions_ : 0)),
              all_(all),
              left_(all ? shadow.left_.first() : kNone),
              recent_(shadow.recent_.first()),
              rest_(shadow.aside_.first()) {}
        const Key* next() {
            require(changes_ == shadow_.changes_ + (all_ ? shadow_.evictions_ : 0), "the shadow has changed");
            if (left_ != kNone) {
                const Page& page = shadow_.rows_[left_];
                left_ = page.after;
                return &page.key;
            }
            return next_of_lru();
        }

    private:
        const Key* next_of_lru() {
            const auto& rows = shadow_.rows_;
            if (!begun_) {
                begun_ = true;
                ready_ = shadow_.ready_;
            }
            const auto is_followed = [&](uint32_t id) {
                if (!rows[id].children) return false;
                const auto gone = gone_.find(id);
                return rows[id].children > (gone == gone_.end() ? 0 : gone->second);
            };
            while (!ready_.empty() || recent_ != kNone) {
                uint32_t id;
                if (!ready_.empty()) {
                    const auto [number, found] = pop(ready_);
                    id = found;
                    const uint64_t* const own = number_of(id);
                    if (!own || *own != number || out_.contains(id) || is_followed(id)) continue;
                } else {
                    id = recent_;
                    recent_ = rows[id].after;
                    if (is_followed(id)) {
                        passed_[id] = shadow_.passed_ + passed_.size();
                        passed_in_order_.push_back(id);
                        continue;
                    }
                }
                out_.insert(id);
                if (const uint32_t parent = rows[id].parent; parent != kNone) {
                    ++gone_[parent];
                    if (const uint64_t* const number = number_of(parent)) push(ready_, {*number, parent});
                }
                if (!rows[id].owed) return &rows[id].key;
            }
            for (;;) {
                uint32_t id;
                if (rest_ != kNone) {
                    id = rest_;
                    rest_ = rows[id].after;
                } else if (passed_at_ < passed_in_order_.size()) {
                    id = passed_in_order_[passed_at_++];
                } else {
                    return nullptr;
                }
                if (!out_.contains(id) && !rows[id].owed) return &rows[id].key;
            }
        }
        // The number of a page aside, or passed on the way.
        const uint64_t* number_of(uint32_t id) const {
            if (shadow_.rows_[id].place == Place::kAside) return &shadow_.rows_[id].number;
            const auto passed = passed_.find(id);
            return passed == passed_.end() ? nullptr : &passed->second;
        }

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
    // Whether the tier has the page of a row.
    bool has(uint32_t id) const { return id != kNone && rows_[id].place != Place::kNone && !rows_[id].owed; }
    std::vector<uint32_t> ids_of(std::span<const Key> keys, bool once) {
        auto sampled = keys | std::views::filter([&](const Key& key) { return samples(key); });
        return rows_.find_all(sampled, once, "a page that the tier has not", [&](uint32_t id) { return has(id); });
    }
    List<Page>& list_of(Place place) {
        return place == Place::kRecent ? recent_ : place == Place::kAside ? aside_ : left_;
    }
    // Append a page to a list, out of its present one.
    void move(uint32_t id, Place to) {
        Page& page = rows_[id];
        if (page.place != Place::kNone) list_of(page.place).remove(rows_, id);
        page.place = to;
        if (to != Place::kNone) list_of(to).push_back(rows_, id);
    }
    // A page of `left` is LRU's again.
    void add(uint32_t id) {
        move(id, Place::kRecent);
        if (rows_[id].parent != kNone) ++rows_[rows_[id].parent].children;
        if (size() > room) give_up(size() - room);
    }
    // A page is stored behind `id`. If LRU has given `id` up, it takes it back, and the pages before it.
    void follow(uint32_t id) {
        while (id != kNone && rows_[id].place == Place::kLeft) {
            const uint32_t parent = rows_[id].parent;
            add(id);
            id = parent;
        }
    }
    // Give up the `n` least recently used pages without followers in the shadow.
    void give_up(int64_t n) {
        while (n) {
            uint32_t id;
            if (!ready_.empty()) {
                const auto [number, found] = pop(ready_);
                id = found;
                const Page& page = rows_[id];
                if (page.place != Place::kAside || page.number != number || page.children) continue;
            } else if (recent_.size()) {
                id = recent_.first();
                if (rows_[id].children) {
                    move(id, Place::kAside);
                    rows_[id].number = passed_++;
                    continue;
                }
            } else {  // a circle of followers, from damaged rows
                id = aside_.first();
            }
            move(id, Place::kLeft);
            if (rows_[id].parent != kNone) unfollow(rows_[id].parent);
            if (rows_[id].owed) {
                rows_[id].owed = false;
                --owed_;
                ++spared;
                release(id);
            }
            --n;
        }
    }
    // One page of the shadow less follows `parent`.
    void unfollow(uint32_t parent) {
        Page& page = rows_[parent];
        if (!--page.children && page.place == Place::kAside) push(ready_, {page.number, parent});
    }
    // Forget a page, except for its followers' link.
    void release(uint32_t id) {
        move(id, Place::kNone);
        const uint32_t parent = std::exchange(rows_[id].parent, kNone);
        if (parent != kNone) {
            Page& page = rows_[parent];
            if (!--page.behind && page.place == Place::kNone && parent != id) rows_.drop(parent);
        }
        if (!rows_[id].behind) rows_.drop(id);
    }
    // The tier has a page more.
    void count() {
        ++seen;
        ++pages;
        ++stored_;
        peak_ = std::max(peak_, pages);
        room = std::max(room, peak_);
        if (stored_ >= room) {
            room = peak_;
            peak_ = pages;
            stored_ = 0;
        }
    }
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
