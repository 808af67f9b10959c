"""A leader that is killed at a message of any kind: nothing that was committed is lost, no byte is wrong, and its ranks
end their moves and let go of their locks in time."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.support.helpers import MHA, MLA, SEED, prompt, until
from tests.support.rank_messages import LeaderProcess, Point
from tests.support.ranks import RanksHost

DEADLINE_S = 0.5
LETTING_GO_S = DEADLINE_S + 5.0  # moves have their deadline; the rest is for a machine that is busy
PAGES = 4
CALLS = ("hello", "memory", "slab", "start", "cut", "flush", "check", "bad")
TOLD = (*CALLS, "move", "cancel", "forget", "close")  # `Service` knows these
ORDERS = ("load", "store")
HEARD = ("answer", "ended")
PLACES = ("before", "half", "behind")
POINTS = [
    *itertools.starmap(Point, itertools.product(TOLD, PLACES)),
    *itertools.starmap(Point, itertools.product((*ORDERS, *HEARD), ("before", "behind"))),
]
FEW = [Point("slab", "half"), Point("move", "behind"), Point("move", "half", 2), Point("ended"), Point("store")]


class Lives:
    """Ranks that serve one leader after the other, and the prompts whose pages a leader has said to be committed."""

    def __init__(self, path: Path, shards: list[int]) -> None:
        model = MLA if max(shards) == 0 else MHA
        options = {"durability": "power"}
        self.host = RanksHost(path, shards, model=model, cpu=10, ssd=512, deadline=DEADLINE_S, ssd_options=options)
        self.host.engine.close()
        self.path = path
        self.committed: list[int] = []
        self.numbers = itertools.count()

    def life(self, point: Point | None) -> Counter[str] | None:
        """A leader that does everything once; the messages that it has seen, or None where it was killed."""
        lead = LeaderProcess(self.host.config, self.host.addresses, point)
        try:
            assert lead.hear() == "open"
            number = next(self.numbers)
            self.store(lead, number)
            self.load(lead, number)
            lead.ask("cool")
            self.load(lead, number)
            self.load(lead, number, told=False)
            file = next(self.path.glob("slab*"))
            os.truncate(file, file.stat().st_size - 1)  # of a slot that is free: there are more of them than points
            lead.ask("check")
            seen: Counter[str] = lead.ask("close")
        except EOFError:
            assert lead.ended() == -signal.SIGKILL
            return None
        assert lead.ended() == 0
        return seen

    def store(self, lead: LeaderProcess, number: int) -> None:
        tokens = prompt(number, PAGES)
        keys = lead.ask("keys", tokens)
        with self.host.blocks(PAGES) as blocks:
            self.host.every("compute", blocks, keys)
            self.host.every("store", lead.ask("store", tokens, blocks))
            if lead.hear():
                self.committed.append(number)

    def load(self, lead: LeaderProcess, number: int, *, told: bool = True) -> list[str]:
        """What the leader says of a prompt's pages. Those that a rank has are right."""
        with self.host.blocks(PAGES) as blocks:
            order, keys = lead.ask("load", prompt(number, PAGES), blocks, told)
            answers = self.host.every("load", order, blocks, keys, LETTING_GO_S) if told else []
            statuses: list[str] = lead.hear()
        for answer in answers:
            for n, (status, good) in enumerate(zip(*answer, strict=True)):
                assert good or status != "loaded", "wrong bytes"
                assert status == "loaded" or statuses[n] != "loaded"
        return statuses

    def nothing_is_lost(self) -> None:
        """Another leader finds what was committed. Before it, nobody has the files."""
        until(self.free, "the ranks let go of their locks", LETTING_GO_S)
        lead = LeaderProcess(self.host.config, self.host.addresses)
        assert lead.hear() == "open"
        assert lead.ask("check") == ()
        for number in self.committed[-6:]:

            def there(number: int = number) -> bool:  # again where a deadline passes on a machine that is busy
                return self.load(lead, number) == ["loaded"] * PAGES

            until(there, f"prompt {number} is there", LETTING_GO_S)
        lead.ask("close")
        assert lead.ended() == 0

    def free(self) -> bool:
        """Whether nobody locks a file of the slab."""
        for path in self.path.glob("slab*"):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
        return True


def run(path: Path, shards: list[int], points: list[Point]) -> None:
    lives = Lives(path, shards)
    try:
        for point in points:
            survived = lives.life(point)
            assert survived is None or survived[point.kind] < point.number, f"it was not killed at {point}"
            lives.nothing_is_lost()
    finally:
        lives.host.close()


def test_every_kind_of_message_is_among_the_points(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "cache", [0, 1])
    try:
        seen = lives.life(None)
        assert seen is not None
        del seen["closed"]  # it may hear that at its end, or be gone before
        assert {kind for kind, count in seen.items() if count} == {*TOLD, *ORDERS, *HEARD}
        lives.nothing_is_lost()
    finally:
        lives.host.close()


@pytest.mark.parametrize(
    ("shards", "points"),
    [
        ([0, 1], FEW),
        pytest.param([0, 1], POINTS, marks=[pytest.mark.suite, pytest.mark.timeout(0)]),
        pytest.param([0, 0], POINTS, marks=[pytest.mark.suite, pytest.mark.timeout(0)]),
    ],
)
def test_a_leader_that_is_killed_at_a_message(tmp_path: Path, shards: list[int], points: list[Point]) -> None:
    run(tmp_path / "cache", shards, points)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("shards", [[0, 1], [0, 0], [0, 0, 1, 1], [0, 1, 2, 3]])
def test_a_leader_that_is_killed_at_many_messages(tmp_path: Path, shards: list[int]) -> None:
    rng = random.Random(SEED)
    for part in range(20):  # as many as there is room for
        some = [point._replace(number=rng.randrange(1, 12)) for point in rng.choices(POINTS, k=50)]
        run(tmp_path / f"cache {part}", shards, some)
