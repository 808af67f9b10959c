"""Messages between a leader and its ranks: a head, JSON, and the arrays in it. They contain no code."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gdscache.arguments import shown
from gdscache.arrays import Int64Array
from gdscache.errors import RankProtocolError
from gdscache.moves import Move, Priority, Way

PROTOCOL = 6
HEAD = struct.Struct("<4sIQ")  # the magic, the bytes of the JSON, the bytes of all
LONGEST = 1 << 30  # bytes of a message
_MAGIC = b"gdsr"
_TYPES: dict[str, np.dtype[Any]] = {"q": np.dtype("<i8"), "Q": np.dtype("<u8"), "B": np.dtype("u1")}
_KINDS = {dtype: kind for kind, dtype in _TYPES.items()}
_ARRAY = "$array"  # the key of an array's type and shape, where the JSON has it; its bytes lie behind the JSON

Array = npt.NDArray[Any]
Fields = dict[str, Any]  # of a message: as in JSON, with arrays of int64, uint64 or uint8


def pack(fields: Mapping[str, Any]) -> bytes:
    bodies: list[bytes] = []

    def told(array: Array) -> dict[str, Any]:
        kind = _KINDS[array.dtype]
        body = np.ascontiguousarray(array, _TYPES[kind]).tobytes()
        bodies.append(body + bytes(-len(body) % 8))
        return {_ARRAY: [kind, array.shape]}

    text = json.dumps(fields, default=told, separators=(",", ":")).encode()
    text += b" " * (-(HEAD.size + len(text)) % 8)
    return b"".join([HEAD.pack(_MAGIC, len(text), HEAD.size + len(text) + sum(map(len, bodies))), text, *bodies])


def length(head: bytes | memoryview) -> int:
    if len(head) < HEAD.size:
        raise RankProtocolError(f"a message of {len(head)} bytes has no head", "pass an order unchanged")
    magic, text, whole = HEAD.unpack_from(head)
    if magic != _MAGIC or not HEAD.size <= HEAD.size + text <= whole <= LONGEST:
        raise RankProtocolError(f"a message begins with {bytes(head[: HEAD.size])!r}", "something else is connected")
    return int(whole)


def unpack(data: bytes | memoryview, of: str = "") -> Fields:
    """The message in these bytes; `of`: a field of the order that it is to be. Raises `RankProtocolError`."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise RankProtocolError(f"an order is {shown(data)}", "pass an order unchanged: bytes")
    if length(data) != len(data):
        raise RankProtocolError(f"a message of {length(data)} bytes has {len(data)}", "pass an order unchanged")
    at = text = HEAD.size + HEAD.unpack_from(data)[1]

    def heard(found: dict[str, Any]) -> Any:  # in the order of the text, like the arrays
        nonlocal at
        if _ARRAY not in found:
            return found
        kind, shape = found[_ARRAY]
        dtype, count = _TYPES[kind], math.prod(shape)
        if min(shape, default=0) < 0 or count * dtype.itemsize > len(data) - at:
            raise ValueError(f"an array of {shape} elements is not there")
        array = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += -(-count * dtype.itemsize // 8) * 8
        return array

    try:
        fields = json.loads(bytes(data[HEAD.size : text]), object_hook=heard)
        if not isinstance(fields, dict):
            raise ValueError(f"it is a {type(fields).__name__}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RankProtocolError(
            f"a message of {len(data)} bytes is damaged: {error}", "check other programs that connect"
        ) from error
    if of and of not in fields:
        hint = "pass load.order to Rank.load, and handle.order of a store to Rank.store"
        raise RankProtocolError(f"an order has {', '.join(fields)}, and no {of}", hint)
    return fields


def described(move: Move) -> Fields:
    return {
        "priority": int(move.priority),
        "ways": [
            (way.source, way.target, way.sources, way.targets, way.through, way.places, way.sums) for way in move.ways
        ],
        "seconds": None if math.isinf(move.seconds) else move.seconds,
        "groups": [(some.start, some.stop) for some in move.groups],
        "number": move.number,
    }


def move_of(fields: Fields) -> Move:
    """The move from `described`. Raises `RankProtocolError`."""
    try:
        ways = []
        for source, target, sources, targets, through, places, sums in fields["ways"]:
            rows = _int64(sources), _int64(targets)
            ways.append(Way(source, target, *rows, through, None if places is None else _int64(places), sums))
        seconds = math.inf if fields["seconds"] is None else float(fields["seconds"])
        groups = tuple(range(start, stop) for start, stop in fields["groups"])
        return Move(Priority(fields["priority"]), tuple(ways), seconds, groups, fields["number"])
    except (KeyError, TypeError, ValueError) as error:
        raise RankProtocolError(f"a move is damaged: {error!r}", "check other programs that connect") from error


def columns(shard: int, layers: int) -> slice:
    """The columns of a page's checksums that are a shard's: one for each layer, shard after shard."""
    return slice(shard * layers, (shard + 1) * layers)


def _int64(array: Any) -> Int64Array:
    """A copy, aligned and ours, as the library needs it."""
    if getattr(array, "dtype", None) != np.int64:
        raise ValueError(f"indices are {getattr(array, 'dtype', type(array).__name__)}")
    return np.array(array)
