"""A user's transport in Python: `preadv` and `pwritev`, past the page cache where the system can.

Tests give it a `read` or a `write` of their own, to fail, to die or to record.
"""

from __future__ import annotations

import os

from gdscache.storage.base import Memory, Op, failed
from gdscache.storage.files import DirectFiles


class PosixTransport(DirectFiles):
    """Reads and writes host memory; files as `DirectFiles` opens them. It is none of the library's own."""

    name = "python"

    def _move(self, op: Op, file: int, offset: int, memory: Memory) -> int:
        path = self.path(file)
        try:
            return (os.preadv if op is Op.READ else os.pwritev)(file, [memory], offset)
        except OSError as error:
            raise failed(op.value, path, offset, error) from error
