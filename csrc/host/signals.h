// Python's signals, kept from being heard while its main thread carries out a short call.
//
// What the system tells of a signal Python notes, and runs the handler later, between any two steps of its main thread;
// what the handler raises is raised there. While signals are held, their handlers are a note of ours instead, so nothing
// is raised; then each is heard. Python's handlers are exchanged rather than the system's: so nothing is missed, whoever
// heard of the signal (another thread, a library's handler, `_thread.interrupt_main`), and the descriptor that event
// loops listen at is written to at once.
//
// This is C++ so that nothing lies between two of these exchanges where Python would hear a signal. Python's functions
// come by their addresses: the library is built without it. All calls are in the main thread, with the interpreter's
// lock, and none waits.

#pragma once

#include <cstdint>
#include <vector>

namespace gdscache {

using Object = void;  // PyObject

// Functions of Python's stable interface.
struct Python {
    Object* (*call)(Object* callable, ...);  // PyObject_CallFunctionObjArgs: its arguments, then null
    int (*callable)(Object*);                // PyCallable_Check
    void (*keep)(Object*);                   // Py_IncRef
    void (*drop)(Object*);                   // Py_DecRef
    void (*take_error)(Object**, Object**, Object**);  // PyErr_Fetch
    void (*set_error)(Object*, Object*, Object*);      // PyErr_Restore
    int (*interrupt)(int);                             // PyErr_SetInterruptEx
    Object* (*frame)();                                // PyEval_GetFrame
};

class Signals {
public:
    // `get`, `set`: signal.getsignal and signal.signal. `names`: the numbers of `numbers` as Python has them.
    Signals(const Python& python, Object* get, Object* set, const int32_t* numbers, Object* const* names,
            int64_t count);
    ~Signals();
    Signals(const Signals&) = delete;
    Signals& operator=(const Signals&) = delete;

    // From now on handlers of Python are `note`, which calls our `note`. False where a signal that came before raises:
    // the error is set then, and all is as it was. Not again before `release`.
    bool hold(Object* note);

    // A signal is to be heard. In a fork of the process its handler runs at once; false where that raises.
    bool note(int32_t number, Object* frame);

    // Everything is as it was, and what came is heard now. False where that raises: the error is set.
    bool release();

private:
    struct One {
        int32_t number;
        Object* name;
        Object* before;  // its handler while it is held, else null
        bool came;
    };
    struct Error {
        Object *type = nullptr, *value = nullptr, *trace = nullptr;
    };

    bool exchange(const One& one, Object* handler, Object** before);
    void put_back(One& one);
    bool hear(One& one);
    void keep_error();
    One* find(int32_t number);

    Python python_;
    Object *get_, *set_, *note_ = nullptr;
    std::vector<One> signals_;
    Error first_;  // that was raised while handlers were put back
    int32_t process_;
};

}  // namespace gdscache
