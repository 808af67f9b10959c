"""The lengths at which all groups of a hybrid model have a hit: vLLM's managers and coordinators find the same."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines import vllm_parts as parts
from tests.support.places import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
CASES = 1000


def test_hits_are_those_that_vllm_finds() -> None:
    """Over random presences of pages. Left out are windows of one token, of which vLLM wants a page that no token
    attends to, and chunks that are no multiple of a block, of which it misses one beside full attention alone."""
    if not parts.PYTHON.exists():
        pytest.skip(parts.MISSING)
    told = subprocess.run(
        [str(parts.PYTHON), str(Path(__file__).with_name("vllm_lengths.py")), str(CASES)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=parts.LIMIT_S,
        env={**os.environ, **parts.SETTINGS, "PYTHONPATH": str(ROOT)},
    )
    result = json.loads(told.stdout[told.stdout.rindex(b"\n{") :])
    assert result["models"] == 12
    assert result["found"] == []
