#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: an array of bfloat16 or float8 with a NaN in it is not sorted by `numpy.sort`. For
# its own floats numpy puts NaNs last, as documented. ml_dtypes' comparison says that a NaN is neither smaller nor
# larger than any number, so the numbers before and behind it are sorted apart. `argsort`, `partition` and `unique` go
# wrong with it, without a warning. The stable way is the worst; the default one is right more often, by the NaN's
# place. Which tokens or pages have the least scores is asked so: one NaN among them (0 of 0 attention, a
# page that was never written), and others are evicted. `astype(numpy.float32)` first sorts right.
#
# Seen with ml_dtypes 0.6.0 and numpy 2.4.6, the scores 3, 1, NaN, 2, 0: sorted as [1, 3, NaN, 0, 2] in bfloat16,
# float8_e4m3fn and float8_e5m2 in all ways, [0, 1, 2, 3, NaN] in float16 and float32. Of 1,000 random scores with one
# NaN, among the hundred least by a stable `argsort` 21 are right in bfloat16, and all 100 in float16 and float32. Fails
# (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "ml_dtypes==0.6.0" "numpy==2.4.6"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys
import warnings

import ml_dtypes
import numpy as np

print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)
warnings.simplefilter("error")
TYPES = {
    "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2,
    "float16": np.float16, "float32": np.float32,
}
FEW = np.array([3, 1, np.nan, 2, 0], np.float32)
scores = np.random.default_rng(0).random(1000, np.float32)
scores[np.random.default_rng(100).choice(1000, 1)] = np.nan
LEAST = 100
seen, right = {}, {}
for name, dtype in TYPES.items():
    few, many = FEW.astype(dtype), scores.astype(dtype)
    ways = [np.sort(few, kind=kind).astype(np.float32).tolist() for kind in ("quicksort", "stable", "heapsort")]
    least = many[np.argsort(many, kind="stable")[:LEAST]].astype(np.float32)
    bound = np.sort(many.astype(np.float32))[LEAST - 1]
    seen[name] = [str(way) for way in ways]
    right[name] = int((least <= bound).sum())
    print(f"{name:13} sorted {ways[0]}, stable {ways[1]}, heap {ways[2]}; of the {LEAST} least of {len(scores)} scores "
          f"{right[name]} are right")
own = {"float16", "float32"}
SORTED, BROKEN = "[0.0, 1.0, 2.0, 3.0, nan]", "[1.0, 3.0, nan, 0.0, 2.0]"
good = all(seen[name] == [SORTED] * 3 and right[name] == LEAST for name in own)
good &= all(seen[name] == [BROKEN] * 3 and right[name] < 60 for name in TYPES.keys() - own)
sys.exit(not good)
PY
