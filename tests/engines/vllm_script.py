"""Steps of a run of vLLM's engine under names, and what its answers are to be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.engines import vllm_parts as parts

Answers = list[dict[str, Any]]
Step = tuple[str, dict[str, Any]]

RESET: Step = ("reset", {})
DRAIN: Step = ("drain", {})
TELL: Step = ("tell", {})
METRICS: Step = ("metrics", {})
MANY = 20  # tokens of long answers that are the same
# Of log-probabilities that are the same: a state of zeros makes 0.01 and more. A GPU may sum in another order.
DIGITS = 5e-3 if torch.cuda.is_available() else 1e-4


def ask(*prompts: dict[str, Any], **more: Any) -> Step:
    return "ask", {"prompts": list(prompts), **more}


def each(prompts: Sequence[dict[str, Any]]) -> list[Step]:
    """One after the other, none of which finds anything in vLLM's own cache."""
    return [step for prompt in prompts for step in (RESET, ask(prompt), DRAIN)]


class Script:
    """Steps under names; `play` gives what they answered: all answers of a name's prompts, and the rest by step."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Step]] = []

    def add(self, name: str, *steps: Step) -> None:
        self._steps += [(name, step) for step in steps]

    def play(
        self, folder: Path, model: Path, connector: dict[str, Any] | None, **given: Any
    ) -> tuple[dict[str, Answers], dict[str, list[Any]]]:
        steps = [step for _, step in self._steps]
        told = parts.run(folder, model, steps, connector, **given).answers[1:]
        asked: dict[str, Answers] = defaultdict(list)
        rest: dict[str, list[Any]] = defaultdict(list)
        for (name, (step, _)), answer in zip(self._steps, told, strict=False):  # vLLM's end is an answer, too
            if step == "ask":
                asked[name] += answer
            else:
                rest[step].append(answer)
        return asked, rest


def follows(found: Answers, wanted: Answers) -> None:
    """Long answers: the same tokens with nearly the same probabilities, up to where two tokens are as likely."""
    for a, b in zip(found, wanted, strict=True):
        assert a["why"] == b["why"] == "length"
        pairs = enumerate(zip(a["tokens"], b["tokens"], strict=True))
        end = next((place for place, (one, other) in pairs if one != other), len(b["tokens"]))
        assert end >= MANY, (a["tokens"], b["tokens"])
        apart = [abs(one[0] - other[0]) for one, other in zip(a["likeliest"], b["likeliest"], strict=True)]
        assert max(apart[: end + 1]) < parts.DRIFT, (end, apart)
        if end < len(b["tokens"]):
            best, second = b["likeliest"][end]
            assert best - second < parts.DRIFT, (end, best, second)


def equal(found: Answers, wanted: Answers, digits: float) -> None:
    """The same tokens, each with the same log-probabilities, up to `digits`."""
    for a, b in zip(found, wanted, strict=True):
        assert (a["why"], a["tokens"]) == (b["why"], b["tokens"])
        pairs = zip(a["likeliest"], b["likeliest"], strict=True)
        each_token = max(abs(one - other) for pair in pairs for one, other in zip(*pair, strict=True))
        assert max(parts.first_drift(a, b), each_token) <= digits, (a, b)


def at_rest(told: dict[str, Any]) -> None:
    """Nothing is held, and every index agrees with its bytes."""
    assert told["leases"] == 0
    assert told["check"] == []
