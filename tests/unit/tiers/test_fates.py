"""What is known of pages that are not there: the filter of evicted ones is bounded, and as good as it says."""

from __future__ import annotations

import hashlib

import pytest

from gdscache.disk.kept import BAD_KEPT
from gdscache.pages.hit import CAUSES, Reason, Told, joined, words
from gdscache.tiers.fates import LEAST, PageFates


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


@pytest.mark.parametrize("evictions", [100, 5000, 20_000])
def test_the_filter_is_bounded_and_remembers_as_many_as_it_says(evictions: int) -> None:
    fates = PageFates(evictions)
    size, kept = fates.evicted.nbytes, max(LEAST, evictions)
    assert 4 * kept <= size <= 8 * kept
    for at in range(0, 3 * kept, 37):
        fates.evict([key(n) for n in range(at, min(at + 37, 3 * kept))])
    assert fates.evicted.nbytes == size
    assert fates.waiting <= (1 << 13) + 37
    assert all(fates.told(key(n)) == Told("evicted") for n in range(2 * kept, 3 * kept)), "one of the last is forgotten"
    never = 20_000
    wrong = sum(fates.told(key(n)).cause == "evicted" for n in range(10**9, 10**9 + never))
    assert wrong / never <= 0.02, "the documented share of false answers"
    old = sum(fates.told(key(n)).cause == "evicted" for n in range(kept // 2))
    assert old / (kept // 2) <= 0.02, "what is older than twice as many evictions is forgotten"


def test_evictions_wait_until_somebody_has_time_or_asks() -> None:
    fates = PageFates(LEAST)
    fates.evict({key(1): None, key(2): None})
    assert fates.waiting == 2
    fates.bring_in(1)
    assert fates.waiting == 1
    assert (fates.told(key(2)), fates.waiting) == (Told("evicted"), 0)
    assert fates.told(key(3)) == Told("absent")


def test_causes_are_bounded_and_forgotten_when_a_page_is_stored_again() -> None:
    fates = PageFates(LEAST, kept=3)
    bad = Told("bad", "ssd", "checksum")
    refused = Told("refused", "ssd", "tinylfu")
    fates.note([key(1), key(2)], refused)
    fates.note([key(3)], Told("no_room", detail="queue_full"))
    fates.note([key(1)], refused)
    fates.note([key(4)], refused)
    assert [fates.told(key(n)).cause for n in (1, 2, 3, 4)] == ["refused", "absent", "no_room", "refused"]
    for n in range(BAD_KEPT + 1):
        fates.found_bad(key(n), bad, n, "/dir", 0.0)
    assert [fates.told(key(n)) for n in (0, 1)] == [Told("absent"), bad]
    assert len(fates.bad) == BAD_KEPT
    fates.forget([key(4)])
    fates.note([key(4)], refused)
    fates.evict([key(1), key(4)])
    assert fates.told(key(4)).cause == "refused", "why it is in no slower tier says more than that it was evicted"
    fates.forget([key(1), key(9)])
    assert fates.told(key(1)) == Told("evicted")


def test_pages_in_a_row_of_which_the_same_is_known_are_one_reason() -> None:
    a, b = Told("cached", "cpu"), Told("bad", "ssd", "checksum")
    assert joined(8, 4, []) == ()
    found = joined(8, 4, [a, a, b, a])
    assert found == (Reason(8, 16, *a), Reason(16, 20, *b), Reason(20, 24, *a))
    assert words(found) == (
        "tokens 8 to 16 cached on cpu, tokens 16 to 20 bad on ssd (checksum), tokens 20 to 24 cached on cpu"
    )
    assert words(joined(0, 1, [a, b] * 20)).endswith(", and 32 more")
    assert {one.cause for one in found} <= CAUSES.keys()
