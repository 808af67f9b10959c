// Eviction orders over keys. Every call keeps the interpreter's lock, which guards these objects.

#include <nanobind/stl/shared_ptr.h>

#include "bind/bind.h"
#include "policies/lifetimes.h"
#include "policies/shadow.h"

namespace gdscache {
namespace {

constexpr int64_t kMost = 1024;  // most keys of an order made at a time

nb::object bytes_of(const Key& key) {
    return nb::steal(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(key.words), kKeyBytes));
}

nb::list list_of(const std::vector<Key>& keys) {
    nb::list made;
    for (const Key& key : keys) made.append(bytes_of(key));
    return made;
}

std::vector<Key> keys_of(nb::handle given) {
    std::vector<Key> keys;
    keys.reserve(nb::len(given));
    for (const nb::handle key : nb::iter(given)) keys.push_back(key_of(key.ptr()));
    return keys;
}

// (key, other key) pairs. The other key may be None.
template <typename Pair>
std::vector<Pair> pairs_of(nb::handle given) {
    std::vector<Pair> pairs;
    pairs.reserve(nb::len(given));
    for (const nb::handle both : nb::iter(given)) {
        PyObject* const key = PyTuple_GetItem(both.ptr(), 0);
        PyObject* const other = key ? PyTuple_GetItem(both.ptr(), 1) : nullptr;
        if (!other) throw nb::python_error();
        pairs.push_back({key_of(key), other == Py_None ? Key() : key_of(other, false)});
    }
    return pairs;
}

std::vector<Key> keys_at(const nb::sequence& keys, const nb::object& order) {
    const Numbers<int64_t> places(order);
    std::vector<Key> found;
    found.reserve(static_cast<size_t>(places.size()));
    for (int64_t n = 0; n < places.size(); ++n) {
        found.push_back(key_of(nb::object(keys[static_cast<size_t>(places.data()[n])]).ptr()));
    }
    return found;
}

// Methods of one key, of keys and of pairs, for Python.
template <typename Of, auto kCall, bool kWhole = true>
auto of_key(Of& self, nb::handle key) {
    return (self.*kCall)(key_of(key.ptr(), kWhole));
}
template <typename Of, auto kCall>
void of_keys(Of& self, nb::handle keys) {
    (self.*kCall)(keys_of(keys));
}
template <typename Of, typename Pair, auto kCall>
void of_pairs(Of& self, nb::handle pairs) {
    (self.*kCall)(pairs_of<Pair>(pairs));
}

// An iterator in lists of keys of growing length: most callers look at few pages.
template <typename Walk>
struct Keys {
    template <typename... Of>
    explicit Keys(Of&... of) : walk(of...) {}

    nb::list next() {
        nb::list made;
        for (int64_t n = 0; n < some; ++n) {
            const Key* const key = walk.next();
            if (!key) break;
            made.append(bytes_of(*key));
        }
        some = std::min(2 * some, kMost);
        return made;
    }

    Walk walk;
    int64_t some = 8;
};

using LifetimeKeys = Keys<LifetimeOrder::Walk>;
using ShadowKeys = Keys<LruShadow::Walk>;

// `uses`: in the order of their times.
void see(ReuseSample& sample, const std::vector<std::tuple<uint64_t, int64_t, int64_t>>& uses, bool stored) {
    int64_t last = INT64_MIN;
    for (const auto& [bits, number, now] : uses) {
        require(now >= std::exchange(last, now) && sample.sound(bits, number, now), "a use that is not sound");
    }
    for (const auto& [bits, number, now] : uses) sample.see(bits, number, now, stored);
}

nb::tuple take(ReuseSample& sample) {
    const Fresh<int64_t> arrived(sample.classes() + 1), hits(sample.classes(), ReuseSample::kAges);
    std::ranges::copy(sample.arrived, arrived.data);
    std::ranges::copy(sample.hits, hits.data);
    std::ranges::fill(sample.arrived, 0);
    std::ranges::fill(sample.hits, 0);
    return nb::make_tuple(arrived.array, hits.array);
}

// `learn(pages, stored)` answers None, or (share, lifetimes of the lots from `share` on, lifetimes of those below).
void begin(LifetimeOrder& order, const nb::sequence& keys, const nb::object& places,
           std::shared_ptr<ReuseSample> sample, nb::callable learn) {
    using Answer = std::optional<std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>>>;
    order.begin(keys_at(keys, places), std::move(sample),
                [learn = std::move(learn)](int64_t pages, int64_t stored) -> std::optional<LifetimeOrder::Lifetimes> {
        Answer answer;
        require(nb::try_cast<Answer>(learn(pages, stored), answer), "an answer of no lifetimes");
        if (!answer) return {};
        auto& [share, less, more] = *answer;
        return LifetimeOrder::Lifetimes{share, std::move(less), std::move(more)};
    });
}

}  // namespace

void bind_policies(nb::module_& module) {
    nb::class_<ReuseSample>(module, "ReuseSample")
        .def(nb::init<int64_t, int64_t, int64_t>(), "classes"_a, "most"_a, "round"_a)
        .def_rw("limit", &ReuseSample::limit)
        .def_rw("last", &ReuseSample::last)
        .def("due", &ReuseSample::due, "pages"_a)
        .def("see", &see, "uses"_a, "stored"_a)
        .def("take", &take)
        .def("__len__", &ReuseSample::known);

    nb::class_<LifetimeKeys>(module, "LifetimeKeys").def("__call__", &LifetimeKeys::next);
    nb::class_<LifetimeOrder> order(module, "LifetimeOrder");
    order.def(nb::init<>())
        .def("begin", &begin, "keys"_a, "order"_a, "sample"_a, "learn"_a)
        .def("insert_all", &of_pairs<LifetimeOrder, LifetimeOrder::New, &LifetimeOrder::insert>, "pages"_a)
        .def("touch_all", &of_keys<LifetimeOrder, &LifetimeOrder::touch>, "keys"_a)
        .def("evict_all", &of_pairs<LifetimeOrder, LifetimeOrder::Gone, &LifetimeOrder::evict>, "gone"_a)
        .def("hasten", &of_key<LifetimeOrder, &LifetimeOrder::hasten, false>, "key"_a)
        .def("is_deferred", &of_key<LifetimeOrder, &LifetimeOrder::is_deferred, false>, "key"_a)
        .def("defer_all",
             [](LifetimeOrder& self, nb::handle keys) {
        for (const Key& key : keys_of(keys)) self.defer(key);
    }, "keys"_a)
        .def("walk", [](LifetimeOrder& self) { return new LifetimeKeys(self); }, nb::keep_alive<0, 1>(),
             nb::rv_policy::take_ownership)
        .def_prop_ro("rows", &LifetimeOrder::rows)
        .def_prop_ro("levels", &LifetimeOrder::levels);
    order.attr("STEPS") = LifetimeOrder::kSteps;
    order.attr("LOTS") = LifetimeOrder::kLots;
    order.attr("SHAPE") =
        nb::make_tuple(LifetimeOrder::kGroups, LifetimeOrder::kSizes, LifetimeOrder::kUsed, LifetimeOrder::kGaps);

    nb::class_<ShadowKeys>(module, "ShadowKeys").def("__call__", &ShadowKeys::next);
    nb::class_<LruShadow>(module, "LruShadow")
        .def("__init__",
             [](LruShadow* self, const nb::sequence& keys, int shift, const nb::object& order) {
        new (self) LruShadow(order.is_none() ? keys_of(keys) : keys_at(keys, order), shift);
    }, "keys"_a = nb::make_tuple(), "shift"_a = 0, "order"_a = nb::none())
        .def("thinned", [](const LruShadow& self, int more) { return new LruShadow(self, more); }, "more"_a,
             nb::rv_policy::take_ownership)
        .def("insert",
             [](LruShadow& self, nb::handle pages, int64_t most) {
        return self.insert(pairs_of<LruShadow::New>(pages), most);
    }, "pages"_a, "most"_a = INT64_MAX)
        .def("touch", &of_keys<LruShadow, &LruShadow::touch>, "keys"_a)
        .def("evict", &of_keys<LruShadow, &LruShadow::evict>, "keys"_a)
        .def("drop", &of_key<LruShadow, &LruShadow::drop>, "key"_a)
        .def("has_left", &of_key<LruShadow, &LruShadow::has_left>, "key"_a)
        .def("followed", &of_key<LruShadow, &LruShadow::followed>, "key"_a)
        .def("recency", [](const LruShadow& self) { return list_of(self.recency()); })
        .def("first",
             [](LruShadow& self) {
        const Key* const key = self.first();
        return key ? bytes_of(*key) : nb::none();
    })
        .def("walk", [](const LruShadow& self) { return new ShadowKeys(self); }, nb::keep_alive<0, 1>(),
             nb::rv_policy::take_ownership)
        .def("__len__", &LruShadow::size)
        .def_prop_ro("shift", &LruShadow::shift)
        .def_prop_ro("debt", &LruShadow::debt)
        .def_prop_ro("hits", &LruShadow::hits)
        .def_prop_ro("left", &LruShadow::left)
        .def_prop_ro("owed", &LruShadow::owed)
        .def_ro("room", &LruShadow::room)
        .def_ro("lost", &LruShadow::lost)
        .def_ro("seen", &LruShadow::seen)
        .def_ro("used", &LruShadow::used)
        .def_ro("spared", &LruShadow::spared)
        .def_prop_ro("rows", &LruShadow::rows)
        .def_prop_ro("ready", &LruShadow::ready);
}

}  // namespace gdscache
