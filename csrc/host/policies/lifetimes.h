// The eviction order by lifetimes (described in gdscache/policies/guarded.py): pages on levels, and their classes.

#pragma once

#include <cstdlib>
#include <functional>
#include <map>
#include <new>
#include <optional>
#include <ranges>
#include <span>

#include "base/error.h"
#include "policies/keys.h"
#include "policies/reuse.h"

namespace gdscache {

// Pages on levels, lowest level first, within a level the earliest arrival first. Unused pages stay in place and are
// overtaken. Deferred pages keep their level's number, aside. Until their first use restored pages go before all others.
class LifetimeOrder {
public:
    static constexpr int64_t kSteps = 32;  // of a period
    static constexpr uint64_t kUses = 8;   // uses counted at most
    static constexpr int64_t kLots = 256;
    static constexpr int64_t kGroups = 5, kSizes = 4, kUsed = 4, kGaps = 6;  // of classes: see `Classes`
    static constexpr int64_t kNew = kGroups * kSizes, kClasses = kNew + kUsed * kGaps;
    static constexpr int64_t kGhosts = 16;  // cells a page

    struct New {
        Key key, parent;
    };
    struct Gone {
        Key key, freed;  // `freed`: the page that loses its last follower with this one, or none
    };
    // Lifetimes in steps: of lots from `share` on, and of those below.
    struct Lifetimes {
        int64_t share = 0;
        std::vector<int64_t> less = std::vector<int64_t>(kClasses), more = less;
    };
    // Called when a conclusion is due, with the number of pages and the time; nothing if it is too soon.
    using Learn = std::function<std::optional<Lifetimes>(int64_t pages, int64_t stored)>;

    LifetimeOrder() = default;
    LifetimeOrder(LifetimeOrder&&) = delete;

    // Start over with restored pages, the first to evict first.
    void begin(std::span<const Key> keys, std::shared_ptr<ReuseSample> sample, Learn learn) {
        require(sample && sample->classes() == kClasses, "a sample of other classes");
        Table<Page> pages;
        List<Page> restored;
        for (const Key& key : keys) {
            require(pages.find(key) == kNone, "a page that is restored twice");
            const uint32_t id = pages.add(key);
            pages[id].level = kRestored;
            restored.push_back(pages, id);
        }
        pages_ = std::move(pages);
        restored_ = restored;
        stock_.clear();
        spare_.clear();
        levels_.clear();
        aside_.clear();
        run_.clear();
        sample_ = std::move(sample);
        learn_ = std::move(learn);
        lifetimes_ = {};
        stored_ = now_ = ticks_ = 0;
        present_ = static_cast<int64_t>(keys.size());
        ++changes_;
        widen();
    }
    void insert(std::span<const New> pages) {
        require(ghosts_ != nullptr, "an order that was not begun");
        ++changes_;
        for (const New& page : pages) {
            if (!run_.empty() && run_.back().key != page.parent) enter_run();
            run_.push_back(page);
        }
    }
    void touch(std::span<const Key> keys) {
        ++changes_;
        enter_run();
        for (uint32_t id : ids_of(keys, /*once=*/false)) {
            if (pages_[id].level == kRestored) {  // a restored page has no state
                const New again{pages_[id].key, {}};
                restored_.remove(pages_, id);
                pages_.drop(id);
                --present_;
                enter({&again, 1}, 0);  // in the same row
                id = pages_.find(again.key);
            }
            use(id);
        }
    }
    void evict(std::span<const Gone> gone) {
        ++changes_;
        enter_run();
        const std::vector<uint32_t> ids = ids_of(gone | std::views::transform(&Gone::key), /*once=*/true);
        for (size_t n = 0; n < gone.size(); ++n) {
            const uint32_t id = ids[n];
            --present_;
            if (pages_[id].level == kRestored) {
                restored_.remove(pages_, id);
            } else {
                const uint64_t bits = gone[n].key.words[0], uses = pages_[id].state & kUsesMask;
                take(id);
                ghosts_[bits & mask_] = static_cast<uint16_t>(bits >> 52 << 4 | std::min(uses + 1, kUses));
            }
            pages_.drop(id);
            const Key& freed = gone[n].freed;
            if (!freed.none() && !(n + 1 < gone.size() && freed == gone[n + 1].key)) hasten(freed);
        }
    }
    void defer(const Key& key) {
        const uint32_t id = pages_.find(key);
        if (id == kNone || pages_[id].level == kRestored || stock_[pages_[id].level].aside) return;
        ++changes_;
        const int64_t number = stock_[pages_[id].level].number;
        take(id);
        const uint32_t aside = level(aside_, number);
        stock_[aside].aside = true;
        put(id, aside);
    }
    void hasten(const Key& key) {
        if (!is_deferred(key)) return;
        ++changes_;
        const uint32_t id = pages_.find(key);
        const int64_t number = stock_[pages_[id].level].number;
        take(id);
        pages_[id].level = level(levels_, number);
        stock_[pages_[id].level].pages.push_front(pages_, id);
    }
    bool is_deferred(const Key& key) const {
        const uint32_t id = pages_.find(key);
        return id != kNone && pages_[id].level != kRestored && stock_[pages_[id].level].aside;
    }

    class Walk;

    // For tests.
    size_t rows() const { return pages_.size(); }
    size_t levels() const { return levels_.size() + aside_.size(); }

private:
    static constexpr uint64_t kUsesMask = 0xF;
    static constexpr int kGroup = 4, kLot = 7, kWhen = 15;

    static constexpr int64_t size_of(size_t together) { return (together >= 4) + (together >= 16) + (together >= 64); }

    static constexpr int64_t used_class(uint64_t uses, int64_t gap) {
        return LifetimeOrder::kNew + static_cast<int64_t>(std::bit_width(uses) - 1) * LifetimeOrder::kGaps + gap;
    }

    static constexpr uint64_t own_lot(uint64_t bits) { return bits >> 28 & 0xFF; }

    struct Page {
        Key key;
        uint32_t before = 0, after = 0;
        uint32_t level = 0;
        bool named = false;
        uint64_t state = 0;  // bits from the lowest: 4, its uses; 3, its group; 8, its lot; above, its last use
    };
    struct Level {
        int64_t number = 0;
        bool aside = false;
        List<Page> pages;
    };
    using Levels = std::map<int64_t, uint32_t>;  // number -> place in `stock_`
    static constexpr uint32_t kNone = Table<Page>::kNone;
    static constexpr uint32_t kRestored = UINT32_MAX;  // in place of a level

    std::vector<uint32_t> ids_of(auto&& keys, bool once) {
        return pages_.find_all(keys, once, "a page that is not in the order", [](uint32_t id) { return id != kNone; });
    }
    // Enter the pages of a run, whose length is now known.
    void enter_run() {
        if (run_.empty()) return;
        std::vector<New> run;
        run.swap(run_);
        enter(run, size_of(run.size()));
        if (run_.empty()) {
            run.clear();
            if (run.capacity() <= 4096) run_.swap(run);  // its memory is reused
        }
    }
    // Enter new pages of a run of this `size` class.
    void enter(std::span<const New> run, int64_t size) {
        const Key* before = nullptr;  // the page before; the four values below are its state
        uint64_t used = 0, group = 0, lot = 0;
        uint32_t on = kNone;
        for (const New& page : run) {
            require(pages_.find(page.key) == kNone, "a page that is in the order already");
            ++present_;
            const uint64_t bits = page.key.words[0];
            uint16_t& ghost = ghosts_[bits & mask_];
            uint64_t uses = 0;
            if (ghost && ghost >> 4 == static_cast<int>(bits >> 52)) {  // it was evicted, and comes back
                uses = ghost & kUsesMask;
                ghost = 0;
            }
            if (!before || page.parent != *before) {
                const uint32_t above = page.parent.none() ? kNone : pages_.find(page.parent);
                const bool known = above != kNone && pages_[above].level != kRestored;
                const uint64_t state = known ? pages_[above].state : 0;
                used = state & kUsesMask;
                group = state >> kGroup & 7;
                lot = known ? state >> kLot & 0xFF : own_lot(bits);
            }
            if (used) {
                group = static_cast<uint64_t>(std::bit_width(used));
                if (used >= kUses) lot = own_lot(bits);
            }
            const int64_t number = uses ? used_class(uses, kGaps - 1) : static_cast<int64_t>(group) * kSizes + size;
            before = &page.key;
            used = uses;
            const uint64_t state = static_cast<uint64_t>(stored_) << kWhen | lot << kLot | group << kGroup | uses;
            const int64_t deadline = now_ + lifetime(state, number);
            if (on == kNone || stock_[on].number != deadline) on = level(levels_, deadline);
            const uint32_t id = pages_.add(page.key);
            pages_[id].state = state;
            put(id, on);
            ++stored_;
            if (++ticks_ * kSteps >= present_) {
                ticks_ = 0;
                ++now_;
            }
            if (sample_->watches(bits)) sample_->see(bits, number, stored_, true);
            if (stored_ >= sample_->due(present_)) {
                if (auto found = learn_(present_, stored_)) {
                    require(found->less.size() == kClasses && found->more.size() == kClasses,
                            "lifetimes of other classes");
                    lifetimes_ = std::move(*found);
                }
            }
            if (present_ * kGhosts > static_cast<int64_t>(mask_ + 1)) widen();
        }
    }
    void use(uint32_t id) {
        uint64_t state = pages_[id].state;
        if ((state & kUsesMask) < kUses) ++state;
        const uint64_t idle = static_cast<uint64_t>(stored_) - (state >> kWhen);
        const auto gap = static_cast<int64_t>(std::bit_width(8 * idle / static_cast<uint64_t>(present_)));
        const int64_t number = used_class(state & kUsesMask, std::min(gap, kGaps - 1));
        state = (state & ((1u << kWhen) - 1)) | static_cast<uint64_t>(stored_) << kWhen;
        pages_[id].state = state;
        const int64_t deadline = now_ + lifetime(state, number);
        const uint32_t from = pages_[id].level;
        if (stock_[from].number == deadline && !stock_[from].aside) {
            stock_[from].pages.remove(pages_, id);
            stock_[from].pages.push_back(pages_, id);
        } else {
            take(id);
            put(id, level(levels_, deadline));
        }
        const uint64_t bits = pages_[id].key.words[0];
        if (sample_->watches(bits)) sample_->see(bits, number, stored_, false);
    }
    // A larger table. Ghosts are lost, but a growing tier has not evicted yet.
    void widen() {
        const uint64_t cells = std::bit_ceil(static_cast<uint64_t>(kGhosts * std::max<int64_t>(present_, 64)));
        ghosts_.reset(static_cast<uint16_t*>(std::calloc(cells, sizeof(uint16_t))));
        if (!ghosts_) throw std::bad_alloc();
        mask_ = cells - 1;
    }
    // The level with a number, made if missing.
    uint32_t level(Levels& levels, int64_t number) {
        const auto [place, fresh] = levels.try_emplace(number, 0);
        if (fresh) {
            if (spare_.empty()) {
                place->second = static_cast<uint32_t>(stock_.size());
                stock_.emplace_back();
            } else {
                place->second = spare_.back();
                spare_.pop_back();
            }
            stock_[place->second] = {.number = number, .aside = false, .pages = {}};
        }
        return place->second;
    }
    void put(uint32_t id, uint32_t level) {
        pages_[id].level = level;
        stock_[level].pages.push_back(pages_, id);
    }
    void take(uint32_t id) {
        const uint32_t from = pages_[id].level;
        Level& level = stock_[from];
        level.pages.remove(pages_, id);
        if (level.pages.size()) return;
        (level.aside ? aside_ : levels_).erase(level.number);
        spare_.push_back(from);
    }
    int64_t lifetime(uint64_t state, int64_t number) const {
        const bool more = static_cast<int64_t>(state >> kLot & 0xFF) < lifetimes_.share;
        return (more ? lifetimes_.more : lifetimes_.less)[static_cast<size_t>(number)];
    }

    Table<Page> pages_;
    List<Page> restored_;
    std::vector<Level> stock_;
    std::vector<uint32_t> spare_;
    Levels levels_, aside_;
    std::shared_ptr<ReuseSample> sample_;
    Learn learn_;
    Lifetimes lifetimes_;
    std::vector<New> run_;  // new pages, each the follower of the last
    struct Free {
        void operator()(uint16_t* cells) const { std::free(cells); }
    };
    std::unique_ptr<uint16_t[], Free> ghosts_;  // a cell: 12 bits of the key above 4 bits of uses; 0: empty
    uint64_t mask_ = 0;
    int64_t present_ = 0, stored_ = 0, now_ = 0, ticks_ = 0;
    uint64_t changes_ = 0;
};

// The pages, the first to evict first. Not usable after a change of the order.
class LifetimeOrder::Walk {
public:
    explicit Walk(LifetimeOrder& order)
        : order_((order.enter_run(), order)),
          changes_(order.changes_),
          level_(order.levels_.begin()),
          at_(order.restored_.first()) {}
    const Key* next() {
        require(changes_ == order_.changes_, "the order has changed");
        while (at_ == kNone) {
            if (!aside_ && level_ == order_.levels_.end()) {
                aside_ = true;
                level_ = order_.aside_.begin();
            }
            if (aside_ && level_ == order_.aside_.end()) return nullptr;
            at_ = order_.stock_[level_++->second].pages.first();
        }
        const auto& page = order_.pages_[at_];
        at_ = page.after;
        return &page.key;
    }

private:
    const LifetimeOrder& order_;
    const uint64_t changes_;
    Levels::const_iterator level_;
    bool aside_ = false;
    uint32_t at_;
};

}  // namespace gdscache
