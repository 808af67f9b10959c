"""The transport `uring` where the system refuses io_uring, or has no room for it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gdscache.errors import IOFailedError
from gdscache.storage.native import NativeTransport
from tests.support.native_parts import has_ring
from tests.support.places import ROOT

CHILD = """
import errno, logging, sys
from pathlib import Path
from tests.support.native_parts import forbid_ring
from gdscache.errors import TransportUnavailableError
from gdscache.cuda.host_memory import HostBuffer
from gdscache.storage import open_transport

if cause := forbid_ring({error}):
    sys.exit("no filter: " + cause)
directory = Path(sys.argv[1])
settings = dict(directory=directory, device="cpu", threads=2, direct_io="auto", gds="auto")
logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
try:
    open_transport("uring", **settings)
except TransportUnavailableError as error:
    print("refused:", error.message, error.hint)
with open_transport("auto", **settings) as transport, HostBuffer(8192, "off") as memory:
    file = transport.open(directory / "slab")
    print(transport.read(file, 0, memory.view))
    print(memory.view == (directory / "slab").read_bytes())
"""


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_rules_like_dockers_leave_the_threads(error: int, tmp_path: Path) -> None:
    (tmp_path / "slab").write_bytes(os.urandom(8192))
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(error=error), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    if done.stderr.startswith("no filter"):
        pytest.skip(f"this machine takes {done.stderr}")
    assert done.stderr == ""
    cause = f"io_uring_setup answers {os.strerror(error)}"
    refused, chosen, moved, same = done.stdout.splitlines()[:1] + done.stdout.splitlines()[-3:]
    assert refused.startswith(f"refused: {cause}")
    assert "transport to posix" in refused
    assert chosen.startswith(f"transport posix, 2 threads, for {tmp_path}")
    assert chosen.endswith(f"no io_uring: {cause}")
    assert (moved, same) == ("8192", "True")


@pytest.mark.skipif(not has_ring(), reason="io_uring is not allowed here")
def test_a_process_without_descriptors_is_told_and_loses_none() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    refusals: list[IOFailedError] = []
    try:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for free in range(5):
            if free:
                os.close(held.pop())
            before = len(held)
            try:
                NativeTransport(1).close()
            except IOFailedError as error:
                refusals.append(error)
            spare = []
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.open("/dev/null", os.O_RDONLY))
            for file in spare:
                os.close(file)
            assert (len(held), len(spare)) == (before, free)
        assert {(error.errno, "ulimit" in error.hint) for error in refusals} == {(errno.EMFILE, True)}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in held:
            os.close(file)
