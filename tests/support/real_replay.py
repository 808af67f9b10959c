"""A trace through a real engine: every byte is written, moved by its threads, read back and compared (`Host.finish`).

Requests come one after the other: lookup, load, the rest of the prompt "computed", store, and everything written before
the next one begins. So what it finds does not depend on the machine, and `Traffic(..., serial=True)` finds the same, as
long as a store fits the CPU tier beside the dirty pages. A larger store is carried out in rounds, and finds what the
writer has done by then.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdscache.commands.replay.trace import Workload
from gdscache.commands.replay.traffic import Found
from gdscache.config import Config
from gdscache.limits import LIMITS
from gdscache.pages.keys import Page, namespace_digest, page_keys
from tests.support.helpers import Host

WAIT_S = 600.0  # for a request's writes


@dataclasses.dataclass
class RealOutcome:
    """What happened. `found[i]` is of request `i`; `failed`: pages of loads that were not good, by status.

    `stats` is the engine's, before it was closed.
    """

    found: list[Found]
    failed: Counter[str] = dataclasses.field(default_factory=Counter)
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
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


def replay_real(workload: Workload, config: Config, directory: Path) -> RealOutcome:
    """Send a workload of full pages through an engine whose SSD tier is in `directory`, which it fills."""
    fields = config.dump()
    if fields["ssd"] is not None:
        fields["ssd"] |= {"path": str(directory), "stripes": []}
    host = Host(fields, blocks=max(len(prompt.pages) for prompt in workload.prompts), limits=LIMITS)
    outcome = RealOutcome([])
    with host.engine as engine:
        for request in range(len(workload.prompts)):
            _request(host, tokens_of(workload, request), outcome)
        outcome.stats = engine.stats()
        outcome.problems = engine.check().problems
    return outcome


def _request(host: Host, tokens: npt.NDArray[np.uint32], outcome: RealOutcome) -> None:
    engine, size = host.engine, host.layout.page_tokens
    hit = engine.lookup(tokens)
    engine.drain(WAIT_S)  # what a lookup sends on to the SSD
    loaded = 0
    if hit.pages:
        blocks = host.take(len(hit.pages))
        report = host.finish(engine.load(hit, blocks), blocks, [page.key for page in hit.pages])
        loaded = report.tokens // size
        outcome.failed.update(status.value for status in report.pages[loaded:])
    tiers = Counter(hit.tiers)
    outcome.found.append(Found(tiers["cpu"], tiers["ssd"], loaded))
    if loaded * size < len(tokens):
        handle = host.store(tokens, start=loaded * size)
        engine.drain(WAIT_S)
        outcome.dropped.update(handle.result(WAIT_S).dropped.values())
