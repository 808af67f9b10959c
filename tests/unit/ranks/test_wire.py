"""Messages between leader and ranks: what was packed comes back, and no other bytes are one."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.errors import RankProtocolError
from gdscache.moves import PLANES, Move, Priority, Way
from gdscache.ranks import wire

FIELDS: st.SearchStrategy[Any] = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@st.composite
def arrays(draw: st.DrawFn) -> wire.Array:
    dtype = draw(st.sampled_from([np.int64, np.uint64, np.uint8]))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    return np.arange(math.prod(shape)).astype(dtype).reshape(shape)


@given(FIELDS, st.lists(arrays(), max_size=3))
def test_what_is_packed_comes_back(fields: dict[str, Any], told: list[wire.Array]) -> None:
    data = wire.pack({"some": told, **fields, "more": {"deeper": [told[-1:]]}})
    assert wire.length(data[: wire.HEAD.size]) == len(data)
    message = wire.unpack(data)
    arrays = [*message.pop("some"), *message.pop("more")["deeper"][0]]
    assert message == fields
    for a, b in zip(arrays, [*told, *told[-1:]], strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.array_equal(a, b)


@given(st.lists(arrays(), max_size=2), st.data())
def test_other_bytes_are_no_message_or_another_one(told: list[wire.Array], data: st.DataObject) -> None:
    """Whatever is changed, cut or added: one error class, or a message of as many bytes."""
    packed = bytearray(wire.pack({"do": "move", "some": told}))
    for _ in range(data.draw(st.integers(1, 3))):
        how = data.draw(st.sampled_from(["flip", "cut", "add"]))
        at = data.draw(st.integers(0, max(0, len(packed) - 1)))
        if how == "flip" and packed:
            packed[at] ^= data.draw(st.integers(1, 255))
        elif how == "cut":
            del packed[at:]
        else:
            packed[at:at] = data.draw(st.binary(max_size=9))
    try:
        message = wire.unpack(bytes(packed))
    except RankProtocolError:
        return
    found = message.get("some", ())
    assert sum(array.nbytes for array in found if isinstance(array, np.ndarray)) <= len(packed)


@pytest.mark.parametrize("shape", [[1 << 40], [-1], [1 << 62, 4], [-4, -4], ["4"], [0, 1 << 70], 4, None])
def test_a_shape_that_is_not_there_takes_no_memory(shape: Any) -> None:
    text = json.dumps({"some": {"$array": ["q", shape]}}).encode()
    text += b" " * (-(wire.HEAD.size + len(text)) % 8)
    data = wire.HEAD.pack(b"gdsr", len(text), wire.HEAD.size + len(text) + 64) + text + bytes(64)
    tracemalloc.start()
    try:
        with pytest.raises(RankProtocolError, match="is damaged"):
            wire.unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "head",
    [
        b"", wire.HEAD.pack(b"GET ", 0, 16), wire.HEAD.pack(b"gdsr", 0, 15), wire.HEAD.pack(b"gdsr", 100, 50),
        wire.HEAD.pack(b"gdsr", 0, wire.LONGEST + 1),
    ],
)  # fmt: skip
def test_a_length_that_is_claimed_is_not_believed(head: bytes) -> None:
    with pytest.raises(RankProtocolError):
        wire.length(head)


def _move() -> Move:
    some = np.array([3, 1], np.int64)
    sums = np.arange(8, dtype=np.uint64).reshape(2, 4)
    ways = (Way("cpu", PLANES, some, some + 4, sums=sums), Way("ssd", PLANES, some, some, "bounce", some + 1))
    return Move(Priority.LOAD, ways, math.inf, (range(2), range(2, 4)), 7)


def test_a_move_comes_back() -> None:
    found, wanted = wire.move_of(wire.unpack(wire.pack(wire.described(_move())))), _move()
    about = "priority", "seconds", "groups", "number"
    assert [getattr(found, name) for name in about] == [getattr(wanted, name) for name in about]
    for a, b in zip(found.ways, wanted.ways, strict=True):
        assert (a.source, a.target, a.through) == (b.source, b.target, b.through)
        for name in ("sources", "targets", "places", "sums"):
            assert np.array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize(
    "change",
    [
        {"ways": 3},
        {"ways": [["cpu", "planes", [3], [1], "", None, None]]},
        {"groups": [3]},
        {"priority": 99},
        {"seconds": "long"},
    ],
)
def test_a_move_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RankProtocolError, match="a move is damaged"):
        wire.move_of({**wire.described(_move()), **change})


def test_indices_of_another_type_are_refused() -> None:
    move = _move()
    move.ways[0].sources = move.ways[0].sources.astype(np.uint8)  # type: ignore[assignment]
    with pytest.raises(RankProtocolError, match="indices are uint8"):
        wire.move_of(wire.described(move))
