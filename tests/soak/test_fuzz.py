"""What an engine reads from its directory may be any bytes: refused by name, left out or set aside, and never a fault.

libFuzzer is guided by coverage, by atheris, which is there for Linux on x86-64. The message of a failure names the file
with the input, which is tried again by

    PYTHONPATH=. python tests/support/fuzz_child.py TARGET FILE
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fuzz import Fuzzer
from tests.support.helpers import SEED

TARGETS = (
    *("history", "stripe", "status", "trailer"),
    *("catalogue", "catalogue_log", "catalogue_rows", "catalogue_old", "directory"),
)
SHORT_S, LONG_S, PLANTED_S = 1, 60, 30
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed: not made for this Python or machine"
)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    with Fuzzer(tmp_path_factory.mktemp("failing")) as fuzzer:
        yield fuzzer


@pytest.mark.parametrize(
    ("target", "seconds"),
    [pytest.param(target, SHORT_S, marks=pytest.mark.suite) for target in ("stripe", "catalogue_rows", "directory")]
    + [pytest.param(target, LONG_S, marks=pytest.mark.soak) for target in TARGETS],
)
def test_no_bytes_do_what_none_may(fuzzer: Fuzzer, target: str, seconds: int, record_property: Any) -> None:
    found = fuzzer.fuzz(target, seconds, 1 + SEED % (2**31 - 1))  # libFuzzer takes 0 for none
    summary = f"{target}: {found.runs:,} inputs in {seconds} s, coverage {found.coverage}, {found.corpus} kept"
    record_property("fuzz", summary)
    print(summary)
    inputs = "".join(f"\n{path}: {path.read_bytes()[:500]!r}" for path in found.failing)
    assert not found.failing, f"an input does what none may:{inputs}\n{found.log}"
    assert found.status == 0, found.log
    assert found.runs, found.log
    assert found.coverage > 5, f"nothing of a reader was reached\n{found.log}"


@pytest.mark.suite
def test_what_is_planted_is_found(fuzzer: Fuzzer) -> None:
    """A reader with a fault behind three bytes in a row."""
    found = fuzzer.fuzz("planted", PLANTED_S, 1)
    assert found.status != 0
    (failing,) = found.failing
    assert failing.read_bytes().startswith(b"\x67\x07\xfe")
    assert "error: planted" in found.log
