"""Loads by layers: models whose layers go in groups, and what a forward would read of each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from gdscache import PageStatus
from gdscache.errors import DeadlineError
from gdscache.load.handle import LayerwiseLoad
from gdscache.pages.layout import GroupSizes, PageLayout, read_groups
from tests.support.faults import FaultRule
from tests.support.faulty import Fault
from tests.support.helpers import MHA, Bytes, Host, Planes, expected, read_page, until

FAULTY = "tests.support.faulty:FaultyTransport"

SOON = 0.5  # seconds of a deadline that is to pass

CANCELLED, DEADLINE, LOADED = PageStatus.CANCELLED, PageStatus.DEADLINE, PageStatus.LOADED

PAGES = 4

# Six layers of 4,608 bytes: in groups (0), (1, 2), (3, 4), (5), no border of which lies on a sector.
EVEN = MHA | {"layers": 6, "head_dim": 72}

UNEVEN = {  # layers of 3,312 and 7,712 bytes
    "name": "tiny",
    "layers": 10,
    "dtype": "bfloat16",
    "page_tokens": 4,
    "planes": [
        {"name": "k", "shape": [4, 72]},
        {"name": "v", "shape": [4, 30]},
        {"name": "scale", "shape": [3], "dtype": "float32"},
        {"name": "index", "shape": [1100], "dtype": "float8_e4m3fn", "layers": [0, 3]},
    ],
}

MODELS = {"even": EVEN, "uneven": UNEVEN}

SIZES = GroupSizes(least=4096, first=1)


def groups_of(host: Host) -> tuple[range, ...]:
    groups = read_groups(host.layout, PAGES, SIZES)
    assert len(groups) >= 4
    return groups


def lies(host: Host, tokens: Sequence[int], page: int) -> Callable[[int], bool]:
    """Whether a request is for this page, wherever in it."""
    slot = host.engine.manager.tiers["ssd"].index.slot(host.engine.pages(tokens)[page].key)
    return lambda offset: offset // host.layout.extent_bytes == slot


def layer_bytes(planes: Planes, layout: PageLayout, layer: int, blocks: Sequence[int]) -> Bytes:
    return read_page([planes[layer]], layout, blocks)


def right(host: Host, layer: int, key: bytes) -> Bytes:
    start, stop = host.layout.layer_bounds[layer]
    return expected(host.layout, key)[start:stop]


def seen(host: Host, load: LayerwiseLoad, blocks: list[int], layer: int) -> list[Bytes]:
    """What a forward would read of each page in this layer."""
    load.wait(layer)
    return [layer_bytes(host.planes, host.layout, layer, host.page(blocks, i)) for i in range(PAGES)]


def whole(host: Host, load: LayerwiseLoad, blocks: list[int], keys: list[bytes], layers: range | None = None) -> None:
    """Each layer of every page is right when its wait returns."""
    for layer in range(host.layout.n_layers) if layers is None else layers:
        for i, found in enumerate(seen(host, load, blocks, layer)):
            assert np.array_equal(found, right(host, layer, keys[i])), f"layer {layer} of page {i}"


def met(rule: FaultRule, times: int = 1) -> None:
    until(lambda: rule.met >= times, "the group is read")


def waits(load: LayerwiseLoad, layer: int) -> None:
    with pytest.raises(DeadlineError):
        load.wait(layer, 0.1)


BAD = {
    Fault.EIO: PageStatus.IO_ERROR,
    Fault.SHORT: PageStatus.SHORT_READ,
    Fault.FLIP: PageStatus.CHECKSUM,
    Fault.ZERO: PageStatus.CHECKSUM,
}


def quarantined(host: Host) -> dict[str, Any]:
    found: dict[str, Any] = host.engine.stats()["tiers"]["ssd"]["quarantine"]
    return found
