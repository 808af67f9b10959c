"""The engine's two faces as a benchmark uses them: store a prompt's pages, load them, check what arrived."""

from __future__ import annotations

import abc
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gdscache import CacheEngine
from gdscache.errors import IOFailedError
from gdscache.load.handle import LayerwiseLoad
from gdscache.store.handle import StoreHandle

Planes = list[tuple[torch.Tensor, ...]]


class Face(abc.ABC):
    """A prompt of `pages` full pages and one token. Every method that moves pages returns the seconds it took."""

    def __init__(self, engine: CacheEngine, tokens: npt.NDArray[np.uint32], pages: int, planes: Planes) -> None:
        self.engine = engine
        self.tokens = tokens
        self.pages = pages
        self.planes = planes
        self.slots = torch.arange(pages)

    @abc.abstractmethod
    def store(self, salt: str) -> float:
        """Store the pages in the planes (for salt "", a pattern), until they are on the SSD.

        Raises `IOFailedError` when a page is dropped.
        """

    @abc.abstractmethod
    def load(self, tier: str) -> float:
        """Load the pages of salt "" from `tier`, until the verdict.

        Raises `IOFailedError` when they come from elsewhere.
        """

    def check(self) -> None:
        """The first and last layer must hold what was stored. Raises `IOFailedError`."""
        for tensor in self._outer():
            if not torch.equal(tensor[self.slots.to(tensor.device)], self._pattern(tensor)):
                raise IOFailedError("a load gave other bytes than were stored", "please report it")

    def _fill(self) -> None:
        for tensor in self._outer():
            tensor[self.slots.to(tensor.device)] = self._pattern(tensor)

    def _outer(self) -> list[torch.Tensor]:
        return [*self.planes[0], *self.planes[-1]]

    def _pattern(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows that tell pages apart: the page's number, as far as bfloat16 counts."""
        numbers = torch.arange(self.pages, device=tensor.device) % 251
        return numbers.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1)).expand(-1, *tensor.shape[1:])

    def _settled(self, handle: StoreHandle) -> None:
        report = handle.result(600.0)
        missed = [i for i, tiers in enumerate(report.tiers) if "ssd" not in tiers]
        if missed:
            raise IOFailedError(f"{len(missed)} pages did not reach the SSD: {report.dropped}", "see the log")

    def _loaded(self, load: LayerwiseLoad | None, tier: str) -> None:
        sources: dict[str, Any] = {} if load is None else load.result().bytes_by_tier
        if sources != {tier: self.pages * self.engine.layout.page_bytes}:
            raise IOFailedError(f"all pages were to come from the {tier} tier, these came: {sources}", "see the log")


class OwnedFace(Face):
    """`sequence`: the engine owns the pool."""

    def store(self, salt: str) -> float:
        with self.engine.sequence(self.tokens, salt) as sequence:
            self.slots = sequence.slots[: self.pages]
            if not salt:
                self._fill()
            start = time.perf_counter()
            handle = sequence.commit()
            self._settled(handle)
            return time.perf_counter() - start

    def load(self, tier: str) -> float:
        start = time.perf_counter()
        with self.engine.sequence(self.tokens) as sequence:
            self._loaded(sequence.load, tier)
            elapsed = time.perf_counter() - start
            self.slots = sequence.slots[: self.pages]
            return elapsed

    def hit(self) -> float:
        """A sequence whose pages are all on the GPU, until its last layer may be used."""
        start = time.perf_counter()
        with self.engine.sequence(self.tokens) as sequence:
            for layer in range(self.engine.layout.n_layers):
                sequence.wait(layer)
            elapsed = time.perf_counter() - start
            if sequence.load is not None or sequence.cached_tokens != len(self.tokens) - 1:
                raise IOFailedError(f"{sequence.cached_tokens} tokens were on the GPU", "please report it")
        return elapsed


class AttachedFace(Face):
    """`lookup`, `load` and `store` with planes of the caller's own."""

    def store(self, salt: str, *, filled: bool = False) -> float:
        if not (salt or filled):
            self._fill()
        start = time.perf_counter()
        self._settled(self.engine.store(self.tokens, self.slots, salt=salt))
        return time.perf_counter() - start

    def load(self, tier: str) -> float:
        start = time.perf_counter()
        load = self.engine.load(self.engine.lookup(self.tokens), self.slots)
        self._loaded(load, tier)
        return time.perf_counter() - start
