"""The scheduler's side of the vLLM connector for hybrid models: a small scheduler, and what later prompts find."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from gdscache.errors import InterfaceUnsupportedError
from gdscache.groups import pools
from gdscache.groups.base import Group, alignment
from gdscache.integrations.vllm.requests import LOOK_AGAIN_S
from tests.support.vllm_scheduler import GROUPS, GroupScheduler


def test_a_scheduler() -> None:
    run_state_machine_as_test(GroupScheduler, settings=settings(stateful_step_count=60))


# -- what is stored of a prompt is what later prompts need -------------------------------------------------------------

by_name = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
chunks = st.sampled_from([1, 3, 7, 100])


class Alone(GroupScheduler):
    """Requests come one after another, and each finds what was stored. `own`: whether vLLM has a prefix cache."""

    def __init__(self, groups: Sequence[Group], chunk: int, every: int = 0, *, own: bool = False) -> None:
        super().__init__()
        self.open(groups, every, 200, lambda page: own, chunk)

    def run(self, tokens: Sequence[int], more: int = 1) -> tuple[int, tuple[int, ...]]:
        """What was found of a request, and all its tokens when it ended."""
        request = self.ask(tuple(tokens), more)
        fetch = self.cache.fetches[-1] if self.cache.fetches else None
        found = 0 if fetch is None or fetch.released else fetch.found.tokens
        self.finish_all()
        self.read()
        return found, request.tokens


@by_name
@settings(max_examples=2 * settings.default.max_examples)
@given(prompt=st.integers(1, 40), more=st.integers(1, 20), chunk=chunks)
def test_a_prompt_is_found_again_and_with_its_answer(groups: list[Group], prompt: int, more: int, chunk: int) -> None:
    """Up to the last length at which a hit can be. The last token of the answer was not computed."""
    align, scheduler = alignment(groups), Alone(groups, chunk)
    found, tokens = scheduler.run(range(prompt), more)
    assert (found, len(tokens)) == (0, prompt + more)
    assert scheduler.run([*tokens, 99, 98, 97])[0] == (prompt + more - 1) // align * align
    assert scheduler.run(range(prompt))[0] == (prompt - 1) // align * align


@pytest.mark.parametrize("groups", [groups for name, groups in GROUPS.items() if name != "windows alone"])
@given(shared=st.integers(1, 30), own=st.integers(1, 30), chunk=chunks)
def test_where_prompts_part_the_third_one_hits(groups: list[Group], shared: int, own: int, chunk: int) -> None:
    align, scheduler = alignment(groups), Alone(groups, chunk)
    for number in (1, 2, 3):
        found, _ = scheduler.run([*range(shared), *(100 * number + i for i in range(own))])
    assert found == shared // align * align


@pytest.mark.parametrize("groups", [groups for name, groups in GROUPS.items() if name != "windows alone"])
def test_prompts_that_came_together_part_where_the_first_is_stored_by_then(groups: list[Group]) -> None:
    """A burst: the second one was looked up when it came, and nothing of the first one was stored."""
    prompts = [(*range(24), *(100 * number + i for i in range(9))) for number in (1, 2, 3)]
    first, burst = Alone(groups, 100), Alone(groups, 100)
    first.run(prompts[0])
    burst.ask(prompts[1], 1)
    burst.cache.stored |= first.cache.stored
    burst.cache.now += LOOK_AGAIN_S
    burst.finish_all()
    burst.read()
    assert burst.run(prompts[2])[0] == 24 // alignment(groups) * alignment(groups)


@by_name
@given(every=st.integers(1, 30), shared=st.integers(1, 60), chunk=chunks)
def test_windows_are_kept_every_so_many_tokens(groups: list[Group], every: int, shared: int, chunk: int) -> None:
    align, scheduler = alignment(groups), Alone(groups, chunk, every)
    step = max(align, every // align * align)
    scheduler.run(range(60))
    assert scheduler.run([*range(shared), 99, 98])[0] >= min(shared, 59) // step * step


@pytest.mark.parametrize("adapts", [True, False])
def test_while_prompts_part_often_the_second_one_hits(adapts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first one does not know where it will part, its windows are kept everywhere."""
    monkeypatch.setattr(pools, "_DENSE", 4)
    groups = GROUPS["equal pages"]
    scheduler = Alone(groups, 100, 1000)
    scheduler.table._partings = pools.Partings(groups, 1000, adapts=adapts)
    found = []
    for document in range(100, 130):
        for question in (1, 2):
            hit, _ = scheduler.run([document, *range(20), *(500 * question + i for i in range(9))])
        found.append(hit)
    assert found[0] == 0
    assert found[-1] == (20 if adapts else 0)


@by_name
@given(prompt=st.integers(1, 40), chunk=chunks)
def test_what_ours_has_lost_is_stored_again_from_vllms_own_cache(groups: list[Group], prompt: int, chunk: int) -> None:
    align, scheduler = alignment(groups), Alone(groups, chunk, own=True)
    scheduler.run(range(prompt))
    scheduler.cache.stored.clear()
    scheduler.run(range(prompt))
    scheduler.reset()
    assert scheduler.run(range(prompt))[0] == (prompt - 1) // align * align


def test_a_hit_that_needs_no_page_is_no_load() -> None:
    """Behind a chunk the next token attends to nothing."""
    scheduler = Alone([Group("0", (0,), 4, "chunk", 8)], 7)
    request = scheduler.ask(tuple(range(18)), 1)
    scheduler._land(scheduler.cache.fetches[0], "all")
    assert scheduler.table.ask(request, 0) == (16, False)
    scheduler.table.place(request, ([0, 0, 0, 0, 7],), 16)
    assert scheduler.table.take_loads() == []
    assert [fetch.released for fetch in scheduler.cache.fetches] == [1]


def test_pages_are_released_also_where_vllm_wants_others() -> None:
    scheduler = Alone(GROUPS["equal pages"], 7)
    scheduler.run(range(18))
    request = scheduler.ask(tuple(range(18)), 1)
    fetch = scheduler.cache.fetches[-1]
    scheduler._land(fetch, "all")
    assert scheduler.table.ask(request, 0) == (16, False)
    with pytest.raises(InterfaceUnsupportedError):
        scheduler.table.place(request, ([7] * 9, [8] * 9), 16)
    scheduler.table.finish(request.request_id)
    assert fetch.released == 1
