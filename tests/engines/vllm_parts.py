"""What the tests against vLLM's real engine share: its environment, its model, and how a run is made and compared."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("vllm_child.py")
PYTHON = Path(os.environ.get("GDSCACHE_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
KIND = os.environ.get("GDSCACHE_VLLM_KIND", "mha")  # of the model: mha, mla, or one of `vllm_child.HYBRIDS`
TP = int(os.environ.get("GDSCACHE_VLLM_TP", "2"))  # processes of tests with several
LIMIT_S = 240.0  # of one run; a machine of two cores opens vLLM in 15 to 30 seconds
DRIFT = 0.15  # of log-probabilities: what bfloat16 rounds away is about 0.03, one wrong block makes 0.5
TIE = 0.03  # between two tokens, either of which may be the likelier one after rounding
MISSING = f"no vLLM at {PYTHON}: `make engines` makes that environment, or set GDSCACHE_VLLM_PYTHON"

# On a GPU kernels for latents and windows differ by how much of a prompt is cached: ties of two tokens go either way.
TIES = (KIND != "mha" or os.environ.get("GDSCACHE_SGLANG_KIND") == "mla") and torch.cuda.is_available()
# On a GPU the sums of a batch depend on what else is in it, unless vLLM is asked for the same answer all the time.
ON_GPU = {"VLLM_BATCH_INVARIANT": "1"} if torch.cuda.is_available() else {}
STATES = ("gdn", "convolutions", "mamba")  # kinds of models some of whose layers keep a state
WITH_STATES = {"VLLM_BATCH_INVARIANT": "0"}  # vLLM refuses to do that for states
SETTINGS = ON_GPU | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2",
}  # fmt: skip

# Prompts. All tests ask for these, so that one run without a cache says what each of them is to answer.
LONG: dict[str, Any] = {"parts": [[0, 1500]]}
BRANCH: dict[str, Any] = {"parts": [[0, 1000], [1, 400]]}  # begins as LONG does; seeds give the same tokens again
OTHER: dict[str, Any] = {"parts": [[2, 700]]}
EXACT: dict[str, Any] = {"parts": [[3, 1024]]}  # whole blocks: the last one is computed for its last token
PROMPTS = [LONG, BRANCH, OTHER, EXACT]


def salted(prompt: dict[str, Any], salt: str) -> dict[str, Any]:
    return {**prompt, "salt": salt}


def path() -> str:
    """This tree before whatever else the process finds by its environment: vLLM itself, perhaps."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def cache(directory: Path, **changes: Any) -> dict[str, Any]:
    """`kv_connector_extra_config` for a small cache in that directory. `options` are those beside `config`."""
    options = changes.pop("options", {})
    config = {
        "cpu": {"capacity": "64MiB"},
        "ssd": {"path": str(directory), "capacity": "128MiB", "transport": "posix", "gds": "off", "threads": 2},
        "host_buffer": "16MiB",
        "deadline": 20,
    }
    for section, values in changes.items():
        config[section] = None if values is None else {**config.get(section, {}), **values}
    return {"config": config, **options}


@dataclasses.dataclass
class Result:
    """What a run said, step by step, and how it ended."""

    answers: list[Any]
    status: int
    log: str
    seconds: float


def run(
    folder: Path,
    model: Path,
    steps: list[tuple[str, dict[str, Any]]],
    connector: dict[str, Any] | None = None,
    *,
    faults: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    fails: bool = False,
    limit: float = LIMIT_S,
    **orders: Any,
) -> Result:
    """Run vLLM in a process of its own. `fails`: it is not to end well."""
    number = len(list(folder.glob("orders*")))
    asked, told, log = (folder / f"{name}{number}" for name in ("orders", "answers", "log"))
    asked.write_text(json.dumps({"model": str(model), "connector": connector, "steps": steps, **orders}))
    settings = {**os.environ, **SETTINGS, "PYTHONPATH": path(), **(environment or {})}
    if faults is not None:
        plan = folder / f"faults{number}"
        plan.write_text(json.dumps(faults))
        settings["GDSCACHE_FAULTS"] = str(plan)
    start = time.monotonic()
    with log.open("w") as out:
        child = subprocess.Popen(
            [str(PYTHON), str(CHILD), str(asked), str(told)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=settings,
            cwd=folder,
            start_new_session=True,
        )
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            raise AssertionError(f"vLLM hangs: after {limit:g} s\n{log.read_text()[-4000:]}") from None
    answers = json.loads(told.read_text()) if told.exists() else []
    result = Result(answers, status, log.read_text(), time.monotonic() - start)
    if not fails:
        assert status == 0, result.log[-6000:]
        assert faults is not None or "background work broke off" not in result.log, result.log[-6000:]
    return result


def made(folder: Path, kind: str, seed: int = 0) -> Path:
    """A model of a kind, in `folder / "tiny"`."""
    orders = folder / "make.json"
    model = {"kind": kind, "seed": seed, "heads": max(2, TP)}
    orders.write_text(json.dumps({"make": str(folder / "tiny"), "model": model}))
    told(CHILD, orders, "-")
    return folder / "tiny"


def told(*arguments: str | Path, **environment: str) -> str:
    """What vLLM's Python prints. Skips where there is no vLLM."""
    if not PYTHON.exists():
        pytest.skip(MISSING)
    settings = {**os.environ, **SETTINGS, "PYTHONPATH": path(), **environment}
    done = subprocess.run(
        [str(PYTHON), *map(str, arguments)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=LIMIT_S,
        env=settings,
        text=True,
    )
    return done.stdout


def drift(a: dict[str, Any], b: dict[str, Any]) -> float:
    """How far the probabilities of the first token are apart; infinity where the tokens differ, unless the two most
    likely ones of `b` are as good as equal where they part."""
    pairs = zip(a["tokens"], b["tokens"], b["likeliest"], strict=True)
    best, second = next((two for one, other, two in pairs if one != other), (0.0, 0.0))
    return math.inf if best - second > TIE else first_drift(a, b)


def first_drift(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The same, whatever the tokens are."""
    both = a["first"].keys() & b["first"].keys()
    return max((abs(a["first"][t] - b["first"][t]) for t in both), default=math.inf)


def alike(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> float:
    """The share of requests that have the same tokens."""
    same = [a["tokens"] == b["tokens"] for a, b in zip(found, wanted, strict=True)]
    return same.count(True) / len(same)


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The tokens are those of a run without a cache up to a tie, and the first one's probabilities nearly.

    With `TIES` the probabilities alone count, which one wrong block moves by three times `DRIFT`.
    """
    assert [answer["why"] for answer in found] == ["length"] * len(wanted)
    apart = first_drift if TIES else drift
    drifts = [apart(a, b) for a, b in zip(found, wanted, strict=True)]
    assert max(drifts) < DRIFT, (drifts, [a["tokens"] for a in found], [b["tokens"] for b in wanted])


def cached(found: list[dict[str, Any]]) -> list[int]:
    return [answer["cached"] for answer in found]


def flip(slab: Path, every: int) -> None:
    """One bit of every so many bytes of a file is another."""
    with slab.open("r+b") as file:
        for at in range(every // 2, os.fstat(file.fileno()).st_size, every):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 16]))


# What later versions have besides, and that the connector may do without.
LATER = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """In words, what is gone, new or has other parameters."""
    gone = [f"{name} is gone" for name in before.keys() - now.keys()]
    new = [f"{name} is new: {now[name]}" for name in now.keys() - before.keys() - LATER]
    other = [
        f"{name}: {now[name]}, was {before[name]}" for name in before.keys() & now.keys() if before[name] != now[name]
    ]
    return sorted(gone + new + other)


def broken(written_for: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What has changed of an engine's classes, and which fields it lacks."""
    found = [
        f"{name}: {change}"
        for name, before in written_for["classes"].items()
        for change in changes(before, now["classes"][name])
    ]
    return found + [f"{name} has no {field}" for name, has in now["fields"].items() for field in has if not has[field]]


TURNS, MOST_TOKENS = 5, 1900


def requests(count: int) -> list[dict[str, Any]]:
    """Conversations of `TURNS` requests each, several at a time, whose prompts begin with one of four instructions."""
    draw = random.Random(0)
    open_: list[list[list[int]]] = []
    found: list[dict[str, Any]] = []
    seeds = iter(range(100, 1 << 30))
    while len(found) < count:
        if len(open_) < max(4, count // 40):
            open_.append([[draw.randrange(4), draw.choice((300, 500))]])
        talk = draw.choice(open_)
        talk.append([next(seeds), draw.randrange(20, 300)])
        if sum(number for _, number in talk) <= MOST_TOKENS:
            found.append({"parts": [list(part) for part in talk], "most": draw.choice((8, 24))})
        if len(talk) > TURNS:
            open_.remove(talk)
    return found
