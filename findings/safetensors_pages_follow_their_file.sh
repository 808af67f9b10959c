#!/usr/bin/env bash
# safetensors 0.8.0 with torch on Linux: tensors on the CPU that `load_file`, `get_tensor` and a slice return are the
# file itself, mapped into memory. If the file is written again in place (a cache that keeps a page a slot and gives the
# slot to the next page), a page that was loaded before has the bytes of the next one, and nothing says so. Where
# something was written into the tensor, 4 KiB around it stay as they were, so it has numbers of both pages. numpy's
# `load_file` of the same package reads, and so do `load(bytes)` and `backend="pread"`, which is new in 0.8.0.
# `save_file` puts a new file in the old one's place, which loaded tensors do not see. Whoever writes slots in place
# clones what was loaded first (`tensor.clone()`), or asks for `pread`.
#
# Seen with safetensors 0.8.0, torch 2.13.0 on a CPU and numpy 2.4.6: a page of ones is loaded, and its file written
# again, in place, with twos. Of `load_file`, `get_tensor` and a slice all numbers are 2 then; with 5 written into the
# first one, 1,003 numbers are 1 and the rest 2. Of numpy's `load_file`, `load`, `backend="pread"`, and behind
# `save_file`: 1. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "safetensors==0.8.0" "packaging==26.4"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import collections
import pathlib
import sys

import numpy as np
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

print("safetensors", safetensors.__version__, "torch", torch.__version__, "numpy", np.__version__)
SLOT = "slot.safetensors"
NUMBERS = 1 << 16


def page(number):
    return {"page": torch.full((NUMBERS,), float(number))}


def in_place(number):
    """A page is written over the one in the slot, as many bytes."""
    new = safetensors.torch.save(page(number))
    with open(SLOT, "r+b") as slot:
        assert pathlib.Path(SLOT).stat().st_size == len(new)
        slot.write(new)


def by_key(take):
    with safetensors.safe_open(SLOT, "pt") as opened:
        return take(opened)


def written():
    tensor = safetensors.torch.load_file(SLOT)["page"]
    tensor[0] = 5
    return tensor


def saved(number):
    safetensors.torch.save_file(page(number), SLOT)


WAYS = {
    "load_file": (lambda: safetensors.torch.load_file(SLOT)["page"], in_place),
    "get_tensor": (lambda: by_key(lambda opened: opened.get_tensor("page")), in_place),
    "slice": (lambda: by_key(lambda opened: opened.get_slice("page")[:]), in_place),
    "load_file, then written to": (written, in_place),
    'load_file, backend="pread"': (lambda: safetensors.torch.load_file(SLOT, backend="pread")["page"], in_place),
    "load": (lambda: safetensors.torch.load(pathlib.Path(SLOT).read_bytes())["page"], in_place),
    "load_file of numpy": (lambda: safetensors.numpy.load_file(SLOT)["page"], in_place),
    "load_file, then save_file": (lambda: safetensors.torch.load_file(SLOT)["page"], saved),
}
seen = {}
for name, (load, write) in WAYS.items():
    saved(1)
    loaded = load()
    write(2)
    seen[name] = dict(sorted(collections.Counter(np.asarray(loaded).tolist()).items()))
    print(f"{name:26} numbers and how many of them: {seen[name]}")
ones, twos = {1.0: NUMBERS}, {2.0: NUMBERS}
mixed = seen.pop("load_file, then written to")
good = mixed.get(5.0) == 1 and 0 < mixed.get(1.0, 0) < NUMBERS // 2 < mixed.get(2.0, 0)
sys.exit(not good or seen != {
    "load_file": twos, "get_tensor": twos, "slice": twos, 'load_file, backend="pread"': ones, "load": ones,
    "load_file of numpy": ones, "load_file, then save_file": ones,
})
PY
