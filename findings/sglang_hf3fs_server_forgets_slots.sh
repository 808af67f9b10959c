#!/usr/bin/env bash
# SGLang 0.5.23: the metadata server of HiCache's 3FS backend (`mini_3fs_metadata_server`), which says which slot of the
# shared file has which page, loses slots, and comes back with an old list. A page is reserved, written and confirmed.
# Two servers that store the same page at one time (a router that sends both the same system prompt) get a slot each,
# and the second confirmation takes the place of the first: the first slot is neither free nor a page's from then on.
# When none is free, each such page evicts two others. The cache shrinks to nothing, until nothing can be reserved at
# all; only `clear` gives slots back, and no figure shows it. With `--persistence-path` the list is saved each minute,
# and at the end by `atexit`, which a process that a signal ends does not come to: a container's SIGTERM leaves the list
# of up to a minute ago. The server that starts next goes by that. Slots that were given to other pages since have their
# old names again, so a prompt gets the keys and values of another one, and the answer is success. Clear the cache
# behind each restart of the metadata server.
#
# Seen with sglang 0.5.23, uvicorn 0.54.0 and torch 2.13.0 on a CPU, the backend's own stand-in for a client of 3FS
# (`use_mock_hf3fs_client`, a plain file), a file of 16 pages. Of 14 pages that two backends store, each at one time, 2
# are found, and one backend alone keeps 2 of the 16 that it stores next. Behind a restart 4 of 16 pages have another
# one's numbers; none where the list was saved in between. Fails (exit 1) where that is no longer so. Host memory is a
# tensor here, and the `__init__` modules of the package, which need a GPU's kernels, are left out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6" "fastapi==0.136.3" \
    "uvicorn==0.54.0" "orjson==3.13.0" "requests==2.34.2"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "sglang==0.5.23"
cd "$folder"
cat >parts.py <<'PY'
"""The parts of SGLang that this is about, without those that need a GPU's kernels."""
import importlib.util
import pathlib
import sys
import types
import unittest.mock

root = pathlib.Path(importlib.util.find_spec("sglang").origin).parent
for name in ("", ".srt", ".srt.mem_cache", ".srt.mem_cache.storage", ".srt.mem_cache.storage.hf3fs"):
    module = types.ModuleType(f"sglang{name}")
    module.__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules[f"sglang{name}"] = module
for name in ("mem_cache.pool_host", "observability", "observability.metrics_collector"):
    sys.modules[f"sglang.srt.{name}"] = unittest.mock.MagicMock(__path__=[])
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import run_metadata_server
from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS
PY
"$folder/env/bin/python" - 2>"$folder/log" <<'PY' || { tail "$folder/log"; exit 1; }
import contextlib
import importlib.metadata
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import parts
import torch

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("sglang", "uvicorn", "torch")))
TOKENS, PAGE, PAGES = 4, 256, 16  # tokens and bytes of a page, and pages of the file
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]


class Pool:
    """Host memory of one page."""

    layout, page_size = "layer_first", TOKENS

    def __init__(self):
        self.page = torch.zeros(PAGE // 2, dtype=torch.bfloat16)

    def get_data_page(self, index, flat=True):
        return self.page

    def get_dummy_flat_data_page(self):
        return torch.zeros_like(self.page)

    def set_from_flat_data_page(self, index, data):
        self.page.copy_(data)


@contextlib.contextmanager
def server(seconds=60, path="list.json"):
    """The metadata server in a process of its own, which saves its list in such a time, and which SIGTERM ends."""
    call = f"import parts; parts.run_metadata_server('127.0.0.1', {port}, {path!r}, {seconds})"
    process = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.1)
        yield
        if seconds < 60:
            time.sleep(2 * seconds)
    finally:
        process.terminate()
        process.wait(30)


def backend():
    """The backend of one server's only rank, from a configuration file as SGLang makes it."""
    with open("config.json", "w") as file:
        json.dump({"file_path_prefix": os.path.abspath("pages"), "file_size": PAGES * PAGE, "numjobs": 1, "entries": 8,
                   "metadata_server_url": f"http://127.0.0.1:{port}"}, file)
    os.environ["SGLANG_HICACHE_HF3FS_CONFIG_PATH"] = "config.json"
    made = parts.HiCacheHF3FS.from_env_config(PAGE, torch.bfloat16, parts.HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="org/model",
        extra_config={"use_mock_hf3fs_client": True},
    ))
    made.register_mem_pool_host(Pool())
    return made


def store(one, number):
    one.mem_pool_host.page.fill_(number)
    assert one.batch_set_v1([f"page {number}"], torch.arange(TOKENS)) == [True]


def read(one, number):
    """The number of the page that is read under this one's name, or None."""
    key = [f"page {number}"]
    if not one.batch_exists(key) or not one.batch_get_v1(key, torch.arange(TOKENS))[0]:
        return None
    (value,) = one.mem_pool_host.page.unique().tolist()
    return int(value)


def found(one, numbers):
    return sum(read(one, number) == number for number in numbers)


def at_once(one, two, number):
    """Both have written the page by the time that one of them confirms it."""
    written = threading.Barrier(2)

    def confirmed(client, call=None):
        call = call or client.confirm_write
        return lambda *args, **names: (written.wait(30), call(*args, **names))[1]

    calls = [each.metadata_client.confirm_write for each in (one, two)]
    for each in (one, two):
        each.metadata_client.confirm_write = confirmed(each.metadata_client)
    threads = [threading.Thread(target=store, args=(each, number)) for each in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each, call in zip((one, two), calls):
        each.metadata_client.confirm_write = call


seen = []
with server(path=None):
    one, two = backend(), backend()
    for number in range(1, 15):
        at_once(one, two, number)
    seen.append(found(one, range(1, 15)))
    for number in range(101, 101 + PAGES):
        store(one, number)
    seen.append(found(one, range(101, 101 + PAGES)))
    one.clear()
    for number in range(101, 101 + PAGES):
        store(one, number)
    seen.append(found(one, range(101, 101 + PAGES)))
print(f"14 pages stored by two at one time: {seen[0]} found; then 16 by one: {seen[1]}; behind a clear: {seen[2]}")
for seconds in (1, 60):
    pathlib.Path("list.json").unlink(missing_ok=True)
    with server(1):
        one = backend()
        for number in range(1, 1 + PAGES):
            store(one, number)
        assert found(one, range(1, 1 + PAGES)) == PAGES
    with server(seconds):
        for number in range(51, 55):
            store(one, number)
        assert found(one, range(5, 1 + PAGES)) == PAGES - 4 and found(one, range(51, 55)) == 4
    with server():
        got = {number: read(one, number) for number in (*range(1, 1 + PAGES), *range(51, 55))}
    wrong = {number: value for number, value in got.items() if value not in (None, number)}
    print(f"saved each {seconds} s: {sum(got[n] == n for n in got)} right, another one's numbers: {wrong}")
    seen.append(sorted(wrong))
sys.exit(seen != [2, 2, PAGES, [], [1, 2, 3, 4]])
PY
