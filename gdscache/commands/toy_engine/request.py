"""A request and what the engine knows of it; how an engine is to run."""

from __future__ import annotations

import dataclasses
import enum
import time

import torch

from gdscache import LayerwiseLoad
from gdscache.cuda.streams import Fence


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How the engine runs.

    `overlap`: a request computes layer by layer while its cached pages arrive, and its batch with it; else it joins
    when all of them are there. `share`: full pages that are still in the pool are shared instead of loaded. `store`:
    full pages are stored, and may be shared.
    `keep_logits`: requests keep the logits of their tokens. `deadline`: seconds after which the engine stops waiting
    for blocks to be released.
    """

    chunk_tokens: int = 512
    max_batch: int = 8
    overlap: bool = True
    share: bool = True
    store: bool = True
    keep_logits: bool = False
    deadline: float = 60.0


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclasses.dataclass(eq=False)
class Request:
    """One request. `tokens` is the prompt and what was generated; times are `time.perf_counter()` seconds."""

    tokens: list[int]
    prompt_tokens: int
    new_tokens: int
    salt: str = ""
    stop: frozenset[int] = frozenset()
    state: State = State.WAITING
    submitted: float = dataclasses.field(default_factory=time.perf_counter)
    first_token: float = 0.0
    finished: float = 0.0
    sources: dict[str, int] = dataclasses.field(default_factory=dict)  # prompt tokens not computed, by where from
    recomputed: int = 0  # tokens of pages that were promised and turned out to be bad
    margins: list[float] = dataclasses.field(default_factory=list)  # best logit less the second best, a token
    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)

    keys: list[bytes] = dataclasses.field(default_factory=list)  # of the full pages
    blocks: list[int] = dataclasses.field(default_factory=list)
    places: torch.Tensor | None = None  # of the blocks' tokens in the pool's rows, int64 on the device
    computed: int = 0  # tokens whose rows are in the blocks, or are being loaded there
    published: int = 0  # of them, in full pages that others may find
    load: LayerwiseLoad | None = None  # until its verdict
    loaded_from: int = 0  # first token of the load
    load_begun: float = 0.0
    load_seconds: float | None = None  # what the load took, when it has brought all that it promised
    uncached: bool = False  # compute everything: a load of this request never ended
    late: bool = False
    reads: list[Fence] = dataclasses.field(default_factory=list)  # gdscache may read or write the blocks before these

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]
