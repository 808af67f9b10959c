"""The tests that every transport passes. In a file of tests, which pytest then collects as usual:

    class TestMine(TransportSuite):
        def make_transport(self, threads):
            return MyTransport(threads=threads, direct_io="auto")

With `memory_kinds = ("host", "cuda")` in the class, moves are tested with GPU memory too, in tests with the marker
`gpu`. Raises `MissingPackageError` if pytest is missing: it comes with `gdscache[test]`.
"""

from __future__ import annotations

import sys

from gdscache.errors import MissingPackageError

try:
    import pytest
except ImportError as error:
    raise MissingPackageError(
        f"the suite for transports needs pytest, which cannot be imported: {error}", "install gdscache[test]"
    ) from error

_CASES = "gdscache.testing.cases"
if _CASES not in sys.modules:
    pytest.register_assert_rewrite(_CASES)

from gdscache.testing.cases import Cases  # noqa: E402

__all__ = ["TransportSuite"]


class TransportSuite(Cases):
    """Subclass it, and give `make_transport`. `memory_kinds`: the kinds of memory to test, of those the transport can
    move."""
