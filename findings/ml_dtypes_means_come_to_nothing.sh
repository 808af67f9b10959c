#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: sums of bfloat16 and float8 arrays are added up in their own type, number by number,
# and stop where one more is rounded away: at 256 for ones of bfloat16, 16 of float8_e4m3fn, 8 of float8_e5m2. `mean`
# divides that by all, so it comes to nothing as the array grows. numpy's own float16 is averaged in float32, and adds
# in pairs. Nothing is warned of. Two pages are compared by their mean difference, a scale is made of a mean: pages of
# which each number is off by a half differ by 0.008 in the mean, and pass. `std`, `var` and `average` do the same, a
# mean over a short axis is right. `dtype=numpy.float32` in the call, or `astype` in front of it, gives 0.5.
#
# Seen with ml_dtypes 0.6.0 and numpy 2.4.6, 65,536 ones: means of 0.0039 (bfloat16), 0 (float8_e4m3fn) and 0.00012
# (float8_e5m2), 1 in float16, and 1 for all with `dtype=numpy.float32`. Two bfloat16 pages of 32,768 numbers that
# differ by 0.5 each: a mean difference of 0.0078, and 0.5 in float32. Fails (exit 1) where that is no longer so.
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
TYPES = {
    "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2,
    "float16": np.float16,
}
warnings.simplefilter("error")
ONES = 1 << 16
seen = {}
for name, dtype in TYPES.items():
    ones = np.ones(ONES, dtype)
    total = "not asked" if dtype is np.float16 else float(ones.sum())  # 65,536 is beyond float16, and warned of
    seen[name] = total, float(ones.mean()), float(ones.mean(dtype=np.float32))
    print(f"{ONES} ones of {name:14} sum {total}, mean {seen[name][1]:.5f}, mean in float32 {seen[name][2]}")
page = np.random.default_rng(0).standard_normal((2, 16, 8, 128), dtype=np.float32).astype(ml_dtypes.bfloat16)
other = (page.astype(np.float32) + 0.5).astype(ml_dtypes.bfloat16)
off = np.abs(page - other)
means = float(off.mean()), float(off.mean(dtype=np.float32)), float(np.average(off))
print(f"two pages of {page.size} numbers, off by a half each: mean {means[0]}, in float32 {means[1]:.4f}")
print("over the last axis alone, and then in float32:", float(off.mean(-1).mean(dtype=np.float32)))
sys.exit(
    seen != {
        "bfloat16": (256.0, 2**-8, 1.0), "float8_e4m3fn": (16.0, 0.0, 1.0), "float8_e5m2": (8.0, 2**-13, 1.0),
        "float16": ("not asked", 1.0, 1.0),
    }
    or not (means[0] == means[2] == 2**-7 and 0.49 < means[1] < 0.51)
)
PY
