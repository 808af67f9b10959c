"""`gdscache replay` against an engine that moves every byte of the same trace: it finds what the simulation finds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gdscache.commands.replay import report as reports
from gdscache.commands.replay.setup import config_of
from gdscache.commands.replay.trace import Request, Workload, expand
from gdscache.config import Config
from gdscache.engine.engine import CacheEngine
from gdscache.limits import LIMITS
from tests.support.real_replay import RealOutcome, namespace_of, replay_real, tokens_of, with_keys
from tests.support.replays import adds_up, make, problems, run
from tests.support.traces import conversation, needs_conversation, request

pytestmark = pytest.mark.suite

REQUESTS = 2_000

# Every tier is full most of the time, and each policy is there with others than its default. The CPU tier always has
# room for a whole prompt beside what is dirty: a store in several rounds depends on how fast the writer is meanwhile.
POLICIES: dict[str, tuple[str, ...]] = {
    "write_through": (),
    "no_cpu_tier": ("cpu=null",),
    "no_ssd_tier": ("ssd=null",),
    "selective": ("store.write_policy=write_through_selective", "eviction=lru"),
    "write_back": ("store.write_policy=write_back", "eviction=lru"),
    "write_back_in_bulk": ("store.write_policy=write_back",),
    "second_offer": ("store.admission=second_offer",),
    "tinylfu": ("store.admission=tinylfu", "eviction=lru"),
    "back_and_tinylfu": ("store.write_policy=write_back", "store.admission=tinylfu"),
    "endurance": ("ssd.endurance=64KiB",),
}


def conversations(requests: int, seed: int = 0) -> list[Request]:
    """People who share a few system prompts and come back with longer prompts; some blocks are partial."""
    draw, blocks = random.Random(seed), iter(range(1 << 30))
    starts = [[next(blocks) for _ in range(draw.randint(1, 6))] for _ in range(4)]
    open_: list[list[int]] = []
    found = []
    for at in range(requests):
        if not open_ or draw.random() < 0.3:
            open_.append(list(draw.choice(starts)))
        chat = open_[-1 - min(int(draw.expovariate(0.2)), len(open_) - 1)]
        chat += [next(blocks) for _ in range(draw.randint(1, 8))]
        found.append(request(chat, 512 * len(chat) - draw.choice([0, 0, 7]), timestamp=at))
        if 512 * len(chat) != found[-1].input_tokens:
            chat.pop()  # a partial block is not what the next turn goes on from
    return found


def agree(requests: Sequence[Request], sets: Sequence[str], directory: Path, cpu: int, ssd: int) -> RealOutcome:
    """Replay both ways, and hold every request of one against the other."""
    config = config_of(make(cpu, ssd).dump(), ["ssd.transport=posix", *sets])
    work = with_keys(expand(requests), namespace_of(config))
    outcome = replay_real(work, config, directory)
    tiers, simulated = run(work, config, limits=LIMITS)
    modelled = reports.describe([tiers], simulated, work, [0.0] * len(requests))
    assert problems(tiers) == []
    assert adds_up(modelled)
    assert outcome.problems == ()
    assert outcome.failed == {}
    differing = [
        (i, mine, other)
        for i, (mine, other) in enumerate(zip(outcome.found, simulated.found, strict=True))
        if mine != other
    ]
    assert differing == []
    assert dict(outcome.dropped) == {c: n for c, n in modelled["stores"]["dropped_pages"].items() if n}
    stats: Mapping[str, Any] = outcome.stats
    for name, tier in modelled["tiers"].items():
        assert stats["tiers"][name]["evictions"] == tier["evictions"], name
        assert stats["stored"].get(name, 0) == tier["stored_pages"], name
    if modelled["ssd"] is not None:
        assert stats.get("refused", {}) == modelled["ssd"]["refused_pages"]
    return outcome


@pytest.mark.parametrize("name", POLICIES)
def test_the_engine_finds_what_the_simulation_finds(tmp_path: Path, name: str) -> None:
    requests = conversations(150)
    outcome = agree(requests, POLICIES[name], tmp_path, 180, 400)
    evictions = {tier: about["evictions"] for tier, about in outcome.stats["tiers"].items()}
    assert "cpu" not in evictions or evictions["cpu"] > 50
    hits = sum(found.cpu + found.ssd for found in outcome.found)
    assert hits > 50
    assert sum(found.loaded for found in outcome.found) > 50


@pytest.mark.soak
@pytest.mark.timeout(1200)
@needs_conversation
@pytest.mark.parametrize("name", POLICIES)
def test_the_engine_finds_what_the_simulation_finds_on_the_conversation_trace(tmp_path: Path, name: str) -> None:
    requests = conversation()[:REQUESTS]
    outcome = agree(requests, POLICIES[name], tmp_path, 700, 3000)
    assert len(outcome.found) == REQUESTS
    assert all(tier["evictions"] for name, tier in outcome.stats["tiers"].items() if name == "cpu")


@needs_conversation
def test_the_first_requests_of_the_conversation_trace(tmp_path: Path) -> None:
    agree(conversation()[:200], (), tmp_path, 200, 1000)


def test_pages_have_the_keys_of_their_tokens(tmp_path: Path) -> None:
    work = expand([request([7, 8]), request([7, 9, 10])], 256)
    config = config_of(make(8, None).dump(), ["model.page_tokens=256"])
    named = with_keys(work, namespace_of(config))
    planes = [[torch.zeros((8, 256, 8), dtype=torch.uint8)]]
    with CacheEngine.from_config(config, planes=planes) as engine:
        for i, prompt in enumerate(work.prompts):
            assert engine.pages(tokens_of(work, i)) == [named.names[number] for number in prompt.pages]


def test_a_config_of_its_own_geometry(tmp_path: Path) -> None:
    """Several layers and planes; pages that are not a whole number of 4 KiB."""
    model = {"name": "m", "layers": 3, "kv_heads": 2, "head_dim": 24, "page_tokens": 128}
    fields = {
        "model": model,
        "gpu": {"device": "cpu"},
        "cpu": {"capacity": 200 * 72 * 1024},
        "ssd": {"path": "elsewhere", "capacity": 500 * 72 * 1024, "transport": "posix"},
    }
    config = Config.from_dict(fields)
    work: Workload = expand(conversations(50), 128)
    work = with_keys(work, namespace_of(config))
    outcome = replay_real(work, config, tmp_path)
    assert outcome.found == run(work, config, limits=LIMITS)[1].found
    assert any(found.loaded for found in outcome.found)
    assert outcome.stats["tiers"]["ssd"]["evictions"] > 0
    assert not Path("elsewhere").exists()
