"""Messages between a leader and its ranks: a head, JSON, and arrays. They contain no code."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array
from gdscache.errors import RankProtocolError
from gdscache.moves import Move, Priority, Way

PROTOCOL = 5
HEAD = struct.Struct("<4sIQ")  # the magic, the bytes of the JSON, the bytes of all
LONGEST = 1 << 30  # bytes of a message
_MAGIC = b"gdsr"
_TYPES: dict[str, np.dtype[Any]] = {"q": np.dtype("<i8"), "Q": np.dtype("<u8"), "B": np.dtype("u1")}

_KINDS = {dtype: kind for kind, dtype in _TYPES.items()}

Array = npt.NDArray[Any]


class Message(NamedTuple):
    """`fields` as in JSON, and arrays of int64, uint64 or uint8."""

    fields: dict[str, Any]
    arrays: list[Array]


def pack(fields: dict[str, Any], arrays: Sequence[Array] = ()) -> bytes:
    told = [(_KINDS[array.dtype], array.shape) for array in arrays]
    text = json.dumps([fields, told], separators=(",", ":")).encode()
    text += b" " * (-(HEAD.size + len(text)) % 8)
    bodies = [
        np.ascontiguousarray(array, _TYPES[kind]).tobytes() for array, (kind, _) in zip(arrays, told, strict=True)
    ]
    bodies = [body + bytes(-len(body) % 8) for body in bodies]
    return b"".join([HEAD.pack(_MAGIC, len(text), HEAD.size + len(text) + sum(map(len, bodies))), text, *bodies])


def length(head: bytes | memoryview) -> int:
    if len(head) < HEAD.size:
        raise RankProtocolError(f"a message of {len(head)} bytes has no head", "pass an order unchanged")
    magic, text, whole = HEAD.unpack_from(head)
    if magic != _MAGIC or not HEAD.size <= HEAD.size + text <= whole <= LONGEST:
        raise RankProtocolError(f"a message begins with {bytes(head[: HEAD.size])!r}", "something else is connected")
    return int(whole)


def unpack(data: bytes | memoryview) -> Message:
    """The message in these bytes. Raises `RankProtocolError`."""
    if length(data) != len(data):
        raise RankProtocolError(f"a message of {length(data)} bytes has {len(data)}", "pass an order unchanged")
    at = HEAD.size + HEAD.unpack_from(data)[1]
    try:
        fields, told = json.loads(bytes(data[HEAD.size : at]))
        arrays = []
        for kind, shape in told:
            dtype, count = _TYPES[kind], math.prod(shape)
            if min(shape, default=0) < 0 or count * dtype.itemsize > len(data) - at:
                raise ValueError(f"an array of {shape} elements is not there")
            arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape))
            at += -(-count * dtype.itemsize // 8) * 8
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RankProtocolError(
            f"a message of {len(data)} bytes is damaged: {error}", "check other programs that connect"
        ) from error
    return Message(fields, arrays)


def described(move: Move) -> tuple[dict[str, Any], list[Array]]:
    ways, arrays = [], list[Array]()
    for way in move.ways:
        ways.append((way.source, way.target, way.through, way.places is not None, way.sums is not None))
        arrays += [way.sources, way.targets]
        arrays += [array for array in (way.places, way.sums) if array is not None]
    fields = {
        "priority": int(move.priority),
        "ways": ways,
        "seconds": None if math.isinf(move.seconds) else move.seconds,
        "groups": [(some.start, some.stop) for some in move.groups],
        "number": move.number,
    }
    return fields, arrays


def move_of(fields: dict[str, Any], arrays: list[Array]) -> Move:
    """The move from `described`; removes its arrays from the list. Raises `RankProtocolError`."""
    try:
        ways = []
        for source, target, through, placed, summed in fields["ways"]:
            sources, targets = _int64(arrays.pop(0)), _int64(arrays.pop(0))
            places = _int64(arrays.pop(0)) if placed else None
            ways.append(Way(source, target, sources, targets, through, places, arrays.pop(0) if summed else None))
        seconds = math.inf if fields["seconds"] is None else float(fields["seconds"])
        groups = tuple(range(start, stop) for start, stop in fields["groups"])
        return Move(Priority(fields["priority"]), tuple(ways), seconds, groups, fields["number"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RankProtocolError(f"a move is damaged: {error!r}", "check other programs that connect") from error


def columns(shard: int, layers: int) -> slice:
    """The columns of a page's checksums that are a shard's: one for each layer, shard after shard."""
    return slice(shard * layers, (shard + 1) * layers)


def _int64(array: Array) -> Int64Array:
    """A copy, aligned and ours, as the library needs it."""
    if array.dtype != np.int64:
        raise ValueError(f"indices are {array.dtype}")
    return np.array(array)
