// Page keys, and rows of tables, with the interpreter's lock; checksums; planes in host memory. A key takes less than half a microsecond. Numpy releases the
// lock for each of its calls, however small, and taking it again may cost 5 ms.

#include <malloc.h>

#include "bind/handles.h"
#include "hash/blake2b.h"
#include "hash/xxh3.h"

namespace gdscache {
namespace {

constexpr uint64_t kFactors[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63};
constexpr uint64_t kStep = 0x9E3779B97F4A7C15;
constexpr int64_t kSpread = 64;  // numbers with a range above this times their count are sorted

// Row numbers, all within the table.
struct Rows : Numbers<int64_t> {
    template <typename T>
    Rows(const nb::object& rows, const Array<T>& table) : Numbers(rows), table_rows(table.shape(0)) {
        require(table.dims() > 0, "a table without rows");
        row_bytes = table_rows ? static_cast<size_t>(table.bytes() / table_rows) : 0;
        require(within(data(), size(), table_rows), "a row that the table has not");
    }

    int64_t table_rows;
    size_t row_bytes;
};

bool has_twins(const int64_t* blocks, int64_t count) {
    if (count < 2) return false;
    const auto [low, high] = std::minmax_element(blocks, blocks + count);
    const int64_t first = *low, span = *high - first + 1;
    if (span < count) return true;
    if (span <= kSpread * count) {
        std::vector<bool> seen(static_cast<size_t>(span));
        for (int64_t n = 0; n < count; ++n) {
            const size_t at = static_cast<size_t>(blocks[n] - first);
            if (seen[at]) return true;
            seen[at] = true;
        }
        return false;
    }
    std::vector<int64_t> sorted(blocks, blocks + count);
    std::ranges::sort(sorted);
    return std::ranges::adjacent_find(sorted) != sorted.end();
}

const char* blocks_fault(const Int64s& blocks, int64_t limit) {
    if (!within(blocks.data(), blocks.size(), limit)) return "outside";
    return has_twins(blocks.data(), blocks.size()) ? "twice" : "";
}

nb::object narrow_tokens(const Array<const std::byte>& tokens) {
    require(tokens.bytes() % 8 == 0, "tokens are int64");
    const int64_t count = tokens.bytes() / 8;
    const Fresh<uint32_t> found(count);
    const auto* const from = reinterpret_cast<const int64_t*>(tokens.data());
    uint32_t* const to = found.data;
    uint64_t high = 0;
    for (int64_t n = 0; n < count; ++n) {
        high |= static_cast<uint64_t>(from[n]) >> 32;
        to[n] = static_cast<uint32_t>(from[n]);
    }
    return high == 0 ? found.array : nb::none();
}

nb::object take(const nb::object& table, const nb::object& rows) {
    Array<const std::byte> all;
    require(all.take(table.ptr()) && !all.none(), "a table that is no contiguous array");
    const Rows wanted(rows, all);
    nb::object shape = nb::steal(PyTuple_New(all.dims()));
    if (!shape.is_valid()) throw nb::python_error();
    for (int n = 0; n < all.dims(); ++n) {
        PyTuple_SetItem(shape.ptr(), n, PyLong_FromLongLong(n ? all.shape(n) : wanted.size()));
    }
    nb::object found = empty_array(shape, table.attr("dtype"));
    Array<std::byte> out;
    require(out.take(found.ptr()), "a table of no numbers");
    std::byte* to = out.data();
    for (int64_t n = 0; wanted.row_bytes && n < wanted.size(); ++n, to += wanted.row_bytes) {
        std::memcpy(to, all.data() + static_cast<size_t>(wanted.data()[n]) * wanted.row_bytes, wanted.row_bytes);
    }
    return found;
}

void put(const Array<std::byte>& table, const nb::object& rows, const Array<const std::byte>& values) {
    const Rows wanted(rows, table);
    const auto bytes = static_cast<int64_t>(wanted.row_bytes);
    require(values.bytes() == wanted.size() * bytes || !wanted.table_rows, "not a row of values for each number");
    for (int64_t n = 0; bytes && n < wanted.size(); ++n) {
        std::memcpy(table.data() + wanted.data()[n] * bytes, values.data() + n * bytes, wanted.row_bytes);
    }
}

// Rows of stored checksums, without the part bound to the pages' keys (docs/format.md).
nb::object unbound(const UInt64s& stored, const nb::object& rows, const Array<const std::byte>& keys) {
    const Rows wanted(rows, stored);
    if (keys.bytes() != static_cast<int64_t>(kKeyBytes) * wanted.size()) {
        const std::string why = std::to_string(keys.bytes()) + " bytes of keys for " + std::to_string(wanted.size());
        throw NamedError("InvalidValueError", EINVAL, why + " pages", "a key has 32 bytes");
    }
    require(stored.dims() == 2, "a table of checksums has two dimensions");
    const int64_t sums = stored.shape(1);
    const Fresh<uint64_t> found(wanted.size(), sums);
    uint64_t* out = found.data;
    const std::byte* key = keys.data();
    for (int64_t n = 0; n < wanted.size(); ++n, key += kKeyBytes) {
        uint64_t words[4], binding = 0;  // little-endian, as every machine of the build
        std::memcpy(words, key, sizeof words);
        for (int word = 0; word < 4; ++word) binding += words[word] * kFactors[word];
        const uint64_t* const row = stored.data() + wanted.data()[n] * sums;
        for (int64_t layer = 0; layer < sums; ++layer, binding += kStep) *out++ = row[layer] - binding;
    }
    return found.array;
}

Blake2b::Bytes bytes_of(const nb::bytes& given) { return {static_cast<const uint8_t*>(given.data()), given.size()}; }

// A key, or a digest.
Blake2b::Bytes short_of(const nb::bytes& given) {
    require(given.size() >= 1 && given.size() <= 64, "a key or digest has 1 to 64 bytes");
    return bytes_of(given);
}

nb::bytes made_of(const Blake2b::Digest& digest) { return nb::bytes(digest.data(), digest.size()); }

nb::list chained_keys(const nb::bytes& key, nb::bytes parent, const nb::bytes& data, int64_t step) {
    require(step > 0, "a page without bytes");
    const Blake2b keyed(short_of(key));
    const Blake2b::Bytes all = bytes_of(data);
    const auto size = static_cast<size_t>(step);
    nb::list keys;
    for (size_t at = 0; at + size <= all.size(); at += size) {
        parent = made_of(keyed.digest(short_of(parent), all.subspan(at, size)));
        keys.append(parent);
    }
    return keys;
}

nb::list keys_of(const nb::bytes& key, const std::vector<nb::bytes>& digests) {
    const Blake2b keyed(short_of(key));
    nb::list keys;
    for (const nb::bytes& digest : digests) keys.append(made_of(keyed.digest(short_of(digest))));
    return keys;
}

nb::object layer_sums(const UInt64s& extents, const Int64s& bounds) {
    const int64_t layers = bounds.shape(0);
    require(bounds.has(layers, 2), "bounds are two numbers a layer");
    for (int64_t n = 0; n < layers; ++n) {
        require(bounds[2 * n] >= 0 && bounds[2 * n + 1] >= bounds[2 * n], "a layer that ends before it begins");
    }
    for (int64_t page = 0; page < extents.size(); ++page) require(extents[page], "an extent without an address");
    const Fresh<uint64_t> found(extents.size(), layers);
    const Unlocked others;
    for (int64_t page = 0; page < extents.size(); ++page) {
        const auto* const extent = at<const uint8_t>(extents[page]);
        for (int64_t layer = 0; layer < layers; ++layer) {
            const int64_t begin = bounds[2 * layer], end = bounds[2 * layer + 1];
            found.data[page * layers + layer] = xxh3(extent + begin, static_cast<size_t>(end - begin));
        }
    }
    return found.array;
}

}  // namespace

OpenPlanes::OpenPlanes(const Int64s& planes, const Array<const int32_t>& first_plane, int64_t blocks,
                       int64_t block_tokens, int64_t page_blocks, bool packed) {
    const int64_t count = planes.shape(0), layers = first_plane.size() - 1;
    refuse_if(!planes.has(count, 4) || count < 1 || count > 1 << 24, "no sound number of planes");
    refuse_if(layers < 1 || layers > count, "no sound number of layers");
    refuse_if(first_plane[layers] != count, "the layers have other planes in all");
    HostPlanes made{{},    {first_plane.data(), first_plane.data() + layers + 1}, blocks, block_tokens, page_blocks,
                    packed};
    for (const int64_t* row = planes.data(); row != planes.data() + 4 * count; row += 4) {
        made.planes.push_back({reinterpret_cast<uint8_t*>(row[0]), row[1], row[2], row[3]});
    }
    check(made);
    pool = std::make_shared<const HostPlanes>(std::move(made));
}

void bind_tables(nb::module_& module) {
    module.def("chained_keys", &chained_keys, "key"_a, "parent"_a, "data"_a, "step"_a);
    module.def("keys_of", &keys_of, "key"_a, "digests"_a);
    module.def("blocks_fault", &blocks_fault, "blocks"_a, "limit"_a);
    module.def("narrow_tokens", &narrow_tokens, "tokens"_a);
    module.def("trim_heap", [] { malloc_trim(0); });
    module.def("take_rows", &take, "table"_a, "rows"_a);
    module.def("put_rows", &put, "table"_a, "rows"_a, "values"_a);
    module.def("take_unbound", &unbound, "stored"_a, "rows"_a, "keys"_a);
    module.def("best_arm", [] { return best_arm().name; });
    module.def("layer_sums", &layer_sums, "extents"_a, "bounds"_a);

    nb::class_<OpenPlanes>(module, "HostPlanes")
        .def(nb::init<const Int64s&, const Array<const int32_t>&, int64_t, int64_t, int64_t, bool>(), "planes"_a,
             "first_plane"_a, "blocks"_a, "block_tokens"_a, "page_blocks"_a, "packed"_a = false)
        .def("close", [](OpenPlanes& self) { self.pool.reset(); });
}

}  // namespace gdscache
