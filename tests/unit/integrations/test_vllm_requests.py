"""The scheduler's side of the vLLM connector: a small scheduler that does random things, and single cases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from gdscache import PageHashes
from gdscache.integrations.fetching import ENDING_S
from gdscache.integrations.vllm.requests import LoadOrder, RequestTable
from tests.support.fetches import FakeCache, FakeFetch, names_of
from tests.support.vllm_scheduler import SIZE, WAIT, Scheduler, hashes_of


def test_a_scheduler() -> None:
    run_state_machine_as_test(Scheduler, settings=settings(stateful_step_count=60))


# -- single cases ------------------------------------------------------------------------------------------------------


def table(cache: FakeCache | None = None) -> tuple[RequestTable, FakeCache]:
    cache = cache or FakeCache()
    return RequestTable(cache, SIZE, wait=WAIT, clock=cache.clock), cache


def request_of(tokens: int, name: str = "r") -> Any:
    words = tuple(range(tokens))
    return SimpleNamespace(
        request_id=name, num_tokens=tokens, num_computed_tokens=0, block_hashes=hashes_of(words), tokens=words
    )


def stored(cache: FakeCache, request: Any, pages: int) -> None:
    cache.stored.update(names_of(PageHashes(request.block_hashes[:pages])))


def arrived(pages: int) -> tuple[RequestTable, FakeCache, Any]:
    """A request of 11 tokens, of which so many pages are stored."""
    scheduler, cache = table()
    request = request_of(11)
    stored(cache, request, pages)
    scheduler.add(request)
    return scheduler, cache, request


def landed(cache: FakeCache) -> FakeFetch:
    fetch = cache.fetches[-1]
    fetch.there, fetch.ended = fetch.wanted, True
    return fetch


@pytest.mark.parametrize(("tokens", "found"), [(9, 8), (8, 6), (2, 0), (1, 0)])
def test_one_token_is_left_to_compute(tokens: int, found: int) -> None:
    scheduler, cache = table()
    request = request_of(tokens)
    stored(cache, request, 9)
    scheduler.add(request)
    if found:
        landed(cache)
    assert scheduler.ask(request, 0) == (found, False)


def test_a_load_goes_behind_what_vllm_has_itself() -> None:
    scheduler, cache, request = arrived(4)
    fetch = landed(cache)
    assert scheduler.ask(request, 4) == (4, False)
    scheduler.place(request, [7, 3, 9, 1, 5], 4)
    assert scheduler.take_loads() == [LoadOrder("r", fetch, 2, (9, 1))]  # type: ignore[arg-type]
    assert scheduler.take_fresh() == {9, 1, 5}
    request.num_computed_tokens = 8
    (order,) = scheduler.stores({"r": 3}, lambda name: [7, 3, 9, 1, 5, 8])
    assert (order.first, order.blocks) == (4, (5,))
    assert list(scheduler.stores({"r": 0}, lambda name: [])) == []


def test_the_gate_judges_again_behind_what_vllm_has_itself() -> None:
    """Only then: what it has declined of the whole request may pay behind that."""
    scheduler, cache = table()
    request, cache.pays_behind = request_of(11), 2
    stored(cache, request, 5)
    scheduler.add(request)
    assert scheduler.ask(request, 0) == scheduler.ask(request, 2) == scheduler.ask(request, 2) == (0, False)
    assert len(cache.fetches) == 2
    assert scheduler.ask(request, 4) == (None, False)
    landed(cache)
    assert scheduler.ask(request, 4) == (6, False)
    assert scheduler.ask(request, 6) == (4, False)
    assert (len(cache.fetches), [fetch.released for fetch in cache.fetches]) == (3, [1, 1, 0])
    assert scheduler.ask(request, 0) == (0, False), "vLLM has lost its pages, and the fetch began behind them"
    assert scheduler.ask(request, 10) == (0, False), "the last token is computed"
    assert len(cache.fetches) == 4


def test_a_request_does_not_wait_for_what_it_computes_sooner() -> None:
    scheduler, cache, request = arrived(4)
    (fetch,) = cache.fetches
    fetch.there = 1
    assert scheduler.ask(request, 0) == (None, False)
    fetch.too_slow = True
    assert scheduler.ask(request, 0) == (2, False)
    assert scheduler.counts["late"] == 1
    scheduler.place(request, [7, 3, 9, 1, 5], 2)
    (load,) = scheduler.take_loads()
    assert (load.first, load.blocks) == (0, (7,))


def test_what_ours_has_lost_is_stored_again_from_vllms_own_cache() -> None:
    scheduler, cache = table()
    request = request_of(11)
    stored(cache, request, 1)
    scheduler.add(request)
    landed(cache)
    assert scheduler.ask(request, 8) == (0, False)
    scheduler.place(request, [7, 3, 9, 1, 5], 0)
    request.num_computed_tokens = 8
    (order,) = scheduler.stores({"r": 3}, lambda name: [7, 3, 9, 1, 5, 8])
    assert (order.first, order.blocks) == (1, (3, 9, 1, 5))


def test_a_bad_page_is_stored_again_when_it_was_computed() -> None:
    scheduler, cache, request = arrived(4)
    fetch = cache.fetches[-1]
    fetch.ended = fetch.no_room = True
    assert scheduler.ask(request, 0) == (8, True)
    scheduler.place(request, [7, 3, 9, 1], 8)
    (load,) = scheduler.take_loads()
    assert load.between
    request.num_computed_tokens = 2  # its second block was bad
    scheduler.place(request, [7, 3, 9, 1, 5], 0)
    assert scheduler.take_loads() == []
    (order,) = scheduler.stores({"r": 9}, lambda name: [7, 3, 9, 1, 5, 8])
    assert (order.first, order.blocks) == (1, (3, 9, 1, 5))


@pytest.mark.parametrize(
    ("computed", "known", "under_way", "stored"),
    [
        (8, 11, None, True),
        (7, 11, None, False),
        (8, 8, None, False),
        (10, 9, None, True),
        (8, 8, 0, True),
        (9, 9, 2, False),
    ],
)
def test_a_page_whose_tokens_are_known_behind_the_last_step_is_stored_at_the_end(
    computed: int, known: int, under_way: int | None, stored: bool
) -> None:
    """Speculated tokens that were accepted, or one that was sampled behind a submitted step; none that a step under way
    computes."""
    scheduler, _, request = arrived(0)
    assert scheduler.ask(request, 0) == (0, False)
    blocks = [7, 3, 9, 1, 5]
    scheduler.place(request, blocks, 0)
    hashes, request.block_hashes = request.block_hashes, request.block_hashes[:3]
    (order,) = scheduler.stores({"r": 8}, lambda name: blocks)
    assert order.blocks == (7, 3, 9)
    request.block_hashes, request.num_computed_tokens, request.num_tokens = hashes, computed, known
    if under_way is not None:
        request.num_in_flight_tokens = under_way
    orders = scheduler.end(request, blocks)
    assert [(order.first, order.blocks) for order in orders] == [(3, (1,))] * stored
    assert all(order.pages(bytes(32))[0] == PageHashes(hashes[:4]).pages(bytes(32))[3] for order in orders)
    assert len(scheduler) == 0


def test_a_load_that_fails_as_a_whole_is_asked_again_once() -> None:
    """What is wrong may be no bad page, and so still there when the request asks again."""
    scheduler, cache, request = arrived(4)
    for _ in range(2):
        fetch = cache.fetches[-1]
        fetch.ended = fetch.no_room = True
        assert scheduler.ask(request, 0) == (8, True)
        scheduler.place(request, [7, 3, 9, 1], 8)
        (load,) = scheduler.take_loads()
        load.fetch.release()
        scheduler.ask(request, 0)
    assert scheduler.ask(request, 0) == (0, False)
    scheduler.place(request, [7, 3, 9, 1, 5, 8], 0)
    (order,) = scheduler.stores({"r": 11}, lambda name: [7, 3, 9, 1, 5, 8])
    assert order.first == 0
    scheduler.finish("r")
    assert [fetch.released for fetch in cache.fetches] == [1, 1]


def test_requests_that_are_left_alone() -> None:
    cache = FakeCache()
    scheduler = RequestTable(
        cache, SIZE, wait=WAIT, refuses=lambda request: "adapter" * (request.request_id == "adapter")
    )
    adapter, prompt_logprobs = request_of(9, "adapter"), request_of(9, "logprobs")
    prompt_logprobs.skip_reading_prefix_cache = True
    for request in (adapter, prompt_logprobs):
        stored(cache, request, 9)
        scheduler.add(request)
        assert scheduler.ask(request, 0) == (0, False)
        scheduler.place(request, [1, 2, 3, 4, 5], 0)
        assert list(scheduler.stores({request.request_id: 9}, lambda name: [1, 2, 3, 4, 5])) == []
        scheduler.finish(request.request_id)
    assert cache.fetches == []
    assert scheduler.take_fresh() == {1, 2, 3, 4, 5}
    assert len(scheduler) == 0
    assert scheduler.ask(adapter, 0) == (0, False)  # one that was never seen
    assert scheduler.counts == {"alone_adapter": 1, "alone_reads_nothing": 1}
    scheduler.leave_alone(stale=True)
    scheduler.add(request_of(9, "later"))
    assert scheduler.counts["alone_weights"] == 1


def test_an_input_that_gets_media_while_it_is_streamed_is_left_alone_from_then_on() -> None:
    cache = FakeCache()
    scheduler = RequestTable(cache, SIZE, wait=WAIT, refuses=lambda request: "media" * request.pictures)
    request = request_of(8)
    request.pictures = False
    scheduler.add(request)
    scheduler.ask(request, 0)
    scheduler.place(request, [1, 2, 3, 4], 0)
    (order,) = scheduler.stores({"r": 4}, lambda name: [1, 2, 3, 4])
    assert order.blocks == (1, 2)
    request.pictures, request.num_computed_tokens = True, 4
    assert list(scheduler.stores({"r": 4}, lambda name: [1, 2, 3, 4])) == []
    stored(cache, request, 4)
    assert scheduler.ask(request, 0) == (0, False)  # it was preempted
    assert len(cache.fetches) == 1


def test_after_a_change_of_weights_nothing_is_stored_of_the_requests_that_are_there() -> None:
    scheduler, cache = table()
    running, waiting = request_of(11), request_of(9, "waiting")
    for request in (running, waiting):
        scheduler.add(request)
    scheduler.ask(running, 0)
    scheduler.place(running, [0, 1, 2, 3, 4], 0)
    scheduler.leave_alone()
    assert all(fetch.released for fetch in cache.fetches)
    assert list(scheduler.stores({"r": 11}, lambda name: [0, 1, 2, 3, 4])) == []
    stored(cache, waiting, 9)
    assert scheduler.ask(waiting, 0) == (0, False)
    scheduler.place(waiting, [5, 6, 7, 8], 0)
    assert list(scheduler.stores({"waiting": 9}, lambda name: [5, 6, 7, 8])) == []
    for request in (running, waiting):
        scheduler.finish(request.request_id)


def test_a_request_that_waits_finds_what_others_stored_meanwhile() -> None:
    scheduler, cache = table()
    request = request_of(11)
    scheduler.add(request)
    assert scheduler.ask(request, 0) == (0, False)
    stored(cache, request, 3)
    assert scheduler.ask(request, 0) == (0, False)  # looked up a moment ago
    cache.now = 1.5
    assert scheduler.ask(request, 0) == (None, False)
    landed(cache)
    assert scheduler.ask(request, 0) == (6, False)
    cache.now = 3.0
    assert scheduler.ask(request, 0) == (6, False)  # nothing has come since
    assert [fetch.released for fetch in cache.fetches] == [1, 0]


@pytest.mark.parametrize(("left", "fetches"), [(ENDING_S - 0.1, 2), (ENDING_S + 0.1, 1)])
def test_pins_that_end_soon_are_too_old(left: float, fetches: int) -> None:
    """The load begins later in the step, and must not meet the end of the pins."""
    scheduler, cache, request = arrived(3)
    landed(cache).until = cache.now + left
    assert scheduler.ask(request, 0) == ((6, False) if fetches == 1 else (None, False))
    assert len(cache.fetches) == fetches


def test_pins_that_end_while_nothing_comes_do_not_prolong_the_wait() -> None:
    scheduler, cache, request = arrived(3)
    asked = 0
    while scheduler.ask(request, 0) == (None, False):
        cache.fetches[-1].until = cache.now
        cache.now += WAIT / 4
        asked += 1
    assert (asked, len(cache.fetches)) == (4, 5)
    landed(cache)
    assert scheduler.ask(request, 0) == (6, False)
    cache.fetches[-1].until = cache.now  # it waits for blocks
    assert scheduler.ask(request, 0) == (None, False), "these come anew, and get their time"


def test_no_tokens_are_never_between_steps() -> None:
    """vLLM ends where a load between steps has no tokens. A fetch may end without room while it is looked at."""
    scheduler, cache, request = arrived(3)
    fetch = cache.fetches[-1]
    fetch.asking = fetch.ended = fetch.no_room = True
    assert scheduler.ask(request, 6) == (0, False)
    scheduler.place(request, [0, 1, 2, 3, 4], 0)
    assert (scheduler.take_loads(), fetch.released) == ([], 1)


def test_nothing_is_loaded_or_stored_of_requests_that_come_while_weights_are_stale() -> None:
    scheduler, cache = table()
    scheduler.stale = True
    request = request_of(11)
    stored(cache, request, 3)
    scheduler.add(request)
    assert scheduler.ask(request, 4) == (0, False)
    scheduler.place(request, [0, 1, 2, 3, 4], 0)
    assert list(scheduler.stores({"r": 11}, lambda name: [0, 1, 2, 3, 4])) == []
    scheduler.stale = False
    again = request_of(11, "again")
    scheduler.add(again)
    landed(cache)
    assert scheduler.ask(again, 0) == (6, False)


def test_each_page_is_named_once_when_it_gets_its_hash() -> None:
    told: list[tuple[int, int, list[bytes]]] = []
    cache, request = FakeCache(), request_of(11)
    scheduler = RequestTable(
        cache, SIZE, wait=WAIT, clock=cache.clock, named=lambda _, group, first, keys: told.append((group, first, keys))
    )
    keys, whole = names_of(PageHashes(request.block_hashes)), request.block_hashes
    request.block_hashes = whole[:2]
    scheduler.add(request)
    assert told == [(0, 0, keys[:2])]
    request.block_hashes = whole
    scheduler.ask(request, 0)
    scheduler.place(request, [7, 3, 9, 1, 5, 8], 0)
    assert list(scheduler.stores({"r": 11}, lambda name: [7, 3, 9, 1, 5, 8]))
    assert told[1:] == [(0, 2, keys[2:])]
