"""Every slot is NaN before a load: a forward that reads a layer too early, or goes on with a bad page, has one in hand.

Beside test_layerwise.py, which fails reads of every page in every group under late reads: here all stages are late,
pages come from every place and mix of places, and the forward is a thread (with a stream of its own on a GPU) that ends
in `settle`.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gdscache import LoadReport, PageStatus
from gdscache.load import run as load_run
from gdscache.load.handle import Gap, LayerwiseLoad
from gdscache.pages.layout import GroupSizes, read_groups
from gdscache.storage.base import Op
from tests.support import fake_gpu
from tests.support.faults import FaultRule
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    MLA,
    WAIT,
    Bytes,
    Host,
    OpenHost,
    drop_from,
    prompt,
    read_page,
    settle,
    write_page,
)
from tests.support.layerwise_parts import BAD, EVEN, LOADED
from tests.support.pairs import pairs

PAGES = 5
LATE = 0.003  # seconds, at most, at each point
# Six layers of 4,608 bytes a page each, in several groups.
MODELS: dict[str, dict[str, Any]] = {
    "mha": EVEN,
    "mla": MLA | {"layers": 6, "kv_lora_rank": 512, "rope_dim": 64},
}
# Options of the engine, how many pages are in the CPU tier, and from where `load` then brings them.
PLACES: dict[str, tuple[dict[str, Any], int, dict[str, int]]] = {
    "cpu": ({"cpu": 16}, PAGES, {"cpu": PAGES}),
    "ssd via cpu": ({"cpu": 16}, 0, {"ssd": PAGES}),
    "cpu and ssd": ({"cpu": 16}, 2, {"cpu": 2, "ssd": 3}),
    "bounce": ({"cpu": None, "bounce": 8}, 0, {"ssd": PAGES}),
    "cpu, ssd and bounce": ({"cpu": 3, "bounce": 8}, 2, {"cpu": 2, "ssd": 3}),  # one slot for three pages of the SSD
}


@pytest.fixture(autouse=True, params=["host", "GPU"])
def _small_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And the planes are the host's, or as on a GPU."""
    if request.param == "GPU":
        fake_gpu.use(monkeypatch, "staged")
        fake_gpu.driver().fake_delay(int(LATE * 1e6 / 4))  # before each thing that a stream does
    monkeypatch.setattr(load_run, "GROUP_SIZES", GroupSizes(least=4096, first=1))
    monkeypatch.setattr(load_run, "copy_groups", lambda layout, pages: read_groups(layout, pages, load_run.GROUP_SIZES))
    PLAN.reset()
    yield
    PLAN.reset()
    if request.param == "GPU":
        fake_gpu.driver().fake_delay(0)


def numbers(host: Host, key: bytes) -> Bytes:
    """The bytes of a page, of which no element is a NaN."""
    draw = np.random.default_rng(int.from_bytes(key[:8], "little"))
    values = torch.from_numpy(draw.standard_normal(host.layout.page_bytes // 2)).to(torch.bfloat16)
    return values.view(torch.uint8).numpy()


def poison(host: Host) -> None:
    for tensors in host.planes:
        for tensor in tensors:
            tensor.fill_(torch.nan)


class Forward(threading.Thread):
    """Looks at each layer of the load's pages as soon as `wait` lets it, settles, and looks again."""

    def __init__(self, host: Host, load: LayerwiseLoad, blocks: list[int], keys: list[bytes]) -> None:
        super().__init__(name="forward")
        self.host, self.load, self.blocks, self.keys = host, load, blocks, keys
        self.early: list[list[torch.Tensor]] = []
        self.settled: list[list[torch.Tensor]] = []
        self.gaps: list[Gap] = []
        self.report: LoadReport | None = None

    def run(self) -> None:
        device = self.host.planes[0][0].device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            for layer in range(len(self.host.planes)):
                self.load.wait(layer, WAIT)
                self.early.append(self._rows(layer))
            self.report = self.load.settle(self._recompute, WAIT)
            self.settled = [self._rows(layer) for layer in range(len(self.host.planes))]
            if stream is not None:
                stream.synchronize()

    def _rows(self, layer: int) -> list[torch.Tensor]:
        rows = torch.tensor(self.blocks, device=self.host.planes[layer][0].device)
        return [plane.index_select(0, rows) for plane in self.host.planes[layer]]

    def _recompute(self, gap: Gap) -> None:
        self.gaps.append(gap)
        for page in range(gap.first // 4, gap.stop // 4):
            data = numbers(self.host, self.keys[page])
            write_page(self.host.planes, self.host.layout, [self.blocks[page]], data)


def page_of(planes: list[list[torch.Tensor]], host: Host, page: int) -> Bytes:
    return read_page(planes, host.layout, [page])


def spoil(host: Host, tokens: list[int], page: int, place: str, draw: random.Random) -> PageStatus:
    """Make the load of this page fail, in one way or another."""
    key = host.engine.pages(tokens)[page].key
    if place == "cpu":
        cpu = host.engine.manager.cpu
        entry = cpu.index.get(key)
        cpu.extents.memory(entry.slot)[draw.randrange(host.layout.page_bytes)] ^= 1 << draw.randrange(8)
        return PageStatus.CHECKSUM
    slot, extent = host.engine.manager.tiers["ssd"].index.slot(key), host.layout.extent_bytes
    fault = draw.choice(list(BAD))
    PLAN.add(FaultRule(fault, Op.READ, lambda path, offset: offset // extent == slot))
    return BAD[fault]


def begin_again(host: Host, tokens: list[int], resident: int) -> None:
    host.engine.clear()  # with what was bad
    host.keep(tokens)
    if host.engine.manager.cpu is not None:
        drop_from(host.engine, "cpu")
    if resident:
        assert host.load(tokens[: 4 * resident]).tokens == 4 * resident


@pytest.mark.parametrize(("model", "place"), pairs(MODELS, PLACES))
def test_no_layer_is_seen_early_and_no_bad_page_is_used(
    open_host: OpenHost, device: str, model: str, place: str
) -> None:
    options, resident, sources = PLACES[place]
    host = open_host(device=device, model=MODELS[model], transport="tests.support.faulty:FaultyTransport", **options)
    host.data = lambda key: numbers(host, key)
    tokens = prompt(1, PAGES)
    draw = random.Random(f"{model} {place}")
    for bad in (None, *range(PAGES)):
        begin_again(host, tokens, resident)
        tiers = host.engine.lookup(tokens).tiers
        assert {tier: tiers.count(tier) for tier in tiers} == sources
        poison(host)
        status = LOADED if bad is None else spoil(host, tokens, bad, tiers[bad], draw)
        PLAN.add(FaultRule(Fault.DELAY, Op.READ, rate=0.5, seconds=LATE))
        load, blocks, keys = host.begin(tokens)
        forward = Forward(host, load, blocks, keys)
        forward.start()
        forward.join(2 * WAIT)
        assert not forward.is_alive(), "a load hangs"
        report = forward.report
        assert report is not None, "a load raised"
        PLAN.reset()

        assert report.pages == tuple(status if page == bad else LOADED for page in range(PAGES))
        for page in range(PAGES):
            right = numbers(host, keys[page])
            if page != bad:
                seen = page_of(forward.early, host, page)
                assert np.array_equal(seen, right), f"page {page} was seen before it was there ({bad} is bad)"
            assert np.array_equal(page_of(forward.settled, host, page), right), f"page {page} after settle()"
        assert forward.gaps == ([] if bad is None else [Gap(0, 4 * bad, 4 * PAGES)])
        others = [block for block in range(64) if block not in blocks]
        assert all(bool(t[others].isnan().all()) for planes in host.planes for t in planes), "another slot was written"
        host.give(blocks + [host.free.pop() for _ in range(len(host.free))])  # no NaN left
        settle(host.engine)
