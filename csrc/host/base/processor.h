// The vector instructions of an x86-64 processor. Asked once: in a virtual machine each cpuid costs some ten microseconds.

#pragma once

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own headers use an undefined vector.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <cpuid.h>
#include <immintrin.h>

namespace gdscache {

// Whether the processor has all instruction sets of leaf 7 (`bits` of EBX), and the system saves their registers
// (`state`, bits of XCR0). Not by __builtin_cpu_supports, which says no in a library linked by zig.
inline bool has(unsigned bits, unsigned state) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & state) == state && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bits) == bits;
}

inline bool has_avx2() {
    static const bool here = has(bit_AVX2, 0x06);
    return here;
}

inline bool has_avx512() {  // F and BW
    static const bool here = has(bit_AVX512F | bit_AVX512BW, 0xE6);
    return here;
}

}  // namespace gdscache

#endif
