"""What prefills take in vLLM: which steps say it, and what the engine is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache.integrations import prefills as timed
from gdscache.integrations.prefills import Prefills
from gdscache.integrations.vllm.requests import prefill_of


def step(scheduled: dict[str, int], new: dict[str, int], cached: dict[str, int]) -> Any:
    """A `SchedulerOutput`: tokens by request, and tokens before them of new requests and of others."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=n) for name, n in new.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
    )


@pytest.mark.parametrize(
    ("scheduled", "new", "cached", "expected"),
    [
        ({"a": 500}, {"a": 0}, {}, (500, 0)),
        ({"a": 500}, {"a": 96}, {}, (500, 96)),
        ({"b": 16}, {}, {"b": 1024}, (16, 1024)),
        ({"b": 15}, {}, {"b": 1024}, None),  # a few tokens
        ({"b": 1}, {}, {"b": 1024}, None),  # a decoding step
        ({"a": 500, "b": 1}, {"a": 0}, {"b": 40}, None),  # of whom would its time be?
        ({}, {}, {}, None),
        ({"a": 500}, {}, {}, None),
    ],
)
def test_steps_about_one_prompt(scheduled: Any, new: Any, cached: Any, expected: tuple[int, int] | None) -> None:
    assert prefill_of(step(scheduled, new, cached)) == expected


class Told:
    def __init__(self) -> None:
        self.prefills: list[tuple[int, int, float]] = []

    def observe_prefill(self, tokens: int, before: int, seconds: float) -> None:
        self.prefills.append((tokens, before, seconds))


def test_the_engine_is_told_how_long_the_pass_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(timed, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    told = Told()
    prefills = Prefills(told.observe_prefill, torch.device("cpu"))
    for prefill, seconds in (((500, 96), 0.25), (None, 1.0), ((16, 0), 0.5), ((16, 0), 0.0)):
        prefills.begin(prefill)
        now[0] += seconds
        prefills.end()
        now[0] += 5.0  # between two steps
    prefills.end()
    assert told.prefills == [(500, 96, 0.25), (16, 0, 0.5)]


class Event:
    """An event that keeps the time of a GPU whose clock stands still until somebody moves it."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None
        self.done = False

    def record(self, stream: Any) -> None:
        self.at = Event.clock

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: Any) -> float:
        return float((other.at - self.at) * 1e3)


def test_on_a_gpu_nothing_waits_for_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []

    def event(**options: Any) -> Event:
        made.append(Event(**options))
        return made[-1]

    monkeypatch.setattr(timed.torch.cuda, "Event", event)
    monkeypatch.setattr(timed.torch.cuda, "current_stream", lambda device: None)
    told = Told()
    prefills = Prefills(told.observe_prefill, torch.device("cuda:0"))
    for tokens in (100, 200):
        prefills.begin((tokens, 0))
        Event.clock += tokens / 1000
        prefills.end()
    assert told.prefills == []
    for one in made:
        one.done = True
    prefills.begin(None)
    prefills.end()
    assert told.prefills == [(100, 0, pytest.approx(0.1)), (200, 0, pytest.approx(0.2))]
