"""XXH3-64 of the native library, each arm of it, against the `xxhash` library. Long inputs and streams:
csrc/host/tests/test_xxh3.cc."""

from __future__ import annotations

import random

import numpy as np
import pytest
import xxhash

from gdscache.errors import NativeCallError
from gdscache.native import best_arm
from tests.support.hooks import hooks

ARMS = ("scalar", "avx2", "avx512", "neon")
BYTES = np.frombuffer(random.Random(7).randbytes(1 << 20), np.uint8).copy()


@pytest.fixture(params=ARMS)
def arm(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if not hooks.has_arm(name):
        pytest.skip(f"this processor has no {name}")
    return name


def test_every_length_up_to_4096_at_any_alignment(arm: str) -> None:
    wrong = [
        size
        for size in range(4097)
        if hooks.xxh3(BYTES[size % 61 : size % 61 + size], arm)
        != xxhash.xxh3_64_intdigest(BYTES[size % 61 : size % 61 + size])
    ]
    assert wrong == []


def test_the_default_is_an_arm_that_is_here() -> None:
    best = best_arm()
    assert hooks.has_arm(best)
    assert hooks.xxh3(BYTES) == xxhash.xxh3_64_intdigest(BYTES) == hooks.xxh3(BYTES, best)
    assert hooks.xxh3(np.empty(0, np.uint8)) == xxhash.xxh3_64_intdigest(b"")


def test_hostile_values_are_refused() -> None:
    with pytest.raises(NativeCallError, match="no such arm"):
        hooks.xxh3(BYTES, "mmx")
    with pytest.raises(TypeError):
        hooks.xxh3(BYTES[::2])
    assert not hooks.has_arm("")
