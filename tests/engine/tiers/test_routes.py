"""The ways between SSD and planes: what can be had, what is chosen, and that both bring the same bytes."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from gdscache import CacheEngine
from gdscache.config import SsdConfig
from gdscache.errors import ConfigError, ShortIOError, TransportUnavailableError
from gdscache.index.index import PageIndex
from gdscache.storage.base import Switch
from gdscache.storage.nixl import NixlTransport
from gdscache.tiers import ssd_route as routes
from gdscache.tiers.ssd import SsdTier
from tests.support.helpers import MHA, MLA, Host, drop_from, layout_of, make_config, prompt, raising, settle
from tests.support.index_machine import chain, put

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ANY: Any = None  # nothing that could be measured: what looks at it fails


def choose(asked: Any, *kinds: str, device: torch.device = CUDA, keep: bool = True) -> routes.RouteChoice:
    io: Any = SimpleNamespace(transport=SimpleNamespace(memory_kinds=frozenset(kinds)))
    return routes.choose(ANY, device, SsdConfig(path=Path("slab"), route=asked), io, ANY, keep=keep)


def test_what_cannot_be_had_is_refused() -> None:
    for kinds, device, cause in [
        (("host",), CUDA, "moves no GPU memory"),
        (("host", "cuda"), CPU, "the planes are on cpu"),
    ]:
        with pytest.raises(TransportUnavailableError, match=cause) as caught:
            choose("direct", *kinds, device=device)
        assert "ssd.route" in caught.value.hint
    with pytest.raises(TransportUnavailableError, match=r"ssd\.route is via_cpu"):
        choose("via_cpu", "cuda", keep=False)
    with pytest.raises(TransportUnavailableError, match="there is a CPU tier"):
        choose("auto", "cuda")


def test_what_can_be_had_is_taken_without_measuring(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gdscache"):
        assert choose("direct", "host", "cuda").route == "direct"
        assert choose("via_cpu", "host", "cuda").route == "via_cpu"
        assert choose("auto", "host", device=CUDA).route == "via_cpu"
        assert choose("auto", "host", "cuda", device=CPU).route == "via_cpu"
        assert choose("auto", "cuda", keep=False).route == "direct"
    assert [record.getMessage().split(":")[1] for record in caplog.records] == [
        f" pages go {route}" for route in ("direct", "via_cpu", "via_cpu", "via_cpu", "direct")
    ]


def test_a_tier_that_nobody_loads_from_has_no_route(tmp_path: Path) -> None:
    layout = layout_of(MHA)
    tier = SsdTier(layout, SsdConfig(path=tmp_path, capacity=8 * layout.extent_bytes), "cpu", threading.RLock())
    with contextlib.closing(tier):
        assert (tier.direct, tier.describe()["route"]) == (False, None)


def test_the_config_knows_the_routes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssd\.route"):
        CacheEngine.from_config(make_config(tmp_path, ssd_options={"route": "fastest"}))
    with pytest.raises(TransportUnavailableError, match="the planes are on cpu"):
        CacheEngine.from_config(make_config(tmp_path, ssd_options={"route": "direct"}))
    with CacheEngine.from_config(make_config(tmp_path, ssd_options={"route": "via_cpu"})) as engine:
        route = engine.stats()["tiers"]["ssd"]["route"]
    assert route == {"route": "via_cpu", "reason": "configured", "gb_per_second": {}}


@pytest.mark.parametrize("model", [MHA, MLA], ids=["mha", "mla"])
def test_pages_that_are_not_kept_pass_through_the_bounce_reserve(tmp_path: Path, model: dict[str, Any]) -> None:
    host = Host(make_config(tmp_path, model=model, cpu=8, ssd=16, bounce=4))
    with contextlib.closing(host.engine):
        tokens = prompt(1, 6)
        host.store(tokens)
        host.engine.drain(20)
        drop_from(host.engine, "cpu")
        host.engine.loader.keep = False
        assert host.load(tokens).bytes_by_tier == {"ssd": 6 * host.layout.page_bytes}
        assert host.engine.stats()["tiers"]["cpu"]["pages"] == 0
        host.engine.loader.keep = True
        host.load(tokens)
        assert host.engine.stats()["tiers"]["cpu"]["pages"] == 6
        settle(host.engine)


def test_free_slots_are_tried_where_there_are_enough_and_may_be_written() -> None:
    index = PageIndex(6)
    put(index, chain(1, 3))
    slots, free = routes._slots(index, 2)
    assert (slots.tolist(), free) == ([3, 4], True)
    slots, free = routes._slots(index, 4)
    assert (slots.tolist(), free) == ([0, 1, 2, 3], False)


@pytest.mark.parametrize(
    ("reading", "copying", "straight", "byte", "route"),
    [
        (2.0, 1.0, 1.5, 0, "direct"),
        (1.0, 2.0, 1.5, 0, "direct"),
        (1.0, 1.0, 1.5, 0, "via_cpu"),
        (2.0, 1.0, 1.5, 1, "via_cpu"),  # other bytes
    ],
)
def test_the_faster_route_is_taken_where_its_bytes_are_right(
    monkeypatch: pytest.MonkeyPatch, reading: float, copying: float, straight: float, byte: int, route: str
) -> None:
    times = iter((reading, copying, straight))
    monkeypatch.setattr(routes, "_move", mock.Mock())
    monkeypatch.setattr(routes, "_copy", torch.Tensor.copy_)
    monkeypatch.setattr(routes, "_best", lambda action: (action(), next(times))[1])
    host: Any = SimpleNamespace(slots=2, rows=torch.zeros(2, 8), buffer=mock.Mock(), layout=mock.Mock(extent_bytes=8))
    there: Any = SimpleNamespace(rows=torch.full((2, 8), float(byte)))
    index = PageIndex(2)
    put(index, chain(1, 2))
    with contextlib.ExitStack() as undo:
        assert routes._measured(mock.Mock(), index, host, there, undo).route == route


# -- on a GPU --------------------------------------------------------------------------------------------------------


def need(module: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


@pytest.fixture
def kvikio() -> None:
    need("kvikio")


class NixlGdsMt(NixlTransport):
    """NIXL with GDS_MT, also where cuFile goes through its own compat mode: no configuration asks for that."""

    def __init__(self, threads: int, direct_io: Switch) -> None:
        super().__init__(threads, direct_io, gds=True)


@pytest.mark.gpu
@pytest.mark.parametrize("cpu", [None, 8])
@pytest.mark.parametrize(
    ("transport", "route"),
    [
        ("kvikio", "direct"), ("kvikio", "via_cpu"), ("kvikio", "auto"), ("nixl", "via_cpu"),
        ("tests.engine.tiers.test_routes:NixlGdsMt", "direct"),
        ("tests.engine.tiers.test_routes:NixlGdsMt", "via_cpu"), ("tests.engine.tiers.test_routes:NixlGdsMt", "auto"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", [MHA, MLA], ids=["mha", "mla"])
def test_every_route_brings_the_same_bytes(
    tmp_path: Path, request: pytest.FixtureRequest, model: dict[str, Any], transport: str, route: str, cpu: int | None
) -> None:
    need("kvikio" if transport == "kvikio" else "nixl")
    if ":" in transport:
        request.getfixturevalue("gds_mt")
    options = {"route": route, "gds": "off"}
    config = make_config(
        tmp_path, device="cuda", model=model, cpu=cpu, ssd=32, bounce=8, transport=transport, ssd_options=options
    )
    tokens = prompt(3, 9)
    for _ in range(2):  # once more after a restart
        host = Host(config)
        with contextlib.closing(host.engine):
            if not host.engine.lookup(tokens).tokens:
                host.store(tokens)
                host.engine.drain(20)
            else:
                assert host.load(tokens).bytes_by_tier == {"ssd": 9 * host.layout.page_bytes}
            if cpu is not None:
                drop_from(host.engine, "cpu")
            assert host.load(tokens).bytes_by_tier == {"ssd": 9 * host.layout.page_bytes}
            chosen = host.engine.stats()["tiers"]["ssd"]["route"]
            assert route in ("auto", chosen["route"])
            if route == "auto":
                assert min(chosen["gb_per_second"].values()) > 0
            kept = host.engine.stats()["tiers"].get("cpu", {}).get("pages", 0)
            assert kept == (0 if chosen["route"] == "direct" or cpu is None else 8)
            settle(host.engine)


@pytest.mark.gpu
@pytest.mark.usefixtures("kvikio")
def test_a_route_that_fails_while_it_is_measured_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_move", raising(ShortIOError("a read moved 0 of 8192 bytes")))
    config = make_config(
        tmp_path, device="cuda", cpu=None, ssd=32, bounce=8, transport="kvikio", ssd_options={"gds": "off"}
    )
    host = Host(config)
    with contextlib.closing(host.engine):
        chosen = host.engine.stats()["tiers"]["ssd"]["route"]
        assert chosen["route"] == "via_cpu"
        assert "moved 0 of 8192" in chosen["reason"]
