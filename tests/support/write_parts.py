"""Engines with a write policy, and what has been written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gdscache.storage.base import Op
from tests.support.faulty import PLAN
from tests.support.helpers import Host, make_config, settle

FAULTY = "tests.support.faulty:FaultyTransport"


@pytest.fixture
def open_host(tmp_path: Path) -> Any:
    """Engines over the same directory, with the write policy named; all of them settled and closed at the end."""
    PLAN.reset()
    hosts: list[Host] = []

    def opened(policy: str, **options: Any) -> Host:
        hits, marks = options.pop("hits", 2), options.pop("marks", {})
        sections = {"store": {"write_policy": policy, "write_hits": hits, **options.pop("store", {})}}
        config = make_config(tmp_path / "cache", transport=FAULTY, **(sections | options))
        config["cpu"] |= marks
        host = Host(config)
        hosts.append(host)
        return host

    yield opened
    PLAN.reset()
    for host in hosts:
        if not host.engine._closed:
            settle(host.engine)
            host.engine.close()


def on(host: Host, tier: str, tokens: list[int]) -> list[int]:
    """The places of a prompt's pages that a tier shows."""
    with host.engine.manager.lock:
        index = host.engine.manager.tiers[tier].index
        return [i for i, page in enumerate(host.engine.pages(tokens)) if index.has(page.key)]


def dirty(host: Host) -> int:
    return int(host.engine.stats()["tiers"]["cpu"]["dirty_pages"])


def written() -> int:
    """Writes that the transport has done."""
    return len(PLAN.moved[Op.WRITE])
