"""Engines evict in the order that their configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from gdscache import CacheEngine
from gdscache.config import EvictionOrder
from gdscache.policies import POLICIES
from tests.support.helpers import make_config, prompt, run, settle


@pytest.mark.parametrize("policy", get_args(EvictionOrder))
def test_an_engine_evicts_as_its_configuration_says(policy: str, slab: Path) -> None:
    """Three small tiers under more pages than they hold, and again after a restart."""
    data = make_config(slab, gpu=6, cpu=6, ssd=10)
    data["eviction"] = policy
    for _ in range(2):
        with CacheEngine.from_config(data) as engine:
            for tier in engine.manager.tiers.values():
                assert type(tier.index.orders.policy) is POLICIES[policy]
            for seed in (1, 2, 1, 3, 4, 1, 5):
                run(engine, prompt(seed, 4, extra=1))
            settle(engine)
            for name_, tier in engine.manager.tiers.items():
                assert tier.index.check(elsewhere=list(getattr(tier, "_returned", ()))) == [], name_
                assert len(tier.index) > 0
            assert any(tier.index.evictions for tier in engine.manager.tiers.values())
