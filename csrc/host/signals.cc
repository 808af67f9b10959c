#include "signals.h"

#include <signal.h>
#include <unistd.h>

#include <utility>

namespace gdscache {

namespace {

constexpr int kTries = 10'000;  // an exchange fails once for each signal whose handler raises

}  // namespace

Signals::Signals(const Python& python, Object* get, Object* set, const int32_t* numbers, Object* const* names,
                 int64_t count)
    : python_(python), get_(get), set_(set), process_(getpid()) {
    python_.keep(get_);
    python_.keep(set_);
    signals_.reserve(static_cast<size_t>(count));
    for (int64_t n = 0; n < count; ++n) {
        python_.keep(names[n]);
        signals_.push_back({numbers[n], names[n], nullptr, false});
    }
}

Signals::~Signals() {
    for (One& one : signals_) python_.drop(one.name);
    python_.drop(get_);
    python_.drop(set_);
}

// Set Python's handler. The system's stays as it is, with its flags, whosever it is: Python sets that too.
bool Signals::exchange(const One& one, Object* handler, Object** before) {
    struct sigaction action;
    const bool known = sigaction(one.number, nullptr, &action) == 0;
    *before = python_.call(set_, one.name, handler, nullptr);  // hears what came until now, first
    if (*before && known) sigaction(one.number, &action, nullptr);
    return *before != nullptr;
}

bool Signals::hold(Object* note) {
    note_ = note;
    for (One& one : signals_) {
        Object* const now = python_.call(get_, one.name, nullptr);
        const bool runs = now && python_.callable(now);
        if (now) python_.drop(now);
        if (now && !runs) continue;  // the system's default, or ignored, or a handler that is not Python's
        if (!now || !exchange(one, note, &one.before)) {
            one.before = nullptr;
            release();
            return false;
        }
    }
    return true;
}

bool Signals::note(int32_t number, Object* frame) {
    One* const one = find(number);
    if (!one) return true;
    if (one->before && getpid() != process_) {  // another thread forked meanwhile, and nobody is to release here
        Object* const answer = python_.call(one->before, one->name, frame, nullptr);
        if (answer) python_.drop(answer);
        return answer != nullptr;
    }
    one->came = true;
    return true;
}

bool Signals::release() {
    keep_error();  // of a hold that failed
    for (One& one : signals_) {
        if (one.before) put_back(one);
    }
    for (One& one : signals_) {
        if (!std::exchange(one.came, false)) continue;
        if (first_.type) {
            python_.interrupt(one.number);  // Python hears it behind the error
        } else if (!hear(one)) {
            keep_error();
        }
    }
    const Error error = std::exchange(first_, {});
    if (!error.type) return true;
    python_.set_error(error.type, error.value, error.trace);
    return false;
}

void Signals::put_back(One& one) {
    Object* const before = std::exchange(one.before, nullptr);
    Object* now = nullptr;
    for (int tries = 0; !exchange(one, before, &now) && tries < kTries; ++tries) keep_error();
    if (now && now != note_) {  // what was done meanwhile has set another
        Object* ours = nullptr;
        for (int tries = 0; !exchange(one, now, &ours) && tries < kTries; ++tries) keep_error();
        if (ours) python_.drop(ours);
    }
    if (now) python_.drop(now);
    python_.drop(before);
}

// Run the handler of a signal that came, as Python would.
bool Signals::hear(One& one) {
    Object* const handler = python_.call(get_, one.name, nullptr);
    if (!handler) return false;
    Object* answer = nullptr;
    const bool runs = python_.callable(handler);
    if (runs) answer = python_.call(handler, one.name, python_.frame(), nullptr);
    python_.drop(handler);
    if (answer) python_.drop(answer);
    return answer || !runs;
}

// Keep the error that is set, if one is, unless there is one from before.
void Signals::keep_error() {
    Error error;
    python_.take_error(&error.type, &error.value, &error.trace);
    if (!first_.type) {
        first_ = error;
        return;
    }
    for (Object* part : {error.type, error.value, error.trace}) {
        if (part) python_.drop(part);
    }
}

Signals::One* Signals::find(int32_t number) {
    for (One& one : signals_) {
        if (one.number == number) return &one;
    }
    return nullptr;
}

}  // namespace gdscache
