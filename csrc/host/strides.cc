#include "threads_disk.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "xxh3.h"

namespace gdscache {

int64_t read_and_look(Caller& caller, const Piece& piece) {
    const size_t most = piece.copied ? kStride : SIZE_MAX;
    const Look *look = piece.looks, *const last = look + piece.n_looks;
    std::vector<iovec> stride;
    int64_t moved = 0;
    size_t within = 0;  // bytes of fragment `next` that were read
    for (uint32_t next = 0; next < piece.count;) {
        const iovec* const fragments = piece.fragments + next;
        size_t bytes = 0;
        stride.clear();
        while (next < piece.count && bytes < most) {
            const iovec& fragment = piece.fragments[next];
            const size_t some = std::min(fragment.iov_len - within, most - bytes);
            stride.push_back({static_cast<uint8_t*>(fragment.iov_base) + within, some});
            bytes += some;
            within += some;
            if (within == fragment.iov_len) ++next, within = 0;
        }
        const Call call{stride.data(), static_cast<uint32_t>(stride.size()), piece.offset + moved,
                        static_cast<int64_t>(bytes)};
        const int64_t answer = caller.transfer(piece, call);
        if (answer < 0) return moved ? moved : answer;
        moved += answer;
        if (answer != call.bytes) return moved;
        for (size_t n = 0; n < stride.size(); ++n) {
            const auto* const begin = static_cast<const uint8_t*>(fragments[n].iov_base);
            const auto* const end = static_cast<const uint8_t*>(stride[n].iov_base) + stride[n].iov_len;
            for (; look != last && begin <= look->memory && look->memory + look->bytes <= end; ++look) {
                *look->sum = xxh3(look->memory, look->bytes);
            }
        }
    }
    return moved;
}

}  // namespace gdscache
