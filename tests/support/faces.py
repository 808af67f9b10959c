"""The two faces of the engine behind one set of words, for what both promise.

`Pool` is an engine that owns its planes (`engine.sequence`); `Attached` is one over somebody else's (`lookup`, `load`,
`store`). A prompt's pages have the bytes that follow from their keys, and every page that arrives is compared.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from gdscache import CacheEngine
from gdscache.engine.sequence import Sequence as EngineSequence
from gdscache.limits import EngineLimits
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.plan import LoadReport
from gdscache.store.handle import StoreHandle, StoreReport
from tests.support.helpers import WAIT, Host, drop_from, fill, holds, quiet, until

Tokens = Sequence[int]
B = TypeVar("B")  # a load that was begun


class Face(abc.ABC, Generic[B]):
    """An engine by one of its faces. What it holds of a prompt, it holds below the planes: in memory and on the SSD."""

    engine: CacheEngine

    @abc.abstractmethod
    def begin_put(self, tokens: Tokens, salt: str = "") -> StoreHandle:
        """Compute the full pages that the cache does not bring and store them; returns when the planes are free."""

    @abc.abstractmethod
    def begin(self, tokens: Tokens, salt: str = "") -> B:
        """Look up and begin to load into free places of the planes."""

    @abc.abstractmethod
    def verdict(self, begun: B, seconds: float) -> int:
        """Tokens of the good prefix; raises `DeadlineError` when nobody knows in time."""

    @abc.abstractmethod
    def end(self, begun: B) -> LoadReport:
        """The verdict on a load. Each page that it calls good has its bytes; its places are free again."""

    def drop(self, *tiers: str) -> None:
        """Empty tiers as eviction would, and leave the others alone."""
        drop_from(self.engine, *tiers)

    def put(self, tokens: Tokens, salt: str = "") -> StoreReport:
        """`begin_put`, to its end."""
        handle = self.begin_put(tokens, salt)
        quiet(self.engine)
        return handle.result(0)

    def get(self, tokens: Tokens, salt: str = "") -> LoadReport:
        return self.end(self.begin(tokens, salt))

    def found(self, tokens: Tokens, salt: str = "") -> int:
        return self.engine.lookup(tokens, salt=salt).tokens

    def tiers(self, tokens: Tokens) -> tuple[str, ...]:
        """By each page that a lookup finds: the tier it would come from."""
        return self.engine.lookup(tokens).tiers


class Attached(Face[tuple[LayerwiseLoad, list[int], list[bytes]]]):
    """Planes of somebody else's, with blocks of so many tokens; without `block_tokens` a block holds a page."""

    def __init__(self, config: dict[str, Any], limits: EngineLimits, block_tokens: int | None) -> None:
        per_page = config["model"]["page_tokens"] // (block_tokens or config["model"]["page_tokens"])
        self.host = Host(config, 64 * per_page, block_tokens, limits=limits)
        self.engine = self.host.engine

    def begin_put(self, tokens: Tokens, salt: str = "") -> StoreHandle:
        return self.host.store(tokens, salt=salt)

    def begin(self, tokens: Tokens, salt: str = "") -> tuple[LayerwiseLoad, list[int], list[bytes]]:
        return self.host.begin(tokens, salt=salt)

    def verdict(self, begun: tuple[LayerwiseLoad, list[int], list[bytes]], seconds: float) -> int:
        return begun[0].result(seconds).tokens

    def end(self, begun: tuple[LayerwiseLoad, list[int], list[bytes]]) -> LoadReport:
        self.verdict(begun, WAIT)
        return self.host.finish(*begun)


class Pool(Face[tuple[EngineSequence, str]]):
    """Planes of the engine's own, which keep nothing between requests here: their part is in test_engine.py."""

    def __init__(self, config: dict[str, Any], limits: EngineLimits) -> None:
        self.engine = CacheEngine.from_config(config, limits=limits)

    def begin_put(self, tokens: Tokens, salt: str = "") -> StoreHandle:
        with self.engine.sequence(tokens, salt) as seq:
            seq.verify(WAIT)
            fill(self.engine, seq, salt)
            handle = seq.commit()
        handle.release_event.synchronize(WAIT)
        until(self._forgets, "the store lets go of the pool's pages")
        return handle

    def _forgets(self) -> bool:
        """Empty the pool; whether nothing is left, which the lease of a store may keep a little longer."""
        self.drop("gpu")
        return len(self.engine.gpu.index) == 0

    def begin(self, tokens: Tokens, salt: str = "") -> tuple[EngineSequence, str]:
        return self.engine.sequence([*tokens, 0], salt), salt  # one token is always left to compute

    def verdict(self, begun: tuple[EngineSequence, str], seconds: float) -> int:
        return begun[0].verify(seconds)

    def end(self, begun: tuple[EngineSequence, str]) -> LoadReport:
        with begun[0] as seq:
            self.verdict(begun, WAIT)
            holds(self.engine, seq, begun[1])
            if seq.load is not None:
                return seq.load.result(WAIT)
            assert not seq.cached_tokens, "pages of the pool: they were to be forgotten"
            return LoadReport(0, (), {}, 0.0)
