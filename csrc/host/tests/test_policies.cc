// Eviction orders in columns: tables against a map, the order by lifetimes against lists, and LRU's shadow with missing
// keys and pages that follow each other in a circle. tests/unit/policies has its model.

#include "base/error.h"
#include "policies/lifetimes.h"
#include "policies/reuse.h"
#include "policies/shadow.h"
#include "tests/check.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

// Keys with mostly equal bytes, so that many share cells.
Key key_of(uint64_t number) {
    Key key;
    key.words[0] = 7 | number << 60;
    key.words[3] = 1 + number;
    return key;
}

template <typename Call>
bool refused(Call call) {
    try {
        call();
    } catch (const Error&) {
        return true;
    }
    return false;
}

struct Row {
    Key key;
    uint32_t before = 0, after = 0;
    uint64_t value = 0;
};

void check_table(Random& random) {
    Table<Row> table;
    List<Row> list;
    std::map<uint64_t, uint64_t> model;
    std::vector<uint64_t> order;
    const uint64_t numbers = 1 + random.below(3000);
    for (int step = 0; step < 6000; ++step) {
        const uint64_t number = random.below(numbers);
        const uint32_t id = table.find(key_of(number));
        REQUIRE((id != Table<Row>::kNone) == (model.count(number) == 1));
        if (id == Table<Row>::kNone) {
            const uint32_t made = table.add(key_of(number));
            REQUIRE(table[made].value == 0);  // no value of an earlier row
            table[made].value = model[number] = random.next();
            const bool front = random.below(2);
            front ? list.push_front(table, made) : list.push_back(table, made);
            order.insert(front ? order.begin() : order.end(), number);
        } else {
            REQUIRE(table[id].value == model[number]);
            list.remove(table, id);
            order.erase(std::find(order.begin(), order.end(), number));
            table.drop(id);
            model.erase(number);
        }
        REQUIRE((table.size() == model.size() && list.size() == static_cast<int64_t>(order.size())));
    }
    uint32_t id = list.first();
    for (const uint64_t number : order) {
        REQUIRE(table[id].key == key_of(number));
        id = table[id].after;
    }
    REQUIRE(id == Table<Row>::kNone);
}

// With any rows, no call goes astray, and all ends empty.
void check_circles(Random& random) {
    LruShadow shadow;
    std::vector<uint64_t> tier;
    for (int step = 0; step < 2000; ++step) {
        const uint64_t number = random.below(30);
        const Key key = key_of(number);
        const auto place = std::find(tier.begin(), tier.end(), number);
        if (place == tier.end()) {
            REQUIRE(refused([&] { shadow.touch({&key, 1}); }));
            REQUIRE(refused([&] { shadow.evict({&key, 1}); }));
            REQUIRE(refused([&] { shadow.drop(key); }));
            const LruShadow::New page{key, key_of(random.below(30))};  // itself, or one behind it, at times
            REQUIRE(shadow.insert({&page, 1}, INT64_MAX) == std::make_pair(size_t{1}, false));
            REQUIRE(refused([&] { shadow.insert({&page, 1}, INT64_MAX); }));
            tier.push_back(number);
        } else if (random.below(2)) {
            shadow.touch({&key, 1});
        } else {
            random.below(2) ? shadow.evict({&key, 1}) : shadow.drop(key);
            tier.erase(place);
        }
        LruShadow::Walk walk(shadow);
        const Key* const first = shadow.first();
        const Key* const next = walk.next();
        REQUIRE((next ? *first == *next : !first));
        size_t seen = next != nullptr;
        while (walk.next()) ++seen;
        REQUIRE((seen == tier.size() && shadow.recency().size() == tier.size()));
        REQUIRE(shadow.pages == static_cast<int64_t>(tier.size()));
        REQUIRE(shadow.rows() <= 30);
    }
    const LruShadow thin(shadow, 3);  // all keys have the same bits here, which are in the sample
    REQUIRE((thin.left() == shadow.left() && thin.owed() == shadow.owed()));
    for (const uint64_t number : tier) shadow.drop(key_of(number));
    REQUIRE((!shadow.pages && shadow.left() == 0 && shadow.size() == shadow.owed()));
}

// With one lifetime for all the order is LRU, restored pages first and deferred ones last.
void check_lifetimes(Random& random) {
    const auto sample = std::make_shared<ReuseSample>(LifetimeOrder::kClasses, 16, 4);
    sample->limit = 1 << 16;
    LifetimeOrder order;
    int64_t asked = 0;
    std::vector<uint64_t> restored, level, aside;
    std::vector<Key> keys;
    for (uint64_t n = random.below(10); n--;) {
        restored.push_back(n);
        keys.push_back(key_of(n));
    }
    order.begin(keys, sample, [&](int64_t, int64_t now) -> std::optional<LifetimeOrder::Lifetimes> {
        ++asked;
        sample->last = now;
        return {};
    });
    const auto forget = [](std::vector<uint64_t>& all, uint64_t one) {
        const auto place = std::find(all.begin(), all.end(), one);
        return place != all.end() && (all.erase(place), true);
    };
    for (int step = 0; step < 400; ++step) {
        const uint64_t number = random.below(24);
        const Key key = key_of(number);
        const bool there = forget(restored, number) || forget(level, number) || forget(aside, number);
        if (!there) {
            REQUIRE(refused([&] { order.touch({&key, 1}); }));
            const LifetimeOrder::Gone gone{key, {}};
            REQUIRE(refused([&] { order.evict({&gone, 1}); }));
            const LifetimeOrder::New page{key, {}};
            order.insert({&page, 1});
            level.push_back(number);
        } else if (random.below(3)) {
            order.touch({&key, 1});
            level.push_back(number);
        } else {
            const LifetimeOrder::Gone gone{key, {}};
            order.evict({&gone, 1});
        }
        LifetimeOrder::Walk walk(order);
        for (const auto* const some : {&restored, &level, &aside}) {
            for (const uint64_t one : *some) REQUIRE(*walk.next() == key_of(one));
        }
        REQUIRE(!walk.next());
        REQUIRE(order.rows() == restored.size() + level.size());
        REQUIRE(sample->known() <= 16);
        if (!level.empty()) {
            LifetimeOrder::Walk late(order);
            order.defer(key_of(level[0]));
            REQUIRE(order.is_deferred(key_of(level[0])));
            REQUIRE(refused([&] { late.next(); }));  // the order has changed
            order.hasten(key_of(level[0]));
            REQUIRE(!order.is_deferred(key_of(level[0])));
        }
    }
    REQUIRE(asked > 0);
}

TEST_CASE("uses by age") {
    ReuseSample sample(2, 100, 1);
    sample.see(1, 0, 0, true);
    for (const int64_t age : {0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12}) {
        sample.see(1, 0, age, false);
        sample.see(1, 1, age, false);  // 0 later
        sample.see(1, 0, age, false);
    }
    REQUIRE(sample.hits[ReuseSample::kAges] == 11);  // of the other class, all of age 0
    REQUIRE(sample.arrived[0] == 23);
    REQUIRE(sample.arrived[1] == 11);
    REQUIRE(sample.arrived[2] == 1);
    sample.see(2, 0, 0, true);
    sample.see(2, 0, INT64_MAX, false);
    REQUIRE(sample.hits[ReuseSample::kAges - 1] == 1);
    REQUIRE(sample.sound(2, 1, INT64_MAX));
    REQUIRE(!sample.sound(2, 2, INT64_MAX));
    REQUIRE(!sample.sound(2, 0, 0));
}

}  // namespace

TEST_CASE("tables, the order by lifetimes, and LRU's shadow") {
    for (uint64_t round = setting("ROUNDS", 20); round--;) {
        CAPTURE(round);
        Random random(round);
        check_table(random);
        check_circles(random);
        check_lifetimes(random);
    }
}
