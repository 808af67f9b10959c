#!/usr/bin/env bash
# NIXL 1.5.1, backend POSIX: a transfer goes on only inside the caller's calls. `transfer` answers PROC and hands 64
# descriptors to the kernel; each `check_xfer_state` takes back what has ended and hands over up to 64 more. Whoever
# posts a batch of pages and asks again when they should have come has moved the first 64, and waits for the rest then,
# at 64 a look. Linux AIO (the default), io_uring and POSIX AIO behave alike. Documentation of this is proposed
# (ai-dynamo/nixl pull request 2021, open).
#
# Seen with nixl-cu13 1.5.1 on a CPU, 512 pages of 64 KiB written to a file, with Linux AIO: 64 pages are in the file
# behind `transfer`, 64 still 3 s later, then 64 more behind each look, 0.2 s apart; the 8th or 9th look says DONE.
# Fails (exit 1) where that is no longer so.
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
import os
import sys
import time

import numpy as np
from nixl_cu13._api import nixl_agent, nixl_agent_config

logging.disable(logging.INFO)
PAGES, SIZE, AT_ONCE = 512, 65536, 64
print("nixl-cu13", importlib.metadata.version("nixl-cu13"))
memory = np.frombuffer(mmap.mmap(-1, PAGES * SIZE), np.uint8)
memory[:] = 7
file = os.open("pages", os.O_RDWR | os.O_CREAT)
os.posix_fallocate(file, 0, PAGES * SIZE)


def written():
    return sum(os.pread(file, 1, page * SIZE) == b"\x07" for page in range(PAGES))


agent = nixl_agent("agent", nixl_agent_config(backends=[]))
agent.create_backend("POSIX", {})
at, size, zero = memory.ctypes.data, np.full(PAGES, SIZE, np.uint64), np.zeros(PAGES, np.uint64)
offsets = np.arange(PAGES, dtype=np.uint64) * SIZE
held = [
    agent.register_memory([(at, PAGES * SIZE, 0, "")], "DRAM", backends=["POSIX"]),
    agent.register_memory([(0, PAGES * SIZE, file, "")], "FILE", backends=["POSIX"]),
]
handle = agent.initialize_xfer(
    "WRITE",
    agent.get_xfer_descs(np.stack([offsets + np.uint64(at), size, zero], 1), "DRAM"),
    agent.get_xfer_descs(np.stack([offsets, size, zero + np.uint64(file)], 1), "FILE"),
    agent.name,
    backends=["POSIX"],
)
state = agent.transfer(handle)
time.sleep(3)
counts = [written()]
print(f"{state}: {counts[0]} of {PAGES} pages in the file 3 s behind transfer")
looks = 0
while state == "PROC":
    state = agent.check_xfer_state(handle)
    time.sleep(0.2)
    looks += 1
    counts.append(written())
    print(f"look {looks}: {state}, {counts[-1]} pages")
handle.release()
for registered in held:
    agent.deregister_memory(registered)
os.close(file)
steps = [later - sooner for sooner, later in zip(counts, counts[1:])]
sys.exit(not (counts[0] == AT_ONCE and max(steps) <= AT_ONCE and counts[-1] == PAGES and looks >= PAGES // AT_ONCE - 1))
PY
