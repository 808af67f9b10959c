// The plain C interface of signals.

#include <cerrno>
#include <cstring>
#include <new>

#include "api.h"
#include "signals.h"

using namespace gdscache;

struct gdscache_signals : Signals {
    using Signals::Signals;
};

int32_t gdscache_signals_open(const uint64_t* python, void* get, void* set, const int32_t* numbers, void* const* names,
                              int64_t count, struct gdscache_signals** signals) {
    if (!python || !get || !set || count < 0 || (count && (!numbers || !names)) || !signals) return -EINVAL;
    Python functions;
    static_assert(sizeof functions == 8 * sizeof(uint64_t));
    std::memcpy(&functions, python, sizeof functions);
    try {
        *signals = new gdscache_signals(functions, get, set, numbers, names, count);
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

int32_t gdscache_signals_hold(struct gdscache_signals* signals, void* note) { return signals->hold(note) ? 0 : -EINTR; }

int32_t gdscache_signals_note(struct gdscache_signals* signals, int32_t number, void* frame) {
    return signals->note(number, frame) ? 0 : -EINTR;
}

int32_t gdscache_signals_release(struct gdscache_signals* signals) { return signals->release() ? 0 : -EINTR; }
