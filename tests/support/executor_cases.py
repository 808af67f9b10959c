"""Moves that hypothesis draws for executors: layouts, pages, ways, what goes wrong with them, and their spaces."""

from __future__ import annotations

import dataclasses
import errno
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gdscache.moves import PLANES, Move, PageStatus, Priority, Way
from gdscache.pages.layout import EXTENT_ALIGNMENT, PageLayout, Plane
from tests.support.reference_executor import Bytes, Fault, digest

LONG_S = 60.0
HANG_S = 0.4  # the deadline of a move one of whose pages hangs
STRETCH = 2  # slots of one file that follow each other, where a space has two files
# What a load, a prefetch, a store and a write consist of: the source and the target of a way, and where it passes.
HOWS = {
    "load": ("memory", "places", "passes", "passes far"),
    "prefetch": ("fetch", "fetch far"),
    "store": ("keep", "keep bounce"),
    "write": ("write", "write bounce", "write far"),
}
PRIORITIES = {"load": Priority.LOAD, "prefetch": Priority.PREFETCH, "store": Priority.STORE, "write": Priority.DEMOTION}


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A move. `begin`: `cancel` it as soon as it is begun, or its deadline is `over` by then."""

    move: Move
    begin: str

    @property
    def may_expire(self) -> bool:
        return self.move.seconds < LONG_S


@dataclasses.dataclass(eq=False)
class Spaces:
    """The bytes of everything, as `ReferenceExecutor` has them."""

    planes: list[list[Bytes]]
    memories: dict[str, Bytes]
    files: dict[str, Bytes]
    sums: dict[str, Any]

    def copy(self) -> Spaces:
        return Spaces(
            [[plane.copy() for plane in planes] for planes in self.planes],
            *({name: some.copy() for name, some in each.items()} for each in (self.memories, self.files, self.sums)),
        )


@dataclasses.dataclass(eq=False)
class Case:
    """Moves that go on together over disjoint slots. `tight`: jobs are small, and few of them are under way."""

    layout: PageLayout
    block_tokens: int
    spaces: Spaces
    moves: list[Planned]
    faults: list[Fault]
    refusal: PageStatus | None
    reserve: int
    tight: bool
    direct: bool

    def __repr__(self) -> str:
        said = [f"bounds {self.layout.layer_bounds}, {self.block_tokens} of {self.layout.page_tokens} tokens a block"]
        for planned in self.moves:
            move = planned.move
            said.append(f"{move.priority.name} {planned.begin} in {move.seconds} s, groups {move.groups}")
            for way in move.ways:
                pages = f"{way.sources.tolist()} to {way.targets.tolist()}"
                said.append(f"  {way.source} to {way.target} {way.through}: {pages}, sums: {way.sums is not None}")
        said += [str(fault) for fault in self.faults]
        return "\n".join([*said, f"{self.refusal}, reserve {self.reserve}, tight {self.tight}, direct {self.direct}"])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis shows of a case that fails: not its bytes."""
        printer.text(repr(self))


def _dimensions(name: str) -> st.SearchStrategy[Plane]:
    shapes = st.sampled_from([(1,), (3,), (17,), (2, 32), (5, 33), (4, 128), (576,), (3, 500)])
    return st.builds(Plane, st.just(name), shapes, st.sampled_from(["bfloat16", "uint8", "float32"]))


@st.composite
def _layouts(draw: st.DrawFn) -> PageLayout:
    names = draw(st.sampled_from([("kv",), ("k", "v"), ("k", "v", "index")]))
    planes = [draw(_dimensions(name)) for name in names]
    layers = [tuple(planes[: draw(st.integers(1, len(planes)))]) for _ in range(draw(st.integers(1, 5)))]
    return PageLayout(tuple(layers), draw(st.sampled_from([2, 4, 8])))


@st.composite
def _groups(draw: st.DrawFn, layers: int) -> tuple[range, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
    bounds = [0, *cuts, layers]
    return tuple(range(a, b) for a, b in itertools.pairwise(bounds)) if cuts or draw(st.booleans()) else ()


def simple(layout: PageLayout, pages: int, *planned: Planned) -> Case:
    """Moves over spaces of so many pages, of one block each. Nothing goes wrong."""
    spaces = _spaces(layout, np.random.default_rng(pages), layout.page_tokens, pages, pages, 2 * pages, pages)
    return Case(layout, layout.page_tokens, spaces, list(planned), [], None, pages, False, False)


@st.composite
def cases(draw: st.DrawFn, *, python: bool = False) -> Case:
    """`python`: only what a `FaultyTransport` can do: no read is torn, and half of what is torn or short is moved."""
    layout = draw(_layouts())
    plans = draw(st.lists(st.sampled_from(sorted(HOWS)), min_size=1, max_size=4))
    ways = [draw(st.lists(st.tuples(st.sampled_from(HOWS[kind]), st.integers(1, 5)), max_size=3)) for kind in plans]
    ways = [some or [(HOWS[kind][-1], 2)] for kind, some in zip(plans, ways, strict=True)]
    total = sum(pages for some in ways for _, pages in some)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    scattered = draw(st.booleans())
    block_tokens = draw(st.sampled_from([n for n in (1, 2, 4, 8) if layout.page_tokens % n == 0]))
    per_page = layout.page_tokens // block_tokens
    hangs = draw(st.integers(0, 3)) == 0
    reserve = 12 if hangs else draw(st.integers(1, 6))
    sizes = ((total + 3) * per_page, 2 * total + 3, 2 * max(reserve, total), total + 3)
    spaces = _spaces(layout, rng, block_tokens, *sizes)

    def pool(count: int) -> Iterator[int]:
        return iter((rng.permutation(count) if scattered else np.arange(count)).tolist())

    blocks = pool(len(spaces.planes[0][0]))
    slots = {name: pool(len(some)) for name, some in (spaces.memories | spaces.files).items()}
    slots["bounce"] = pool(len(spaces.memories["bounce"]) // 2)  # the half of stores
    faults: list[Fault] = []
    moves = []
    hung = not hangs  # whether no further page may hang

    def positions(space: str, pages: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if space == PLANES:
            return np.array([[next(blocks) for _ in range(per_page)] for _ in range(pages)], np.int64)
        return np.array([next(slots[space]) for _ in range(pages)], np.int64)

    for kind, some in zip(plans, ways, strict=True):
        made, seconds = [], LONG_S
        for how, pages in some:
            way = _way(how, pages, positions)
            if kind in ("load", "prefetch") and draw(st.integers(0, 4)):
                whole = (spaces.memories | spaces.files)[way.source][way.sources]
                found = [[digest(e[a:b]) for a, b in layout.layer_bounds] for e in whole]
                way = dataclasses.replace(way, sums=np.array(found, np.uint64))
            at, reads = (way.sources, True) if kind in ("load", "prefetch") else (way.targets, False)
            files = way.source if reads else way.target
            for page in range(pages):
                what = draw(st.sampled_from(_troubles(way, reads=reads, python=python, hangs=not hung)))
                if what == "sum" and way.sums is not None:
                    layer = draw(st.integers(0, layout.n_layers - 1))
                    way.sums[page, layer] ^= np.uint64(1 << draw(st.integers(0, 63)))
                elif what:
                    faults.append(
                        draw(_fault(what, files, int(at[page]), layout.extent_bytes, reads=reads, python=python))
                    )
                if what == "hang":
                    seconds, hung = HANG_S, True
            made.append(way)
        groups = draw(_groups(layout.n_layers)) if kind == "load" else ()
        begin = draw(st.sampled_from(["", "", "", "cancel", "over"])) if kind != "store" else ""
        seconds = 0.0 if begin == "over" else seconds
        moves.append(Planned(Move(PRIORITIES[kind], tuple(made), seconds, groups), begin))
    refusal = draw(st.sampled_from([None] * 6 + [PageStatus.SWITCHED_OFF, PageStatus.LOCK_LOST]))
    tight, direct = draw(st.booleans()), draw(st.booleans())
    return Case(layout, block_tokens, spaces, moves, faults, refusal, reserve, tight, direct)


def _spaces(
    layout: PageLayout, rng: np.random.Generator, tokens: int, blocks: int, cpu: int, bounce: int, files: int
) -> Spaces:
    def drawn(*shape: int) -> Bytes:
        return rng.integers(0, 256, shape, np.uint8)

    extent = layout.extent_bytes
    planes = [[drawn(blocks, tokens * plane.row_bytes) for plane in planes] for planes in layout.layers]
    memories = {"cpu": drawn(cpu, extent), "bounce": drawn(bounce, extent)}
    sums = {name: rng.integers(0, 1 << 63, (len(some), layout.n_layers), np.uint64) for name, some in memories.items()}
    return Spaces(planes, memories, {"ssd": drawn(files, extent), "far": drawn(files, extent)}, sums)


def _way(how: str, pages: int, positions: Any) -> Way:
    files = "far" if how.endswith("far") else "ssd"
    memory = "bounce" if how.endswith("bounce") else "cpu"
    ends = {
        "memory": ("cpu", PLANES), "places": (files, PLANES), "passes": (files, PLANES), "fetch": (files, "cpu"),
        "keep": (PLANES, memory), "write": (memory, files),
    }  # fmt: skip
    source, target = ends[how.split()[0]]
    way = Way(source, target, positions(source, pages), positions(target, pages))
    if how == "places":
        way = dataclasses.replace(way, through="cpu", places=positions("cpu", pages))
    return way


def _troubles(way: Way, *, reads: bool, python: bool, hangs: bool) -> list[str]:
    """What may go wrong with a page, most often nothing. Where nobody knows its checksums, nobody sees wrong bytes."""
    if way.source == PLANES:
        return [""]
    if way.source in ("cpu", "bounce") and reads:
        return ["", "", "", "sum" if way.sums is not None else ""]
    found = ["error", "short", "late"] + ["hang", "hang"] * hangs
    if not reads:
        found.append("torn")
    elif way.sums is not None:
        found += ["sum", "flip"] + ["torn"] * (not python)
    return [""] * 12 + found


@st.composite
def _fault(draw: st.DrawFn, what: Any, files: str, slot: int, size: int, *, reads: bool, python: bool) -> Fault:
    if what == "torn":  # behind whole sectors: direct I/O moves nothing else
        sectors = size // EXTENT_ALIGNMENT
        start = EXTENT_ALIGNMENT * (sectors // 2 if python else draw(st.integers(0, sectors - 1)))
        return Fault(what, files, slot, start, size)
    start = draw(st.integers(0, size - 1))
    stop = start + 1 if what in ("flip", "hang") else draw(st.integers(start + 1, size))
    failing = errno.EIO if reads or draw(st.booleans()) else errno.ENOSPC
    return Fault(what, files, slot, start, stop, failing if what == "error" else 0)
