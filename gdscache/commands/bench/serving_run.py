"""What a run of vLLM or SGLang does: prompts, what it is ordered to measure, and when it may. Behind `bench ttft`.

A run is a process with one engine and one way of keeping the KV cache. Runs of a stage open their engines side by side.
Each says that it is ready, and measures when it is told to, alone.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

WORDS = 4000  # numbers of tokens lie below
CLIENTS = 64  # requests at a time
GRAPHS = [1, 2, 4, 8, 16, 24, 32, 48, CLIENTS]  # requests of a step that decodes, for which there is a CUDA graph
SETTLE_S, PAUSE_S = 4.0, 2.0  # until what is stored in the background is there; behind a load of traffic
DOCUMENTS, USES, PART, ANSWER = 48, 3, 2048, 16  # requests that have the first half of their prompt in common


def words(seed: str, number: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, WORDS) for _ in range(number)]


def prompt(beginning: int, end: int, order: dict[str, Any]) -> list[int]:
    """`order["tokens"]` tokens, of which the first `order["cached"]` follow from `beginning` alone."""
    cached = order["cached"]
    return words(f"beginning {beginning}", cached) + words(f"end {end}", order["tokens"] - cached)


def shared_prompts(part: int, turn: int) -> list[list[int]]:
    """Prompts of two parts, of which `USES` have the first one in common, in an order drawn at random."""
    found = [
        words(f"document {turn} {document}", part) + words(f"question {turn} {document} {use}", part)
        for use in range(USES)
        for document in range(DOCUMENTS)
    ]
    random.Random(turn).shuffle(found)
    return found


def lone_prompts(part: int, turn: int) -> list[list[int]]:
    """Prompts that nothing has been asked for before."""
    return [words(f"lone {turn} {number}", 2 * part) for number in range(DOCUMENTS)]


def traffic(order: dict[str, Any]) -> Iterator[tuple[str, list[list[int]]]]:
    """Loads of both kinds in turns, `order["turns"]` of each."""
    for turn in range(order["turns"]):
        yield "shared", shared_prompts(order["part"], turn)
        yield "lone", lone_prompts(order["part"], turn)


Generate = Callable[[Sequence[list[int]], int], Sequence[int]]  # prompts, tokens to answer: cached tokens of each


class Answers:
    """What a run says, and its order. Written as it comes, so that a run that is killed leaves what it had."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
        self._path = Path(sys.argv[2])
        self._found: dict[str, Any] = {}

    def say(self, **found: Any) -> None:
        self._found |= found
        self._path.write_text(json.dumps(self._found))

    def add(self, name: str, value: object) -> None:
        """One more value of a series."""
        self.say(**{name: [*self._found.get(name, []), value]})

    def wait_for_turn(self) -> None:
        """Everything is open. Returns when no other run measures."""
        Path(f"{self._path}.ready").touch()
        while not Path(f"{self._path}.go").exists():
            time.sleep(0.05)


def rate(generate: Generate, name: str, prompts: list[list[int]], answers: Answers) -> None:
    """Requests a second, all handed over at once; and the share of the prompts' tokens that were cached, anywhere."""
    start = time.perf_counter()
    cached = generate(prompts, ANSWER)
    answers.add(f"{name}_requests_per_s", len(prompts) / (time.perf_counter() - start))
    answers.add(f"{name}_cached", sum(cached) / sum(map(len, prompts)))


def first_tokens(generate: Generate, forget: Callable[[], object], answers: Answers) -> None:
    """Milliseconds to the first token, and how many tokens were cached, of `order["repeat"]` prompts each way.

    `forget()` has the engine's own GPU cache forget what it has.
    """
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
            if order["groups"]:  # windows and states are kept where prompts part, once two have parted there
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
    after: Callable[[str], object] = lambda kind: None,
) -> None:
    """All that a run was ordered to measure, once it is its turn. First tokens come before the traffic, which pushes
    their pages out. `after(kind)` is called behind each load of traffic, and with an empty word before the first one.
    """
    answers.wait_for_turn()
    first_tokens(generate, forget, answers)
    if not answers.order["traffic"]:
        return
    generate(shared_prompts(answers.order["part"], -1)[: CLIENTS // 2], ANSWER)  # the kernels of traffic are compiled
    after("")
    for kind, prompts in traffic(answers.order):
        rate(generate, kind, prompts, answers)
        time.sleep(PAUSE_S)
        after(kind)
