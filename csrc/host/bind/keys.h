// Keys of pages in Python's sequences.

#pragma once

#include <string>

#include "bind/bind.h"
#include "policies/keys.h"

namespace gdscache {

constexpr size_t kKeyBytes = sizeof(Key);

// The items of a list, a tuple or any other sequence, for the time of a call.
class Items {
public:
    explicit Items(nb::handle given) : fast_(nb::steal(PySequence_Fast(given.ptr(), "pass a sequence"))) {
        if (!fast_.is_valid()) throw nb::python_error();
        list_ = PyList_Check(fast_.ptr());
        size_ = list_ ? PyList_Size(fast_.ptr()) : PyTuple_Size(fast_.ptr());
    }
    Py_ssize_t size() const { return size_; }
    // Raises Python's error if the sequence has become shorter.
    PyObject* operator[](Py_ssize_t n) const {
        PyObject* const item = list_ ? PyList_GetItem(fast_.ptr(), n) : PyTuple_GetItem(fast_.ptr(), n);
        if (!item) throw nb::python_error();
        return item;
    }

private:
    nb::object fast_;
    bool list_;
    Py_ssize_t size_;
};

inline Key key_of(PyObject* bytes, bool whole = true) {
    char* data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(bytes, &data, &size) != 0) throw nb::python_error();
    if (whole ? size != kKeyBytes : static_cast<size_t>(size) > kKeyBytes) {
        const std::string why = "a key of " + std::to_string(size) + " bytes";
        throw NamedError("InvalidValueError", EINVAL, why, "a key has 32 bytes");
    }
    return {data, static_cast<size_t>(size)};
}

}  // namespace gdscache
