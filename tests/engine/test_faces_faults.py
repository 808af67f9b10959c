"""Bad luck on both faces: a fault is a miss of its own cause, the good prefix stays, the bad page goes, no more."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdscache import PageStatus
from gdscache.errors import DeadlineError
from gdscache.storage.base import Op
from tests.support.faces import Face
from tests.support.faulty import PLAN, READ_FAULTS, Fault
from tests.support.helpers import SMALL, WAIT, flip_file, prompt, settle, until
from tests.support.pages import FAULTY, misses, offset_of, slot_of
from tests.support.pairs import pairs

OpenFace = Callable[..., Face[Any]]
LOADED = PageStatus.LOADED
ONE_LOAD = dataclasses.replace(SMALL, load_threads=1)  # at a time


def put_and_drop(face: Face[Any], tokens: list[int]) -> None:
    """From here on only the SSD has the pages."""
    face.put(tokens)
    face.drop("cpu")


# -- reads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "status"), READ_FAULTS)
@pytest.mark.parametrize(("page", "cpu"), pairs([0, 2, 4], [None, 2, 8]))
def test_a_bad_read_costs_its_own_suffix(
    open_face: OpenFace, device: str, fault: Fault, status: PageStatus, page: int, cpu: int | None
) -> None:
    face = open_face(device=device, transport=FAULTY, cpu=cpu)
    tokens, other = prompt(1, 5), prompt(2, 3)
    face.put(tokens)
    put_and_drop(face, other)
    bad = offset_of(face.engine, tokens, page)
    with PLAN.rule(Op.READ, fault, lambda offset: offset == bad, bit=8 * 6143 + 7):
        report = face.get(tokens)
    assert report.tokens == 4 * page
    assert report.first_bad == page
    assert [s for i, s in enumerate(report.pages) if i != page] == [LOADED] * 4
    assert report.pages[page] is status
    assert misses(face.engine) == {status.value: 1}
    left = 4 * page if status is PageStatus.CHECKSUM else 20
    assert face.found(tokens) == left
    assert face.get(tokens).tokens == left
    assert face.get(other).tokens == 12
    face.put(tokens)
    assert face.get(tokens).tokens == 20
    settle(face.engine)
    if page == 2 and cpu is None:
        face.engine.close()
        face = open_face(device=device, cpu=cpu)
        assert face.get(tokens).tokens == 20


def test_every_page_bad(open_face: OpenFace) -> None:
    face = open_face(transport=FAULTY, cpu=3)
    tokens = prompt(1, 6)
    put_and_drop(face, tokens)
    with PLAN.rule(Op.READ, Fault.FLIP):
        assert face.get(tokens).pages == (PageStatus.CHECKSUM,) * 6
    assert face.found(tokens) == 0
    assert {t["pages"] for t in face.engine.stats()["tiers"].values()} == {0}
    settle(face.engine)
    face.engine.close()
    assert open_face().found(tokens) == 0  # the deletions are durable


@pytest.mark.parametrize("flipped", [True, False])
def test_what_several_want_is_read_once_and_a_bad_page_of_it_is_a_miss_for_all(
    open_face: OpenFace, flipped: bool
) -> None:
    face = open_face(transport=FAULTY)
    tokens = prompt(1, 3)
    put_and_drop(face, tokens)
    bad = offset_of(face.engine, tokens, 1)
    found = 4 if flipped else 12
    with PLAN.rule(Op.READ, Fault.FLIP, lambda offset: flipped and offset == bad):
        begun = [face.begin(tokens) for _ in range(3)]
        assert [face.end(b).tokens for b in begun] == [found] * 3
    assert face.found(tokens) == found
    assert len(PLAN.moved[Op.READ]) == 3


def test_deadlines_are_kept_and_what_is_late_is_harmless(open_face: OpenFace) -> None:
    face = open_face(transport=FAULTY, deadline=0.3, cpu=3)
    tokens = prompt(1, 4)
    put_and_drop(face, tokens)
    with PLAN.rule(Op.READ, Fault.HANG):
        begun = face.begin(tokens)
        with pytest.raises(DeadlineError, match=r"verdict|ready"):
            face.verdict(begun, 0.05)
        report = face.end(begun)
        assert report.tokens == 0
        assert set(report.pages) == {PageStatus.DEADLINE}
    assert face.engine.stats()["misses"]["deadline"] == 4
    until(lambda: face.found(tokens) == 16, "the late reads end")  # late is not bad: the pages stay
    assert face.engine.check().problems == ()
    face.engine.close()
    assert open_face(cpu=3).get(tokens).tokens == 16


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("cpu", [None, 6])
def test_a_clear_does_not_spoil_a_load_that_holds_its_pages(
    open_face: OpenFace, cpu: int | None, reopened: bool
) -> None:
    """A leased page stays readable until its load is over; a clear is no checksum error."""
    face = open_face(transport=FAULTY, cpu=cpu, limits=ONE_LOAD)
    first, tokens = prompt(1, 2), prompt(2, 3)
    face.put(first)
    put_and_drop(face, tokens)
    if reopened:  # then no checksum is in memory yet
        face.engine.close()
        face = open_face(transport=FAULTY, cpu=cpu, limits=ONE_LOAD)
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        blocking = face.begin(first)
        until(lambda: rule.met > 0, "the only thread for loads is busy")
        waiting = face.begin(tokens)
        assert face.engine.clear()["ssd"] == 5
    assert face.end(blocking).pages == (LOADED,) * 2
    assert face.end(waiting).pages == (LOADED,) * 3
    assert face.found(tokens) == 0
    settle(face.engine)


# -- writes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "cause"),
    [(Fault.EIO, "io_error"), (Fault.SHORT, "io_error"), (Fault.LOST, ""), (Fault.TORN, ""), (Fault.FLIP, "")],
)
def test_a_bad_write_is_never_served(open_face: OpenFace, device: str, fault: Fault, cause: str) -> None:
    face = open_face(device=device, transport=FAULTY)
    filler, tokens = prompt(9, 12), prompt(1, 5)
    face.put(filler)  # every slot has had another page's bytes
    with PLAN.rule(Op.WRITE, fault, skip=2, times=1, bit=12345):
        stored = face.put(tokens)
    if cause:
        assert sorted(stored.dropped.values()) == [cause]
        assert face.engine.stats()["dropped"] == {cause: 1}
    else:
        assert stored.dropped == {}
    assert face.get(tokens).tokens == 20  # the CPU tier has the bytes
    face.drop("cpu")
    settle(face.engine)
    good = face.get(tokens).tokens
    assert good in range(0, 20, 4)
    assert misses(face.engine) == ({} if cause else {"checksum": 1})
    settle(face.engine)
    face.engine.close()
    face = open_face(device=device)
    assert face.get(tokens).tokens == good
    put_and_drop(face, tokens)
    assert face.get(tokens).tokens == 20


def test_the_cpu_tier_serves_while_the_ssd_is_written(open_face: OpenFace) -> None:
    face = open_face(transport=FAULTY)
    tokens = prompt(1, 4)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        handle = face.begin_put(tokens)
        until(lambda: face.tiers(tokens) == ("cpu",) * 4, "the CPU tier has the pages")
        assert face.get(tokens).bytes_by_tier == {"cpu": 4 * face.engine.layout.page_bytes}
        assert not handle.done()
        assert face.engine.manager.tiers["ssd"].index.evictions == 0
        assert face.tiers(tokens) == ("cpu",) * 4


def test_pages_on_their_way_to_the_ssd_are_not_evicted(open_face: OpenFace) -> None:
    face = open_face(transport=FAULTY, cpu=3)
    first, second = prompt(1, 3), prompt(2, 2)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        face.begin_put(first)
        until(lambda: face.found(first) == 12, "the CPU tier has the pages")
        face.begin_put(second)
        assert face.found(first) == 12
        assert face.found(second) == 0  # in the bounce reserve, on no tier yet
    face.engine.drain(WAIT)
    assert face.get(first).tokens == 12
    assert face.get(second).tokens == 8


def test_a_queue_smaller_than_a_store_keeps_its_head(open_face: OpenFace) -> None:
    face = open_face(queue=2)
    assert face.put(prompt(1, 5)).dropped == dict.fromkeys((2, 3, 4), "queue_full")
    assert face.found(prompt(1, 5)) == face.get(prompt(1, 5)).tokens == 8


# -- memory and files ------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_the_cpu_pool(open_face: OpenFace, device: str) -> None:
    face = open_face(device=device)
    tokens = prompt(1, 4)
    face.put(tokens)
    cpu = face.engine.manager.cpu
    memory = cpu.extents.memory(slot_of(face.engine, tokens, 2, "cpu"))
    memory[face.engine.layout.page_bytes - 1] ^= 0x80
    (problem,) = face.engine.check().problems
    assert "layer 2" in problem
    assert "differ from the stored ones" in problem
    report = face.get(tokens)
    assert report.pages == (LOADED, LOADED, PageStatus.CHECKSUM, LOADED)
    assert report.tokens == 8
    assert misses(face.engine) == {"checksum": 1}
    assert face.tiers(tokens) == ("cpu", "cpu", "ssd", "cpu")  # the SSD has it whole
    assert face.get(tokens).tokens == 16


def test_a_flipped_bit_in_the_padding_is_nobodys(open_face: OpenFace, slab: Path) -> None:
    face = open_face()
    tokens = prompt(1, 2)
    face.put(tokens)
    cpu, page_bytes = face.engine.manager.cpu, face.engine.layout.page_bytes
    cpu.extents.memory(slot_of(face.engine, tokens, 1, "cpu"))[page_bytes] ^= 1
    flip_file(slab / "slab-0.bin", offset_of(face.engine, tokens, 1) + page_bytes)
    assert face.get(tokens).tokens == 8
    face.drop("cpu")
    assert face.get(tokens).tokens == 8


@pytest.mark.parametrize("cpu", [None, 6])
def test_any_bit_of_a_stored_page(open_face: OpenFace, slab: Path, cpu: int | None) -> None:
    """A sample of all bits, through the whole engine, by changing the file."""
    face = open_face(cpu=cpu)
    tokens, layout = prompt(1, 3), face.engine.layout
    rng = random.Random(1)
    ends = [0, 8 * layout.page_bytes - 1, *(8 * start for start, _ in layout.layer_bounds)]
    for bit in [*ends, *(rng.randrange(8 * layout.page_bytes) for _ in range(30))]:
        put_and_drop(face, tokens)
        flip_file(slab / "slab-0.bin", offset_of(face.engine, tokens, 1) + bit // 8, bit % 8)
        assert face.get(tokens).pages == (LOADED, PageStatus.CHECKSUM, LOADED), bit
    assert misses(face.engine) == {"checksum": 35}


@pytest.mark.parametrize(("verify", "found"), [("always", 4), ("once", 12)])
def test_pages_of_the_cpu_tier_are_checked_always_or_once(open_face: OpenFace, verify: str, found: int) -> None:
    face = open_face(load={"verify": verify}, ssd=None)
    tokens = prompt(1, 3)
    face.put(tokens)
    cpu = face.engine.manager.cpu
    cpu.extents.checksums[slot_of(face.engine, tokens, 1, "cpu")] ^= 1  # the bytes are good
    assert face.get(tokens).tokens == found
    face.engine.close()
