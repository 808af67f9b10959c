"""XXH3-64 of the native library, each arm of it, against the `xxhash` library."""

from __future__ import annotations

import random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.arrays import address, integers
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


def test_long_inputs(arm: str) -> None:
    rng = random.Random(3)
    for size in [rng.randrange(4097, len(BYTES) - 64) for _ in range(60)] + [
        n * 1024 + d for n in (5, 9) for d in (-1, 0, 1)
    ]:
        start = rng.randrange(64)
        assert hooks.xxh3(BYTES[start : start + size], arm) == xxhash.xxh3_64_intdigest(BYTES[start : start + size])


@st.composite
def chunkings(draw: st.DrawFn) -> list[int]:
    sizes = st.one_of(
        st.integers(0, 70), st.sampled_from([64, 128, 192, 255, 256, 257, 1024, 4096]), st.integers(0, 9000)
    )
    return draw(st.lists(sizes, max_size=30))


@settings(max_examples=100)
@given(chunkings(), st.integers(0, 70), st.sampled_from([None, 0, 1, 64, 65]), st.booleans())
def test_chunks_of_a_stream(sizes: list[int], start: int, to: int | None, stream: bool) -> None:
    total = sum(sizes)
    expected = xxhash.xxh3_64_intdigest(BYTES[start : start + total])
    for name in ARMS:
        if not hooks.has_arm(name):
            continue
        room = np.zeros(total + 256, np.uint8)
        at = -address(room) % 64 + (to or 0)
        out = None if to is None else room[at:]
        assert hooks.xxh3_chunks(BYTES[start:], integers(sizes), out, stream, name) == expected
        if out is not None:
            assert np.array_equal(room[at : at + total], BYTES[start : start + total])
            assert not room[:at].any()
            assert not room[at + total :].any()


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
    for sizes in [[-1], [5, -(1 << 63)], [len(BYTES), 1], [(1 << 63) - 1, (1 << 63) - 1]]:
        with pytest.raises(NativeCallError, match="more bytes than there are"):
            hooks.xxh3_chunks(BYTES, integers(sizes))
    with pytest.raises(NativeCallError, match="no room"):
        hooks.xxh3_chunks(BYTES, integers([5]), np.zeros(4, np.uint8))
    assert not hooks.has_arm("")
