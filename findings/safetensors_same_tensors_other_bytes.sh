#!/usr/bin/env bash
# safetensors 0.8.0: saving the same tensors with the same metadata gives other bytes each time. The header's
# `__metadata__` is written in the order of a hash table with a seed of its own each call, and so are its entries, from
# two on. Tensors, names and metadata read back are equal. So a checksum of a file (or of its header) does not say
# whether what is in it is the same: a store that keeps pages under a digest of their file keeps each of them again, and
# a comparison of two runs differs. Without metadata, or with one entry, the bytes are the same.
#
# Seen with safetensors 0.8.0 and numpy 2.4.6, 20 saves each: one digest with 0 and with 1 entry of metadata, several
# (20 here) with 8; all files read back the same. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "safetensors==0.8.0" "numpy==2.4.6"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import hashlib
import importlib.metadata
import json
import sys

import numpy as np
from safetensors.numpy import load, save

print("safetensors", importlib.metadata.version("safetensors"), "numpy", np.__version__)
tensors = {f"layers.{layer}.{name}": np.full((2, 4), layer, np.float32) for layer in range(4) for name in "kv"}
seen = {}
for entries in (0, 1, 8):
    metadata = {f"key{number}": str(number) for number in range(entries)}
    files = [save(tensors, metadata) for _ in range(20)]
    headers = [json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")]) for file in files]
    assert all(header.get("__metadata__", {}) == metadata for header in headers)
    assert all((held == tensors[name]).all() for file in files for name, held in load(file).items())
    seen[entries] = len({hashlib.sha256(file).hexdigest() for file in files})
    print(f"{entries} entries of metadata: {seen[entries]} digests of {len(files)} files, order of the last one's "
          f"entries {list(headers[-1].get('__metadata__', {}))}")
sys.exit(not (seen[0] == seen[1] == 1 and seen[8] > 1))
PY
