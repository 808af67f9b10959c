"""Engines whose stores go by a write policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gdscache.store.plan import WATERMARKS
from tests.support.faulty import PLAN
from tests.support.helpers import SMALL, Host, make_config, settle
from tests.support.write_parts import FAULTY


@pytest.fixture
def policy_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines over the same directory, with the write policy named; all of them settled and closed at the end."""
    PLAN.reset()
    hosts: list[Host] = []

    def opened(policy: str, **options: Any) -> Host:
        hits = options.pop("hits", 2)
        monkeypatch.setattr("gdscache.store.plan.WATERMARKS", options.pop("watermarks", WATERMARKS))
        sections = {"store": {"write_policy": policy, **options.pop("store", {})}}
        config = make_config(tmp_path / "cache", transport=FAULTY, **(sections | options))
        host = Host(config, limits=dataclasses.replace(SMALL, write_hits=hits))
        hosts.append(host)
        return host

    yield opened
    PLAN.reset()
    for host in hosts:
        if not host.engine._closing.begun:
            settle(host.engine)
            host.engine.close()
