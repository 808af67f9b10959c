// Rows and numbers of tables in host memory: what numpy does too, giving Python's lock up for each step.

#pragma once

#include <cstdint>

namespace gdscache {

// What is wrong with block numbers that are to be different and within [0, limit).
enum class Fault : int32_t { kNone, kOutside, kTwice };
Fault fault(const int64_t* blocks, int64_t count, int64_t limit);

// Token ids as uint32. False where one does not fit, for any reason.
bool narrow(const int64_t* tokens, int64_t count, uint32_t* out);

// Copy rows out of a table, or into it. False, before the first byte, where it has no such row.
bool take_rows(const uint8_t* table, int64_t table_rows, int64_t row_bytes, const int64_t* rows, int64_t count,
               uint8_t* out);
bool put_rows(uint8_t* table, int64_t table_rows, int64_t row_bytes, const int64_t* rows, int64_t count,
              const uint8_t* in);

// Rows of checksums as a catalogue stores them, `sums` each, without what follows from the pages' keys (docs/format.md),
// 32 bytes each. False, before the first byte, where the table has no such row.
bool take_unbound(const uint64_t* table, int64_t table_rows, int64_t sums, const int64_t* rows, int64_t count,
                  const uint8_t* keys, uint64_t* out);

}  // namespace gdscache
