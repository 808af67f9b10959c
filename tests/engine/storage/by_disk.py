"""What the library's own transports have an executor do, in one call: a piece by a disk of their kind."""

from __future__ import annotations

from gdscache.arrays import integers
from gdscache.native import error_of, move_pieces
from gdscache.storage.base import Memory, Op, address_of
from gdscache.storage.cufile import CufileTransport
from gdscache.storage.files import NativeTransport


def _move(transport: NativeTransport, op: Op, file: int, offset: int, memory: Memory) -> int:
    transport.path(file)
    address = address_of(memory)
    [(error, moved)] = move_pieces(
        "ring" if transport.uring else "threads",
        1,
        integers([(file, offset, address, memory.nbytes)]),
        write=op is Op.WRITE,
        copied=not transport.direct,
        cufile=transport.cufile,
    ).tolist()
    if error:
        raise error_of(error)
    return int(moved)


class NativeByDisk(NativeTransport):
    _move = _move


class CufileByDisk(CufileTransport):
    _move = _move
