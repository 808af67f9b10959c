// The eviction order by lifetimes (described in gdscache/policies/lifetime.py): pages on levels, and their classes.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "policies/keys.h"
#include "policies/reuse.h"

namespace gdscache {

// Pages on levels, lowest level first, within a level the earliest arrival first. Unused pages stay in place and are
// overtaken: nothing is ever recounted. Deferred pages keep their level's number, aside. Restored pages go before all
// others until their first use.
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
    void begin(std::span<const Key> keys, std::shared_ptr<ReuseSample> sample, Learn learn);
    void insert(std::span<const New> pages);
    void touch(std::span<const Key> keys);
    void evict(std::span<const Gone> gone);
    void defer(const Key& key);
    void hasten(const Key& key);
    bool is_deferred(const Key& key) const;

    // For tests.
    size_t rows() const { return pages_.size(); }
    size_t levels() const { return levels_.size() + aside_.size(); }

private:
    struct Page {
        Key key;
        uint32_t before = 0, after = 0;
        uint32_t level = 0;
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

public:
    // The pages, the first to evict first. Not usable after a change of the order.
    class Walk {
    public:
        explicit Walk(LifetimeOrder& order);
        const Key* next();

    private:
        const LifetimeOrder& order_;
        const uint64_t changes_;
        Levels::const_iterator level_;
        bool aside_ = false;
        uint32_t at_;
    };

private:
    void enter_run();
    void enter(std::span<const New> run, int64_t size);
    void use(uint32_t id);
    void widen();
    uint32_t level(Levels& levels, int64_t number);
    void put(uint32_t id, uint32_t level) {
        pages_[id].level = level;
        stock_[level].pages.push_back(pages_, id);
    }
    void take(uint32_t id);
    int64_t lifetime(uint64_t state, int64_t number) const;

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

}  // namespace gdscache
