// Held signals over a Python of our own, whose handlers raise, and tables.

#include "../signals.h"

#include <signal.h>

#include <cstdarg>
#include <set>
#include <utility>

#include "../tables.h"
#include "check.h"

using namespace gdscache;
using namespace gdscache::test;

namespace {

constexpr int kSignals = 4;
const int32_t kNumbers[kSignals] = {SIGUSR1, SIGUSR2, SIGHUP, SIGALRM};

// Python as far as it matters: handlers by signal, signals that are to be heard, and one error. An object is an address.
struct Mock {
    char names[kSignals], get, set, note, plain, raising[kSignals], quiet[kSignals], error;
    Object* handlers[kSignals];
    std::set<int> tripped;      // known, not heard
    std::vector<int> heard;     // by handlers that are not the note
    Object* set_error = nullptr;
    int64_t kept = 0;
    Signals* signals = nullptr;

    int number(Object* name) const { return static_cast<int>(static_cast<char*>(name) - names); }

    bool run(Object* handler, int n) {
        if (handler == &note) return signals->note(kNumbers[n], &plain);
        heard.push_back(n);
        if (handler != &raising[n]) return true;
        CHECK(!set_error);
        set_error = &error;
        return false;
    }

    bool check() {  // PyErr_CheckSignals: one that raises leaves the others for later
        while (!tripped.empty()) {
            const int n = *tripped.begin();
            tripped.erase(n);
            if (handlers[n] != &plain && !run(handlers[n], n)) return false;
        }
        return true;
    }
};

Mock* mock;
Random* random_;

Object* call(Object* callable, ...) {
    va_list arguments;
    va_start(arguments, callable);
    Object* const name = va_arg(arguments, Object*);
    Object* const handler = name ? va_arg(arguments, Object*) : nullptr;
    va_end(arguments);
    const int n = mock->number(name);
    if (callable == &mock->get) {
        mock->kept++;
        return mock->handlers[n];
    }
    if (callable == &mock->set) {
        if (random_->below(3) == 0) mock->tripped.insert(static_cast<int>(random_->below(kSignals)));
        if (!mock->check()) return nullptr;
        if (random_->below(4) == 0) mock->tripped.insert(static_cast<int>(random_->below(kSignals)));
        mock->kept++;
        return std::exchange(mock->handlers[n], handler);
    }
    if (!mock->run(callable, n)) return nullptr;
    mock->kept++;
    return &mock->plain;
}

void take_error(Object** type, Object** value, Object** trace) {
    *type = std::exchange(mock->set_error, nullptr);
    *value = *trace = nullptr;
    if (*type) mock->kept++;
}

void give_error(Object* type, Object*, Object*) {
    CHECK(type && !mock->set_error);
    mock->set_error = type;
    mock->kept--;
}

const Python kPython = {
    call,
    [](Object* one) { return one == &mock->plain ? 0 : 1; },
    [](Object*) { mock->kept++; },
    [](Object*) { mock->kept--; },
    take_error,
    give_error,
    [](int number) {
        for (int n = 0; n < kSignals; ++n) {
            if (kNumbers[n] == number) mock->tripped.insert(n);
        }
        return 0;
    },
    []() -> Object* { return &mock->plain; },
};

void test_signals(Random& random) {
    Mock made{};
    mock = &made;
    Object* names[kSignals];
    Object* before[kSignals];
    for (int n = 0; n < kSignals; ++n) {
        names[n] = &made.names[n];
        Object* const some[] = {&made.plain, &made.quiet[n], &made.raising[n]};
        before[n] = made.handlers[n] = some[random.below(3)];
    }
    {
        Signals signals(kPython, &made.get, &made.set, kNumbers, names, kSignals);
        made.signals = &signals;
        for (int round = 0; round < 20; ++round) {
            made.set_error = nullptr;
            const bool held = signals.hold(&made.note);
            CHECK(held == (made.set_error == nullptr));
            if (held) {
                const size_t heard = made.heard.size();
                for (int n = 0; n < kSignals; ++n) {
                    CHECK(made.handlers[n] == (before[n] == &made.plain ? before[n] : &made.note));
                    if (random.below(2)) made.tripped.insert(n);
                }
                CHECK(made.check() && made.heard.size() == heard);  // nothing is heard, nothing raises
                CHECK(signals.release() == (made.set_error == nullptr));
            }
            for (int n = 0; n < kSignals; ++n) CHECK(made.handlers[n] == before[n]);
        }
    }
    CHECK(made.kept == 0);  // every object that was had is given back
}

void test_each_is_heard() {
    Random still(1);
    random_ = &still;
    Mock made{};
    mock = &made;
    Object* names[kSignals];
    for (int n = 0; n < kSignals; ++n) {
        names[n] = &made.names[n];
        made.handlers[n] = n == 1 ? static_cast<Object*>(&made.raising[n]) : &made.quiet[n];
    }
    Signals signals(kPython, &made.get, &made.set, kNumbers, names, kSignals);
    made.signals = &signals;
    while (!signals.hold(&made.note)) made.set_error = nullptr;
    made.heard.clear();
    for (int n = 0; n < kSignals; ++n) CHECK(signals.note(kNumbers[n], &made.plain));
    CHECK(!signals.release() && made.set_error == &made.error);
    made.set_error = nullptr;
    while (!made.check()) made.set_error = nullptr;
    const std::set<int> heard(made.heard.begin(), made.heard.end());
    CHECK(heard.size() == kSignals);
}

void test_tables(Random& random) {
    const int64_t limit = 1 + static_cast<int64_t>(random.below(40)), count = static_cast<int64_t>(random.below(20));
    std::vector<int64_t> blocks;
    for (int64_t n = 0; n < count; ++n) blocks.push_back(static_cast<int64_t>(random.below(44)) - 1);
    if (random.below(2)) {  // far apart: the other way
        for (int64_t& block : blocks) block *= int64_t{1} << 40;
    }
    const int64_t most = random.below(2) ? limit : int64_t{1} << 50;
    bool outside = false;
    for (const int64_t block : blocks) outside |= block < 0 || block >= most;
    const bool twice = std::set<int64_t>(blocks.begin(), blocks.end()).size() < blocks.size();
    CHECK(fault(blocks.data(), count, most) == (outside ? Fault::kOutside : twice ? Fault::kTwice : Fault::kNone));

    const int64_t width = static_cast<int64_t>(random.below(9));
    std::vector<uint8_t> table = random.bytes(static_cast<size_t>(limit * width)), out(static_cast<size_t>(count * width));
    std::vector<int64_t> rows;
    for (int64_t n = 0; n < count; ++n) rows.push_back(static_cast<int64_t>(random.below(static_cast<uint64_t>(limit))));
    CHECK(take_rows(table.data(), limit, width, rows.data(), count, out.data()));
    const std::vector<uint8_t> was = table;
    CHECK(put_rows(table.data(), limit, width, rows.data(), count, out.data()) && table == was);
    std::vector<uint32_t> narrowed(rows.size());
    CHECK(narrow(rows.data(), count, narrowed.data()));
    for (size_t n = 0; n < rows.size(); ++n) CHECK(narrowed[n] == rows[n]);
    if (count) {
        std::vector<int64_t> wide = rows;
        wide[random.below(wide.size())] = random.below(2) ? int64_t{1} << 32 : -1;
        CHECK(!narrow(wide.data(), count, narrowed.data()));
    }
    if (count) {
        rows.back() = random.below(2) ? limit : -1;
        CHECK(!take_rows(table.data(), limit, width, rows.data(), count, out.data()));
        CHECK(!put_rows(table.data(), limit, width, rows.data(), count, out.data()) && table == was);
    }
}

}  // namespace

int main(int argc, char** argv) {
    Random random(7);
    random_ = &random;
    for (uint64_t round = 0; round < rounds(argc, argv, 2000); ++round) {
        test_signals(random);
        test_tables(random);
    }
    test_each_is_heard();
    std::printf(" signals, tables: good\n");
}
