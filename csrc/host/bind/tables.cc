// Rows of tables, with the interpreter's lock: who gives it up may wait 5 ms to have it again, which numpy does for each
// of these, however small.

#include "../tables.h"

#include <string>

#include "bind.h"

namespace gdscache {

namespace {

constexpr int64_t kKeyBytes = 32;

using Rows = Numbers<int64_t>;

// Bytes of a row of a table.
template <typename T>
int64_t row_bytes(const Array<T>& table) {
    require(table.dims() > 0, "a table without rows");
    return table.shape(0) ? table.bytes() / table.shape(0) : 0;
}

const char* blocks_fault(const Array<const int64_t>& blocks, int64_t limit) {
    const Fault found = fault(blocks.data(), blocks.size(), limit);
    return found == Fault::kNone ? "" : found == Fault::kOutside ? "outside" : "twice";
}

nb::object narrow_tokens(const Array<const std::byte>& tokens) {
    require(tokens.bytes() % 8 == 0, "tokens are int64");
    const int64_t count = tokens.bytes() / 8;
    const Fresh<uint32_t> found({count});
    const bool fits = narrow(reinterpret_cast<const int64_t*>(tokens.data()), count, found.data);
    return fits ? found.array : nb::none();
}

nb::object take(const nb::object& table, const nb::object& rows) {
    Array<const std::byte> all;
    require(all.take(table.ptr()) && !all.none(), "a table that is no contiguous array");
    const Rows wanted(rows);
    nb::object shape = nb::steal(PyTuple_New(all.dims()));
    if (!shape.is_valid()) throw nb::python_error();
    for (int n = 0; n < all.dims(); ++n) {
        PyTuple_SetItem(shape.ptr(), n, PyLong_FromLongLong(n ? all.shape(n) : wanted.size()));
    }
    nb::object found = empty_array(shape, table.attr("dtype"));
    Array<std::byte> out;
    require(out.take(found.ptr()), "a table of no numbers");
    const bool known = take_rows(reinterpret_cast<const uint8_t*>(all.data()), all.shape(0), row_bytes(all), wanted.data(),
                                 wanted.size(), reinterpret_cast<uint8_t*>(out.data()));
    require(known, "a row that the table has not");
    return found;
}

void put(const Array<std::byte>& table, const nb::object& rows, const Array<const std::byte>& values) {
    const Rows wanted(rows);
    const int64_t bytes = row_bytes(table);
    require(values.bytes() == wanted.size() * bytes || !table.shape(0), "not a row of values for each number");
    const bool known = put_rows(reinterpret_cast<uint8_t*>(table.data()), table.shape(0), bytes, wanted.data(), wanted.size(),
                                reinterpret_cast<const uint8_t*>(values.data()));
    require(known, "a row that the table has not");
}

nb::object unbound(const Array<const uint64_t>& stored, const nb::object& rows, const Array<const std::byte>& keys) {
    const Rows wanted(rows);
    if (keys.bytes() != kKeyBytes * wanted.size()) {
        throw CallError{std::to_string(keys.bytes()) + " bytes of keys for " + std::to_string(wanted.size()) + " pages",
                        EINVAL, "a key has 32 bytes", "InvalidValueError"};
    }
    require(stored.dims() == 2, "a table of checksums has two dimensions");
    const Fresh<uint64_t> found({wanted.size(), stored.shape(1)});
    const bool known = take_unbound(stored.data(), stored.shape(0), stored.shape(1), wanted.data(), wanted.size(),
                                    reinterpret_cast<const uint8_t*>(keys.data()), found.data);
    require(known, "a row that the table has not");
    return found.array;
}

}  // namespace

void bind_tables(nb::module_& module) {
    module.def("blocks_fault", &blocks_fault, nb::arg("blocks"), nb::arg("limit"));
    module.def("narrow_tokens", &narrow_tokens, nb::arg("tokens"));
    module.def("take_rows", &take, nb::arg("table"), nb::arg("rows"));
    module.def("put_rows", &put, nb::arg("table"), nb::arg("rows"), nb::arg("values"));
    module.def("take_unbound", &unbound, nb::arg("stored"), nb::arg("rows"), nb::arg("keys"));
}

}  // namespace gdscache
