"""The direct route by the library's own cuFile: pages between SSD and a GPU that is not there (fake_gpu.py,
fake_cufile.py), without a call of Python on their way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gdscache import CacheEngine, PageStatus
from gdscache.storage import Memory
from gdscache.storage.cufile import CufileTransport
from tests.support import fake_cufile, fake_gpu
from tests.support.cufile_parts import Fault
from tests.support.helpers import (
    EXTRA,
    MHA,
    MLA,
    OpenEngine,
    OpenHost,
    drop_from,
    flip_file,
    kept,
    prompt,
    quiet,
    run,
    settle,
    tokens_of,
    until,
)

DIRECT: dict[str, Any] = {"cpu": None, "ssd": 24, "bounce": 16, "transport": "cufile"}
ALWAYS = 1 << 20  # times
SOON = 0.5  # seconds of a deadline that is to pass


@pytest.fixture(autouse=True)
def _well(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        yield
        return
    fake_cufile.use(monkeypatch)
    before = fake_cufile.living()
    yield
    fake_cufile.release()
    assert fake_cufile.living() == before, "files or memory of cuFile are left"


def place(engine: CacheEngine, tokens: list[int], page: int) -> int:
    """Where in the slab a page lies."""
    slot = engine.manager.tiers["ssd"].index.slot(engine.pages(tokens)[page].key)
    return int(slot * engine.layout.extent_bytes)


@pytest.mark.parametrize("model", [MHA, MLA, EXTRA], ids=["mha", "mla", "extra"])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
def test_pages_go_straight_to_the_ssd_and_back(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, model: Any, kernels: bool
) -> None:
    fake_cufile.use(monkeypatch, kernels=kernels)
    host = open_host(**DIRECT, model=model)
    assert "gdscache-io" not in {thread.name for thread in threading.enumerate()}, "Python has a part in the I/O"
    tokens = prompt(1, 5)
    before = fake_cufile.moves()
    host.keep(tokens)
    written = fake_cufile.moves()
    assert before < written
    for _ in range(2):
        assert host.load(tokens).tokens == 20  # which compares every byte
    assert fake_cufile.moves() > written
    settle(host.engine)


def test_neighbours_are_one_call(open_host: OpenHost) -> None:
    """Pages that lie side by side in the file and in the reserve."""
    host, tokens = kept(open_host, 4, **DIRECT)
    before = fake_cufile.moves()
    assert host.load(tokens).tokens == 16
    assert fake_cufile.moves() - before < 4


def test_pages_come_from_the_cpu_tier_and_from_the_ssd(open_host: OpenHost) -> None:
    """Memory of the host and of the GPU by the same disk: what the CPU tier gets is read by plain calls."""
    host = open_host(**DIRECT | {"cpu": 12})
    first, second = prompt(1, 4), prompt(2, 4)
    host.store(first)
    host.keep(second)
    assert host.load(first).tokens == 16
    drop_from(host.engine, "cpu")
    before = fake_cufile.moves()
    assert host.load(second).tokens == 16
    assert fake_cufile.moves() > before
    before = fake_cufile.moves()
    host.engine.prefetch(first).result(60)
    assert fake_cufile.moves() == before, "a prefetch leaves pages in host memory"
    assert host.load(first).tokens == 16


def test_a_flipped_byte_is_a_miss_and_stored_anew(open_host: OpenHost) -> None:
    host, tokens = kept(open_host, 3, **DIRECT)
    slab = next(host.engine.manager.tiers["ssd"].path.glob("slab*"))
    flip_file(slab, place(host.engine, tokens, 1) + 7)
    load, blocks, _ = host.begin(tokens)
    assert load.result(60).pages == (PageStatus.LOADED, PageStatus.CHECKSUM, PageStatus.LOADED)
    host.give(blocks)
    settle(host.engine)
    host.keep(tokens)
    assert host.load(tokens).tokens == 12


@pytest.mark.parametrize(
    ("kind", "value", "status"),
    [
        (Fault.ERROR, 5011, PageStatus.IO_ERROR), (Fault.ERRNO, 5, PageStatus.IO_ERROR),
        (Fault.MORE, 1, PageStatus.IO_ERROR),
        (Fault.SHORT, 0, PageStatus.SHORT_READ), (Fault.LIE, 0, PageStatus.CHECKSUM),
    ],
)  # fmt: skip
def test_a_fault_costs_its_own_page(open_host: OpenHost, kind: Fault, value: int, status: PageStatus) -> None:
    """Whatever cuFile says of a read; and `LIE` has to leave something in the reserve that is not the page."""
    host = open_host(**DIRECT)
    tokens, other = prompt(1, 3), prompt(2, 3)
    host.store(tokens)
    host.keep(other)
    assert host.load(other).tokens == 12
    fake_cufile.fault(False, kind, value, place(host.engine, tokens, 1), ALWAYS)
    load, blocks, _ = host.begin(tokens)
    found = load.result(60).pages
    assert found[1] is status, found
    assert found[0] is PageStatus.LOADED
    if kind is not Fault.LIE:  # which spares nothing behind it in the same call
        assert found[2] is PageStatus.LOADED
    host.give(blocks)
    fake_cufile.release()
    settle(host.engine)


def test_a_write_that_fails_stores_nothing(open_host: OpenHost) -> None:
    host = open_host(**DIRECT)
    tokens = prompt(1, 3)
    fake_cufile.fault(True, Fault.ERROR, 5044, times=ALWAYS)
    assert host.store(tokens).result(60).dropped
    fake_cufile.release()
    quiet(host.engine)
    assert tokens_of(host.engine, tokens) == 0
    host.keep(tokens)
    assert host.load(tokens).tokens == 12


def test_a_read_that_hangs_misses_its_deadline_and_ends_late(open_host: OpenHost) -> None:
    """Its slots of the reserve stay out of use until it has ended."""
    host, tokens = kept(open_host, 3, **DIRECT, deadline=SOON)
    fake_cufile.fault(False, Fault.WAIT, 0, place(host.engine, tokens, 0))
    load, blocks, _ = host.begin(tokens)
    report = load.result(60)
    assert report.pages[0] is PageStatus.DEADLINE
    held = host.engine.stats()["tiers"]["ssd"]["quarantine"]
    assert held["late_reads"] > 0
    assert held["held_slots"]["bounce_loads"] > 0
    host.give(blocks)
    fake_cufile.release()
    until(lambda: not host.engine.stats()["tiers"]["ssd"]["quarantine"]["late_reads"], "the late read ends")
    assert host.engine.stats()["tiers"]["ssd"]["quarantine"]["held_slots"]["bounce_loads"] == 0
    settle(host.engine)
    host.keep(tokens)
    assert host.load(tokens).tokens == 12


def test_an_engine_closes_beside_a_read_that_hangs(open_host: OpenHost) -> None:
    """Its memory stays registered, and its file open, until it has ended."""
    host, tokens = kept(open_host, 3, **DIRECT, deadline=SOON)
    before = fake_cufile.living()
    fake_cufile.fault(False, Fault.WAIT, 0, place(host.engine, tokens, 0))
    load, blocks, _ = host.begin(tokens)
    load.result(60)
    host.give(blocks)
    host.engine.manager.close_s = 0.1
    host.engine.close()
    assert fake_cufile.waiting() == 1
    assert fake_cufile.living() == before
    fake_cufile.release()
    until(lambda: fake_cufile.living() < before, "what hung is given back")


def test_a_read_waits_for_the_copies_out_of_its_slot(open_host: OpenHost) -> None:
    """cuFile knows no streams: bytes that a kernel still reads are not read over."""
    host = open_host(**DIRECT | {"bounce": 2})  # one slot for loads
    tokens = prompt(1, 4)
    host.keep(tokens)
    fake_gpu.driver().fake_delay(2000)
    try:
        for _ in range(3):
            assert host.load(tokens).tokens == 16
    finally:
        fake_gpu.driver().fake_delay(0)
    settle(host.engine)


def test_a_subclass_is_asked_itself(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes over what it knows, and no class of a user's that is made of it."""
    asked: list[int] = []

    class Own(CufileTransport):
        def read(self, file: int, offset: int, memory: Memory) -> int:
            asked.append(memory.nbytes)
            return super().read(file, offset, memory)

    monkeypatch.setattr(fake_cufile, "CufileTransport", Own)
    host, tokens = kept(open_host, 3, **DIRECT)
    assert host.load(tokens).tokens == 12
    assert sum(asked) == 3 * host.layout.extent_bytes
    settle(host.engine)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cufile")
@pytest.mark.parametrize("cpu", [None, 8])
@pytest.mark.parametrize("model", [MHA, MLA], ids=["mha", "mla"])
def test_the_real_one(open_engine: OpenEngine, model: Any, cpu: int | None) -> None:
    """Straight between SSD and GPU; and a flipped byte is a miss."""
    options: dict[str, Any] = {"ssd_options": {"route": "direct"}, "transport": "cufile", "model": model}
    engine = open_engine(device="cuda", gpu=12, cpu=cpu, ssd=24, bounce=16, **options)
    assert engine.stats()["tiers"]["ssd"]["transport"]["gds"]
    assert "gdscache-io" not in {thread.name for thread in threading.enumerate()}, "Python has a part in the I/O"
    tokens = prompt(1, 5, extra=1)
    assert run(engine, tokens) == 0
    quiet(engine)
    for _ in range(2):
        drop_from(engine, "gpu", *(["cpu"] if cpu else []))
        assert run(engine, tokens) == 20  # which compares every byte
    slab = next(engine.manager.tiers["ssd"].path.glob("slab*"))
    drop_from(engine, "gpu", *(["cpu"] if cpu else []))
    flip_file(slab, place(engine, tokens, 2) + 7)
    assert run(engine, tokens) == 8
