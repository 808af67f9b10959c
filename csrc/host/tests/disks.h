// Each disk of the system's.

#pragma once

#include <cstdio>

#include "base/error.h"
#include "disk/disk.h"
#include "tests/check.h"

namespace gdscache::test {

// Runs a test by the disk with a ring, where the system has rings, and by the one with threads.
template <typename Open>
void each_disk(Open ring, Open threads, void (*test)(Open)) {
    for (const Open open : {ring, threads}) {
        const bool by_ring = open == ring;
        CAPTURE(by_ring);
        try {
            if (by_ring) open_ring_disk(1, 1);
        } catch (const Error& error) {
            std::printf(" (no ring: %s)", error.what());
            continue;
        }
        test(open);
    }
}

}  // namespace gdscache::test
