// Checksums, and pages between planes and extents in host memory.

#include "../pages.h"

#include <memory>

#include "../xxh3.h"
#include "handles.h"

namespace gdscache {
namespace {

nb::object layer_sums(const Array<const uint64_t>& extents, const Array<const int64_t>& bounds) {
    const int64_t layers = bounds.shape(0);
    require(bounds.has(layers, 2), "bounds are two numbers a layer");
    for (int64_t n = 0; n < layers; ++n) {
        require(bounds[2 * n] >= 0 && bounds[2 * n + 1] >= bounds[2 * n], "a layer that ends before it begins");
    }
    for (int64_t page = 0; page < extents.size(); ++page) require(extents[page], "an extent without an address");
    const Fresh<uint64_t> found({extents.size(), layers});
    const nb::gil_scoped_release others;
    for (int64_t page = 0; page < extents.size(); ++page) {
        const auto* const extent = at<const uint8_t>(extents[page]);
        for (int64_t layer = 0; layer < layers; ++layer) {
            const int64_t begin = bounds[2 * layer], end = bounds[2 * layer + 1];
            found.data[page * layers + layer] = xxh3(extent + begin, static_cast<size_t>(end - begin));
        }
    }
    return found.array;
}

HostPool open_pool(const Array<const int64_t>& planes, const Array<const int32_t>& first_plane, int64_t blocks,
                   int64_t block_tokens, int64_t page_blocks) {
    const int64_t count = planes.shape(0), layers = first_plane.size() - 1;
    refuse_if(!planes.has(count, 4) || count < 1 || count > 1 << 24, "no sound number of planes");
    refuse_if(layers < 1 || layers > count, "no sound number of layers");
    refuse_if(first_plane[layers] != count, "the layers have other planes in all");
    auto made = std::make_shared<OpenPool>();
    for (int64_t n = 0; n < count; ++n) {
        const int64_t* const row = planes.data() + 4 * n;
        made->planes.push_back({reinterpret_cast<uint8_t*>(row[0]), row[1], row[2], row[3]});
    }
    made->first_plane.assign(first_plane.data(), first_plane.data() + layers + 1);
    made->pool = {made->planes.data(), made->first_plane.data(), layers, blocks, block_tokens, page_blocks};
    check(made->pool);
    return {std::move(made)};
}

// `kMove`: `gather` or `scatter`. The checksums, uint64 (pages, layers); (0, layers) where nobody wants them.
template <typename Part, auto kMove>
nb::object move_pages(const HostPool& from, const Array<const int64_t>& blocks, const Array<const uint64_t>& parts,
                      const nb::object& layers, bool streamed, bool summed) {
    const std::shared_ptr<OpenPool> kept = from.pool;
    const Pool& pool = open(kept, "the pool").pool;
    const Range range(layers);
    const int64_t pages = parts.size(), count = range.size();
    require(range.start >= 0 && range.start <= range.stop && range.stop <= pool.n_layers, "layers that the pool has not");
    require(blocks.has(pages, pool.page_blocks), "pass blocks as int64 (pages, blocks a page)");
    for (int64_t n = 0; n < pages; ++n) {
        require(parts[n] && knows(pool, blocks.data() + n * pool.page_blocks), "a block that the pool has not");
    }
    const Fresh<uint64_t> sums({summed ? pages : 0, count});
    const nb::gil_scoped_release others;
    for (int64_t n = 0; n < pages; ++n) {
        kMove(pool, blocks.data() + n * pool.page_blocks, range.start, range.stop, at<Part>(parts[n]),
              summed ? sums.data + n * count : nullptr, streamed ? Store::kStreamed : Store::kCached);
    }
    if (streamed) stream_fence();
    return sums.array;
}

}  // namespace

void bind_pages(nb::module_& module) {
    module.def("best_arm", [] { return best_arm().name; });
    module.def("layer_sums", &layer_sums, nb::arg("extents"), nb::arg("bounds"));

    using Numbers = const Array<const int64_t>&;
    nb::class_<HostPool>(module, "Pool")
        .def("__init__",
             [](HostPool* self, Numbers planes, const Array<const int32_t>& first_plane, int64_t blocks,
                int64_t block_tokens, int64_t page_blocks) {
                 new (self) HostPool(open_pool(planes, first_plane, blocks, block_tokens, page_blocks));
             },
             nb::arg("planes"), nb::arg("first_plane"), nb::arg("blocks"), nb::arg("block_tokens"), nb::arg("page_blocks"))
        .def("gather", &move_pages<uint8_t, gather>, nb::arg("blocks"), nb::arg("parts"), nb::arg("layers"),
             nb::kw_only(), nb::arg("streamed") = true, nb::arg("sums") = true)
        .def("scatter", &move_pages<const uint8_t, scatter>, nb::arg("blocks"), nb::arg("parts"), nb::arg("layers"),
             nb::kw_only(), nb::arg("streamed") = true, nb::arg("sums") = true)
        .def("close", [](HostPool& self) { self.pool.reset(); });
}

}  // namespace gdscache
