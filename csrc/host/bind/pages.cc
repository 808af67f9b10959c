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

// `kMove`: `gather` or `scatter`. Returns checksums, uint64 (pages, layers); (0, layers) without `summed`.
template <typename Part, auto kMove>
nb::object move_pages(const OpenPlanes& from, const Int64s& blocks, const UInt64s& parts, const nb::object& layers,
                      bool streamed, bool summed) {
    const std::shared_ptr<const HostPlanes> kept = from.pool;
    const HostPlanes& pool = open(kept, "the pool");
    const Range range(layers);
    const int64_t pages = parts.size(), count = range.size();
    const bool known = range.start >= 0 && range.start <= range.stop && range.stop <= pool.layers();
    require(known, "layers that the pool has not");
    require(blocks.has(pages, pool.page_blocks), "pass blocks as int64 (pages, blocks a page)");
    require(within(blocks.data(), blocks.size(), pool.blocks), "a block that the pool has not");
    for (int64_t n = 0; n < pages; ++n) require(parts[n], "an extent without an address");
    const Fresh<uint64_t> sums(summed ? pages : 0, count);
    const nb::gil_scoped_release others;
    for (int64_t n = 0; n < pages; ++n) {
        const auto move = [&] {
            return kMove(pool, blocks.data() + n * pool.page_blocks, range.start, range.stop, at<Part>(parts[n]),
                         summed ? sums.data + n * count : nullptr, streamed ? Store::kStreamed : Store::kCached);
        };
        if constexpr (std::is_void_v<decltype(move())>) move();
        else refuse_if(!move(), "a page that does not fit into a packed extent");
    }
    if (streamed) stream_fence();
    return sums.array;
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
        .def("gather", &move_pages<uint8_t, gather>, "blocks"_a, "parts"_a, "layers"_a, nb::kw_only(),
             "streamed"_a = true, "sums"_a = true)
        .def("scatter", &move_pages<const uint8_t, scatter>, "blocks"_a, "parts"_a, "layers"_a, nb::kw_only(),
             "streamed"_a = true, "sums"_a = true)
        .def("close", [](OpenPlanes& self) { self.pool.reset(); });
}

}  // namespace gdscache
