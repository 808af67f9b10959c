"""A run of vLLM or SGLang: its prompts, its measurements, and its turn. Behind `bench ttft`.

A run is a process with one engine and one way of keeping the KV cache. Runs of a stage open their engines at the same
time. Each reports that it is ready, and measures alone in its turn.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

WORDS = 4000  # upper bound of token ids
CLIENTS = 64  # requests at a time
GRAPHS = [1, 2, 4, 8, 16, 24, 32, 48, CLIENTS]  # batch sizes of decode steps with a CUDA graph
SETTLE_S, PAUSE_S = 4.0, 2.0  # for background stores to end; after a load of traffic
DOCUMENTS, USES, PART, ANSWER = 48, 3, 2048, 16  # requests that share the first half of their prompt


def words(seed: str, number: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, WORDS) for _ in range(number)]


def prompt(beginning: int, end: int, order: dict[str, Any]) -> list[int]:
    """`order["tokens"]` tokens; the first `order["cached"]` depend on `beginning` alone."""
    cached = order["cached"]
    return words(f"beginning {beginning}", cached) + words(f"end {end}", order["tokens"] - cached)


def shared_prompts(part: int, turn: int) -> list[list[int]]:
    """Prompts of two parts, in random order; `USES` prompts share each first part."""
    found = [
        words(f"document {turn} {document}", part) + words(f"question {turn} {document} {use}", part)
        for use in range(USES)
        for document in range(DOCUMENTS)
    ]
    random.Random(turn).shuffle(found)
    return found


def lone_prompts(part: int, turn: int) -> list[list[int]]:
    """Prompts without a common part."""
    return [words(f"lone {turn} {number}", 2 * part) for number in range(DOCUMENTS)]


def traffic(order: dict[str, Any]) -> Iterator[tuple[str, list[list[int]]]]:
    """Loads of both kinds in turns, `order["turns"]` of each."""
    for turn in range(order["turns"]):
        yield "shared", shared_prompts(order["part"], turn)
        yield "lone", lone_prompts(order["part"], turn)


Generate = Callable[[Sequence[list[int]], int], Sequence[int]]  # prompts, tokens to answer: cached tokens of each


class Answers:
    """A run's order and results. Results are written at once, so that a killed run keeps them."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
        self._path = Path(sys.argv[2])
        self._found: dict[str, Any] = {}

    def say(self, **found: Any) -> None:
        self._found |= found
        self._path.write_text(json.dumps(self._found))

    def add(self, name: str, value: object) -> None:
        self.say(**{name: [*self._found.get(name, []), value]})

    def wait_for_turn(self) -> None:
        """Report that everything is open. Returns in this run's turn."""
        Path(f"{self._path}.ready").touch()
        while not Path(f"{self._path}.go").exists():
            time.sleep(0.05)


def rate(generate: Generate, name: str, prompts: list[list[int]], answers: Answers) -> None:
    """Requests a second, all submitted at once; and the share of the prompts' tokens that were cached in any place."""
    start = time.perf_counter()
    cached = generate(prompts, ANSWER)
    answers.add(f"{name}_requests_per_s", len(prompts) / (time.perf_counter() - start))
    answers.add(f"{name}_cached", sum(cached) / sum(map(len, prompts)))


def first_tokens(generate: Generate, forget: Callable[[], object], answers: Answers) -> None:
    """Milliseconds to the first token, and the number of cached tokens, of `order["repeat"]` prompts each way.
    `forget()` empties the engine's own GPU cache."""
    order = answers.order
    found: dict[str, Any] = {}

    def turn(name: str, number: int, end: int) -> None:
        asked, start = prompt(number, end, order), time.perf_counter()
        (cached,) = generate([asked], 1)
        ms = (time.perf_counter() - start) * 1e3
        row = found.setdefault(name, {"ms": [], "cached": []})
        row["ms"].append(ms)
        row["cached"].append(cached)
        answers.say(first=found)

    generate([prompt(98, 98, order)], 1)  # kernels are loaded
    if not order["restarted"]:
        for n in range(order["repeat"]):
            turn("recomputed", n, n)
            if order["groups"]:  # windows and states are kept at places where two prompts have parted
                turn("parted", n, 200 + n)
            turn("resident", n, 100 + n)
        time.sleep(SETTLE_S)
        if order["way"] == "none":
            return
    for n in range(order["repeat"]):
        if not order["restarted"]:
            forget()
        turn("loaded", n, order["ends"] + n)


def measure(
    answers: Answers,
    generate: Generate,
    forget: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Measure a run's order in its turn. First tokens come before the traffic, which evicts their pages. `after()` is
    called before the first load of traffic, and after each."""
    answers.wait_for_turn()
    first_tokens(generate, forget, answers)
    if not answers.order["traffic"]:
        return
    generate(shared_prompts(answers.order["part"], -1)[: CLIENTS // 2], ANSWER)  # compiles the kernels of traffic
    after()
    for kind, prompts in traffic(answers.order):
        rate(generate, kind, prompts, answers)
        time.sleep(PAUSE_S)
        after()
