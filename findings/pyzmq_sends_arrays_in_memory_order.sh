#!/usr/bin/env bash
# pyzmq 27.3.0: `send` of a transposed numpy array (Fortran order) sends its memory as it lies, without an error. The
# documentation's recipe for arrays sends type and shape in front, and the receiver makes an array of that shape from
# the bytes in C order. So keys that are sent transposed, or a tensor behind `permute`, arrive in the right shape with
# their numbers in other places. The copying `send`, the one without a copy, and `send_multipart` do the same. An array
# with gaps raises. hashlib, zlib, zstandard and `memoryview.cast` refuse both, so a checksum of the same array raises
# where the socket takes it. `numpy.ascontiguousarray` first.
#
# Seen with pyzmq 27.3.0 and numpy 2.4.6, the recipe between two sockets of one process, a float32 array of (2, 3): it
# arrives equal; transposed it arrives as [[0, 1], [2, 3], [4, 5]] in place of [[0, 3], [1, 4], [2, 5]]; each second
# column of it is refused. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "pyzmq==27.3.0" "numpy==2.4.6"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import hashlib
import importlib.metadata
import sys

import numpy as np
import zmq

print("pyzmq", importlib.metadata.version("pyzmq"), "numpy", np.__version__)
context = zmq.Context()
sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
sender.bind("inproc://pages")
receiver.connect("inproc://pages")
page = np.arange(6, dtype=np.float32).reshape(2, 3)
ARRAYS = {"as it is": page, "transposed": page.T, "each second column": page[:, ::2]}


def sent(array, how):
    """What arrives of an array whose type and shape are told."""
    try:
        how(array)
    except (BufferError, ValueError):
        return "refused"
    return np.frombuffer(receiver.recv(), array.dtype).reshape(array.shape)


def hashed(array):
    try:
        return bool(hashlib.sha256(array).digest() == hashlib.sha256(array.tobytes()).digest())
    except (BufferError, ValueError):
        return "refused"


seen = {}
for name, array in ARRAYS.items():
    for how, send in (
        ("send", sender.send), ("send, no copy", lambda array: sender.send(array, copy=False)),
        ("send_multipart", lambda array: sender.send_multipart([array])),
    ):
        got = sent(array, send)
        told = got if isinstance(got, str) else got.tolist()
        seen[name, how] = told if isinstance(told, str) else bool((got == array).all())
        print(f"{name:18} {how:14} {told}; hashlib: {hashed(array)}")
        if name == "transposed":
            assert told == [[0, 1], [2, 3], [4, 5]] and array.tolist() == [[0, 3], [1, 4], [2, 5]]
wanted = {"as it is": True, "transposed": False, "each second column": "refused"}
context.destroy(0)
sys.exit(
    [hashed(array) for array in ARRAYS.values()] != [True, "refused", "refused"]
    or seen != {(name, how): wanted[name] for name, how in seen}
)
PY
