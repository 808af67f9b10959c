"""The transports `uring` and `posix`: what an executor needs of them, and when they cannot be had."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from gdscache import errors
from gdscache.storage import files
from gdscache.storage.files import NativeTransport
from gdscache.testing.transport_suite import random_bytes
from tests.support.helpers import WAIT, OpenHost, prompt, until
from tests.support.native_parts import has_ring
from tests.support.transport_parts import opened


@pytest.fixture(params=["uring", "posix"])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and not has_ring():
        pytest.skip("io_uring is not allowed here")
    return str(request.param)


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    path = tmp_path / "slab"
    path.write_bytes(random_bytes(1))
    return path


@pytest.mark.parametrize(
    ("uring", "code", "error", "hint"),
    [
        (True, errno.EPERM, errors.TransportUnavailableError, "posix"),
        (True, errno.ENOSYS, errors.TransportUnavailableError, "posix"),
        (True, errno.EMFILE, errors.IOFailedError, "ulimit -n"),
        (True, errno.ENOMEM, errors.IOFailedError, "memory"),
        (False, errno.ENFILE, errors.IOFailedError, "ulimit -n"),
        (False, errno.EAGAIN, errors.ThreadStartError, "ulimit -u"),
    ],
)
def test_a_disk_that_cannot_be_had_is_said(
    monkeypatch: pytest.MonkeyPatch, uring: bool, code: int, error: type[Exception], hint: str
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise errors.RefusedDiskError("the system answers no", "", code)

    monkeypatch.setattr(files, "move_pieces", refused)
    with pytest.raises(error, match="the system answers no") as caught:
        NativeTransport(2, uring=uring)
    assert hint in getattr(caught.value, "hint", "")


@pytest.mark.parametrize("settings", [{"threads": 0}, {"threads": 1025}, {"threads": 1, "direct_io": "yes"}])
def test_settings_out_of_range_start_no_thread(name: str, settings: dict[str, Any]) -> None:
    tasks, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.InvalidValueError):
        NativeTransport(**settings, uring=name == "uring")
    assert len(os.listdir("/proc/self/fd")) == files
    until(lambda: len(os.listdir("/proc/self/task")) <= tasks, "threads end")


def test_a_closed_transport_flushes_nothing(name: str, slab: Path) -> None:
    with opened(name, 1, "auto") as transport:
        file = transport.open(slab)
        transport.flush(file)
    with pytest.raises(errors.EngineClosedError, match="was closed"):
        transport.flush(file)


@pytest.mark.parametrize("cpu", [None, 8])
def test_pages_survive_a_loss_of_power_with_it(name: str, open_host: OpenHost, tmp_path: Path, cpu: int | None) -> None:
    host = open_host(tmp_path / "cache", cpu=cpu, transport=name, ssd_options={"durability": "power"})
    report = host.store(prompt(1, 4)).result(WAIT)
    assert not report.dropped
    assert all("ssd" in tiers for tiers in report.tiers)


@pytest.mark.skipif(not has_ring(), reason="io_uring is not allowed here")
def test_a_process_without_descriptors_is_told_and_loses_none() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    refusals: list[errors.IOFailedError] = []
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
            except errors.IOFailedError as error:
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
