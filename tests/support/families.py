"""Families of made-up traffic, whose parameters are drawn too: what no order can have been tuned to.

A seed draws the figures of a trace first, each from a wide range, most of them evenly in their logarithm, and then the
trace. A request is a prompt in whole pages. A family decides the order of the requests; their times are drawn evenly
from an hour. Equal seeds give equal traces on every machine that has the same Python.

    python -m tests.support.families chat 0 > chat.jsonl     # a trace for `gdscache replay`
"""

from __future__ import annotations

import heapq
import json
import math
import random
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate, count, islice

from gdscache.commands.replay.trace import BLOCK_TOKENS, Request

Piece = tuple[object, int]  # a text of a prompt: its name, and its pages
Prompt = tuple[Piece, ...]
Step = tuple[float, Prompt]  # seconds after the step before, and what is asked then
Family = Callable[[random.Random], Iterator[Prompt]]
Ids = dict[tuple[int, object, int], int]

LONGEST = 256  # pages of a prompt: a session ends before its prompt is longer
REFERENCES = 40_000  # pages of a trace, unless another number is asked for
_HOUR_MS = 3_600_000


def chat(draw: random.Random) -> Iterator[Prompt]:
    """Conversations with think times: most end soon, some go on for long."""
    system, first, growth = _pages(draw, 1, 8), _between(draw, 1, 12), _between(draw, 1, 6)
    turns, pause, spread = _between(draw, 1.5, 12), _between(draw, 30, 900), draw.uniform(0.5, 1.5)

    def session(number: int) -> Iterator[Step]:
        prompt: Prompt = (("system", system), ((number, 0), _around(draw, first)))
        for turn in range(1, 1 + _geometric(draw, turns)):
            yield pause * draw.lognormvariate(0, spread), prompt
            prompt = (*prompt, ((number, turn), _around(draw, growth)))

    return _sessions(draw, _between(draw, 0.02, 1), session)


def agents(draw: random.Random) -> Iterator[Prompt]:
    """Loops of tool calls behind long prompts that few kinds of agents share; now and then a person is asked."""
    kinds, tools, growth = _pages(draw, 1, 30), _between(draw, 4, 60), _between(draw, 1, 4)
    steps, pause = _between(draw, 5, 60), _between(draw, 2, 20)
    asks, person = draw.uniform(0, 0.1), _between(draw, 60, 1000)
    pick, prompts = _zipf(draw, kinds), [_around(draw, tools) for _ in range(kinds)]

    def session(number: int) -> Iterator[Step]:
        kind = pick()
        prompt: Prompt = (("tools", kind), prompts[kind]), ((number, 0), _around(draw, growth))
        for step in range(1, 1 + _geometric(draw, steps)):
            asked = draw.random() < asks
            yield (person if asked else pause) * draw.lognormvariate(0, 0.8), prompt
            prompt = (*prompt, ((number, step), _around(draw, growth)))

    # The kinds have prompts of their own: a name says which.
    return _sessions(draw, _between(draw, 0.005, 0.2), session)


def retrieval(draw: random.Random) -> Iterator[Prompt]:
    """Questions about shared documents, some of which are asked about far more than others."""
    system, documents, size = _pages(draw, 1, 4), _pages(draw, 50, 2000), _between(draw, 2, 20)
    pick, second, question = _zipf(draw, documents), draw.uniform(0, 0.5), _pages(draw, 1, 3)
    sizes = [_around(draw, size) for _ in range(documents)]
    for number in count():
        found = [pick() for _ in range(1 + (draw.random() < second))]
        texts = (((("document", i), sizes[i])) for i in found)
        yield ("system", system), *texts, (number, question)


def batch(draw: random.Random) -> Iterator[Prompt]:
    """Jobs: one prompt of instructions over many texts, each of which comes once."""
    kinds, instructions, text = _pages(draw, 1, 60), _between(draw, 2, 40), _between(draw, 1, 20)
    texts, pause = _between(draw, 10, 200), _between(draw, 1, 60)
    pick, sizes = _zipf(draw, kinds), [_around(draw, instructions) for _ in range(kinds)]

    def job(number: int) -> Iterator[Step]:
        kind = pick()
        for one in range(_geometric(draw, texts)):
            prompt = (("instructions", kind), sizes[kind]), ((number, one), _around(draw, text))
            yield pause * draw.lognormvariate(0, 0.8), prompt

    return _sessions(draw, _between(draw, 0.002, 0.05), job)


def scans(draw: random.Random) -> Iterator[Prompt]:
    """Days of questions or chats, and each night the same scan over many texts, in the same order."""
    day = _named("day", draw.choice((chat, retrieval, agents))(draw))
    night, text, requests = _pages(draw, 30, 600), _between(draw, 1, 10), _pages(draw, 200, 1500)
    sizes = [_around(draw, text) for _ in range(night)]
    while True:
        yield from islice(day, requests)
        yield from ((("scan", 1), (("scan", i), size)) for i, size in enumerate(sizes))


def drift(draw: random.Random) -> Iterator[Prompt]:
    """Documents that are new, wanted by many, and forgotten."""
    readers, spread, size = _between(draw, 1.5, 20), draw.uniform(0.5, 1.5), _between(draw, 2, 20)
    interest, question = _between(draw, 30, 3000), _pages(draw, 1, 3)

    def document(number: int) -> Iterator[Step]:
        pages, at = _around(draw, size), 0.0
        half = interest * draw.lognormvariate(0, spread)
        times = sorted(draw.expovariate(math.log(2) / half) for _ in range(_geometric(draw, readers)))
        for reader, time in enumerate(times):
            yield time - at, ((number, pages), ((number, reader), question))
            at = time

    return _sessions(draw, 0.1, document)


def crowds(draw: random.Random) -> Iterator[Prompt]:
    """Questions about shared documents, and crowds that come all at once for one of them and do not come back."""
    base = _named("base", draw.choice((retrieval, chat))(draw))
    between, crowd, size = _pages(draw, 100, 1000), _between(draw, 20, 400), _between(draw, 4, 60)
    part, question = draw.uniform(0.3, 0.95), _pages(draw, 1, 3)
    for number in count():
        yield from islice(base, _around(draw, between))
        pages = _around(draw, size)
        for reader in range(_around(draw, crowd)):
            own = (("crowd", number), pages), ((number, reader), question)
            yield own if draw.random() < part else next(base)


def tenants(draw: random.Random) -> Iterator[Prompt]:
    """Tenants of very unequal size, each with traffic of its own family and pages of its own."""
    number = draw.randint(3, 10)
    kinds = [draw.choice((chat, agents, retrieval, batch, drift, noise)) for _ in range(number)]
    parts = [_named(i, kind(random.Random(draw.getrandbits(64)))) for i, kind in enumerate(kinds)]
    pick = _zipf(draw, number)
    while True:
        yield next(parts[pick()])


def mixtures(draw: random.Random) -> Iterator[Prompt]:
    """Several families at once, whose shares change from phase to phase."""
    kinds = draw.sample((chat, agents, retrieval, batch, scans, drift, crowds, noise, best, worst), draw.randint(2, 4))
    parts = [_named(i, kind(random.Random(draw.getrandbits(64)))) for i, kind in enumerate(kinds)]
    length = _between(draw, 200, 3000)
    while True:
        shares = [draw.random() ** 3 for _ in parts]
        for _ in range(_around(draw, length)):
            yield next(draw.choices(parts, shares)[0])


def noise(draw: random.Random) -> Iterator[Prompt]:
    """Texts that are asked for evenly and independently: nothing can be known, and no order is better than another."""
    texts, size = _pages(draw, 500, 5000), _between(draw, 1, 6)
    sizes = [_around(draw, size) for _ in range(texts)]
    while True:
        i = draw.randrange(texts)
        yield ((i, sizes[i]),)


def best(draw: random.Random) -> Iterator[Prompt]:
    """LRU's best case: the more recently a text was asked for, the sooner it is again (the LRU stack model)."""
    new, mean, size = draw.uniform(0.02, 0.3), _between(draw, 20, 500), _between(draw, 1, 8)
    stack: list[Piece] = []
    for number in count():
        depth = int(draw.expovariate(1 / mean))
        fresh = draw.random() < new or depth >= len(stack)
        stack.append((number, _around(draw, size)) if fresh else stack.pop(-1 - depth))
        yield (stack[-1],)


def worst(draw: random.Random) -> Iterator[Prompt]:
    """LRU's worst case: texts that are asked for in turn, over and over; shorter rounds within longer ones."""
    rounds, size = [_pages(draw, 40, 3000) for _ in range(draw.randint(1, 3))], _between(draw, 1, 6)
    sizes = [[_around(draw, size) for _ in range(texts)] for texts in rounds]
    turns = [_pages(draw, 5, 2000) for _ in rounds]
    at = [0] * len(rounds)
    while True:
        for i, texts in enumerate(rounds):
            for _ in range(turns[i]):
                yield (((i, at[i]), sizes[i][at[i]]),)
                at[i] = (at[i] + 1) % texts


def turns(draw: random.Random) -> Iterator[Prompt]:
    """LRU's best case and its worst by turns: what was learned of one is wrong for the other."""
    parts = [_named(i, kind(random.Random(draw.getrandbits(64)))) for i, kind in enumerate((best, worst))]
    length = _between(draw, 300, 5000)
    while True:
        for part in parts:
            yield from islice(part, _around(draw, length))


FAMILIES: dict[str, Family] = {
    "chat": chat, "agents": agents, "retrieval": retrieval, "batch": batch, "scans": scans, "drift": drift,
    "crowds": crowds, "tenants": tenants, "mixtures": mixtures, "noise": noise, "best": best, "worst": worst,
    "turns": turns,
}  # fmt: skip


def drawn(family: str, seed: int, references: int = REFERENCES) -> list[Request]:
    """Requests of a family until they have `references` pages, a block each. All of it follows from `seed`."""
    ids: Ids = {}
    prompts: list[tuple[int, ...]] = []
    for prompt in FAMILIES[family](random.Random(f"{family} {seed}")):
        prompts.append(blocks_of(prompt, ids))
        references -= len(prompts[-1])
        if references <= 0:
            break
    clock = random.Random(f"times of {family} {seed}")
    times = sorted(clock.randrange(_HOUR_MS) for _ in prompts)
    return [Request(at, BLOCK_TOKENS * len(p), 1, p) for at, p in zip(times, prompts, strict=True)]


def blocks_of(prompt: Prompt, ids: Ids) -> tuple[int, ...]:
    """The ids of a prompt's blocks; `ids` has those given so far, by the block before, the text and the page in it."""
    blocks: list[int] = []
    for name, pages in prompt:
        for page in range(pages):
            blocks.append(ids.setdefault((blocks[-1] if blocks else -1, name, page), len(ids)))
    return tuple(blocks)


def _sessions(draw: random.Random, rate: float, session: Callable[[int], Iterator[Step]]) -> Iterator[Prompt]:
    """Sessions that begin so many times a second, evenly at random; their requests in the order of time."""
    waiting: list[tuple[float, int, Prompt, Iterator[Step]]] = []
    start, number = draw.expovariate(rate), 0
    while True:
        while waiting and waiting[0][0] <= start:
            at, own, prompt, steps = heapq.heappop(waiting)
            yield prompt
            _wait(waiting, at, own, steps)
        _wait(waiting, start, number, session(number))
        start += draw.expovariate(rate)
        number += 1


def _wait(waiting: list[tuple[float, int, Prompt, Iterator[Step]]], at: float, own: int, steps: Iterator[Step]) -> None:
    after = next(steps, None)
    if after is not None and sum(pages for _, pages in after[1]) <= LONGEST:
        heapq.heappush(waiting, (at + after[0], own, after[1], steps))


def _named(name: object, prompts: Iterator[Prompt]) -> Iterator[Prompt]:
    """The same prompts of texts that nobody else has."""
    return (tuple(((name, text), pages) for text, pages in prompt) for prompt in prompts)


def _between(draw: random.Random, low: float, high: float) -> float:
    """A parameter, evenly in its logarithm."""
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def _pages(draw: random.Random, low: int, high: int) -> int:
    return round(_between(draw, low, high))


def _around(draw: random.Random, median: float) -> int:
    """A length: lognormal, at least one, at most eight times the median."""
    return max(1, round(min(median * draw.lognormvariate(0, 0.7), 8 * median)))


def _geometric(draw: random.Random, mean: float) -> int:
    """1, 2, ..., each one more with the same chance."""
    return 1 if mean <= 1 else 1 + int(math.log(1.0 - draw.random()) / math.log(1.0 - 1.0 / mean))


def _zipf(draw: random.Random, n: int) -> Callable[[], int]:
    """A chooser of `0 ... n-1`, the i-th with a chance of 1 / (i + 1) ** skew; the skew is drawn too."""
    skew = draw.uniform(0.2, 1.3)
    sums = list(accumulate((i + 1) ** -skew for i in range(n)))
    return lambda: min(bisect_left(sums, draw.random() * sums[-1]), n - 1)


def main(family: str, seed: str) -> None:
    for r in drawn(family, int(seed)):
        fields = {"timestamp": r.timestamp, "input_length": r.input_tokens, "output_length": r.output_tokens}
        print(json.dumps({**fields, "hash_ids": r.blocks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
