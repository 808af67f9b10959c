#!/usr/bin/env bash
# torch 2.13.0 on x86 CPUs: the bits of a NaN in bfloat16 depend on where it is. Where the vectorised code makes it, it
# is 0xffff, with its sign and payload gone; where the scalar code does (the rest behind whole vectors, a tensor with
# gaps between its elements, a single element), it is 0x7fc0. A sum or an attention over the same numbers has NaNs of
# both kinds in one tensor. On a CPU without AVX2 all are 0x7fc0. float16 and the float8 types do not depend on the
# place. So a page with a NaN (padding that was never written, an overflow) has other bytes and another digest where it
# is computed again in other pieces or on another host, though all its numbers are the same. What is named by its bytes
# is kept twice, and a comparison of bytes takes the second for a broken one.
#
# Seen with torch 2.13.0, code for AVX2 and AVX-512 alike: 80 NaNs converted from float32 to bfloat16 are 0xffff, each
# second one of 160 is 0x7fc0; 70 NaNs of bfloat16 and 1 added: both patterns; with `ATEN_CPU_CAPABILITY=default` only
# 0x7fc0. Of float16 one pattern in all cases. Fails (exit 1) where that is no longer so; on a CPU without AVX2 nothing
# is shown (exit 0).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6"
cd "$folder"
cat > patterns.py <<'PY'
import math
import sys

import torch

capability = torch.backends.cpu.get_cpu_capability()
print("torch", torch.__version__, capability)
if capability == "DEFAULT" and sys.argv[1] != "default":
    sys.exit()
seen = {}
for dtype in (torch.bfloat16, torch.float16):
    nans = torch.full((160,), math.nan)
    cases = {"dense": nans[:80].to(dtype), "each second": nans[::2].to(dtype), "sum": nans[:70].to(dtype) + 1}
    for case, tensor in cases.items():
        assert tensor.isnan().all()
        seen[dtype, case] = sorted({f"{bits & 0xFFFF:04x}" for bits in tensor.view(torch.int16).tolist()})
        print(f"{str(dtype)[6:]:9} {case:12} {', '.join(seen[dtype, case])}")
want = [["ffff"], ["7fc0"], ["7fc0", "ffff"]] if sys.argv[1] == "vectors" else [["7fc0"]] * 3
got = [seen[torch.bfloat16, case] for case in cases]
sys.exit(got != want or any(seen[torch.float16, case] != ["7e00"] for case in cases))
PY
"$folder/env/bin/python" patterns.py vectors
ATEN_CPU_CAPABILITY=default "$folder/env/bin/python" patterns.py default
