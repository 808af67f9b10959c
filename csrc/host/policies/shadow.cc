#include "policies/shadow.h"

#include <algorithm>

#include "base/error.h"

namespace gdscache {

void LruShadow::push(Heap& heap, Ready one) {
    heap.push_back(one);
    std::ranges::push_heap(heap, std::greater<>());
}

LruShadow::Ready LruShadow::pop(Heap& heap) {
    std::ranges::pop_heap(heap, std::greater<>());
    const Ready one = heap.back();
    heap.pop_back();
    return one;
}

LruShadow::LruShadow(std::span<const Key> keys, int shift) : shift_(shift) {
    require(shift >= 0 && shift < 32, "no sound sample");
    for (const Key& key : keys) {
        if (!samples(key)) continue;
        require(rows_.find(key) == kNone, "a page that is restored twice");
        move(rows_.add(key), Place::kRecent);
    }
    pages = room = peak_ = size();
}

LruShadow::LruShadow(const LruShadow& whole, int more) : shift_(whole.shift_ + more) {
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

std::pair<size_t, bool> LruShadow::insert(std::span<const New> all, int64_t most) {
    changed();
    for (size_t n = 0; n < all.size(); ++n) {
        const Key& key = all[n].key;
        if (!samples(key)) continue;
        const Key parent = shift_ ? Key() : all[n].parent;
        uint32_t id = rows_.find(key);
        require(id == kNone || rows_[id].place == Place::kNone || rows_[id].owed, "a page that the tier has already");
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

// The tier has a page more.
void LruShadow::count() {
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

void LruShadow::touch(std::span<const Key> keys) {
    changed();
    for (const Key& key : keys) {
        if (!samples(key)) continue;
        const uint32_t id = rows_.find(key);
        require(id != kNone && rows_[id].place != Place::kNone && !rows_[id].owed, "a page that the tier has not");
        ++seen;
        ++used;
        if (rows_[id].place == Place::kLeft) {
            ++gained;
            add(id);
        } else {
            move(id, Place::kRecent);
        }
    }
}

void LruShadow::evict(std::span<const Key> keys) {
    ++evictions_;
    for (const Key& key : keys) {
        if (!samples(key)) continue;
        const uint32_t id = rows_.find(key);
        require(id != kNone && rows_[id].place != Place::kNone && !rows_[id].owed, "a page that the tier has not");
        --pages;
        if (rows_[id].place == Place::kLeft) {
            release(id);
        } else {
            rows_[id].owed = true;
            ++owed_;
        }
    }
}

void LruShadow::drop(const Key& key) {
    changed();
    if (!samples(key)) return;
    const uint32_t id = rows_.find(key);
    require(id != kNone && rows_[id].place != Place::kNone && !rows_[id].owed, "a page that the tier has not");
    --pages;
    if (rows_[id].place != Place::kLeft && rows_[id].parent != kNone) unfollow(rows_[id].parent);
    release(id);
}

bool LruShadow::owes(const Key& key) const {
    const uint32_t id = rows_.find(key);
    return id != kNone && rows_[id].owed;
}

bool LruShadow::followed(const Key& key) const {
    const uint32_t id = rows_.find(key);
    return id != kNone && rows_[id].children;
}

LruShadow::Place LruShadow::place_of(const Key& key) const {
    const uint32_t id = rows_.find(key);
    return id == kNone ? Place::kNone : rows_[id].place;
}

std::vector<Key> LruShadow::recency() const {
    std::vector<Key> found;
    for (const List<Page>* list : {&left_, &aside_, &recent_}) {
        for (uint32_t id = list->first(); id != kNone; id = rows_[id].after) {
            if (!rows_[id].owed) found.push_back(rows_[id].key);
        }
    }
    return found;
}

const Key* LruShadow::first() {
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

// Append a page to a list, out of its present one.
void LruShadow::move(uint32_t id, Place to) {
    Page& page = rows_[id];
    if (page.place != Place::kNone) list_of(page.place).remove(rows_, id);
    page.place = to;
    if (to != Place::kNone) list_of(to).push_back(rows_, id);
}

// A page of `left` is LRU's again.
void LruShadow::add(uint32_t id) {
    move(id, Place::kRecent);
    if (rows_[id].parent != kNone) ++rows_[rows_[id].parent].children;
    if (size() > room) give_up(size() - room);
}

// A page is stored behind `id`, which LRU may have given up: LRU takes it and the pages before it back, since lookups
// need them.
void LruShadow::follow(uint32_t id) {
    while (id != kNone && rows_[id].place == Place::kLeft) {
        const uint32_t parent = rows_[id].parent;
        add(id);
        id = parent;
    }
}

// Give up the `n` least recently used pages without followers in the shadow.
void LruShadow::give_up(int64_t n) {
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
void LruShadow::unfollow(uint32_t parent) {
    Page& page = rows_[parent];
    if (!--page.children && page.place == Place::kAside) push(ready_, {page.number, parent});
}

// Forget a page, except for its followers' link.
void LruShadow::release(uint32_t id) {
    move(id, Place::kNone);
    const uint32_t parent = std::exchange(rows_[id].parent, kNone);
    if (parent != kNone) {
        Page& page = rows_[parent];
        if (!--page.behind && page.place == Place::kNone && parent != id) rows_.drop(parent);
    }
    if (!rows_[id].behind) rows_.drop(id);
}

LruShadow::Walk::Walk(const LruShadow& shadow, bool all)
    : shadow_(shadow),
      changes_(shadow.changes_ + (all ? shadow.evictions_ : 0)),
      all_(all),
      left_(all ? shadow.left_.first() : kNone),
      recent_(shadow.recent_.first()),
      rest_(shadow.aside_.first()) {}

const Key* LruShadow::Walk::next() {
    require(changes_ == shadow_.changes_ + (all_ ? shadow_.evictions_ : 0), "the shadow has changed");
    if (left_ != kNone) {
        const Page& page = shadow_.rows_[left_];
        left_ = page.after;
        return &page.key;
    }
    return next_of_lru();
}

// The number of a page aside, or passed on the way.
const uint64_t* LruShadow::Walk::number_of(uint32_t id) const {
    if (shadow_.rows_[id].place == Place::kAside) return &shadow_.rows_[id].number;
    const auto passed = passed_.find(id);
    return passed == passed_.end() ? nullptr : &passed->second;
}

const Key* LruShadow::Walk::next_of_lru() {
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

}  // namespace gdscache
