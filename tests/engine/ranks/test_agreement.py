"""Numbers that all ranks go by, whatever breaks between an engine and its ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from gdscache.errors import GdsCacheError, RankProtocolError
from gdscache.ranks import agreement
from gdscache.ranks.agreement import Agreement
from tests.support.helpers import raising


@pytest.fixture
def three() -> Iterator[list[Agreement]]:
    ranks = [Agreement(rank) for rank in range(3)]
    ranks[0].connect([one.address for one in ranks[1:]])
    yield ranks
    for one in ranks:
        one.close()


def never() -> int:
    raise AssertionError("rank 0 alone looks")


def test_all_ranks_go_by_what_rank_0_finds(three: list[Agreement]) -> None:
    first, *others = three
    for found in (0, 3, 1 << 40):
        assert first.of(lambda found=found: found) == found
        assert [one.of(never) for one in others] == [found] * 2
    assert first.of(raising(GdsCacheError("on purpose", "none"))) == 0
    assert [one.of(never) for one in others] == [0, 0]


def test_a_rank_waits_for_its_number(three: list[Agreement]) -> None:
    told = list[int]()
    waits = threading.Thread(target=lambda: told.append(three[1].of(never)))
    waits.start()
    three[0].of(lambda: 7)
    waits.join(30)
    assert told == [7]


def test_who_has_ended_is_not_waited_for(three: list[Agreement]) -> None:
    first, ends, last = three
    ends.close()
    for found in (4, 5):
        assert first.of(lambda found=found: found) == last.of(never) == found
    first.of(lambda: 6)
    first.close()
    assert [last.of(never), last.of(never)] == [6, 0], "what was sent before the end is heard"


def test_a_process_of_another_user_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = Agreement(0), Agreement(1)
    whole, refused = agreement.check_peer, list[socket.socket]()

    def check(connection: socket.socket) -> None:
        if not refused:
            refused.append(connection)
            raise RankProtocolError("another user's", "none")
        whole(connection)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as foreign:
        foreign.connect("\0" + last.address.name)
        foreign.sendall(b"\1" * 8)
        first.connect([last.address])
        monkeypatch.setattr(agreement, "check_peer", check)
        assert first.of(lambda: 9) == last.of(never) == 9
    assert refused
    first.close()
    last.close()


def test_a_lone_rank_goes_by_itself() -> None:
    assert Agreement(0).of(lambda: 5) == 5
