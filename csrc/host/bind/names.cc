// Page keys, with the interpreter's lock: a key takes less than half a microsecond.

#include "bind/bind.h"
#include "hash/blake2b.h"

namespace gdscache {
namespace {

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

}  // namespace

void bind_names(nb::module_& module) {
    module.def("chained_keys", &chained_keys, "key"_a, "parent"_a, "data"_a, "step"_a);
    module.def("keys_of", &keys_of, "key"_a, "digests"_a);
}

}  // namespace gdscache
