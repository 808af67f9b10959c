"""A real pool of these tests' own, and the end of the fence around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scale.pool_parts import RealPool, end_fence, real_pool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    with real_pool(tmp_path) as pool:
        yield pool


@pytest.fixture(scope="module", autouse=True)
def fenced() -> Iterator[None]:
    yield
    end_fence()
