"""CacheEngine: the one door of gdscache."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from gdscache.build import Parts, build
from gdscache.config import Config, load_config
from gdscache.errors import (
    DeadlineError,
    EngineClosedError,
    InvalidValueError,
    SequenceStateError,
    SlotCountError,
    TokensError,
)
from gdscache.keys import KEY_BYTES, as_tokens, namespace_digest, page_keys
from gdscache.layout import PageLayout
from gdscache.loader import Loader
from gdscache.loading import LayerwiseLoad
from gdscache.sequence import Sequence as TokenSequence
from gdscache.storing import StoreHandle
from gdscache.streams import Event, record
from gdscache.tiers.base import Lease
from gdscache.tiers.gpu import GpuTier
from gdscache.tiers.index import Page
from gdscache.tiers.manager import TierManager

_SALTS_KEPT = 4096


@dataclasses.dataclass(frozen=True)
class Hit:
    """What `lookup` found: a snapshot, without a lease.

    `tokens` tokens from `start` on are cached, in full pages; `tiers` names the fastest tier of each page; `seconds` is
    what loading them should take by what was measured so far, None before anything was.
    """

    start: int
    tokens: int
    tiers: tuple[str, ...]
    seconds: float | None
    pages: tuple[Page, ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What `check` found: `problems` in words, and whether they were mended."""

    problems: tuple[str, ...]
    fixed: bool

    @property
    def ok(self) -> bool:
        return not self.problems or self.fixed


class CacheEngine:
    """A tiered KV cache: GPU pool → pinned CPU pool → SSD.

    `planes` attaches an engine's own paged tensors, `planes[layer][plane]` of shape `(blocks, block_tokens, *row)`;
    then `lookup`, `load` and `store` take slots of those tensors. Without it the engine owns a pool, and `sequence` is
    the way.
    All methods may be called from many threads. Raises a subclass of `GdsCacheError` that names what cannot be opened.
    """

    def __init__(self, config: Config, planes: Sequence[Sequence[torch.Tensor]] | None = None) -> None:
        self.config = config
        self.layout: PageLayout = config.model.layout()
        self._parts: Parts = build(config, self.layout, planes)
        self._namespaces: dict[str, bytes] = {}
        self._described: set[bytes] = set()
        self._closing = threading.Lock()
        self._owner = os.getpid()
        self._closed = False

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config,
        planes: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> Self:
        """Open an engine from a YAML file, a mapping of the same shape, or a `Config`."""
        if isinstance(config, Mapping):
            config = Config.from_dict(config)
        elif not isinstance(config, Config):
            config = load_config(config)
        return cls(config, planes)

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def manager(self) -> TierManager:
        """The tiers and their bookkeeping."""
        self._check_open()
        return self._parts.manager

    @property
    def loader(self) -> Loader:
        """What runs loads."""
        self._check_open()
        return self._parts.loader

    @property
    def gpu(self) -> GpuTier:
        """The pool that the engine owns: `gpu.planes(layer)` are its paged tensors."""
        gpu = self.manager.gpu
        if gpu is None:
            raise SequenceStateError("this engine has attached planes and no pool of its own", "use load() and store()")
        return gpu

    def namespace(self, salt: str = "") -> bytes:
        """The namespace (32 bytes) of this model and a request's salt (an adapter, a tenant)."""
        digest = self._namespaces.get(salt)
        if digest is None:
            digest = namespace_digest(self.config.model.namespace_fields(salt))
            if len(self._namespaces) < _SALTS_KEPT:
                self._namespaces[salt] = digest
        return digest

    def pages(self, tokens: Any, salt: str = "") -> list[Page]:
        """The names of all full pages of `tokens`."""
        namespace = self.namespace(salt)
        keys = page_keys(namespace, as_tokens(tokens), self.layout.page_tokens)
        return [Page(key, parent, namespace) for key, parent in zip(keys, [namespace, *keys], strict=False)]

    # -- an engine without a block manager -------------------------------------------------------------------------

    def sequence(self, tokens: Any, salt: str = "") -> TokenSequence:
        """Find the longest cached prefix, allocate slots, begin loading. Raises `PoolFullError` and holds nothing."""
        return TokenSequence(self, self.gpu, tokens, salt)

    # -- an engine with planes of its own --------------------------------------------------------------------------

    def lookup(self, tokens: Any, start: int = 0, salt: str = "") -> Hit:
        """The consecutive full pages from token `start` (a multiple of `page_tokens`) that are cached.

        Takes no lease and changes nothing but recency.
        """
        pages = self.pages(tokens, salt)
        first = min(self._first_page(start), len(pages))
        found = self.manager.lookup(pages, first)
        seconds = self.manager.estimate(found, self.layout.page_bytes)
        tokens_found = len(found) * self.layout.page_tokens
        return Hit(start, tokens_found, tuple(found), seconds, tuple(pages[first : first + len(found)]))

    def load(self, hit: Hit, slots: Any, after: Event = None) -> LayerwiseLoad:
        """Begin copying a hit into `slots`, block indices of the attached planes, page after page; returns at once.

        Loads as many pages as `slots` are for; `load.tokens` says how many are on their way, since the keys are
        resolved again. The slots are written after the current stream's work so far, or after the event `after`.
        """
        return self.load_many([(hit, slots)], after)

    def load_many(self, requests: Sequence[tuple[Hit, Any]], after: Event = None) -> LayerwiseLoad:
        """Begin a batch of loads: one submit, and one wait a layer."""
        self._check_attached()
        planes, batch = self._parts.planes, []
        for hit, slots in requests:
            blocks = planes.block_table(slots)
            if len(blocks) > len(hit.pages):
                raise SlotCountError(
                    f"slots for {len(blocks)} pages, the hit has {len(hit.pages)}",
                    f"pass {planes.blocks_per_page} blocks for each page of the hit",
                )
            batch.append((hit.pages[: len(blocks)], blocks))
        if len(batch) > 1:
            planes.block_table(torch.cat([blocks.view(-1) for _, blocks in batch]))  # no slot twice across requests
        return self.loader.start(batch, "load", [after or record(planes.device)])

    def store(self, tokens: Any, slots: Any, start: int = 0, salt: str = "", after: Event = None) -> StoreHandle:
        """Begin storing the full pages of `tokens` from token `start` on, found in `slots` of the attached planes.

        Returns at once; the slots are read after the current stream's work so far (or after the event `after`) and
        must not be rewritten before `handle.release_event`. What finds no room is dropped and counted.
        """
        self._check_attached()
        planes = self._parts.planes
        blocks = planes.block_table(slots)
        pages = self.pages(tokens, salt)[self._first_page(start) :]
        if len(blocks) > len(pages):
            raise SlotCountError(
                f"slots for {len(blocks)} pages, there are {len(pages)} full pages from token {start} on",
                "a partial last page is not stored: pass slots for full pages only",
            )
        namespace = self.namespace(salt)
        epoch = self.manager.epoch(namespace)
        return self.submit_store(pages[: len(blocks)], blocks, epoch, salt, after)

    def submit_store(
        self,
        pages: Sequence[Page],
        blocks: torch.Tensor,
        epoch: int,
        salt: str,
        after: Event = None,
        sources: Lease | None = None,
    ) -> StoreHandle:
        """Hand pages to the background; what `store` and `Sequence.commit` end in. `sources` pins the blocks."""
        ssd, namespace = self.manager.ssd, self.namespace(salt)
        if ssd is not None and pages and namespace not in self._described and len(self._described) < _SALTS_KEPT:
            self._described.add(namespace)
            ssd.describe_namespace(namespace, self.config.model.namespace_fields(salt))
        event = after or record(self._parts.planes.device)
        return self._parts.storer.store(pages, blocks, [epoch] * len(pages), event, sources)

    # -- both ------------------------------------------------------------------------------------------------------

    def prefetch(self, tokens: Any, start: int = 0, salt: str = "") -> LayerwiseLoad:
        """Begin bringing cached pages from the SSD into the CPU tier, as many as find room. Its handle is a load's."""
        pages = self.pages(tokens, salt)[self._first_page(start) :]
        if self.manager.cpu is None:
            pages = []
        return self.loader.prefetch(pages, "prefetch")

    def clear(self) -> dict[str, int]:
        """Drop every page from every tier; the pages removed, by tier. What is being stored is dropped too."""
        return self.manager.clear()

    def invalidate(self, namespace: bytes) -> dict[str, int]:
        """Drop every page of one namespace (see `namespace()`) from every tier; the pages removed, by tier."""
        if not isinstance(namespace, bytes) or len(namespace) != KEY_BYTES:
            raise InvalidValueError(f"{namespace!r} is no namespace", "pass engine.namespace(salt)")
        return self.manager.clear(namespace)

    def drain(self, seconds: float | None = None) -> None:
        """Wait until every accepted store is on the tiers it is meant for. Raises `DeadlineError` after `seconds`."""
        self._check_open()
        if not self._parts.storer.drain(seconds):
            raise DeadlineError(f"stores are still on their way after {seconds} s", "see stats()['store_queue']")

    def stats(self) -> dict[str, Any]:
        """Counts and sizes as plain data: tiers, hits and misses by cause, loads, stores and drops by cause."""
        manager = self.manager
        return {
            "device": str(self._parts.planes.device),
            "copies": self._parts.mover.describe(),
            "page_bytes": self.layout.page_bytes,
            "extent_bytes": self.layout.extent_bytes,
            **manager.stats(),
            "store_queue": self._parts.storer.stats(),
        }

    def check(self, fix: bool = False) -> CheckReport:
        """Hold every index against its slots, its catalogue and its bytes in the CPU tier. Meant for a quiet engine.

        With `fix`, pages that disagree are dropped and rows that name no page are deleted.
        """
        problems = self.manager.check(fix)
        return CheckReport(tuple(problems), fixed=fix and not self.manager.check())

    # -- end -------------------------------------------------------------------------------------------------------

    def close(self, drain: bool = True) -> None:
        """Finish stores (or drop them), wait for loads, give everything back. Twice is fine.

        In a process forked off the one that opened the engine it does nothing: threads and locks are not there.
        """
        if os.getpid() != self._owner:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with contextlib.ExitStack() as last_to_first:
                last_to_first.callback(self._parts.close)
                last_to_first.callback(self._parts.loader.close)
                self._parts.storer.close(drain=drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed", "open a new one with CacheEngine.from_config")

    def _check_attached(self) -> None:
        if self.manager.gpu is not None:
            raise SequenceStateError("this engine owns its pool", "use sequence(), or attach your planes")

    def _first_page(self, start: int) -> int:
        if start < 0 or start % self.layout.page_tokens:
            raise TokensError(
                f"start is {start}, a page has {self.layout.page_tokens} tokens", "start at a page boundary"
            )
        return start // self.layout.page_tokens
