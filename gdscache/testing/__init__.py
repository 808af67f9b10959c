"""A test suite for transports. Raises `MissingPackageError` if pytest is missing: it comes with `gdscache[test]`."""

from gdscache.errors import MissingPackageError

try:
    import pytest
except ImportError as error:
    raise MissingPackageError(
        f"the suite for transports needs pytest, which cannot be imported: {error}", "install gdscache[test]"
    ) from error

pytest.register_assert_rewrite("gdscache.testing.transport_suite")
