// The module `gdscache._native`. Its Python side is gdscache/_native.pyi.

#include <new>
#include <system_error>

#include "base/memory.h"
#include "bind/bind.h"
#include "cuda/cuda.h"

namespace gdscache {
namespace {

void raise(const Error& error, std::string_view name = "NativeCallError") {
    try {
        const nb::object kind = nb::module_::import_("gdscache.errors").attr(name.data());
        const bool system = name != "DeviceError" && name != "InvalidValueError";
        const auto bytes = static_cast<Py_ssize_t>(std::strlen(error.what()));
        const nb::str why = nb::steal<nb::str>(PyUnicode_DecodeUTF8(error.what(), bytes, "replace"));
        const nb::object made = system ? kind(why, error.hint, error.code) : kind(why, error.hint);
        PyErr_SetObject(kind.ptr(), made.ptr());
    } catch (nb::python_error& other) {
        other.restore();
    }
}

void translate(const std::exception_ptr& thrown, void*) {
    const MustNotFail reserve;  // also called when memory has run out
    try {
        std::rethrow_exception(thrown);
    } catch (const NamedError& error) {
        raise(error, error.kind);
    } catch (const CudaError& error) {
        raise(error, "DeviceError");
    } catch (const Error& error) {
        raise(error);
    } catch (const std::bad_alloc&) {
        raise({ENOMEM, "no memory", "free memory"});
    } catch (const std::length_error&) {
        raise({ENOMEM, "no memory", "free memory"});
    } catch (const std::system_error& error) {  // a thread
        raise({EAGAIN, error.what(), "raise ulimit -u"});
    }
}

}  // namespace

nb::object empty_array(const nb::object& shape, const nb::object& dtype) {
    static PyObject* empty = nullptr;  // never freed: modules may end before its callers
    if (!empty) empty = nb::object(nb::module_::import_("numpy").attr("empty")).release().ptr();
    return nb::borrow(empty)(shape, dtype);
}

}  // namespace gdscache

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // objects alive at the process's end stay
    nb::register_exception_translator(gdscache::translate);
    gdscache::bind_tables(module);
    gdscache::bind_policies(module);
    gdscache::bind_index(module);
    gdscache::bind_disk(module);
    gdscache::bind_gpu(module);
    gdscache::bind_executor(module);
    if (gdscache::bind_hooks) gdscache::bind_hooks(module);
}
