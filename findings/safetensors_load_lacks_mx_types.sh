#!/usr/bin/env bash
# safetensors 0.8.0 with torch: `save` writes tensors of the MX types (`float4_e2m1fn_x2` as F4, `float8_e8m0fnu` as
# F8_E8M0) that `load`, its inverse, does not read: KeyError. `load_file` reads these bytes from a file, with the bits
# that were saved, since it finds types in another way. And no part of an F4 tensor can be read. Its shape in the file
# counts numbers, torch's counts pairs in a byte, and each slice of `get_slice` raises, even that of all rows. So pages
# of an MX cache that travel as bytes (a socket, a key-value store) cannot be opened where they arrive, without a detour
# by a file, and a part of a page only by reading all of it. float8_e4m3fn goes both ways.
#
# Seen with safetensors 0.8.0 and torch 2.13.0 on a CPU, tensors of (6, 8): `load` KeyError for F4 and F8_E8M0,
# `load_file` the same bits for all three; slices of F4 RuntimeError, its shape in the file [6, 16], slices of the
# others right. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "safetensors==0.8.0" "packaging==26.4"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import pathlib
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save

print("safetensors", importlib.metadata.version("safetensors"), "torch", torch.__version__)


def tried(call, want):
    """How a tensor's bytes compare with those wanted, or the error's name."""
    try:
        got = call()
    except (KeyError, RuntimeError) as error:
        return type(error).__name__
    return "same" if torch.equal(got.contiguous().view(torch.uint8), want) else "other"


seen = {}
for name in ("float4_e2m1fn_x2", "float8_e8m0fnu", "float8_e4m3fn"):
    numbers = torch.arange(48, dtype=torch.uint8).reshape(6, 8)
    file = save({"page": numbers.view(getattr(torch, name))})
    pathlib.Path("page.safetensors").write_bytes(file)
    with safe_open("page.safetensors", "pt") as opened:
        part = opened.get_slice("page")
        shape = part.get_shape()
        seen[name] = (
            tried(lambda: load(file)["page"], numbers), tried(lambda: load_file("page.safetensors")["page"], numbers),
            tried(lambda: part[:], numbers), tried(lambda: part[2:4], numbers[2:4]),
        )
    print(f"{name:16} shape {shape}; load, load_file, slices of all rows and of two: {', '.join(seen[name])}")
sys.exit(seen != {
    "float4_e2m1fn_x2": ("KeyError", "same", "RuntimeError", "RuntimeError"),
    "float8_e8m0fnu": ("KeyError", "same", "same", "same"),
    "float8_e4m3fn": ("same", "same", "same", "same"),
})
PY
