// The columns of a tier's index (gdscache/index/table.py), and the pages that it evicts. Every call keeps the
// interpreter's lock, which guards these objects.

#include <unordered_map>

#include "bind/bind.h"
#include "policies/lifetimes.h"

namespace gdscache {
namespace {

constexpr int64_t kAbsent = -1;  // no slot

PyObject* checked(PyObject* found) {
    if (!found && PyErr_Occurred()) throw nb::python_error();
    return found;
}

bool has(const nb::object& container, PyObject* item) {
    const int found = PySequence_Contains(container.ptr(), item);
    if (found < 0) throw nb::python_error();
    return found != 0;
}

bool equal(PyObject* one, PyObject* other) {
    const int same = PyObject_RichCompareBool(one, other, Py_EQ);
    if (same < 0) throw nb::python_error();
    return same != 0;
}

int64_t number_in(const nb::object& dict, PyObject* key) {
    PyObject* const found = checked(PyDict_GetItemWithError(dict.ptr(), key));
    return found ? PyLong_AsLongLong(found) : kAbsent;
}

// Slots in a set, or in the keys of a dictionary.
class Slots {
public:
    explicit Slots(nb::object of) : of_(std::move(of)), any_(nb::len(of_) != 0) {}
    bool has(int64_t slot) const { return any_ && gdscache::has(of_, nb::int_(slot).ptr()); }

private:
    nb::object of_;
    bool any_;
};

// `Columns` of index/table.py, for the time of a call.
struct Columns {
    explicit Columns(nb::handle of)
        : resting(of.attr("resting")),
          in_use(of.attr("in_use")),
          parents(of.attr("parents")),
          restored(of.attr("restored_parents")),
          namespaces(of.attr("namespaces")),
          orphans(of.attr("orphans")) {
        require(children.take(of.attr("children").ptr()), "followers that are no array of C's int");
    }

    int64_t at_rest(PyObject* key) const { return number_in(resting, key); }
    nb::object entry(PyObject* key) const { return nb::borrow(checked(PyDict_GetItemWithError(in_use.ptr(), key))); }
    nb::object at(const nb::object& list, int64_t slot) const {
        return nb::borrow(checked(PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(slot))));
    }
    nb::object parent(int64_t slot) const {
        nb::object found = at(parents, slot);
        if (!found.is_none()) return found;
        const char* const row = PyBytes_AsString(restored.ptr()) + static_cast<size_t>(slot) * kKeyBytes;
        return nb::steal(PyBytes_FromStringAndSize(row, kKeyBytes));
    }
    int32_t& followers(int64_t slot) const {
        require(slot >= 0 && slot < children.size(), "a slot that the tier has not");
        return children.data()[slot];
    }

    nb::object resting, in_use, parents, restored, namespaces, orphans;
    Array<int32_t> children;
};

// The search of index/index.py for pages to evict.
class Victims {
public:
    // `orders`: those in which a page may be deferred.
    Victims(nb::object held, nb::object dirty, nb::object pending, nb::object orders)
        : held_(std::move(held)), dirty_(std::move(dirty)), pending_(std::move(pending)), kept_(std::move(orders)) {
        for (const nb::handle order : kept_) orders_.push_back(nb::cast<const LifetimeOrder*>(order));
    }

    // Look at `keys`, the coldest first, until `wanted` pages are chosen (`PageIndex._victims`). Returns their number.
    size_t look(nb::handle table, nb::handle keys, const nb::object& keep, size_t wanted, bool tails_only) {
        const Columns columns(table);
        const nb::object all = nb::steal(checked(PyObject_GetIter(keys.ptr())));
        while (chosen_.size() < wanted) {
            nb::object key = nb::steal(checked(PyIter_Next(all.ptr())));
            if (!key.is_valid()) break;
            int64_t slot = columns.at_rest(key.ptr());
            const bool in_use = slot == kAbsent;
            if (in_use) {
                const nb::object entry = columns.entry(key.ptr());
                require(entry.is_valid(), "a page of the order that the tier has not");
                if (!unleased(entry)) continue;
                slot = field<int64_t>(entry, "slot");
            } else if (held_.has(slot)) {
                continue;
            }
            State& state = states_[slot];
            const int32_t followers = tails_only ? columns.followers(slot) : 0;
            if (in_use || state.gone || !followers) {  // else the most frequent case: a page with followers
                if (state.chosen || has(keep, key.ptr()) || dirty_.has(slot)) continue;
                if (followers <= state.gone) {
                    choose(columns, std::move(key), slot, keep, wanted);
                    continue;
                }
            }
            if (!std::exchange(state.passed, true)) passed_.emplace_back(slot, std::move(key));
        }
        return chosen_.size();
    }

    nb::list chosen() const {
        nb::list made;
        for (const nb::object& key : chosen_) made.append(key);
        return made;
    }
    // Pages that were passed over and not chosen, in this order.
    nb::list passed() const {
        nb::list made;
        for (const auto& [slot, key] : passed_) {
            if (!states_.at(slot).chosen) made.append(key);
        }
        return made;
    }

private:
    struct State {
        int32_t gone = 0;  // chosen followers
        bool passed = false, chosen = false;
    };

    bool unleased(const nb::object& entry) const {
        return field<int64_t>(entry, "leases") == 0 && !entry.attr("state").is(pending_);
    }
    bool deferred(PyObject* key) const {
        const Key of = key_of(key, false);
        return std::ranges::any_of(orders_, [&](const LifetimeOrder* order) { return order->is_deferred(of); });
    }

    // Choose a page, then each page before it that was passed over and has lost its last follower.
    void choose(const Columns& columns, nb::object key, int64_t slot, const nb::object& keep, size_t wanted) {
        while (chosen_.size() < wanted) {
            if (!std::exchange(states_[slot].chosen, true)) chosen_.push_back(std::move(key));
            key = columns.parent(slot);
            slot = columns.at_rest(key.ptr());
            const nb::object entry = slot == kAbsent ? columns.entry(key.ptr()) : nb::object();
            if (entry.is_valid()) slot = field<int64_t>(entry, "slot");
            if (slot == kAbsent) return;
            State& above = states_[slot];
            ++above.gone;
            if (has(keep, key.ptr()) || !(above.passed || deferred(key.ptr()))) return;
            if (entry.is_valid() && !unleased(entry)) return;
            if (columns.followers(slot) > above.gone || dirty_.has(slot) || held_.has(slot)) return;
        }
    }

    const Slots held_, dirty_;
    const nb::object pending_;
    const nb::object kept_;
    std::vector<const LifetimeOrder*> orders_;
    std::unordered_map<int64_t, State> states_;  // by slot
    std::vector<nb::object> chosen_;
    std::vector<std::pair<int64_t, nb::object>> passed_;
};

// The parent of a page that has left its slot, if no other page follows it; else None.
nb::object unlinked(const Columns& columns, PyObject* key, int64_t slot) {
    const nb::object parent = columns.parent(slot);
    if (const int32_t followers = columns.followers(slot)) columns.orphans[nb::handle(key)] = followers;
    if (equal(parent.ptr(), columns.at(columns.namespaces, slot).ptr())) return nb::none();
    int64_t above = columns.at_rest(parent.ptr());
    if (above == kAbsent) {
        const nb::object entry = columns.entry(parent.ptr());
        if (entry.is_valid()) above = field<int64_t>(entry, "slot");
    }
    if (above != kAbsent) return --columns.followers(above) ? nb::none() : parent;
    const int64_t orphans = number_in(columns.orphans, parent.ptr());
    require(orphans != kAbsent, "a page that follows an absent one, uncounted");
    if (orphans == 1) PyDict_DelItem(columns.orphans.ptr(), parent.ptr());
    else columns.orphans[parent] = orphans - 1;
    return nb::none();
}

nb::tuple take_out(nb::handle table, nb::handle keys) {
    const Columns columns(table);
    nb::list gone, slots;
    for (const nb::handle key : nb::iter(keys)) {
        const int64_t slot = columns.at_rest(key.ptr());
        if (slot == kAbsent) break;
        if (PyDict_DelItem(columns.resting.ptr(), key.ptr()) != 0) throw nb::python_error();
        gone.append(nb::make_tuple(key, unlinked(columns, key.ptr(), slot)));
        slots.append(slot);
    }
    return nb::make_tuple(gone, slots);
}

}  // namespace

void bind_index(nb::module_& module) {
    nb::class_<Victims>(module, "Victims")
        .def(nb::init<nb::object, nb::object, nb::object, nb::object>(), "held"_a, "dirty"_a, "pending"_a, "orders"_a)
        .def("look", &Victims::look, "columns"_a, "keys"_a, "keep"_a, "wanted"_a, "tails_only"_a)
        .def_prop_ro("chosen", &Victims::chosen)
        .def_prop_ro("passed", &Victims::passed);
    module.def("take_out", &take_out, "columns"_a, "keys"_a);
}

}  // namespace gdscache
