"""Our linker under SGLang's own radix trees on one rank or several: a process each, on a CPU, over gloo.

Each case runs on every rank (`sglang_linker_ranks_cases.py`), and what they have called of torch.distributed is
compared: none has entered a collective alone.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.engines.collectives import compared
from tests.engines.sglang_parts import HERE, cases_of, start

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
LIMIT_S = 300.0
RANKS = cases_of(HERE / "sglang_linker_ranks_cases.py")
HYBRIDS = cases_of(HERE / "sglang_hybrid_cases.py")
DIES = {"a_dead_leader": 0, "a_dead_rank": 1}  # the rank that does
ONE = [
    "heads_come_back", "latents_come_back", "packed_pages_come_back", "random_traffic", "new_weights_find_nothing",
]  # fmt: skip
FOUR = ["heads_that_two_ranks_have_come_back", "latents_come_back", "hybrids_come_back"]  # on four ranks, too


def run(case: str, folder: Path, ranks: int = 2) -> None:
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    children = [
        start((RANKS | HYBRIDS)[case], case, folder, str(rank), str(ranks), log=log) for rank, log in enumerate(logs)
    ]
    until = time.monotonic() + LIMIT_S
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        if any(child.poll() not in (None, 0, -signal.SIGKILL) for child in children):
            break  # the others would wait for it
        time.sleep(0.1)
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
    said = "".join(f"--- rank {rank}\n{log.read_text()[-5000:]}" for rank, log in enumerate(logs))
    dead = [DIES[case]] if case in DIES else []
    ends = [-signal.SIGKILL if rank in dead else 0 for rank in range(ranks)]
    assert [child.returncode for child in children] == ends, said
    assert compared(folder, ranks, dead) or ranks == 1, "nothing was written down"
    entered = [json.loads(line) for file in folder.glob("collectives-*") for line in file.read_text().splitlines()]
    assert {one["what"] for one in entered if "gdscache/integrations" in one["by"]} <= {"all_gather_object"}


@pytest.mark.parametrize("case", sorted(RANKS | HYBRIDS))
def test_two_ranks(case: str, tmp_path: Path) -> None:
    run(case, tmp_path)


@pytest.mark.parametrize("case", sorted([*ONE, *HYBRIDS]))
def test_one_rank(case: str, tmp_path: Path) -> None:
    run(case, tmp_path, 1)


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks(case: str, tmp_path: Path) -> None:
    run(case, tmp_path, 4)


@pytest.mark.timeout(4000)
@pytest.mark.skipif("GDSCACHE_EXAMPLES" not in os.environ, reason="takes 45 minutes in all: GDSCACHE_EXAMPLES=suites")
@pytest.mark.parametrize(
    ("case", "operations"),
    [("random_traffic", 5000), *((case, 3334) for case in HYBRIDS if case.startswith("random_traffic"))],
)
def test_ten_thousand_operations(case: str, operations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of K and V and of latents, and of the three kinds of hybrid models: 10,000 each."""
    monkeypatch.setenv("GDSCACHE_OPERATIONS", str(operations))  # of each kind of model
    monkeypatch.setattr("tests.engines.test_sglang_linker_ranks.LIMIT_S", 3600.0)
    run(case, tmp_path)
