"""A move is data: it can be pickled, sent to another process, carried out there, recorded and played back."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from gdscache.extents.host import HostExtents
from gdscache.kernels.copies import PageCopies
from gdscache.moves import PLANES, Move, PageStatus, Priority, Way
from gdscache.moves.native import Machine, NativeExecutor
from gdscache.pages.checksum import layer_checksums
from gdscache.pages.planes import PagedPlanes
from tests.support.helpers import MHA, Host, layout_of, prompt
from tests.support.processes import CONTEXT

LAYOUT = layout_of(MHA)
SLOTS = 8


class Heard:
    """What a move said."""

    def __init__(self) -> None:
        self.statuses: dict[int, str] = {}
        self.layers: set[int] = set()

    def judged(self, rows: Any, status: PageStatus) -> None:
        self.statuses.update(dict.fromkeys(rows.tolist(), status.value))

    def ready(self, layers: range, event: Any) -> None:
        self.layers.update(layers)


def machine() -> tuple[Machine, HostExtents]:
    """Planes, and a memory whose slots have bytes that every process makes alike."""
    memory = HostExtents(LAYOUT, SLOTS * LAYOUT.extent_bytes, "off")
    for slot in range(SLOTS):
        draw = np.random.default_rng(slot)
        memory.memory(slot)[:] = draw.integers(0, 256, LAYOUT.extent_bytes, dtype=np.uint8).tobytes()
        memory.checksums[slot] = layer_checksums(memory.memory(slot), LAYOUT.layer_bounds)
    planes = PagedPlanes.allocate(LAYOUT, SLOTS, torch.device("cpu"))
    return Machine(PageCopies(planes), {"cpu": memory}, {}), memory


def carry_out(pickled: bytes) -> tuple[dict[int, str], list[int], str]:
    """Carry a move out; what it said, and what the planes have then."""
    parts, _ = machine()
    heard, executor = Heard(), NativeExecutor(parts)
    try:
        end = executor.finish(executor.begin(pickle.loads(pickled), (), heard).end())
    finally:
        executor.close()
    assert end.error is None
    planes = b"".join(t.view(torch.uint8).numpy().tobytes() for some in parts.copies.planes.tensors for t in some)
    return heard.statuses, sorted(heard.layers), hashlib.sha256(planes).hexdigest()


def a_load(sums: Any) -> bytes:
    slots = np.array([5, 2, 7], dtype=np.int64)
    blocks = np.array([[1], [4], [0]], dtype=np.int64)
    way = Way("cpu", PLANES, slots, blocks, sums=sums[slots])
    groups = (range(1), range(1, LAYOUT.n_layers))
    return pickle.dumps(Move(Priority.LOAD, (way,), 10.0, groups, number=7))


def test_another_process_does_the_same() -> None:
    _, memory = machine()
    move = a_load(memory.checksums)
    with CONTEXT.Pool(1) as pool:
        there = pool.apply(carry_out, (move,))
    assert there == carry_out(move)
    assert there[:2] == (dict.fromkeys(range(3), "loaded"), list(range(LAYOUT.n_layers)))


def test_the_sums_travel_with_it() -> None:
    _, memory = machine()
    memory.checksums[2, 1] += np.uint64(1)
    assert carry_out(a_load(memory.checksums))[0] == {0: "loaded", 1: "checksum", 2: "loaded"}


def test_what_an_engine_moves_is_recorded_and_played_back(open_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every move of a store, and of a load past the CPU tier, goes through pickle on its way."""
    host: Host = open_host(cpu=8, ssd=16)
    executor, record = host.engine.executor, list[bytes]()
    begin = executor.begin

    def recorded(move: Move, *others: Any, **options: Any) -> Any:
        record.append(pickle.dumps(move))
        return begin(pickle.loads(record[-1]), *others, **options)

    monkeypatch.setattr(executor, "begin", recorded)
    tokens = prompt(1, 3)
    host.keep(tokens)
    host.load(tokens)
    moves = [pickle.loads(data) for data in record]
    assert [(m.priority, len(m)) for m in moves] == [(Priority.STORE, 3), (Priority.DEMOTION, 3), (Priority.LOAD, 3)]
    load = moves[-1]
    assert {(way.source, way.target) for way in load.ways} == {("cpu", PLANES)}
    for tensors in host.planes:
        for tensor in tensors:
            tensor.zero_()
    heard = Heard()
    executor.finish(begin(load, (), heard).end())  # once more: the same bytes are in the same blocks
    assert heard.statuses == dict.fromkeys(range(3), "loaded")
    assert all(bool(tensor[load.ways[0].targets].any()) for tensors in host.planes for tensor in tensors)
