// The plain C interface of tables.

#include <cerrno>
#include <new>

#include "api.h"
#include "tables.h"

using namespace gdscache;

namespace {

bool sound(const void* table, int64_t table_rows, int64_t row_bytes, const int64_t* rows, int64_t count,
           const void* others) {
    if (table_rows < 0 || row_bytes < 0 || count < 0) return false;
    if (row_bytes && table_rows > INT64_MAX / row_bytes) return false;
    return !count || (table && rows && others);
}

}  // namespace

int32_t gdscache_blocks_fault(const int64_t* blocks, int64_t count, int64_t limit) {
    if (count < 0 || (count && !blocks)) return -EINVAL;
    try {
        return static_cast<int32_t>(fault(blocks, count, limit));
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

int32_t gdscache_narrow_tokens(const int64_t* tokens, int64_t count, uint32_t* out) {
    if (count < 0 || (count && (!tokens || !out))) return -EINVAL;
    return narrow(tokens, count, out);
}

int32_t gdscache_take_rows(const void* table, int64_t table_rows, int64_t row_bytes, const int64_t* rows,
                           int64_t count, void* out) {
    if (!sound(table, table_rows, row_bytes, rows, count, out)) return -EINVAL;
    const bool known = take_rows(static_cast<const uint8_t*>(table), table_rows, row_bytes, rows, count,
                                 static_cast<uint8_t*>(out));
    return known ? 0 : -EINVAL;
}

int32_t gdscache_put_rows(void* table, int64_t table_rows, int64_t row_bytes, const int64_t* rows, int64_t count,
                          const void* in) {
    if (!sound(table, table_rows, row_bytes, rows, count, in)) return -EINVAL;
    const bool known = put_rows(static_cast<uint8_t*>(table), table_rows, row_bytes, rows, count,
                                static_cast<const uint8_t*>(in));
    return known ? 0 : -EINVAL;
}

int32_t gdscache_take_unbound(const uint64_t* table, int64_t table_rows, int64_t sums, const int64_t* rows,
                              int64_t count, const void* keys, uint64_t* out) {
    if (sums < 0 || sums > INT64_MAX / 8 || !sound(table, table_rows, 8 * sums, rows, count, out)) return -EINVAL;
    if (count && !keys) return -EINVAL;
    return take_unbound(table, table_rows, sums, rows, count, static_cast<const uint8_t*>(keys), out) ? 0 : -EINVAL;
}
