// Helpers of the Python module: arrays by the buffer protocol, fresh numpy arrays, keys, and errors.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <cstddef>
#include <exception>
#include <optional>
#include <type_traits>

#include "base/error.h"
#include "policies/keys.h"

namespace nb = nanobind;

namespace gdscache {

using namespace nb::literals;

// Call `work`, which may want the interpreter's lock. When the interpreter has ended, the thread stays here until the
// process ends. Python before 3.14 ends such a thread by an unwinding of its stack, which aborts the process where a
// destructor, or anything that is `noexcept`, does not let it pass.
template <typename Work>
[[gnu::noinline]] auto or_stay(Work work) {
    struct Guard {
        ~Guard() {
            while (!back && std::uncaught_exceptions() == errors) pause();
        }
        const int errors = std::uncaught_exceptions();
        bool back = false;
    } guard;
    if constexpr (std::is_void_v<decltype(work())>) {
        work();
        guard.back = true;
    } else {
        auto answer = work();
        guard.back = true;
        return answer;
    }
}

// While this lives, the calling thread has the interpreter's lock.
class Locked {
public:
    Locked() : state_(or_stay(PyGILState_Ensure)) {}
    ~Locked() {
        or_stay([this] { PyGILState_Release(state_); });
    }
    Locked(Locked&&) = delete;

private:
    const PyGILState_STATE state_;
};

// While this lives, other threads may have the interpreter's lock, and this one has not.
class Unlocked {
public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked() {
        or_stay([this] { PyEval_RestoreThread(state_); });
    }
    Unlocked(Unlocked&&) = delete;

private:
    PyThreadState* const state_;
};

// An error that Python raises as the class `kind` of gdscache.errors.
struct NamedError : Error {
    NamedError(const char* of, int number, const std::string& why, const char* what_to_do)
        : Error(number, why, what_to_do), kind(of) {}
    const char* kind;
};

// The object behind a pointer; EBADF after `close`. `what`: its name.
template <typename Pointer>
auto& open(const Pointer& pointer, const char* what) {
    if (!pointer) throw Error(EBADF, std::string(what) + " was closed", "use it before close");
    return *pointer;
}

// The contiguous numbers of an array of Python's, for the time of a call; `std::byte`: the bytes of an array of any
// type. An array of `const` may be read-only. `None` is an array without an address.
template <typename T>
class Array {
public:
    Array() = default;
    Array(Array&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
    Array& operator=(Array&& other) noexcept {
        std::swap(view_, other.view_);
        return *this;
    }
    ~Array() { let_go(); }

    T* data() const { return static_cast<T*>(view_.buf); }
    bool none() const { return !view_.obj; }
    int64_t size() const { return none() ? 0 : static_cast<int64_t>(view_.len) / item(); }
    int64_t bytes() const { return none() ? 0 : static_cast<int64_t>(view_.len); }
    int dims() const { return view_.ndim; }
    int64_t shape(int n) const { return n < view_.ndim ? view_.shape[n] : 1; }
    const T& operator[](int64_t n) const { return data()[n]; }

    bool has(int64_t rows, int64_t columns) const { return dims() == 2 && shape(0) == rows && shape(1) == columns; }

    // Take the array behind an object; false if it has other numbers.
    bool take(PyObject* from) noexcept {
        if (from == Py_None) return true;
        const int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
        if (PyObject_GetBuffer(from, &view_, flags) != 0) {
            PyErr_Clear();
            view_.obj = nullptr;
            return false;
        }
        if (kAny || (view_.itemsize == item() && is_kind(view_.format))) return true;
        let_go();  // `take` may be called again
        return false;
    }

private:
    using Number = std::remove_const_t<T>;
    static constexpr bool kAny = std::is_same_v<Number, std::byte>;

    static constexpr int64_t item() { return static_cast<int64_t>(sizeof(Number)); }
    static bool is_kind(const char* format) {
        const char kind = format ? (*format == '@' || *format == '=' || *format == '<' ? format[1] : format[0]) : 'B';
        const bool sign = kind == 'b' || kind == 'h' || kind == 'i' || kind == 'l' || kind == 'q';
        const bool none = kind == 'B' || kind == 'H' || kind == 'I' || kind == 'L' || kind == 'Q';
        return std::is_signed_v<Number> ? sign : none;
    }

    void let_go() noexcept {
        if (view_.obj) PyBuffer_Release(&view_);
    }

    Py_buffer view_{};
};

using Int64s = Array<const int64_t>;
using UInt64s = Array<const uint64_t>;

// `numpy.empty(shape, dtype)`.
nb::object empty_array(const nb::object& shape, const nb::object& dtype);

// The name of T's dtype.
template <typename T>
nb::str dtype_of() {
    if (sizeof(T) == 8) return nb::str(std::is_signed_v<T> ? "int64" : "uint64");
    if (sizeof(T) == 4) return nb::str(std::is_signed_v<T> ? "int32" : "uint32");
    return nb::str("uint8");
}

// A new numpy array, uninitialized.
template <typename T>
struct Fresh {
    template <typename... Sizes>
    explicit Fresh(Sizes... shape) : array(empty_array(nb::make_tuple(shape...), dtype_of<T>())) {
        Array<T> view;
        require(view.take(array.ptr()), "numpy gives no array of ours");
        data = view.data();
    }

    nb::object array;
    T* data = nullptr;
};

// The numbers of an array, or of anything that numpy makes one of.
template <typename T>
class Numbers {
public:
    explicit Numbers(const nb::object& given) {
        if (numbers_.take(given.ptr())) return;
        kept_ = nb::module_::import_("numpy").attr("ascontiguousarray")(given, dtype_of<T>());
        require(numbers_.take(kept_.ptr()), "an array of no numbers");
    }
    const T* data() const { return numbers_.data(); }
    int64_t size() const { return numbers_.size(); }
    std::vector<T> copied() const { return {data(), data() + size()}; }

private:
    Array<const T> numbers_;
    nb::object kept_;
};

template <typename T>
T field(nb::handle of, const char* name) {
    return nb::cast<T>(of.attr(name));
}

inline nb::object range_of(int64_t start, int64_t stop) {
    return nb::module_::import_("builtins").attr("range")(start, stop);
}

// The `start` and `stop` of a range.
struct Range {
    explicit Range(nb::handle range) : start(field<int64_t>(range, "start")), stop(field<int64_t>(range, "stop")) {}
    int64_t size() const { return stop > start ? stop - start : 0; }

    int64_t start, stop;
};

constexpr size_t kKeyBytes = sizeof(Key);

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

constexpr int64_t kSlice = 100'000'000;  // nanoseconds of a wait; signals are handled behind each

using Text = std::optional<std::string>;
inline const char* chars(const Text& text) { return text ? text->c_str() : nullptr; }

template <typename T>
T* at(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

// The parts of the module, a file each.
void bind_tables(nb::module_& module);
void bind_policies(nb::module_& module);
void bind_index(nb::module_& module);
void bind_disk(nb::module_& module);
void bind_gpu(nb::module_& module);
void bind_executor(nb::module_& module);

class Disk;

// Of the tests' build (tests/bind/hooks.cc), else null: functions, and a disk between an executor and its first one.
[[gnu::weak, gnu::visibility("default")]] void bind_hooks(nb::module_& module);
[[gnu::weak, gnu::visibility("default")]] std::unique_ptr<Disk> between(std::unique_ptr<Disk> disk);

}  // namespace gdscache

namespace nanobind::detail {

template <typename T>
struct type_caster<gdscache::Array<T>> {
    NB_TYPE_CASTER(gdscache::Array<T>, const_name("collections.abc.Buffer | None"))

    bool from_python(handle source, uint32_t, cleanup_list*) noexcept { return value.take(source.ptr()); }
};

}  // namespace nanobind::detail
