"""XXH3-64 of the native library, each arm of it, against the `xxhash` library."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.errors import NativeCallError
from gdscache.kernels.host import xxh3
from gdscache.native.library import address, checked, integers, library

ARMS = ("scalar", "avx2", "avx512", "neon")
BYTES = np.frombuffer(random.Random(7).randbytes(1 << 20), np.uint8).copy()


@pytest.fixture(params=ARMS)
def arm(request: pytest.FixtureRequest) -> bytes:
    name = str(request.param).encode()
    if not library().has_arm(name):
        pytest.skip(f"this processor has no {name.decode()}")
    return name


def one_shot(arm: bytes | None, at: int, size: int) -> int:
    answer = ctypes.c_uint64()
    checked(library().xxh3(arm, at, size, ctypes.addressof(answer)), "xxh3")
    return answer.value


def in_chunks(arm: bytes, at: int, sizes: list[int], out: int | None = None, *, stream: bool = False) -> int:
    answer, table = ctypes.c_uint64(), integers(sizes)
    checked(
        library().xxh3_chunks(arm, at, address(table), len(table), out, stream, ctypes.addressof(answer)),
        "xxh3_chunks",
    )
    return answer.value


def test_every_length_up_to_4096_at_any_alignment(arm: bytes) -> None:
    start = address(BYTES)
    wrong = [
        size
        for size in range(4097)
        if one_shot(arm, start + size % 61, size) != xxhash.xxh3_64_intdigest(BYTES[size % 61 : size % 61 + size])
    ]
    assert wrong == []


def test_long_inputs(arm: bytes) -> None:
    rng = random.Random(3)
    for size in [rng.randrange(4097, len(BYTES) - 64) for _ in range(60)] + [
        n * 1024 + d for n in (5, 9) for d in (-1, 0, 1)
    ]:
        start = rng.randrange(64)
        assert one_shot(arm, address(BYTES) + start, size) == xxhash.xxh3_64_intdigest(BYTES[start : start + size])


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
        if not library().has_arm(name.encode()):
            continue
        room = np.zeros(total + 256, np.uint8)
        base = address(room) + -address(room) % 64
        out = None if to is None else base + to
        assert in_chunks(name.encode(), address(BYTES) + start, sizes, out, stream=stream) == expected
        if out is not None:
            at = out - address(room)
            assert np.array_equal(room[at : at + total], BYTES[start : start + total])
            assert not room[:at].any()
            assert not room[at + total :].any()


def test_random_chunkings_of_all_lengths(arm: bytes) -> None:
    rng = random.Random(11)
    for size in range(1200):
        sizes, left = [], size
        while left:
            sizes.append(min(left, rng.choice([1, 7, 63, 64, 65, 200, 300])))
            left -= sizes[-1]
        assert in_chunks(arm, address(BYTES), sizes) == xxhash.xxh3_64_intdigest(BYTES[:size]), sizes


def test_the_default_is_an_arm_that_is_here() -> None:
    best = library().best_arm()
    assert library().has_arm(best)
    assert xxh3(BYTES) == xxhash.xxh3_64_intdigest(BYTES) == one_shot(best, address(BYTES), len(BYTES))
    assert xxh3(np.empty(0, np.uint8)) == xxhash.xxh3_64_intdigest(b"")


def test_hostile_values_are_refused() -> None:
    answer = ctypes.c_uint64()
    there = ctypes.addressof(answer)
    for arguments in [
        (None, None, 5, there),
        (None, there, -1, there),
        (b"mmx", there, 1, there),
        (None, there, 1, None),
    ]:
        with pytest.raises(NativeCallError):
            checked(library().xxh3(*arguments), "xxh3")
    for sizes in [[-1], [5, -(1 << 63)]]:
        with pytest.raises(NativeCallError):
            in_chunks(b"scalar", there, sizes)
    assert library().has_arm(None) == library().has_arm(b"") == 0
