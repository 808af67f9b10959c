#!/usr/bin/env bash
# NIXL 1.5.1, Python: `check_remote_xfer_done(agent, tag)` says True for another transfer whose notification begins with
# the tag. `tag_is_prefix` is on by default, and off it looks for the tag anywhere in the message: no setting compares
# all of it, though documentation says that the tag can be the whole message. So who waits for "page-1" is answered by
# "page-10", and reads memory that nothing was written to. The message is used up by that: who waits for "page-10" waits
# for ever. Whether it happens depends on the order in which transfers end. Names of one length (`page-0001`), a closing
# character that no name has ("page-1;"), or one's own comparison of `get_new_notifs` keep them apart.
#
# Seen with nixl-cu13 1.5.1 on a CPU, two agents of one process over UCX. Page 10 is written with "page-10" as its
# notification: page 1 is said to be done, its byte is 0 and that of page 10 is 7; page 10 is not done 2 s later. With
# `tag_is_prefix=False` the same. With "page-10;" page 1 (";" behind it) is not done, and page 10 is. Fails (exit 1)
# where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "nixl-cu13==1.5.1" "numpy==2.4.6"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import logging
import mmap
import sys
import time

import numpy as np
from nixl_cu13._api import nixl_agent, nixl_agent_config

logging.disable(logging.INFO)
PAGES, SIZE = 12, 4096
print("nixl-cu13", importlib.metadata.version("nixl-cu13"))


def side(name):
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = np.frombuffer(mmap.mmap(-1, PAGES * SIZE), np.uint8)
    agent.register_memory([(memory.ctypes.data, PAGES * SIZE, 0, "")], "DRAM")
    return agent, memory


(prefill, source), (decode, target) = side("prefill"), side("decode")
prefill.add_remote_agent(decode.get_agent_metadata())
decode.add_remote_agent(prefill.get_agent_metadata())
source[:] = 7


def write(page, notification):
    def at(memory):
        place = np.array([[memory.ctypes.data + page * SIZE, SIZE, 0]], np.uint64)
        return prefill.get_xfer_descs(place, "DRAM")

    handle = prefill.initialize_xfer("WRITE", at(source), at(target), "decode", notification)
    state = prefill.transfer(handle)
    while state == "PROC":
        state = prefill.check_xfer_state(handle)
    handle.release()
    assert state == "DONE"


def done(tag, **how):
    """Whether a transfer is done, asked for 2 s."""
    end = time.monotonic() + 2
    while not (said := decode.check_remote_xfer_done("prefill", tag, **how)) and time.monotonic() < end:
        time.sleep(0.01)
    return said


seen = {}
for name, how, close in (("default", {}, b""), ("not a prefix", {"tag_is_prefix": False}, b""), ("closed", {}, b";")):
    target[:] = 0
    write(10, b"page-10" + close)
    first = done(b"page-1" + close, **how)
    seen[name] = first, done(b"page-10" + close, **how), int(target[SIZE]), int(target[10 * SIZE])
    print(f"{name:12} page 10 was written; done: page 1 {first}, page 10 {seen[name][1]}; bytes {seen[name][2:]}")
mistaken = (True, False, 0, 7)
sys.exit(seen != {"default": mistaken, "not a prefix": mistaken, "closed": (False, True, 0, 7)})
PY
