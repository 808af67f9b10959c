#!/usr/bin/env bash
# torch 2.13.0: `torch.from_dlpack` takes a read-only numpy array as a tensor that can be written to, without a warning.
# numpy 2.4.6 says in DLPack's own flag that the array is read-only; torch asks for that version of the protocol and
# drops the flag. A write through the tensor changes the array, and torch hands the same memory on to numpy as writable.
# `torch.from_numpy`, `as_tensor` and `asarray` share the memory as well, but warn; `torch.tensor` copies. So a page
# that a cache lends read-only can be changed for all its readers by one in-place operation, and no one is told.
#
# Seen with torch 2.13.0 on a CPU and numpy 2.4.6, an array of four zeros with `setflags(write=False)`. Behind
# `tensor[0] = 9` it is [9, 0, 0, 0] with `from_dlpack` (no warning), `from_numpy`, `as_tensor` and `asarray` (one
# each), and unchanged with `tensor`. `numpy.from_dlpack` of the array is read-only, and of the tensor writable.
# Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys
import warnings

import numpy as np
import torch

print("torch", torch.__version__, "numpy", np.__version__)
torch.set_warn_always(True)  # otherwise once a process
seen = {}
for take in (torch.from_dlpack, torch.from_numpy, torch.as_tensor, torch.asarray, torch.tensor):
    array = np.zeros(4, np.float32)
    array.setflags(write=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensor = take(array)
    tensor[0] = 9
    seen[take.__name__] = len(caught), array.tolist()
    print(f"{take.__name__:11} {len(caught)} warnings; the read-only array behind a write: {array.tolist()}")
array = np.zeros(4, np.float32)
array.setflags(write=False)
writable = np.from_dlpack(array).flags.writeable, np.from_dlpack(torch.from_dlpack(array)).flags.writeable
print("writable behind numpy's from_dlpack: of the array", writable[0], ", of the tensor", writable[1])
wrote = [9.0, 0.0, 0.0, 0.0]
sys.exit((seen, writable) != ({
    "from_dlpack": (0, wrote), "from_numpy": (1, wrote), "as_tensor": (1, wrote), "asarray": (1, wrote),
    "tensor": (0, [0.0] * 4),
}, (False, True)))
PY
