"""Eviction orders are brought up to date behind the requests, and by nobody who waits."""

from __future__ import annotations

import pytest

from tests.support.helpers import OpenHost, drop_from, prompt, until

PAGES = 12


@pytest.mark.parametrize("kept", [0, 3])
def test_loads_and_writes_leave_few_changes_behind(open_host: OpenHost, kept: int) -> None:
    host = open_host(gpu=0)
    host.engine.manager.changes_kept, host.engine.manager.changes_at_once = kept, 2
    indexes = {name: tier.index for name, tier in host.engine.manager.tiers.items()}
    tokens = prompt(1, PAGES)
    host.keep(tokens)
    until(lambda: all(index.orders.waiting <= kept for index in indexes.values()), "orders up to date behind a store")
    drop_from(host.engine, "cpu")
    load, blocks, keys = host.begin(tokens)
    host.finish(load, blocks, keys)
    until(lambda: all(index.orders.waiting <= kept for index in indexes.values()), "orders up to date behind a load")
    assert all(index.check() == [] for index in indexes.values())
