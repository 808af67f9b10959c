#!/usr/bin/env bash
# SGLang 0.5.23: the file backend of HiCache gives a page of another type of KV cache as one of its own. A file is named
# by a digest of its tokens, the model's path and the ranks. `HiCacheStorageConfig`, from which the name is made, has no
# type, and the file has no header. A file is long enough where both types have one size, as bfloat16 and float16 or the
# two float8 types, and where the stored one is larger. So a server that is started again with another `--dtype` or
# `--kv-cache-dtype` on the same folder finds all pages, and computes on numbers that were never stored. Nothing is
# raised or warned of; a TODO in the source names it. `/` in a model's path becomes `-`: `org/a-b` and `org-a/b` are
# one model there.
#
# Seen with sglang 0.5.23 and torch 2.13.0 on a CPU: the page [1, -0.5, 3, 0.25] written as bfloat16 is there for
# float16, as [1.875, -1.75, 2.125, 1.625]; one of float8_e4m3fn is there for float8_e5m2, as [0.5, -0.125, 4, 0.03125];
# one of float32 is there for bfloat16, as [0, 1, 0, -0.5]. Fails (exit 1) where that is no longer so. The `__init__`
# modules of the packages are left out here, since they need a GPU's kernels.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "sglang==0.5.23" "orjson==3.13.0" "psutil==7.2.2" \
    "pybase64==1.5.1" "requests==2.34.2" "urllib3==2.8.0" "idna==3.20" "certifi" "charset-normalizer==3.5.3" \
    "triton==3.9.0" "packaging==26.4" \
    "pillow==13.0.0" "starlette==1.10.0" "anyio==4.16.0" "msgspec==0.22.0" "pydantic_core==2.50.5"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import importlib.util
import logging
import pathlib
import sys
import types

import torch

root = pathlib.Path(importlib.util.find_spec("sglang").origin).parent
for name in ("", ".srt", ".srt.utils", ".srt.mem_cache", ".srt.mem_cache.storage", ".srt.mem_cache.storage.file"):
    module = types.ModuleType(f"sglang{name}")
    module.__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules[f"sglang{name}"] = module
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

print("sglang", importlib.metadata.version("sglang"), "torch", torch.__version__)
said = []
logging.basicConfig(level=logging.WARNING)
logging.getLogger().addFilter(lambda record: said.append(record) or True)
VALUES = torch.tensor([1.0, -0.5, 3.0, 0.25])


def backend(model="org/a-b"):
    return HiCacheFile(HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name=model,
    ), "pages")


seen = {}
for written, read in (("bfloat16", "float16"), ("float8_e4m3fn", "float8_e5m2"), ("float32", "bfloat16")):
    key = f"{len(seen):064x}"
    assert backend().set(key, VALUES.to(getattr(torch, written)))
    again = backend()
    got = again.get(key, torch.zeros(4, dtype=getattr(torch, read)))
    seen[written, read] = again.exists(key), None if got is None else got.float().tolist()
    print(f"written as {written}, read as {read}: there {seen[written, read][0]}, {seen[written, read][1]}")
alias = backend("org-a/b").exists(key)
print("there for the model org-a/b:", alias, [path.name for path in pathlib.Path("pages").iterdir()][0])
sys.exit(not alias or bool(said) or seen != {
    ("bfloat16", "float16"): (True, [1.875, -1.75, 2.125, 1.625]),
    ("float8_e4m3fn", "float8_e5m2"): (True, [0.5, -0.125, 4.0, 0.03125]),
    ("float32", "bfloat16"): (True, [0.0, 1.0, 0.0, -0.5]),
})
PY
