"""An engine whose disk is slow on order, and that brings a page a chunk."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.support.helpers import SMALL, Host, OpenHost, stored

FAULTY = "tests.support.faulty:FaultyTransport"
EXTENT = 8192
PAGEWISE = dataclasses.replace(SMALL, prefetch_bytes=EXTENT)  # chunks of one page


def slow_host(open_host: OpenHost, **options: Any) -> Host:
    """Chunks of one page; 24 pages of memory, of which pins have 12."""
    options = {"transport": FAULTY, "cpu": 24, "ssd": 64, "bounce": 8, "limits": PAGEWISE, **options}
    return open_host(**options)


def stocked(open_host: OpenHost, pages: int, **options: Any) -> tuple[Host, list[int]]:
    """And a prompt on its SSD."""
    host = slow_host(open_host, **options)
    return host, stored(host, 1, pages)
