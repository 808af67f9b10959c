"""Whole engines where a container's rules forbid io_uring: their bytes move by threads, and nobody has to say so."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.support.processes import program

CHILD = """
import json, sys
from pathlib import Path
from tests.support.native_parts import forbid_ring
if cause := forbid_ring(int(sys.argv[2])):
    sys.exit("no filter: " + cause)

from gdscache.errors import TransportUnavailableError
from tests.support.helpers import Host, drop_from, make_config, prompt, quiet
from tests.support.small_executor import EXTENT, PAGES, Small, a_load
from tests.support.executor_machine import Heard

directory, said = Path(sys.argv[1]), {}
for transport in ("posix", "auto", "uring"):
    try:
        host = Host(make_config(directory / transport, transport=transport, cpu=64, bounce=8, ssd=80))
    except TransportUnavailableError as error:
        said[transport] = error.message
        continue
    with host.engine as engine:
        tokens = prompt(1, 5)
        dropped, served = host.store(tokens).result(60).dropped, []
        quiet(engine)
        for gone in ((), ("cpu",)):
            drop_from(engine, *gone)
            report = host.load(tokens)
            served.append([report.tokens, sorted(report.bytes_by_tier)])
        disk = engine._parts.executor.moves.disk
        said[transport] = [disk, engine.manager.ssd.io.transport.name, list(dropped), served]
path = directory / "slab"
path.write_bytes(bytes(range(256)) * (PAGES * EXTENT // 256))
small, heard = Small(path, uring=True), Heard()  # rules may come between a transport and its executor
small.executor.finish(small.executor.begin(a_load(path), (), heard).end())
disk = small.executor.moves.disk
said["executor"] = [disk, [status.value for status in heard.verdicts.values()]]
small.close()
print(json.dumps(said))
"""


@pytest.mark.parametrize("error", [errno.EPERM, pytest.param(errno.ENOSYS, marks=pytest.mark.suite)])
def test_engines_store_and_load_by_threads(error: int, tmp_path: Path) -> None:
    """`uring` is refused, for it was asked for by name; what chooses for itself takes threads."""
    done = program("-c", CHILD, str(tmp_path), str(int(error)), cwd=tmp_path)
    if done.stderr.startswith("no filter"):
        pytest.skip(f"this machine takes {done.stderr}")
    assert (done.returncode, done.stderr) == (0, "")
    moved = ["threads", "posix", [], [[20, ["cpu"]], [20, ["ssd"]]]]
    refused = f"io_uring_setup answers {os.strerror(error)}"
    executor = ["threads", ["loaded"] * 4]
    assert json.loads(done.stdout) == {"posix": moved, "auto": moved, "uring": refused, "executor": executor}
