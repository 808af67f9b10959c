// Checksums, and pages between planes and extents in host memory.

#include "moves/pages.h"

#include "bind/handles.h"
#include "hash/xxh3.h"

namespace gdscache {
namespace {

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

void bind_pages(nb::module_& module) {
    module.def("best_arm", [] { return best_arm().name; });
    module.def("layer_sums", &layer_sums, "extents"_a, "bounds"_a);

    nb::class_<OpenPlanes>(module, "HostPlanes")
        .def(nb::init<const Int64s&, const Array<const int32_t>&, int64_t, int64_t, int64_t, bool>(), "planes"_a,
             "first_plane"_a, "blocks"_a, "block_tokens"_a, "page_blocks"_a, "packed"_a = false)
        .def("close", [](OpenPlanes& self) { self.pool.reset(); });
}

}  // namespace gdscache
