"""What happens to a machine: full and read-only disks, few descriptors, files cut or exchanged under an open engine.

Each is a clear error or misses, never wrong bytes (`Host.load` compares them), and over when its cause is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdscache.disk import catalog_file
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, OpenHost, drop_from, prompt
from tests.support.places import ROOT, SUPPORT

pytestmark = pytest.mark.suite

CHILD = SUPPORT / "adversity_child.py"
PAGES = 6


def child(*command: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1] == "fine"


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """The beginning of a command that may mount file systems which nobody else sees."""
    for unshare in (["unshare", "-m"], ["unshare", "-rm"]):
        try:
            tried = subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
            if tried.returncode == 0:
                return unshare
        except OSError:
            break
    pytest.skip("this user may not mount a file system in a namespace of its own here")


@pytest.mark.parametrize(
    ("scenario", "pack"), [("full_at_open", "off"), ("full_in_use", "off"), ("full_in_use", "on"), ("read_only", "off")]
)
def test_a_small_file_system(namespace: list[str], tmp_path: Path, scenario: str, pack: str) -> None:
    run = f"exec {sys.executable} {CHILD} {scenario} {tmp_path} {pack}"
    child(*namespace, "sh", "-c", f"mount -t tmpfs -o size={2 if pack == 'on' else 1}m none {tmp_path} && {run}")


def test_few_descriptors(tmp_path: Path) -> None:
    child(sys.executable, str(CHILD), "few_descriptors", str(tmp_path), "off")


def test_a_file_system_that_becomes_read_only_in_use(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does after an error of the device: writes to the slab and the catalogue are refused."""
    host = open_host(transport="tests.support.faulty:FaultyTransport")
    host.keep_on_ssd(prompt(1, PAGES))
    ssd = host.engine.manager.ssd
    writer = ssd._catalog._writer
    with monkeypatch.context() as patch, PLAN.rule(Op.WRITE, Fault.EIO):
        patch.setattr(catalog_file.os, "access", lambda path, mode: mode != os.W_OK)
        writer.execute("PRAGMA query_only = ON")
        assert set(host.store(prompt(2, 2)).result(WAIT).dropped.values()) == {"io_error"}
        assert host.load(prompt(1, PAGES)).tokens == 4 * PAGES
        writer.execute("PRAGMA query_only = OFF")
    assert not (ssd.path / catalog_file.SUSPECT_NAME).exists()  # read-only is not corrupt
    host.keep(prompt(2, 2))
    for _ in range(2):
        drop_from(host.engine, "cpu")
        assert (host.load(prompt(1, PAGES)).tokens, host.load(prompt(2, 2)).tokens) == (4 * PAGES, 8)
        host.engine.close()
        host = open_host()


def test_pages_of_one_prompt_lie_together(open_host: OpenHost) -> None:
    """Also in a full slab whose slots came back in another order, and when a prompt grows page by page."""
    host = open_host(cpu=None, ssd=32, gpu=8)
    for seed in range(12):
        host.keep(prompt(seed, 8))
    ssd = host.engine.manager.ssd

    def slots(tokens: list[int]) -> list[int]:
        return [slot for page in host.engine.pages(tokens) if (slot := ssd.index.slot(page.key)) is not None]

    for seed in range(9, 12):
        held = slots(prompt(seed, 8))
        assert held == list(range(held[0], held[0] + 8))
    host.engine.clear()
    long = prompt(20, 8)
    for pages in range(1, 9):
        host.keep(long[: pages * 4])
    held = slots(long)
    assert held == list(range(held[0], held[0] + 8))
