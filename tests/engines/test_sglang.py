"""Our linker under SGLang's own radix tree, and our storage under its own host pools, on a CPU; and its contract.

Each case is a process in SGLang's environment (`sglang_*_cases.py`). No kernel and no
model runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang_parts import HERE, cases_of, start
from tests.engines.vllm_parts import broken

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
LIMIT_S = 120.0
WRITTEN_FOR: dict[str, Any] = json.loads((HERE / "sglang_contract.json").read_text())
FILES = [HERE / f"sglang_{name}_cases.py" for name in ("linker", "storage", "ranks", "namespace", "metrics")]
CASES = cases_of(*FILES)
PAIRED = {"killed", "after_the_kill"}


def run(case: str, folder: Path, seconds: float = LIMIT_S) -> str:
    child = start(CASES[case], case, folder)
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        raise AssertionError(f"{case} hangs:\n{child.communicate()[0][-4000:]}") from None
    assert child.returncode == 0, output[-6000:]
    assert output.rstrip().endswith("done")
    return output


@pytest.mark.parametrize("case", sorted(CASES.keys() - PAIRED))
def test_case(case: str, tmp_path: Path) -> None:
    run(case, tmp_path)


@pytest.mark.timeout(1200)
@pytest.mark.skipif("GDSCACHE_EXAMPLES" not in os.environ, reason="takes 15 minutes in all: GDSCACHE_EXAMPLES=suites")
@pytest.mark.parametrize("case", [case for case in CASES if "_at_random" in case])
def test_ten_thousand_operations_of_two_ranks(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDSCACHE_OPERATIONS", "2500")
    monkeypatch.setenv("GDSCACHE_LIMIT_S", "1100")
    run(case, tmp_path, 1150)


def test_killed_in_the_middle_of_stores(tmp_path: Path) -> None:
    child = start(CASES["killed"], "killed", tmp_path)
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("begun"):
            break
    else:
        raise AssertionError("it did not begin")
    time.sleep(1.5)
    assert child.poll() is None
    child.kill()
    child.communicate(timeout=LIMIT_S)
    run("after_the_kill", tmp_path)


def test_the_installed_sglang_is_the_one_that_this_was_written_for() -> None:
    child = start(HERE / "sglang_contract.py")
    output, _ = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 0, output[-6000:]
    now = json.loads(output[output.index("CONTRACT") + len("CONTRACT") :])
    found = broken(WRITTEN_FOR, now)
    found += [
        f"{name}: {now['sources'][name]}, was {was}"
        for name, was in WRITTEN_FOR["sources"].items()
        if now["sources"][name] != was
    ]
    found += [f"fields.toml does not know {name}" for name in now["unknown"]]
    assert not found, f"SGLang {now['version']}, written for {WRITTEN_FOR['version']}:\n" + "\n".join(found)
