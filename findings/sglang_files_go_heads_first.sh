#!/usr/bin/env bash
# SGLang 0.5.23: HiCache's file backend, with a cap (`max_size`), evicts a prompt from its first page on. Pages are
# written and read in the order of the prompt, so its head is always the least recently used. A prefix is found up to
# its first missing page: one page too many makes all others of the oldest prompt unreachable, and they stay on the
# disk. When the prompt comes again its head is written again, which takes the head of the next one. Two prompts that
# together are a little larger than the cap are never found, though one of them would fit. The caches above the disk,
# SGLang's tree among them, give up the last pages first. Only a cap that holds all prompts in use helps.
#
# Seen with sglang 0.5.23 and torch 2.13.0 on a CPU, a cap of 10 pages. A prompt of 10 pages and then one page of
# another: 0 pages of the first are found, 8 are on the disk; written from the last page on, as no engine does, 8 are
# found. Two prompts of 6 pages by turns, 20 requests: 0 pages found. Fails (exit 1) where that is no longer so. The
# `__init__` modules of the packages are left out here, since they need a GPU's kernels.
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
PAGE, CAP = torch.zeros(1024, dtype=torch.uint8), 10


def backend(folder):
    return HiCacheFile(HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="model",
        extra_config={"max_size": CAP * len(PAGE)},
    ), folder)


def prompt(name, pages):
    """The keys of a prompt's pages, first to last."""
    return [f"{name}{page:063x}" for page in range(pages)]


def request(store, keys):
    """Reads the pages of the prompt that are found, and writes the others; how many were found."""
    found = store.batch_exists(keys)
    for key in keys[:found]:
        assert store.get(key, torch.empty_like(PAGE)) is not None
    assert store.batch_set(keys[found:], [PAGE] * (len(keys) - found))
    return found


seen = {}
for order in ("first to last", "last to first"):
    store, keys = backend(order), prompt("a", CAP)
    assert store.batch_set(keys if order == "first to last" else keys[::-1], [PAGE] * CAP)
    before = store.batch_exists(keys)
    request(store, prompt("b", 1))
    there = sum(store.exists(key) for key in keys)
    seen[order] = before, store.batch_exists(keys), there
    print(f"written {order}: {before} pages found; behind one more page {seen[order][1]}, with {there} on the disk")
store = backend("turns")
found = [request(store, prompt("ab"[turn % 2], 6)) for turn in range(20)]
print("pages found by two prompts of 6 by turns:", found)
sys.exit(seen != {"first to last": (10, 0, 8), "last to first": (10, 8, 8)} or any(found))
PY
