#!/usr/bin/env bash
# torch 2.13.0, `torch.distributed.checkpoint`: `load` converts what was saved to the type of the tensor that it is
# given, number by number, and says nothing. A shape that differs raises. A float8 cache is uint8 in vLLM and
# float8_e4m3fn in other engines, with the same bytes: a page that one saved and the other loads has other ones. As
# uint8 each number is cut to a whole one: keys between -1 and 1 are 0. As float8 each code is taken for a number, and
# rounded: 1, the code 56, is 56. Between bfloat16 and float16 what is too large is infinite, and what is too small 0.
# The types that were saved are in the checkpoint (`FileSystemReader(folder).read_metadata()`), so a reader can compare.
# Bytes alone (`view(torch.uint8)` on both sides) come back as they are. `torch.load` and safetensors return a tensor of
# the type that was saved. A change that raises is proposed (pytorch/pytorch pull request 187257, open).
#
# Seen with torch 2.13.0 on a CPU, the page [1, -0.5, 0.375, 3]: saved as float8_e4m3fn and loaded as uint8 it is the
# codes [1, 0, 0, 3], the numbers [0.002, 0, 0, 0.006]; saved as uint8 and loaded as float8_e4m3fn it is [56, 176, 44,
# 64]. 1e5 saved as bfloat16 is infinite as float16. No warning. Both sides as uint8: equal. Fails (exit 1) where that
# is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys
import warnings

import torch
import torch.distributed.checkpoint as checkpoint

print("torch", torch.__version__)
PAGE = torch.tensor([1, -0.5, 0.375, 3])
float8 = PAGE.to(torch.float8_e4m3fn)


def loaded(saved, dtype, shape=(4,)):
    """What comes of a page that was saved as one type and is loaded into a tensor of another."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        checkpoint.save({"page": saved}, checkpoint_id="pages", no_dist=True)
        into = {"page": torch.zeros(shape, dtype=dtype)}
        checkpoint.load(into, checkpoint_id="pages", no_dist=True)
    told.extend(str(warning.message) for warning in said if "type" in str(warning.message))
    return into["page"]


told = []
in_bytes = loaded(float8, torch.uint8)
in_float8 = loaded(float8.view(torch.uint8), torch.float8_e4m3fn)
seen = {
    "float8_e4m3fn as uint8, codes": in_bytes.tolist(),
    "float8_e4m3fn as uint8, numbers": in_bytes.view(torch.float8_e4m3fn).float().tolist(),
    "uint8 as float8_e4m3fn": in_float8.float().tolist(),
    "1e5 and 1e-9, bfloat16 as float16": loaded(torch.tensor([1e5, 1e-9]).bfloat16(), torch.float16, (2,)).tolist(),
    "both as uint8": loaded(float8.view(torch.uint8), torch.uint8).view(torch.float8_e4m3fn).float().tolist(),
}
for name, got in seen.items():
    print(f"{name:34} {got}")
kept = checkpoint.FileSystemReader("pages").read_metadata().state_dict_metadata["page"].properties.dtype
try:
    loaded(float8, torch.float8_e4m3fn, (2, 2))
except checkpoint.CheckpointException:
    print("another shape raises; the type that was saved:", kept, "; warnings:", told)
else:
    sys.exit(1)
sys.exit(bool(told) or kept != torch.uint8 or seen != {
    "float8_e4m3fn as uint8, codes": [1, 0, 0, 3],
    "float8_e4m3fn as uint8, numbers": [2**-9, 0.0, 0.0, 3 * 2**-9],
    "uint8 as float8_e4m3fn": [56.0, 176.0, 44.0, 64.0],
    "1e5 and 1e-9, bfloat16 as float16": [float("inf"), 0.0],
    "both as uint8": PAGE.tolist(),
})
PY
