"""The native library's n-th allocation finds no memory, once, a hundred times or from then on: an error or a miss, and
no crash, no hang, no wrong byte; behind it everything works."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gdscache.policies import POLICIES
from tests.support.helpers import SEED
from tests.support.shims import shim, under


def run(program: tuple[str, ...], *arguments: object, seconds: float = 500) -> str:
    """What a program prints, whose first argument is the shim."""
    library = shim("memory_shim")
    return under([library], *program, library, *arguments, seconds=seconds)


@pytest.mark.parametrize(
    ("transport", "pack", "number"),
    [
        pytest.param("uring", "off", 6, marks=pytest.mark.suite),
        pytest.param("posix", "on", 6, marks=pytest.mark.suite),
        pytest.param("uring", "on", 400, marks=pytest.mark.soak),
        pytest.param("posix", "off", 400, marks=pytest.mark.soak),
    ],
)
def test_an_allocation_that_fails_is_an_error_or_a_miss(tmp_path: Path, transport: str, pack: str, number: int) -> None:
    said = run(("memory_child.py",), tmp_path, transport, pack, number, SEED, seconds=400 + 25 * number)
    whole, *found = [json.loads(line) for line in said.splitlines()]
    assert (whole["failed"], whole["wrong"]) == (0, [])
    assert whole["seen"] > 100, "the shim does not reach the library"
    assert len(found) == 2 * number
    assert not [one for one in found if one["wrong"]]


HALF_DONE = """
import contextlib, ctypes, logging, sys
from tests.support.half_done import index_life
from tests.support.memory_child import aim
logging.disable(logging.CRITICAL)
shim = ctypes.CDLL(sys.argv[1])
aim(shim)
seen, first, failed, count = (
    ctypes.c_long.in_dll(shim, f"shim_{name}") for name in ("seen", "first", "failed", "count")
)

@contextlib.contextmanager
def quiet():
    begun, at, first.value = seen.value, first.value, 0
    yield
    first.value = at and at + seen.value - begun

for policy in sys.argv[2:]:
    for count.value in (1, 3):
        for number in range(1, 1 << 20):
            before, first.value = failed.value, seen.value + number
            index_life(policy, quiet)
            first.value = 0
            if failed.value == before:
                break
        print(number)
"""


@pytest.mark.suite
def test_an_index_is_whole_behind_each_allocation_that_fails() -> None:
    """Each of the native library's, alone or with the next two, under each policy."""
    tried = [*map(int, run(("-c", HALF_DONE), *POLICIES).splitlines())]
    assert len(tried) == 2 * len(POLICIES)
    assert min(tried) > 20, "the shim does not reach the library"


WORDS = """
import ctypes, sys
from gdscache import native
from gdscache.errors import DeviceError, NativeCallError
from tests.support.memory_child import aim
shim = ctypes.CDLL(sys.argv[1])
aim(shim)
ctypes.c_long.in_dll(shim, "shim_count").value = 1 << 40
ctypes.c_long.in_dll(shim, "shim_first").value = ctypes.c_long.in_dll(shim, "shim_seen").value + 1
print(native.error_text(5015), native.error_text(1), sep="\\n")
try:
    native.CuFiles("/nowhere/libcuda.so", 1, "/nowhere/libcufile.so")
except (DeviceError, NativeCallError) as error:
    print(error.message)
assert ctypes.c_long.in_dll(shim, "shim_failed").value
"""


@pytest.mark.suite
def test_what_is_said_of_an_error_finds_memory() -> None:
    """Texts that are longer than a string keeps in itself, where the system has none left."""
    other, of_the_system, refused = run(("-c", WORDS)).splitlines()
    assert "5015" in other
    assert "another CUDA context" in other
    assert of_the_system == os.strerror(1)
    assert "nowhere" in refused
