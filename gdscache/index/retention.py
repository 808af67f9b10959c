"""Retention: a page's priority under eviction, and its expiry, pure values without a clock; and the eviction orders of
a tier, one for each priority.

All pages of a lower priority go before the first of a higher one. An expired page is a miss on every tier.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, ParamSpec, cast

import numpy as np
import numpy.typing as npt

from gdscache.arguments import shown
from gdscache.errors import InvalidValueError, NativeCallError
from gdscache.native import LifetimeOrder
from gdscache.pages.keys import Page
from gdscache.policies.base import EvictionPolicy

LOWEST, HIGHEST = -1, 2
PRIORITIES = tuple(range(LOWEST, HIGHEST + 1))  # a store's choices; the default is 0

LONGEST_TTL = 100 * 365 * 24 * 3600  # seconds


class Retention(NamedTuple):
    """A request's wish for its pages. `expires`: seconds since the epoch, as `time.time()`; None: never.

    Use `Retention.of` for values from outside.
    """

    priority: int = 0
    expires: float | None = None

    @classmethod
    def of(cls, priority: int = 0, ttl: float | None = None, wall_clock: Callable[[], float] = time.time) -> Retention:
        """A priority of `PRIORITIES`, and a time to live in seconds from now on (more than 0; None: for ever).

        Raises `InvalidValueError`.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or priority not in PRIORITIES:
            raise InvalidValueError(
                f"priority is {shown(priority)}", f"pass an integer from {LOWEST} (goes first) to {HIGHEST} (goes last)"
            )
        if ttl is None:
            return DEFAULT if priority == 0 else cls(priority)
        if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl <= LONGEST_TTL:
            raise InvalidValueError(
                f"ttl is {shown(ttl)}",
                f"pass seconds, more than 0 and at most {LONGEST_TTL:,} (100 years), or None: for ever",
            )
        return cls(priority, wall_clock() + ttl)

    def joined(self, other: Retention) -> Retention:
        """The greater priority and the later expiry of two (never is the latest)."""
        if self.expires is None or other.expires is None:
            return Retention(max(self.priority, other.priority))
        return Retention(max(self.priority, other.priority), max(self.expires, other.expires))


DEFAULT: Retention = Retention()


class Expiries:
    """Expiry times of keys: a heap of the distinct times, and the keys of each. The pages of one store share theirs.

    Times without keys leave the heap when they are due, or when they are most of it.
    """

    __slots__ = ("_keys", "_times", "first")

    def __init__(self) -> None:
        self.first = math.inf  # the earliest expiry
        self._times: list[float] = []
        self._keys: dict[float, dict[bytes, None]] = {}

    def add(self, key: bytes, expires: float) -> None:
        keys = self._keys.get(expires)
        if keys is None:
            keys = self._keys[expires] = {}
            heapq.heappush(self._times, expires)
            self.first = min(self.first, expires)
        keys[key] = None

    def remove(self, key: bytes, expires: float) -> None:
        keys = self._keys.get(expires)
        if keys is None or key not in keys:
            return
        del keys[key]
        if not keys:
            del self._keys[expires]
            if len(self._times) > 2 * len(self._keys) + 16:
                self._times = sorted(self._keys)
            self._advance()

    def take(self, now: float, most: int) -> list[bytes]:
        """Take out up to `most` keys that have expired by `now`, the earliest first."""
        taken: list[bytes] = []
        while len(taken) < most and self.first <= now:
            keys = self._keys[self.first]
            while keys and len(taken) < most:
                taken.append(keys.popitem()[0])
            if not keys:
                del self._keys[self.first]
                self._advance()
        return taken

    def _advance(self) -> None:
        while self._times and self._times[0] not in self._keys:
            heapq.heappop(self._times)
        self.first = self._times[0] if self._times else math.inf

    def items(self) -> dict[bytes, float]:
        return {key: expires for expires, keys in self._keys.items() for key in keys}


_named = operator.itemgetter(0, 1)  # a page's key and parent
_P = ParamSpec("_P")
NO_RETENTIONS: Mapping[int, Retention] = {}


class Orders:
    """The pages of a tier, the lowest priority first, within a priority in the order of a policy.

    New pages and uses are only noted. They enter the orders when these are read, when a page is taken out, or by
    `bring_in`: neither a request that finds its pages nor one that brings pages waits for that.

    A change that finds no memory halfway costs the orders, and never a page: they take no changes until they are read
    again, and then begin anew with the pages that are present.

    Many methods: those of an `EvictionPolicy`, for all priorities, and those of retentions.
    """

    changes_kept = 8192  # most changes that may wait

    def __init__(
        self,
        policy: EvictionPolicy,
        present: Callable[[Sequence[bytes]], Sequence[bytes]],
        everything: Callable[[], Sequence[bytes]],
        on_loss: Callable[[], object],
    ) -> None:
        """`policy`: of priority 0, without pages; the other priorities get its kind. `present(keys)`: the keys whose
        pages are present. `everything()`: the keys of all pages. `on_loss()` is called when the orders are lost."""
        self.policy = policy
        self._present = present
        self._everything = everything
        self._on_loss = on_loss
        self._lost = False  # the policies have other pages than the tier, until they begin anew
        self.retained: dict[bytes, Retention] = {}  # of pages whose retention is not the default; read only
        self._of_priority = [policy if priority == 0 else policy.empty() for priority in PRIORITIES]
        self.expiries = Expiries()
        self._changes: deque[Sequence[Page] | Sequence[bytes]] = deque()  # oldest first: new pages, or used keys
        self._changed = 0  # pages and keys in `_changes`
        self._uses: list[bytes] = []  # later uses, perhaps of absent pages

    def empty(self) -> Orders:
        return Orders(self.policy.empty(), self._present, self._everything, self._on_loss)

    def restore(
        self,
        keys: Sequence[bytes],
        order: npt.NDArray[np.int64],
        retentions: Mapping[int, Retention] = NO_RETENTIONS,
    ) -> None:
        """Fill empty orders. `order`: positions in `keys`, the least recently used first. `retentions`: by position,
        where they are not the default."""
        if not retentions:
            self.policy.restore(keys, order)
            return
        levels = np.full(len(keys), -LOWEST, np.int8)
        for position, retention in retentions.items():
            self._keep(keys[position], retention)
            levels[position] = retention.priority - LOWEST
        for level, policy in enumerate(self._of_priority):
            policy.restore(keys, order[levels[order] == level])

    # -- pages come, are used, and go ---------------------------------------------------------------------------------

    def add(self, pages: Sequence[Page], retentions: Sequence[Retention]) -> None:
        if retentions.count(DEFAULT) == len(retentions):
            self._note(pages)
            return
        for page, retention in zip(pages, retentions, strict=True):
            if retention == DEFAULT:
                self._note((page,))
            else:
                self.bring_in()
                self._keep(page.key, retention)
                self._change(self._of(page.key).insert_all, (_named(page),))

    def use(self, keys: Sequence[bytes]) -> None:
        """Uses of present pages; whether a page is present is checked before the next page comes."""
        self._uses += keys
        if self.waiting > self.changes_kept:
            self.sift()

    def sift(self) -> None:
        """Forget uses of absent pages. To be called before pages come."""
        if self._uses:
            uses, self._uses = self._uses, []
            self._note(self._present(uses))

    def remove(self, key: bytes) -> None:
        self.bring_in()
        self._change(self._of(key).remove, key)
        self._forget(key)

    def evict(self, gone: Sequence[tuple[bytes, bytes | None]]) -> None:
        self.bring_in()
        if not self.retained:
            self._change(self.policy.evict_all, gone)
            return
        for key, freed in gone:
            self._change(self._of(key).evict_all, ((key, None),))
            self._forget(key)
            if freed is not None:
                self.hasten(freed)

    @property
    def waiting(self) -> int:
        """New pages and uses that have not entered the orders yet."""
        return self._changed + len(self._uses)

    def bring_in(self, most: int | None = None) -> None:
        """Let the `most` oldest changes enter the orders, or all."""
        self.sift()
        self._change(self._enter, self._changed if most is None else min(most, self._changed))

    def _enter(self, left: int) -> None:
        while left:
            some = self._changes.popleft()
            if len(some) > left:
                self._changes.appendleft(some[left:])
                some = some[:left]
            left -= len(some)
            self._changed -= len(some)
            if isinstance(some[0], Page):
                self.policy.insert_all(list(map(_named, some)))
                continue
            keys = cast("Sequence[bytes]", some)
            if self.retained:
                for key in keys:
                    self._of(key).touch_all((key,))
            else:
                self.policy.touch_all(keys)

    def _note(self, some: Sequence[Page] | Sequence[bytes]) -> None:
        if some and not self._lost:
            self._changes.append(some)
            self._changed += len(some)
            if self._changed > self.changes_kept:
                self.bring_in(self._changed - self.changes_kept)

    def _change(self, change: Callable[_P, object], *args: _P.args, **more: _P.kwargs) -> None:
        if self._lost:
            return
        try:
            change(*args, **more)
        except (MemoryError, NativeCallError) as error:
            self._lose(error)

    def _lose(self, error: MemoryError | NativeCallError) -> None:
        if isinstance(error, NativeCallError) and error.errno != errno.ENOMEM:
            raise error
        self._lost, self._changed = True, 0
        self._changes.clear()
        self._on_loss()

    def _begin_anew(self) -> None:
        """May find no memory, and can be called again."""
        keys, levels = self._everything(), dict[int, list[int]]()
        for at, key in enumerate(keys):
            levels.setdefault(self.retained.get(key, DEFAULT).priority - LOWEST, []).append(at)
        for level, policy in enumerate(self._of_priority):
            policy.restore(keys, np.array(levels.get(level, ()), np.int64))
        self._lost = False

    # -- for eviction -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[bytes]:
        """May find no memory, and can be called again."""
        self.bring_in()
        if self._lost:
            self._begin_anew()
        try:  # all at once, since to begin changes some orders
            return itertools.chain.from_iterable([iter(policy) for policy in self._of_priority])
        except (MemoryError, NativeCallError) as error:
            self._lose(error)
            raise

    def defer_all(self, keys: Sequence[bytes]) -> None:
        """As `EvictionPolicy.defer_all`. This and the next two need orders that are up to date."""
        if not self.retained:
            self._change(self.policy.defer_all, keys)
            return
        for key in keys:
            self._change(self._of(key).defer_all, (key,))

    def hasten(self, key: bytes) -> None:
        self._change((self._of(key) if self.retained else self.policy).hasten, key)

    def deferring(self) -> Sequence[LifetimeOrder]:
        return [order for policy in self._of_priority for order in policy.deferring()]

    def _of(self, key: bytes) -> EvictionPolicy:
        return self._of_priority[self.retained.get(key, DEFAULT).priority - LOWEST]

    # -- retention ----------------------------------------------------------------------------------------------------

    def retain(self, page: Page, retention: Retention) -> None:
        """A present page gets this retention. With another priority it is new in that priority's order."""
        self.bring_in()
        key, before = page.key, self._of(page.key)
        self._forget(key)
        if retention != DEFAULT:
            self._keep(key, retention)
        if self._of(key) is not before:
            self._change(before.remove, key)
            self._change(self._of(key).insert_all, (_named(page),))

    def not_yet_expired(self, keys: Iterable[bytes]) -> None:
        """Those of the keys that were taken out of `expiries` whose pages are still there."""
        for key in self.retained.keys() & keys:
            self._keep(key, self.retained[key])

    def expired_among(self, keys: Iterable[bytes], now: float) -> list[bytes]:
        """The keys that have expired by `now`, each once."""
        retained = self.retained
        found = dict.fromkeys(key for key in keys if key in retained)
        return [key for key in found if (at := retained[key].expires) is not None and at <= now]

    def _keep(self, key: bytes, retention: Retention) -> None:
        self.retained[key] = retention
        if retention.expires is not None:
            self.expiries.add(key, retention.expires)

    def _forget(self, key: bytes) -> None:
        expires = self.retained.pop(key, DEFAULT).expires
        if expires is not None:
            self.expiries.remove(key, expires)

    def check(self, pages: Mapping[bytes, Retention]) -> list[str]:
        """Contradictions with `pages`, all pages of the tier. Changes nothing."""
        problems = []
        if not self._lost:
            new = {change.key for some in self._changes for change in some if isinstance(change, Page)}
            found = [{*order, *(new if order is self.policy else ())} for order in self._of_priority]
            if found != [{key for key, kept in pages.items() if kept.priority == level} for level in PRIORITIES]:
                problems.append("the eviction order and the index name different pages")
        if self.retained != {key: kept for key, kept in pages.items() if kept != DEFAULT}:
            problems.append("pages with a retention of their own differ from the index")
        if self.expiries.items() != {key: kept.expires for key, kept in pages.items() if kept.expires is not None}:
            problems.append("pages that expire differ from the index")
        return problems
