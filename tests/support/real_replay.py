"""A trace through a real engine: every byte is written, moved by its threads, read back and compared.

The engine has attached planes. Requests come one after the other: lookup, load, the rest of the prompt "computed" (its
bytes follow from the page's key), store, and everything written before the next one begins. So what it finds does not
depend on the machine, and `Traffic(..., serial=True)` finds the same, as long as a store fits the CPU tier beside the
dirty pages. A larger store is carried out in rounds, and finds what the writer has done by then.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gdscache.commands.replay.traffic import Found
from gdscache.commands.replay.workload import Workload
from gdscache.config import Config
from gdscache.engine.engine import CacheEngine
from gdscache.pages.keys import Page, namespace_digest, page_keys
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import PagedPlanes

Bytes = npt.NDArray[np.uint8]
WAIT_S = 600.0  # for a request's writes
_JUNK = 0xA5


class WrongBytesError(AssertionError):
    """A load said that a page is good, and its bytes are not what was stored."""


@dataclasses.dataclass
class RealOutcome:
    """What happened. `found[i]` is of request `i`; `failed`: pages of loads that were not good, by status.

    `verified_bytes` were loaded and compared. `stats` is the engine's, before it was closed.
    """

    found: list[Found]
    failed: Counter[str] = dataclasses.field(default_factory=Counter)
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    verified_bytes: int = 0
    problems: tuple[str, ...] = ()
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)


def namespace_of(config: Config) -> bytes:
    """The namespace that an engine of this config gives its pages."""
    return namespace_digest(config.model.namespace_fields())


def tokens_of(workload: Workload, request: int) -> npt.NDArray[np.uint32]:
    """Token ids of a request's full pages: those of page `n` of the workload are all `n`."""
    numbers = np.array(workload.prompts[request].pages, dtype=np.uint32)
    return np.repeat(numbers, workload.page_tokens)


def with_keys(workload: Workload, namespace: bytes) -> Workload:
    """The workload with the keys that its pages have in an engine of this namespace, by their tokens."""
    names = list(workload.names)
    known = bytearray(len(names))
    for request, prompt in enumerate(workload.prompts):
        if all(known[number] for number in prompt.pages):
            continue
        keys = page_keys(namespace, tokens_of(workload, request), workload.page_tokens)
        for number, key, parent in zip(prompt.pages, keys, [namespace, *keys], strict=False):
            names[number] = Page(key, parent, namespace)
            known[number] = 1
    return workload._replace(names=names, namespace=namespace)


class PlanesUnderTest:
    """Paged planes of `slots` pages, and what is in them."""

    def __init__(self, layout: PageLayout, slots: int) -> None:
        self.layout = layout
        self.planes = PagedPlanes.allocate(layout, slots, torch.device("cpu")).tensors

    def write(self, first: int, pages: Bytes) -> None:
        """Put pages, uint8 of shape (pages, page_bytes), into the slots from `first` on."""
        at = 0
        for raw in self._raw():
            end = at + raw.shape[1]
            raw[first : first + len(pages)] = torch.from_numpy(np.ascontiguousarray(pages[:, at:end]))
            at = end

    def read(self, pages: int) -> Bytes:
        """The bytes of the first `pages` slots, uint8 of shape (pages, page_bytes)."""
        return np.concatenate([raw[:pages].numpy() for raw in self._raw()], axis=1)

    def spoil(self, pages: int) -> None:
        """Put junk into the first `pages` slots."""
        for raw in self._raw():
            raw[:pages] = _JUNK

    def _raw(self) -> list[torch.Tensor]:
        return [tensor.view(torch.uint8).view(len(tensor), -1) for tensors in self.planes for tensor in tensors]


def bytes_of(pages: list[Page], page_bytes: int) -> Bytes:
    """Bytes that follow from the keys: noise, uint8 of shape (pages, page_bytes)."""
    rows = np.empty((len(pages), page_bytes), dtype=np.uint8)
    for row, page in zip(rows, pages, strict=True):
        seed = np.frombuffer(page.key[:16], dtype=np.uint64)
        row[:] = np.frombuffer(np.random.Generator(np.random.Philox(key=seed)).bytes(page_bytes), dtype=np.uint8)
    return rows


def replay_real(workload: Workload, config: Config, directory: Path) -> RealOutcome:
    """Send a workload of full pages through an engine whose SSD tier is in `directory`, which it fills.

    Raises `WrongBytesError` when a page that a load calls good is not what was stored, and what an engine raises.
    """
    if config.ssd is not None:
        config = config.model_copy(update={"ssd": config.ssd.model_copy(update={"path": directory, "stripes": ()})})
    layout = config.model.layout()
    under_test = PlanesUnderTest(layout, max(len(p.pages) for p in workload.prompts))
    outcome = RealOutcome([])
    with CacheEngine.from_config(config, planes=under_test.planes) as engine:
        for i in range(len(workload.prompts)):
            _request(engine, workload, i, under_test, outcome)
        outcome.stats = engine.stats()
        outcome.problems = engine.check().problems
    return outcome


def _request(engine: CacheEngine, workload: Workload, i: int, planes: PlanesUnderTest, outcome: RealOutcome) -> None:
    page_tokens = workload.page_tokens
    tokens = tokens_of(workload, i)
    pages = engine.pages(tokens)
    expected = bytes_of(pages, planes.layout.page_bytes)
    hit = engine.lookup(tokens)
    engine.drain(WAIT_S)  # what a lookup sends on to the SSD
    found = len(hit.pages)
    loaded = 0
    if found:
        planes.spoil(found)
        report = engine.load(hit, list(range(found))).result()
        loaded = report.tokens // page_tokens
        outcome.failed.update(status.value for status in report.pages[loaded:])
        got = planes.read(loaded)
        if not np.array_equal(got, expected[:loaded]):
            bad = int(np.flatnonzero((got != expected[:loaded]).any(axis=1))[0])
            raise WrongBytesError(
                f"request {i}: page {bad} of {loaded} came from {hit.tiers[bad]} with other bytes than were stored"
            )
        outcome.verified_bytes += got.nbytes
    tiers = Counter(hit.tiers)
    outcome.found.append(Found(tiers["cpu"], tiers["ssd"], loaded))
    if loaded < len(pages):
        planes.write(loaded, expected[loaded:])
        handle = engine.store(tokens, list(range(loaded, len(pages))), start=loaded * page_tokens)
        engine.drain(WAIT_S)
        outcome.dropped.update(handle.result(WAIT_S).dropped.values())
