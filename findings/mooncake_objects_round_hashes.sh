#!/usr/bin/env bash
# Mooncake 0.3.13.post1: structured objects (`MooncakeBundleTransfer`) round 64-bit hashes. A field of a dict may be a
# list with a list of numbers a row, such as the block hashes of each request. All rows are stored as one array, of the
# type that numpy finds for all of them. vLLM's hashes in events are unsigned: a row in which one is above 2^63 is
# uint64, one in which none is is int64, and of the two together numpy makes float64. Every hash of every row comes back
# as a float, with its lower 11 bits gone: another hash, and the same one for neighbours. Nothing is raised. Whether it
# happens depends on the other rows: alone, each of them comes back as it was. Rows that are arrays of one type
# (`numpy.array(hashes, numpy.uint64)`) keep it, and a field of numbers without rows raises for such a hash.
#
# Seen with mooncake-transfer-engine-non-cuda 0.3.13.post1 and numpy 2.4.6, in a store that is a dict in memory: rows
# [2^63 + 1, 2^63 + 2] and [7] come back as [9.223372036854776e18, 9.223372036854776e18] and [7.0]; each row alone, and
# both as arrays of uint64, as they were. Of 64 rows of one random hash of 64 bits, all 64 come back as other numbers.
# Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "mooncake-transfer-engine-non-cuda==0.3.13.post1" \
    "numpy==2.4.6" "msgpack==1.2.4"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import random
import sys

import numpy as np
from mooncake.structured_object_store import MooncakeBundleTransfer

print("mooncake", importlib.metadata.version("mooncake-transfer-engine-non-cuda"), "numpy", np.__version__)


class Store:
    """What a bundle asks of a store: `put` answers 0, `get` the bytes."""

    def __init__(self):
        self.values = {}

    def put(self, key, value, config=None):
        self.values[key] = bytes(value)
        return 0

    def get(self, key):
        return self.values.get(key, b"")

    def remove(self, key, force=False):
        self.values.pop(key, None)
        return 0

    def is_exist(self, key):
        return int(key in self.values)

    def get_size(self, key):
        return len(self.values[key])


transfer = MooncakeBundleTransfer(Store(), key_prefix="requests")


def back(rows):
    """The rows as they come back, as lists."""
    fields = {"hashes": rows, "request": np.arange(len(rows))}
    got = transfer.get(transfer.put(fields, type="dict"), type="dict")["hashes"]
    return [np.asarray(row).tolist() if isinstance(row, np.ndarray) else row for row in got]


HIGH, LOW = [2**63 + 1, 2**63 + 2], [7]
seen = {
    "both": back([HIGH, LOW]), "high alone": back([HIGH]), "low alone": back([LOW]),
    "arrays": back([np.array(HIGH, np.uint64), np.array(LOW, np.uint64)]),
}
for name, rows in seen.items():
    print(f"{name:10} {rows}")
hashes = random.Random(0)
rows = [[hashes.getrandbits(64)] for _ in range(64)]
other = sum(type(got[0]) is not int or got != want for got, want in zip(back(rows), rows, strict=True))
wrong = sum(int(got[0]) != want[0] for got, want in zip(back(rows), rows, strict=True))
print(f"of {len(rows)} rows of one random hash {other} come back as floats, {wrong} as another number")
sys.exit(
    seen != {"both": [[2.0**63, 2.0**63], [7.0]], "high alone": [HIGH], "low alone": [LOW], "arrays": [HIGH, LOW]}
    or not all(type(number) is float for row in seen["both"] for number in row) or (other, wrong) != (64, 64)
)
PY
