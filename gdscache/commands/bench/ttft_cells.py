"""The cells of `gdscache bench ttft`: prompts, cached shares, places, overlap and gate; and their answers, compared.
Arithmetic only."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gdscache.commands.bench import kit
from gdscache.commands.bench.shapes import LLAMAS, token_bytes
from gdscache.errors import InvalidValueError
from gdscache.pages.layout import PLAIN
from gdscache.sizes import MIB

CACHED = (90, 99, 0, 50)  # percent of a prompt, down to a page; in the order of measuring
PLACES = ("gpu", "cpu", "ssd_via_cpu")
NOWHERE = "none"
SWITCHED = ("cpu", "ssd_via_cpu")  # places with a load
NEAR_TIE = 0.05  # in 16 bits, closer logits may swap places between batches
_OTHER_PRODUCTS = 4  # factor on near ties for equal sums computed in another order
_BY_WORTH = ("same", "near tie", "other")


@dataclasses.dataclass(frozen=True)
class Settings(kit.Settings):
    """The bench's extent. `prompts`: tokens, in the order of measuring; `preset`: the model's shape. `pack`: with
    packed pages.

    Without `everything` the longest of three prompts is left out, and so are unusual hits (`Cell.usual`). A cell has
    `repeat` rounds. `new_tokens` are compared with those of a run without a cache.
    `ceiling_bytes`: the most bytes of a ceiling's figure.
    """

    preset: str = "8b"
    device: str = "cuda"
    pack: bool = False
    dtype: str = "bfloat16"
    prompts: tuple[int, ...] = (32 << 10, 8 << 10, 128 << 10)
    page_tokens: int = 64
    repeat: int = 5
    new_tokens: int = 2
    ceiling_bytes: int = 1 << 30
    seed: int = 0

    @classmethod
    def defaults(
        cls, *, quick: bool = False, device: str = "cuda", pack: bool | None = None, **options: Any
    ) -> dict[str, Any]:
        """Without a GPU a tiny model and short prompts."""
        if not quick and device.startswith("cuda"):
            return {}
        dtype = "bfloat16" if pack or device.startswith("cuda") else "float32"  # no other values are packed
        small = {"prompts": (256,), "repeat": 2, "ceiling_bytes": 8 << 20}
        tiny = {"preset": "tiny", "dtype": dtype, "page_tokens": 16}  # with small pages shares are what labels say
        return tiny | (small if quick else {"prompts": (2048, 512, 8192)})

    @property
    def pages(self) -> int:
        """Pages of the longest prompt that is measured, the last one perhaps in part."""
        return -(-max(cell.prompt_tokens for cell in chosen(self)) // self.page_tokens)

    @property
    def tier_pages(self) -> int:
        """Pages of a tier with room for two of the longest prompts."""
        return 2 * self.pages + self.pages // 8 + 16

    @property
    def needed(self) -> int:
        tokens = self.tier_pages * self.page_tokens * (2 if self.dtype == "float32" else 1)
        return tokens * token_bytes(self.preset) * 5 // 4 + 32 * MIB  # the SSD tier, and its catalogue with its log

    @property
    def near_tie(self) -> float:
        """Closer logits may swap places."""
        return NEAR_TIE if self.dtype in ("bfloat16", "float16") else 0.0

    def check(self) -> None:
        """Raises `InvalidValueError` for settings without a measurement."""
        if self.preset not in LLAMAS:
            raise InvalidValueError(f"unknown preset {self.preset!r}", f"choose of {', '.join(LLAMAS)}")
        for tokens in self.prompts:
            if tokens < 4 * self.page_tokens:
                raise InvalidValueError(f"a prompt of {tokens} tokens", f"use at least {4 * self.page_tokens}")


class Cell(NamedTuple):
    """A measurement: `cached_percent` of a prompt of `prompt_tokens` lie at `where`."""

    prompt_tokens: int
    cached_percent: int
    where: str
    overlap: bool
    gate: bool

    @property
    def usual(self) -> bool:
        """Whether it is an engine's usual hit: loads run under the forward pass, and no gate decides."""
        return self.overlap and not self.gate

    @property
    def group(self) -> tuple[int, int]:
        """Cells of a group are measured in turns, with the same baselines."""
        return self.prompt_tokens, self.cached_percent

    @property
    def label(self) -> str:
        words = [f"{self.prompt_tokens:,} tokens", f"{self.cached_percent} % cached", self.where.replace("_", " ")]
        if self.where in SWITCHED:
            words += ["overlap" if self.overlap else "no overlap", *(["gate"] if self.gate else [])]
        return ", ".join(words)


def cell_of(row: Any) -> Cell:
    """The cell of a report's row."""
    return Cell._make(row[key] for key in Cell._fields)


def cells(settings: Settings) -> list[Cell]:
    """The whole matrix, group by group."""
    found = []
    for prompt, cached in itertools.product(settings.prompts, CACHED):
        for where, overlap, gate in itertools.product(PLACES if cached else (NOWHERE,), (True, False), (False, True)):
            if where in SWITCHED or (overlap and not gate):
                found.append(Cell(prompt, cached, where, overlap, gate))
    return found


def chosen(settings: Settings) -> list[Cell]:
    """The matrix's measured cells."""
    longest = max(settings.prompts) if len(settings.prompts) > 2 else None
    usual = [cell for cell in cells(settings) if cell.usual]
    return cells(settings) if settings.everything else [cell for cell in usual if cell.prompt_tokens != longest]


def cached_tokens(prompt: int, percent: int, page_tokens: int) -> int:
    """A prompt's cached tokens: full pages, and never its last token."""
    return min(prompt * percent // 100, prompt - 1) // page_tokens * page_tokens


def transfer_seconds(bytes_by_tier: Mapping[str, int], rates: Mapping[str, float]) -> float | None:
    """A load's least time: its bytes over the bare ceilings (GB/s by name), all at work at once. None without a
    ceiling. SSD bytes are compared with a loop that reads them and copies them on."""
    ssd = sum(bytes_by_tier.get(tier, 0) for tier in ("ssd", "ssd" + PLAIN))
    parts = [(sum(bytes_by_tier.values()), "copy"), (ssd, "onward")]
    if any(nbytes and not rates.get(name) for nbytes, name in parts):
        return None
    return max((nbytes / rates[name] / 1e9 for nbytes, name in parts if nbytes), default=0.0)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A request's answer. `ttft`: seconds to the first token. `sources`: tokens that were not computed, by source.
    `waits`: the host's seconds in `wait`, a layer each. `placed`: bytes of the cached pages by tier, before it."""

    ttft: float
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    sources: dict[str, int]
    waits: tuple[float, ...]
    recomputed: int
    placed: dict[str, int] = dataclasses.field(default_factory=dict)


def compare(ours: Sequence[Answer], plain: Sequence[Answer], near_tie: float) -> str:
    """`same` tokens, `near tie` (16-bit results that depend on the batch size), or `other` ones."""
    found = "same"
    for mine, other in zip(ours, plain, strict=False):
        pairs = zip(mine.tokens, other.tokens, strict=True)
        where = next((number for number, (one, another) in enumerate(pairs) if one != another), None)
        if where is not None and other.margins[where] > near_tie:
            return "other"
        found = "near tie" if where is not None else found
    return found


def worst(
    mine: Sequence[Answer], plain: Sequence[Answer], resident: Sequence[Answer], near_tie: float, *, gated: bool
) -> str:
    """The tokens of hits against tokens without a cache, and against tokens of the same forward pass with a resident
    prefix. Only the second comparison has the same products, so in 16 bits the first may differ more. Hits that the
    gate cuts differ from both."""
    found = [compare(mine, plain, _OTHER_PRODUCTS * near_tie)]
    if not gated:
        found.append(compare(mine, resident, near_tie))
    return max(found, key=_BY_WORTH.index)
