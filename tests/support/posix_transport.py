"""A user's transport in Python: `preadv` and `pwritev`, past the page cache where the system can.

Tests give it a `read` or a `write` of their own, to fail, to die or to record.
"""

from __future__ import annotations

from gdscache.storage.files import DirectFiles


class PosixTransport(DirectFiles):
    """Reads and writes host memory; files as `DirectFiles` opens them. It is none of the library's own."""

    name = "python"
