"""Made-up traffic in the form of a trace: kinds of use that are known from practice and stress a cache differently.

A prompt is a list of texts, each with a name and a length; a block's id names all that is before its end, as in
recorded traces. What a model answers becomes part of the next turn's prompt. Nothing here is random beyond its seed:
equal seeds give equal traces on every machine that has the same Python.

The figures are defaults of dataclasses, and read there. Lengths and times are lognormal, given by median and sigma;
arrivals are Poisson. The kinds are not fitted to any recorded trace.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

from gdscache.commands.replay.trace import BLOCK_TOKENS, SYNTHETIC, Request, TraceError
from gdscache.errors import InvalidValueError

LONGEST = 128 * 1024  # tokens: a conversation ends before its prompt is longer


class Text(NamedTuple):
    """A piece of a prompt: the same name, the same tokens."""

    name: object
    tokens: int


class Call(NamedTuple):
    """A request before its blocks have ids: ms, the prompt, tokens of output."""

    at: float
    prompt: tuple[Text, ...]
    output: int


class Kind(Protocol):
    """A kind of traffic."""

    def calls(self, draw: random.Random, seconds: float) -> Iterator[Call]:
        """Requests of `seconds` seconds, in any order."""
        ...


@dataclass(frozen=True)
class Spread:
    """A lognormal quantity, cut at `most`."""

    median: float
    sigma: float
    most: float = math.inf

    def draw(self, draw: random.Random) -> float:
        return min(draw.lognormvariate(math.log(self.median), self.sigma), self.most)

    def tokens(self, draw: random.Random) -> int:
        return max(1, round(self.draw(draw)))


@dataclass(frozen=True)
class Agents:
    """Agents at work: a few long prompts of instructions and tools, then many short steps that return within seconds.

    A step adds the model's call of a tool and the tool's result. Now and then a person is asked, and the agent rests.
    """

    kinds: int = 8  # of agents; the first ones are the most used
    prompt: Spread = Spread(8_000, 0.5, 32_000)
    sessions_per_second: float = 0.06
    steps: float = 25  # on average
    task: Spread = Spread(800, 1.0, 16_000)
    result: Spread = Spread(500, 1.2, 16_000)
    output: Spread = Spread(150, 0.8, 4_000)
    pause: Spread = Spread(6, 0.9)  # seconds between steps
    asks: float = 0.04  # steps that wait for a person
    person: Spread = Spread(120, 1.0)

    def calls(self, draw: random.Random, seconds: float) -> Iterator[Call]:
        prompts = [Text(("tools", i), self.prompt.tokens(draw)) for i in range(self.kinds)]
        pick = _zipf(self.kinds, 1.0)
        for session, start in enumerate(_arrivals(draw, self.sessions_per_second, seconds)):
            prompt = [prompts[pick(draw)], Text((session, "task"), self.task.tokens(draw))]
            at = start
            for step in range(_geometric(draw, self.steps)):
                output = self.output.tokens(draw)
                if at >= seconds or sum(text.tokens for text in prompt) > LONGEST:
                    break
                yield Call(1000 * at, tuple(prompt), output)
                prompt += [Text((session, step, "call"), output), Text((session, step), self.result.tokens(draw))]
                at += (self.person if draw.random() < self.asks else self.pause).draw(draw)


@dataclass(frozen=True)
class Chat:
    """People who chat: a short common prompt, some turns with pauses of a minute or far longer; most leave soon."""

    system: int = 700  # tokens
    users_per_second: float = 0.5
    turns: float = 3.5  # on average
    first: Spread = Spread(900, 1.5, 32_000)
    message: Spread = Spread(120, 1.2, 8_000)
    output: Spread = Spread(350, 0.8, 4_000)
    pause: Spread = Spread(75, 1.3)  # seconds between turns

    def calls(self, draw: random.Random, seconds: float) -> Iterator[Call]:
        for user, start in enumerate(_arrivals(draw, self.users_per_second, seconds)):
            prompt = [Text("system", self.system), Text((user, "first"), self.first.tokens(draw))]
            at = start
            for turn in range(_geometric(draw, self.turns)):
                output = self.output.tokens(draw)
                if at >= seconds or sum(text.tokens for text in prompt) > LONGEST:
                    break
                yield Call(1000 * at, tuple(prompt), output)
                prompt += [Text((user, turn, "answer"), output), Text((user, turn), self.message.tokens(draw))]
                at += self.pause.draw(draw)


@dataclass(frozen=True)
class Rag:
    """Questions about documents, each asked once: a common prompt, one or two documents by Zipf's law, a question.

    Only the first document of a prompt can be found again; the second one is a prefix only behind the same first one.
    """

    system: int = 1_200  # tokens
    documents: int = 4_000
    skew: float = 0.9
    document: Spread = Spread(3_000, 0.8, 32_000)
    second: float = 0.3  # share of prompts with two documents
    question: Spread = Spread(60, 0.7, 2_000)
    output: Spread = Spread(250, 0.7, 4_000)
    requests_per_second: float = 2.0

    def calls(self, draw: random.Random, seconds: float) -> Iterator[Call]:
        documents = [Text(("document", i), self.document.tokens(draw)) for i in range(self.documents)]
        pick = _zipf(self.documents, self.skew)
        for number, at in enumerate(_arrivals(draw, self.requests_per_second, seconds)):
            found = [documents[pick(draw)] for _ in range(1 + (draw.random() < self.second))]
            question = Text(number, self.question.tokens(draw))
            yield Call(1000 * at, (Text("system", self.system), *found, question), self.output.tokens(draw))


@dataclass(frozen=True)
class Batch:
    """Jobs over many texts, some dozens at once: a job's instructions, then a text that comes once: a scan.

    Instructions are of a few kinds, and come again in later jobs.
    """

    kinds: int = 40  # of instructions
    skew: float = 0.7
    instructions: Spread = Spread(3_000, 0.6, 16_000)
    jobs_per_second: float = 0.025
    texts: float = 60  # a job, on average
    text: Spread = Spread(3_500, 0.8, 32_000)
    output: Spread = Spread(200, 0.6, 2_000)
    pause: Spread = Spread(25, 0.8)  # seconds between texts

    def calls(self, draw: random.Random, seconds: float) -> Iterator[Call]:
        kinds = [Text(("instructions", i), self.instructions.tokens(draw)) for i in range(self.kinds)]
        pick = _zipf(self.kinds, self.skew)
        for job, start in enumerate(_arrivals(draw, self.jobs_per_second, seconds)):
            instructions = kinds[pick(draw)]
            at = start
            for number in range(_geometric(draw, self.texts)):
                if at >= seconds:
                    break
                text = Text((job, number), self.text.tokens(draw))
                yield Call(1000 * at, (instructions, text), self.output.tokens(draw))
                at += self.pause.draw(draw)


@dataclass(frozen=True)
class Drift:
    """Documents that are new, wanted by everybody, and forgotten: what was popular says little about what will be."""

    system: int = 600  # tokens
    documents_per_second: float = 0.25
    readers: Spread = Spread(2.5, 1.3, 400)  # requests about a document
    interest: Spread = Spread(180, 0.9)  # seconds after which half of its readers came
    document: Spread = Spread(4_000, 0.8, 32_000)
    question: Spread = Spread(80, 0.8, 2_000)
    output: Spread = Spread(250, 0.7, 4_000)

    def calls(self, draw: random.Random, seconds: float) -> Iterator[Call]:
        for number, born in enumerate(_arrivals(draw, self.documents_per_second, seconds)):
            document = Text(("document", number), self.document.tokens(draw))
            half = self.interest.draw(draw)
            for reader in range(self.readers.tokens(draw)):
                at = born + (draw.expovariate(math.log(2) / half) if reader else 0.0)
                question = Text((number, reader), self.question.tokens(draw))
                output = self.output.tokens(draw)
                if at < seconds:
                    yield Call(1000 * at, (Text("system", self.system), document, question), output)


@dataclass(frozen=True)
class Tenants:
    """All of the others at once, each on its own: what one of them wastes is taken from the others."""

    parts: tuple[tuple[str, Kind], ...] = field(
        default_factory=lambda: (
            ("agents", Agents(sessions_per_second=0.02)),
            ("chat", Chat(users_per_second=0.2)),
            ("rag", Rag(requests_per_second=0.6)),
            ("batch", Batch(jobs_per_second=0.006)),
            ("drift", Drift(documents_per_second=0.06)),
        )
    )

    def calls(self, draw: random.Random, seconds: float) -> Iterator[Call]:
        for name, part in self.parts:
            for at, prompt, output in part.calls(random.Random(draw.getrandbits(64)), seconds):
                yield Call(at, tuple(Text((name, text.name), text.tokens) for text in prompt), output)


KINDS: dict[str, Callable[[], Kind]] = {
    "agents": Agents,
    "chat": Chat,
    "rag": Rag,
    "batch": Batch,
    "drift": Drift,
    "tenants": Tenants,
}


def generate(kind: str | Kind, seed: int = 0, seconds: float = 3600.0) -> list[Request]:
    """The requests of `seconds` seconds of a kind of traffic, in the order of time, with timestamps in whole ms.

    `kind` is a row of `KINDS`, or an object with figures of its own. Raises `InvalidValueError` for a name that is not
    in the table, and for a time in which nothing arrives.
    """
    if isinstance(kind, str):
        if kind not in KINDS:
            raise InvalidValueError(f"no kind of traffic is named {kind!r}", f"it is one of {', '.join(KINDS)}")
        kind = KINDS[kind]()
    if not 0 < seconds < math.inf:
        raise InvalidValueError(f"traffic of {seconds:g} seconds cannot be made", "give more than 0 seconds")
    ids: dict[object, int] = {}
    calls = sorted(kind.calls(random.Random(seed), seconds), key=lambda call: call.at)
    if not calls:
        raise InvalidValueError(f"nothing arrives in {seconds:g} seconds", "give more seconds")
    requests = []
    for at, prompt, output in calls:
        tokens = sum(text.tokens for text in prompt)
        requests.append(Request(int(at), tokens, output, _blocks(prompt, ids)))
    return requests


def named(name: str) -> list[Request]:
    """An hour of the traffic that `synthetic:KIND` or `synthetic:KIND:SEED` names.

    Raises `InvalidValueError` for a kind that does not exist and a seed that is no whole number.
    """
    kind, _, seed = name.removeprefix(SYNTHETIC).partition(":")
    try:
        number = int(seed or "0")
    except ValueError:
        raise InvalidValueError(f"seed {seed!r} is no whole number", f"write {SYNTHETIC}{kind}:7") from None
    return generate(kind, number)


def write_trace(path: Path, requests: Sequence[Request]) -> None:
    """Write requests as a trace that `read_trace` reads: JSON lines, packed where the name ends with .gz.

    Raises `TraceError` where the file cannot be written.
    """
    lines = (
        json.dumps(
            {
                "timestamp": request.timestamp,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.blocks,
            }
        )
        for request in requests
    )
    text = "".join(f"{line}\n" for line in lines).encode()
    try:
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}", "name a file elsewhere") from error


def _blocks(prompt: Sequence[Text], ids: dict[object, int]) -> tuple[int, ...]:
    """The ids of a prompt's blocks; `ids` has the ids given so far, by what the blocks hold."""
    blocks: list[int] = []
    held: list[tuple[object, int, int]] = []  # of the block that is not full: text, from token, to token
    room = BLOCK_TOKENS

    def close() -> None:
        nonlocal room
        blocks.append(ids.setdefault((blocks[-1] if blocks else None, tuple(held)), len(ids)))
        held.clear()
        room = BLOCK_TOKENS

    for name, tokens in prompt:
        at = 0
        while at < tokens:
            taken = min(room, tokens - at)
            held.append((name, at, at + taken))
            at += taken
            room -= taken
            if not room:
                close()
    if held:
        close()
    return tuple(blocks)


def _arrivals(draw: random.Random, per_second: float, seconds: float) -> Iterator[float]:
    at = draw.expovariate(per_second)
    while at < seconds:
        yield at
        at += draw.expovariate(per_second)


def _geometric(draw: random.Random, mean: float) -> int:
    """1, 2, ..., each one more with the same chance."""
    return 1 if mean <= 1 else 1 + int(math.log(1.0 - draw.random()) / math.log(1.0 - 1.0 / mean))


def _zipf(n: int, skew: float) -> Callable[[random.Random], int]:
    """A chooser of `0 ... n-1`, the i-th with a chance of 1 / (i + 1) ** skew."""
    sums = list(accumulate((i + 1) ** -skew for i in range(n)))
    return lambda draw: min(bisect_left(sums, draw.random() * sums[-1]), n - 1)
