"""Pages of one process's directory that others with the same bytes read by themselves."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gdscache import CacheEngine
from gdscache.config import Config
from gdscache.errors import RankError, RankMismatchError, TierUnavailableError
from gdscache.integrations.settings import Rows, planes_section
from gdscache.integrations.sglang.host import BorrowedPages, HostPages
from gdscache.pages.keys import namespace_digest
from gdscache.ranks.borrower import Borrower
from gdscache.storage.base import Op
from tests.support.faults import Fault
from tests.support.faulty import PLAN
from tests.support.helpers import WAIT, our_threads, raising, until

PAGE, PAGES, WIDTH = 4, 24, 512
KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(20)]
FAULTY = {"transport": "tests.support.faulty:FaultyTransport"}


def config(path: Path, name: str = "tiny", values: str = "", **more: Any) -> Config:
    sections: dict[str, Any] = {
        "model": {"name": name, **planes_section([{"latent": Rows(WIDTH, values)}], PAGE)},
        "ssd": {"path": str(path), "capacity": 64 * 4096, "transport": "posix", "gds": "off", "threads": 2},
        "host_buffer": 8 * 4096,
        "deadline": WAIT,
    }
    for section, values in more.items():
        sections[section] = {**sections.get(section, {}), **values} if isinstance(values, dict) else values
    return Config.from_dict(sections)


def pool() -> torch.Tensor:
    return torch.zeros((PAGES, PAGE, WIDTH), dtype=torch.uint8)


class Ranks:
    """A rank that stores, and others that read what it has stored, in one process."""

    def __init__(self, path: Path, borrowers: int = 1, **more: Any) -> None:
        self.config = config(path, **more)
        self.namespace = namespace_digest(self.config.model.namespace_fields())
        self.own = pool()
        self.first = HostPages(CacheEngine(self.config, [(self.own,)]))
        self.address = self.first.lend()
        self.pools = [pool() for _ in range(borrowers)]
        self.others = [self.borrowed(tensor) for tensor in self.pools]

    def borrowed(self, tensor: torch.Tensor, **changes: Any) -> BorrowedPages:
        given = {"config": self.config, "namespace": self.namespace, "address": self.address, "rank": 1, **changes}
        return BorrowedPages(Borrower([(tensor,)], **given), PAGE)

    def store(self, keys: list[str], mark: int = 1, before: list[str] | None = None) -> None:
        for page in range(len(keys)):
            self.own[page] = (mark + page) % 256
        assert self.first.set(keys, slots(*range(len(keys))), before or []) == [True] * len(keys)

    @property
    def leases(self) -> int:
        return sum(one["pages"] for one in self.first.engine.stats()["leases"])

    def close(self) -> None:
        for other in self.others:
            other.close()
        self.first.close()


def slots(*pages: int) -> list[int]:
    return [page * PAGE for page in pages]


@contextlib.contextmanager
def ranks(path: Path, borrowers: int = 1, **more: Any) -> Iterator[Ranks]:
    with contextlib.closing(Ranks(path, borrowers, **more)) as found:
        yield found


def test_packed_pages_are_lent_up_to_the_first_that_does_not_fit(tmp_path: Path) -> None:
    with ranks(tmp_path, values="bfloat16", model={"pack": "on"}) as found:
        found.store(KEYS[:3])
        found.own[0] = torch.randint(0, 256, (PAGE, WIDTH), dtype=torch.uint8, generator=torch.Generator())
        assert found.first.set(KEYS[3:4], slots(0), KEYS[:3]) == [True]
        assert found.first.set(KEYS[4:5], slots(1), KEYS[:4]) == [True]
        assert found.first.exists(KEYS[:6]) == 5
        assert found.others[0].exists(KEYS[:6]) == 3
        assert found.others[0].get(KEYS[:5], slots(*range(10, 15))) == [True] * 3 + [False] * 2
        assert torch.equal(found.pools[0][10:13, 0, 0], torch.tensor([1, 2, 3], dtype=torch.uint8))
        assert found.first.engine.stats()["stores"]["unfit"] == 1
        until(lambda: not found.leases, "nothing is lent any more")
        assert not found.first.engine.check().problems


def test_what_the_first_rank_has_stored_comes_to_all(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as found:
        assert [other.exists(KEYS[:6]) for other in found.others] == [0, 0, 0]
        found.store(KEYS[:6])
        for other, tensor in zip(found.others, found.pools, strict=True):
            assert other.exists(KEYS[:9]) == 6
            assert other.exists(KEYS[2:9], KEYS[:2]) == 4
            assert other.get(KEYS[:8], slots(*range(10, 18))) == [True] * 6 + [False] * 2
            assert tensor.view(PAGES, -1)[:, 0].tolist() == [0] * 10 + [1, 2, 3, 4, 5, 6] + [0] * 8
            assert torch.equal(tensor[10:16], found.own[:6])
            assert other.set(KEYS[6:7], slots(0)) == [False], "the first rank stores"
        until(lambda: not found.leases, "nothing is lent any more")
    with ranks(tmp_path) as again:
        assert again.others[0].get(KEYS[:6], slots(*range(6))) == [True] * 6, "after a restart"
        assert torch.equal(again.pools[0].view(PAGES, -1)[:6, 0], torch.arange(1, 7, dtype=torch.uint8))
        again.first.clear()
        assert again.others[0].exists(KEYS[:6]) == 0


def test_slots_that_are_not_the_keys_or_the_pool_s(tmp_path: Path) -> None:
    """An exception would end SGLang's thread."""
    with ranks(tmp_path) as found:
        found.store(KEYS[:3])
        for one in (found.first, found.others[0]):
            assert one.get(KEYS[:3], slots(10, 11)) == [True, True, False]
            assert one.get(KEYS[:2], slots(10, 11, 12)) == [True, True]
            for wrong in (PAGES, -1, 10):
                assert one.get(KEYS[:2], slots(10, wrong)) == [False, False]
        until(lambda: not found.leases, "nothing is lent any more")


def test_a_page_that_is_read_is_not_overwritten(tmp_path: Path) -> None:
    """The slab is far too small for what is stored while a rank reads: it gets the right bytes or a miss."""
    with ranks(tmp_path, ssd={"capacity": 12 * 4096, **FAULTY}) as found:
        found.store(KEYS[:4])
        with PLAN.rule(Op.READ, Fault.HANG):
            came: list[list[bool]] = []
            reading = threading.Thread(target=lambda: came.append(found.others[0].get(KEYS[:4], slots(0, 1, 2, 3))))
            reading.start()
            until(lambda: PLAN.held, "it reads")
            assert found.leases == 4
            for first in range(4, 16, 4):
                for page in range(4):
                    found.own[page] = 99
                found.first.set(KEYS[first : first + 4], slots(0, 1, 2, 3))
            assert found.first.exists(KEYS[:4]) == 4, "pages that are lent stay"
        reading.join(WAIT)
        assert came == [[True] * 4]
        assert found.pools[0].view(PAGES, -1)[:4, 0].tolist() == [1, 2, 3, 4]
        until(lambda: not found.leases, "nothing is lent any more")


def test_a_page_whose_bytes_are_wrong_is_a_miss_for_all(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, ssd=FAULTY) as found:
        found.store(KEYS[:4])
        with PLAN.rule(Op.READ, Fault.FLIP, skip=2, times=1):
            came = found.others[0].get(KEYS[:4], slots(0, 1, 2, 3))
        assert came.count(False) >= 1
        gone = came.index(False)
        until(lambda: found.first.exists(KEYS[:4]) == gone, "the first rank has heard of it")
        assert found.others[1].exists(KEYS[:4]) == gone
        found.store(KEYS[:4])
        assert found.others[1].get(KEYS[:4], slots(0, 1, 2, 3)) == [True] * 4, "stored again"


def test_a_read_that_hangs_ends_with_the_deadline_and_writes_nothing_later(tmp_path: Path) -> None:
    with ranks(tmp_path, ssd=FAULTY, deadline=0.5) as found:
        found.store(KEYS[:4])
        with PLAN.rule(Op.READ, Fault.HANG):
            begun = time.monotonic()
            assert found.others[0].get(KEYS[:4], slots(0, 1, 2, 3)) == [False] * 4
            assert time.monotonic() - begun < 5
            found.pools[0].fill_(7)
            assert found.leases == 4, "slots that are read are not given away"
        until(lambda: not found.leases, "the reads have ended")
        assert (found.pools[0] == 7).all()
        assert found.others[0].get(KEYS[:4], slots(0, 1, 2, 3)) == [True] * 4


def test_what_hanging_reads_kept_is_free_when_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdscache.ranks.borrower.CLOSE_S", 0.05)
    with ranks(tmp_path, ssd=FAULTY, deadline=0.3) as found:
        found.store(KEYS[:2])
        before = len(os.listdir("/proc/self/fd"))
        late = found.borrowed(pool())
        with PLAN.rule(Op.READ, Fault.HANG):
            assert late.get(KEYS[:2], slots(0, 1)) == [False] * 2
            late.close()
            assert len(os.listdir("/proc/self/fd")) > before, "the reads need the file"
        until(lambda: "gdscache-borrower-late" not in our_threads(), "the reads have ended")
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_close_that_breaks_off_hangs_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lender takes the pages of a borrower back when that hangs up."""
    with ranks(tmp_path) as found:
        before = our_threads()
        borrower = found.borrowed(pool())._borrower
        close = borrower._copies.close
        monkeypatch.setattr(borrower._copies, "close", raising(OSError("as ordered")))
        with pytest.raises(OSError, match="as ordered"):
            borrower.close()
        close()
        until(lambda: len(our_threads()) == len(before), "both ends of the channel have ended")


def test_a_close_waits_for_loads_that_are_under_way(tmp_path: Path) -> None:
    with ranks(tmp_path, ssd=FAULTY) as found:
        found.store(KEYS[:4])
        came: list[list[bool]] = []
        with PLAN.rule(Op.READ, Fault.HANG):
            reading = threading.Thread(target=lambda: came.append(found.others[0].get(KEYS[:4], slots(0, 1, 2, 3))))
            reading.start()
            until(lambda: PLAN.held, "it reads")
            closing = threading.Thread(target=found.others[0].close)
            closing.start()
            closing.join(0.2)
            assert closing.is_alive()
            assert found.others[0].get(KEYS[:4], slots(4, 5, 6, 7)) == [False] * 4, "nothing new is begun"
        for thread in (closing, reading):
            thread.join(WAIT)
            assert not thread.is_alive()
        assert came == [[True] * 4]


def test_a_rank_that_goes_gives_back_what_it_had(tmp_path: Path) -> None:
    with ranks(tmp_path, ssd=FAULTY, deadline=0.3) as found:
        found.store(KEYS[:4])
        with PLAN.rule(Op.READ, Fault.HANG):
            found.others[0].get(KEYS[:4], slots(0, 1, 2, 3))
            assert found.leases == 4
            found.others[0]._borrower._channel.close()  # as its process's end does
            until(lambda: not found.leases, "nobody reads them")
        assert found.first.exists(KEYS[:4]) == 4


def test_a_first_rank_that_has_gone_means_misses_at_once(tmp_path: Path) -> None:
    with ranks(tmp_path) as found:
        found.store(KEYS[:4])
        found.first.close()
        begun = time.monotonic()
        assert found.others[0].exists(KEYS[:4]) == 0
        assert found.others[0].get(KEYS[:4], slots(0, 1, 2, 3)) == [False] * 4
        assert time.monotonic() - begun < WAIT / 2
        assert not found.pools[0].any()


def test_a_first_rank_that_does_not_answer_costs_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(tmp_path, deadline=0.4) as found:
        found.store(KEYS[:4])
        go, named = threading.Event(), found.first.named
        monkeypatch.setattr(found.first._lender, "_named", lambda *given: go.wait(WAIT) and named(*given))
        begun = time.monotonic()
        assert found.others[0].get(KEYS[:4], slots(0, 1, 2, 3)) == [False] * 4
        first = time.monotonic() - begun
        assert [found.others[0].exists(KEYS[:4]) for _ in range(20)] == [0] * 20
        assert 0.3 < first < WAIT / 2
        assert time.monotonic() - begun < first + 20 * 0.4 / 2, "it is not asked while it owes an answer"
        go.set()
        until(lambda: found.others[0].exists(KEYS[:4]) == 4, "it answers again")
        until(lambda: not found.leases, "what came too late is given back")


def test_pages_of_other_weights_are_not_found(tmp_path: Path) -> None:
    """Ranks see a change each at a time of its own: between these nothing is found."""
    with ranks(tmp_path) as found:
        found.store(KEYS[:4])
        (other,) = found.others
        other.weights_changed()
        assert other.exists(KEYS[:4]) == 0
        assert other.get(KEYS[:4], slots(0, 1, 2, 3)) == [False] * 4
        found.first.weights_changed()
        assert other.exists(KEYS[:4]) == 0, "of the old weights"
        found.first.flushed()
        found.store(KEYS[:4], mark=50)
        assert other.get(KEYS[:4], slots(0, 1, 2, 3)) == [True] * 4
        assert found.pools[0].view(PAGES, -1)[:4, 0].tolist() == [50, 51, 52, 53]
        found.first.weights_changed()
        assert other.exists(KEYS[:4]) == 0


def test_pages_of_memory_are_not_lent(tmp_path: Path) -> None:
    for sections, missing in (({"cpu": {"capacity": 64 * 4096}}, "a CPU tier"), ({"ssd": None}, "no SSD")):
        engine = CacheEngine(config(tmp_path, **sections), [(pool(),)])
        with engine, pytest.raises(TierUnavailableError, match=missing):
            engine.lend(lambda hashes, parent, epoch: ())


def test_other_models_and_no_address_are_refused(tmp_path: Path) -> None:
    with ranks(tmp_path) as found:
        with pytest.raises(RankMismatchError, match="namespace"):
            found.borrowed(pool(), namespace=bytes(32))
        with pytest.raises(RankError, match="cannot be reached"):
            found.borrowed(pool(), address="gdscache-lender-nobody")
        assert found.others[0].exists(["00", KEYS[0]]) == 0, "no key of a page"
        assert found.others[0].exists([KEYS[0], KEYS[0]]) == 0, "twice the same"
        found.store(KEYS[:1])
        assert found.others[0].exists(KEYS[:1]) == 1


@pytest.mark.parametrize(
    "count", [400, pytest.param(2_000, marks=pytest.mark.suite), pytest.param(10_000, marks=pytest.mark.soak)]
)
def test_random_calls_of_several_ranks(tmp_path: Path, count: int) -> None:
    """What comes is what was stored, in a slab that is too small, with reads that fail now and then."""
    source = random.Random(7)
    with ranks(tmp_path, 2, ssd={"capacity": 10 * 4096, **FAULTY}) as found:
        came = 0
        for _ in range(count):
            first = source.randrange(len(KEYS) - 4)
            some = KEYS[first : first + 4]
            if source.random() < 0.4:
                for page in range(4):
                    found.own[page] = first + page + 1  # the same whenever it is stored
                found.first.set(some, slots(0, 1, 2, 3), KEYS[:first])
                continue
            which = source.randrange(2)
            found.pools[which].fill_(255)
            fault = PLAN.rule(Op.READ, source.choice([Fault.FLIP, Fault.EIO]), skip=source.randrange(3), times=1)
            with fault if source.random() < 0.2 else contextlib.nullcontext():
                good = found.others[which].get(some, slots(5, 6, 7, 8), KEYS[:first])
            for page, loaded in enumerate(good):
                if loaded:
                    came += 1
                    assert (found.pools[which][5 + page] == first + page + 1).all()
            rest = np.r_[0:5, 9:PAGES]
            assert (found.pools[which][rest] == 255).all()
        assert came > count / 20
        until(lambda: not found.leases, "nothing is lent any more")
        assert not found.first.engine.check().problems
