"""cuFile's bad days, over a stand-in for its library: each fault is an error of its own request, and nothing hangs."""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gdscache.errors import TransportUnavailableError
from gdscache.storage import calls, open_transport, probe
from gdscache.storage.probe import ProbeResult
from tests.support import cufile_child
from tests.support.cufile_parts import HANG, IO_FAILED, NOT_ON_THIS_FILE, SOURCES, Call, Fault, build, missing
from tests.support.processes import Child

pytestmark = pytest.mark.suite

SECONDS = 60.0  # that a child may take

TRANSPORTS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(missing(*needs)), reason=missing(*needs) or "-"))
    for name, needs in {"kvikio": ["kvikio"], "nixl": ["nixl"], "cufile": list[str]()}.items()
]
SCENARIOS = [
    cufile_child.bytes_arrive, cufile_child.a_fault_is_its_own_request_s,
    cufile_child.counts_do_not_make_up_for_each_other, cufile_child.a_refusal_has_its_cause,
    cufile_child.an_open_that_hangs_is_an_error, cufile_child.a_hang_is_its_own_request_s,
    cufile_child.close_beside_a_hang, cufile_child.an_engine_serves_nothing_wrong,
    cufile_child.an_engine_outlives_a_hang,
]  # fmt: skip


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libraries")
    build(folder)
    return folder


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_cufile(libraries: Path, tmp_path: Path, name: str, scenario: str) -> None:
    with Child(cufile_child.serve, libraries, name, scenario, tmp_path) as child:
        assert child.receive(SECONDS) == "done"
        child.end()


# The probe, whose children have the stand-ins from their start.

DEADLINE_S = {"kvikio": 4.0, "nixl": 6.0, "cufile": 6.0}  # in which a child has begun and come to what hangs
ENOUGH_S = 60.0
OPEN_HANGS = [["refuse", Call.DRIVER, HANG]]
READ_HANGS = [["fault", False, Fault.WAIT]]
LIES = {
    "a read that was not done": [["fault", False, Fault.LIE, 0]],
    "a torn write": [["fault", True, Fault.LIE, 4096]],
    "a count that is too large": [["fault", True, Fault.MORE, 4096]],
    "an error": [["fault", False, Fault.ERROR, IO_FAILED]],
    "a refusal": [["refuse", Call.HANDLE, NOT_ON_THIS_FILE]],
}


class Machine:
    """A machine with a GPU and the nvidia-fs driver, as far as the probe looks."""

    def __init__(self, patch: pytest.MonkeyPatch, libraries: Path, folder: Path) -> None:
        self._patch = patch
        self.directory, self.pids = folder / "cache", folder / "pids"
        self.directory.mkdir()
        self.pids.touch()
        stats, modules = folder / "stats", folder / "modules"
        for file in (stats, modules):
            file.touch()
        patch.setattr(probe, "NVIDIA_FS_STATS", stats)
        patch.setattr(calls, "PROC_MODULES", modules)
        patch.setenv("PYTHONPATH", str(SOURCES / "gpu"))
        patch.setenv("STAND_INS", str(libraries))
        patch.setenv("STAND_IN_PIDS", str(self.pids))
        patch.setenv("STAND_IN_STATS", str(stats))

    def goes_wrong(self, faults: list[list[Any]]) -> None:
        self._patch.setenv("STAND_IN_FAULTS", json.dumps(faults))

    def counts_nothing(self) -> None:
        self._patch.delenv("STAND_IN_STATS")

    def ask(self, name: str, deadline_s: float) -> ProbeResult:
        return probe.probe(name, self.directory, 0, deadline_s)

    def is_left_alone(self) -> None:
        """No child lives, and no file of theirs is left."""
        children = [int(pid) for pid in self.pids.read_text().split()]
        assert children, "no child was asked"
        for child in children:
            with pytest.raises(ProcessLookupError):
                os.kill(child, 0)
        assert not list(self.directory.iterdir())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, libraries: Path, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(monkeypatch, libraries, tmp_path)
    yield made
    made.is_left_alone()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_the_probe_proves_what_works(machine: Machine, name: str) -> None:
    result = machine.ask(name, ENOUGH_S)
    assert (result.ok, result.mode) == (True, "gds"), result
    machine.counts_nothing()
    result = machine.ask(name, ENOUGH_S)
    assert (result.ok, result.mode) == (True, "compat"), result


DECEIVED = [  # fewer of the others': their children import torch, and are slow to begin
    pytest.param(*transport.values, lie, marks=transport.marks)
    for transport in TRANSPORTS
    for lie in (LIES if transport.values == ("kvikio",) else ("a read that was not done", "a refusal"))
]


@pytest.mark.parametrize(("name", "lie"), DECEIVED)
def test_the_probe_is_not_deceived(machine: Machine, name: str, lie: str) -> None:
    machine.goes_wrong(LIES[lie])
    result = machine.ask(name, ENOUGH_S)
    assert result.mode == ("compat" if name == "kvikio" else "posix"), result  # kvikio does without cuFile
    assert "exit status 1" in result.reason, f"the cause is missing: {result}"


@pytest.mark.parametrize("name", TRANSPORTS)
def test_the_probe_s_child_is_killed_when_a_read_hangs(machine: Machine, name: str) -> None:
    machine.goes_wrong(READ_HANGS)
    begun, seconds = time.monotonic(), DEADLINE_S[name]
    result = machine.ask(name, seconds)
    assert time.monotonic() - begun < 2 * seconds + 30
    assert result.mode != "gds", result
    assert f"no answer within {seconds:g} s" in result.reason, result


# Not kvikio, which is opened by its name alone, and then does without cuFile. NIXL's waits are those of cuFile.
@pytest.mark.parametrize("name", [pytest.param("nixl", marks=[*TRANSPORTS[1].marks, pytest.mark.soak]), TRANSPORTS[2]])
def test_when_cufile_never_opens_auto_goes_on_and_on_does_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """`auto` says in one line what it chose and why not GDS; `on` fails with the cause and what to change."""
    machine.goes_wrong(OPEN_HANGS)
    monkeypatch.setattr(probe, "probe", functools.partial(probe.probe, deadline_s=DEADLINE_S[name]))
    options: dict[str, Any] = {"directory": machine.directory, "device": "cuda:0", "threads": 1, "direct_io": "auto"}
    wanted = "auto" if name == "cufile" else name
    with caplog.at_level(logging.INFO, "gdscache.storage"), open_transport(wanted, gds="auto", **options) as transport:
        assert transport.memory_kinds == {"host"}
        assert transport.name in (("uring", "posix") if name == "cufile" else (name,))
    [line] = [record.getMessage() for record in caplog.records]
    assert "no answer within" in line
    assert "\n" not in line
    with pytest.raises(TransportUnavailableError, match="no answer within") as caught:
        open_transport(wanted, gds="on", **options)
    assert "gds" in caught.value.hint
