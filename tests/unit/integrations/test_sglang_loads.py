"""What the SGLang linker knows of requests: pages are in the CPU tier, or it is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from gdscache.errors import InvalidValueError
from gdscache.integrations.sglang import loads
from gdscache.integrations.sglang.loads import GONE_S, LOOK_AGAIN_S, LOOKED_S, STOPPED_S, LoadTable
from gdscache.integrations.sglang.pages import PageLinks, digest
from tests.support.fetches import PIN, FakeCache, names_of
from tests.support.helpers import raising

WAIT = 0.5
PROMPTS = [(0, 1, 2, 3, 4, 5), (0, 1, 2, 9, 9, 9, 9), (7, 7, 7)]


def keys_of(tokens: tuple[int, ...]) -> list[str]:
    """A page a token here: each key names all tokens up to it."""
    return [hashlib.sha256(repr(tokens[: end + 1]).encode()).hexdigest() for end in range(len(tokens))]


def named(keys: list[str]) -> list[bytes]:
    return names_of(PageLinks().named(keys))


def store(cache: FakeCache, keys: list[str]) -> None:
    cache.stored |= set(named(keys))


class Cache(FakeCache):
    """`coming`: pages of the last fetch that come as time passes. `speed`: seconds a page, as it was measured."""

    def __init__(self) -> None:
        super().__init__()
        self.coming = 0
        self.speed: float | None = None

    def rest(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        if self.coming and self.fetches:
            self.fetches[-1].there += 1
            self.coming -= 1

    def seconds(self, pages: int) -> float | None:
        return None if self.speed is None else pages * self.speed


class Table:
    """A table, and what of the world around it a test sets."""

    def __init__(self, stored: Sequence[str] = (), wait: float = WAIT) -> None:
        self.cache = Cache()
        store(self.cache, [*stored])
        self.alone = True
        self.table = LoadTable(self.cache, PageLinks(), wait=wait, alone=lambda: self.alone, clock=self.cache.clock)


KEYS = keys_of(PROMPTS[0])


def test_what_is_there_is_promised_and_loaded() -> None:
    world = Table(KEYS[:4], wait=0.0)
    assert (world.table.lookup("a", KEYS), world.table.counts["late"]) == (0, 0)
    world.cache.fetches[0].there = 4
    assert world.table.lookup("a", KEYS) == 4
    assert len(world.cache.fetches) == 1, "a lookup that repeats begins nothing"
    asked: list[str] = []
    assert world.table.load("a", KEYS[:4], lambda: asked.append("blocks") or (lambda: [5, 6, 7, 8]))
    (queued,) = world.table.take()
    assert (queued.rid, queued.blocks(), list(queued.hit())) == ("a", [5, 6, 7, 8], named(KEYS[:4]))
    assert asked == ["blocks"]
    assert world.table.take() == []


def test_a_lookup_waits_for_pages_on_their_way() -> None:
    world = Table(KEYS)
    world.cache.coming = 6
    assert world.table.lookup("a", KEYS) == 6
    waited = world.cache.now
    assert 0 < waited < WAIT
    assert world.table.load("a", KEYS, lambda: lambda: range(6))
    assert world.cache.now == waited, "a load has its pages"


def test_a_lookup_waits_no_longer_than_that_and_promises_what_has_come() -> None:
    world = Table(KEYS)
    world.cache.coming = 2
    assert world.table.lookup("a", KEYS) == 2
    assert world.cache.now == pytest.approx(WAIT, abs=0.01)
    assert world.table.counts["late"] == 1
    assert not world.table.load("a", KEYS, lambda: pytest.fail("that was not promised"))
    assert world.cache.fetches[0].released == 1
    assert len(world.table) == 0


@pytest.mark.parametrize("beyond", [False, True])
def test_all_lookups_for_a_batch_wait_so_long_together(beyond: bool) -> None:
    """Also for a tier beyond this machine."""
    world = Table()
    world.cache.asks = beyond
    for tokens in PROMPTS:
        store(world.cache, keys_of(tokens))
        assert world.table.lookup(repr(tokens), keys_of(tokens)) == 0
    assert world.cache.now == pytest.approx(WAIT, abs=0.01)
    world.table.take()
    world.table.lookup("later", KEYS)
    assert world.cache.now == pytest.approx(2 * WAIT, abs=0.01)


def test_nobody_waits_while_others_run() -> None:
    world = Table(KEYS)
    world.alone = False
    assert world.table.lookup("a", KEYS) == 0
    world.cache.fetches[-1].there = 2
    assert world.table.lookup("a", KEYS) == 2
    assert world.cache.now == 0


@pytest.mark.parametrize(("speed", "waited"), [(WAIT / 6, WAIT), (WAIT / 5.9, 0.0)])
def test_what_would_come_too_late_is_not_waited_for(speed: float, waited: float) -> None:
    world = Table(KEYS)
    world.cache.speed = speed
    assert world.table.lookup("a", KEYS) == 0
    assert world.cache.now == pytest.approx(waited, abs=0.01)


def test_what_the_time_that_is_left_does_not_bring_is_not_waited_for() -> None:
    world = Table(KEYS)
    world.cache.speed, world.cache.coming = WAIT / 10, 6
    assert world.table.lookup("a", KEYS) == 6
    world.cache.now += 0.6 * WAIT
    before = world.cache.now
    assert world.table.lookup("b", KEYS) == 0
    assert world.cache.now == before


def test_a_tail_of_what_was_looked_up_needs_no_new_fetch() -> None:
    """Others have computed its head meanwhile."""
    world = Table(KEYS)
    world.table.lookup("a", KEYS)
    world.cache.fetches[0].there = 6
    assert world.table.lookup("a", KEYS[2:]) == 4
    assert len(world.cache.fetches) == 1
    assert world.table.load("a", KEYS[2:5], lambda: lambda: [1, 2, 3])
    assert list(world.table.take()[0].hit()) == named(KEYS[2:5])


def test_other_pages_are_fetched_anew() -> None:
    world = Table(KEYS)
    world.table.lookup("a", KEYS)
    world.table.lookup("a", keys_of(PROMPTS[1]))
    assert [fetch.released for fetch in world.cache.fetches] == [1, 0]
    assert not world.table.load("a", KEYS, lambda: lambda: []), "that is not what was looked up last"
    assert [fetch.released for fetch in world.cache.fetches] == [1, 1]


def test_pages_that_branch_off_are_others() -> None:
    """The request's tokens have changed behind a common beginning."""
    world = Table(wait=0.0)
    other = keys_of(PROMPTS[1])
    store(world.cache, other)
    world.table.lookup("a", other)
    world.cache.fetches[0].there = 7
    assert world.table.lookup("a", KEYS) == 0, "of these none has come"
    assert [fetch.wanted for fetch in world.cache.fetches] == [7, 3]


def test_more_that_others_have_stored_is_found() -> None:
    world = Table(KEYS[:2])
    world.table.lookup("a", KEYS)
    store(world.cache, KEYS)
    world.table.lookup("a", KEYS)
    assert len(world.cache.fetches) == 1
    world.cache.now += LOOK_AGAIN_S
    world.table.lookup("a", KEYS)
    assert [fetch.wanted for fetch in world.cache.fetches] == [2, 6]
    assert world.cache.fetches[0].released == 1


def test_pins_outlast_promises_by_the_longest_stop_of_a_process() -> None:
    world, promise = Table(KEYS), STOPPED_S + LOOKED_S + WAIT
    world.cache.coming = 6
    world.table.lookup("a", KEYS)
    world.cache.now = PIN - promise - 0.1
    assert world.table.lookup("a", KEYS) == 6
    assert len(world.cache.fetches) == 1
    world.cache.now += promise  # in one pass of SGLang's
    assert world.table.load("a", KEYS, lambda: lambda: [])
    world.table.take()
    world.cache.coming = 6
    world.table.lookup("b", KEYS)
    world.table.take()
    world.cache.now += PIN - promise
    world.cache.coming = 6
    assert world.table.lookup("b", KEYS) == 6
    assert len(world.cache.fetches) == 3, "these pins end too soon"


def test_pages_whose_pins_have_ended_are_not_loaded() -> None:
    world = Table(KEYS)
    world.cache.coming = 6
    world.table.lookup("a", KEYS)
    world.cache.now += PIN
    assert not world.table.load("a", KEYS, lambda: lambda: [])
    assert world.cache.fetches[0].released == 1


def test_who_is_not_looked_up_any_more_is_let_go() -> None:
    """SGLang says nothing where a request that waits is aborted."""
    world = Table(KEYS)
    for rid in ("gone", "waits"):
        world.table.lookup(rid, KEYS)
    world.table.take()
    world.cache.now += GONE_S / 2
    world.table.lookup("waits", KEYS)
    world.cache.now += GONE_S / 2 + 0.1
    world.table.lookup("comes", KEYS)
    assert [fetch.released for fetch in world.cache.fetches] == [1, 0, 0]
    assert len(world.table) == 2


def test_nobody_is_let_go_who_may_be_in_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "SOUGHT_KEPT", 3)
    world = Table(KEYS)
    world.cache.coming = 6
    assert world.table.lookup("first", KEYS) == 6
    world.cache.now += GONE_S + 1
    for rid in ("second", "third", "fourth"):
        world.table.lookup(rid, KEYS)
    assert len(world.table) == 3, "the fourth finds no room"
    assert world.table.load("first", KEYS, lambda: lambda: [])
    world.table.take()
    world.table.lookup("fourth", KEYS)
    assert len(world.table) == 3


def test_a_load_that_finds_no_memory_holds_nothing() -> None:
    world = Table(KEYS)
    world.table.lookup("r", KEYS)
    world.cache.fetches[-1].there = len(KEYS)
    with pytest.raises(MemoryError):
        world.table.load("r", KEYS, raising(MemoryError))
    assert (world.cache.fetches[-1].released, len(world.table)) == (1, 0)


def test_computed_pages_are_let_go() -> None:
    world = Table(KEYS[:3])
    world.table.lookup("a", KEYS)
    world.table.lookup("b", keys_of(PROMPTS[2]))
    world.table.computed(KEYS[:2])
    assert [fetch.released for fetch in world.cache.fetches] == [1, 0]


def test_the_gate_judges_again_behind_what_sglang_has_itself() -> None:
    world = Table(KEYS)
    world.cache.pays_behind = 2
    world.table.lookup("a", KEYS)
    world.table.lookup("a", KEYS)
    assert [(fetch.wanted, fetch.released) for fetch in world.cache.fetches] == [(0, 0)]
    world.table.lookup("a", KEYS[2:])
    world.table.lookup("a", KEYS[2:])
    assert [(fetch.wanted, fetch.released) for fetch in world.cache.fetches] == [(0, 1), (len(KEYS) - 2, 0)]


def test_keys_and_links() -> None:
    links = PageLinks(kept=4)
    namespace = bytes(range(32))
    whole = links.named(KEYS).pages(namespace)
    assert len(links) == 4
    assert links.named(KEYS[3:]).pages(namespace) == whole[3:], "it is remembered which page is before the fourth"
    alone = PageLinks().named(KEYS[3:]).pages(namespace)
    assert [page.key for page in alone] == [page.key for page in whole[3:]]
    assert alone[0].parent == namespace
    assert PageLinks().named(KEYS[3:], KEYS[:3]).pages(namespace) == whole[3:]
    depths = [(links, 0, []), (links, 3, []), (PageLinks(), 3, KEYS[:3]), (PageLinks(), 3, [])]
    assert [links.named(KEYS[at:], before).before for links, at, before in depths] == [0, 3, 3, 0]
    assert len(PageLinks().named([])) == 0
    links = PageLinks()
    with pytest.raises(InvalidValueError, match="twice"):
        links.named([KEYS[0], KEYS[1], KEYS[0]])
    assert links.named(KEYS[:2]).pages(namespace) == whole[:2], "nothing of a refused call is remembered"
    for wrong in ("", "ab", "x" * 64, None, KEYS[0] + "00"):
        with pytest.raises(InvalidValueError, match="not the key of a page"):
            digest(wrong)  # type: ignore[arg-type]
