#!/usr/bin/env bash
# Mooncake 0.3.13.post1 (the store of `mooncake-transfer-engine-non-cuda`): `put` of an array keeps as many bytes as it
# has elements. Its argument is any buffer, and a float32 array of 6 numbers is one of 24 bytes. 6 bytes are stored, the
# answer is 0 (success), and `get` and `get_size` agree on 6. So three quarters of each page are lost where it is put,
# and half of one that is 16 bits wide. An array that is not in C order, or has gaps, is read as if it were without:
# what is stored are the bytes from its start on. `put_batch` and `upsert` do the same. `put_parts` refuses all of
# these, and `put_tensor` of a torch tensor keeps type, shape and order. `memoryview(array).cast("B")` is stored whole,
# and raises where there is an order to lose.
#
# Seen with mooncake-transfer-engine-non-cuda 0.3.13.post1 and numpy 2.4.6, one store beside its master on loopback, an
# array of 6 numbers, all calls answer 0: 6 of 24 bytes of float32, 6 of 12 of float16, 6 of 6 of uint8, the same with
# `put_batch` and `upsert`; of uint8 transposed and of each second one, the first six bytes of the memory. Behind
# `cast("B")`: 24 of 24. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "mooncake-transfer-engine-non-cuda==0.3.13.post1" \
    "numpy==2.4.6"
cd "$folder"
GLOG_minloglevel=3 "$folder/env/bin/python" - <<'PY'
import importlib.metadata
import pathlib
import socket
import subprocess
import sys
import time

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore

print("mooncake", importlib.metadata.version("mooncake-transfer-engine-non-cuda"), "numpy", np.__version__)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


port = free_port()
master = subprocess.Popen(
    [str(pathlib.Path(mooncake.__file__).parent / "mooncake_master"), "-rpc_address=127.0.0.1", f"-rpc_port={port}",
     "-metrics_host=127.0.0.1", f"-metrics_port={free_port()}"],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
try:
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", f"127.0.0.1:{port}") == 0
    numbers = np.arange(1, 7, dtype=np.float32)
    rows = numbers.astype(np.uint8).reshape(2, 3)
    cases = {
        "float32": numbers, "float16": numbers.astype(np.float16), "uint8": rows.ravel(), "uint8 transposed": rows.T,
        "uint8 each second": np.arange(1, 13, dtype=np.uint8)[::2], 'float32, cast("B")': memoryview(numbers).cast("B"),
    }
    calls = {
        "put": store.put, "put_batch": lambda key, value: store.put_batch([key], [value]), "upsert": store.upsert,
    }
    seen = {}
    for call, put in calls.items():
        for name, value in cases.items():
            key = f"{call} {name}"
            answer = put(key, value)
            got, want = store.get(key), value.tobytes()
            seen[call, name] = answer, len(got), len(want), got == want
            print(f"{call:9} {name:18} answers {answer}; {len(got)} of {len(want)} bytes, equal: {got == want}")
            assert store.get_size(key) == len(got)
    assert store.get("put float32") == numbers.tobytes()[:6]
    assert store.get("put uint8 transposed") == rows.tobytes()
    assert store.get("put uint8 each second") == bytes(range(1, 7))
    store.close()
finally:
    master.kill()
    master.wait()
wanted = {
    "float32": (0, 6, 24, False), "float16": (0, 6, 12, False), "uint8": (0, 6, 6, True),
    "uint8 transposed": (0, 6, 6, False), "uint8 each second": (0, 6, 6, False),
    'float32, cast("B")': (0, 24, 24, True),
}
sys.exit(seen != {(call, name): wanted[name] for call in calls for name in cases})
PY
