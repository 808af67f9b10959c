"""Transports that fail on order: `transport: faulty:FaultyTransport` in a configuration. `PLAN` is what all of them do.

Without rules they are the transports that come with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gdscache import PageStatus
from gdscache.storage.base import Op
from tests.support.faults import Fault, FaultPlan, FaultRule, faulty

__all__ = [
    "PLAN", "READ_FAULTS", "Fault", "FaultyKvikio", "FaultyMerging", "FaultyNixl", "FaultyTransport", "FaultyUring",
    "Plan",
]  # fmt: skip


class Plan(FaultPlan):
    """Rules by operation first, and chosen by the offset alone.

    A bit that flips is one of the page's, unless it is drawn again and again: any may lie in the padding of an extent,
    where it harms nothing.
    """

    @contextmanager
    def rule(  # type: ignore[override]
        self, op: Op, fault: Fault, chosen: Callable[[int], bool] | None = None, **conditions: Any
    ) -> Iterator[FaultRule]:
        where = None if chosen is None else lambda path, offset: chosen(offset)
        if fault is Fault.FLIP and "rate" not in conditions:
            conditions.setdefault("bit", 7)
        with super().rule(fault, op, where=where, **conditions) as rule:
            yield rule

    @property
    def moved(self) -> dict[Op, list[int]]:
        """The offsets of reads and writes, in the order of their ends."""
        return {op: [offset for o, _, offset in list(self.ended) if o is op] for op in Op}


PLAN = Plan(trace=True)
FaultyTransport = faulty(PLAN)
FaultyMerging = faulty(PLAN, merges=True)
FaultyUring = faulty(PLAN, inner="uring")
FaultyNixl = faulty(PLAN, inner="nixl")
FaultyKvikio = faulty(PLAN, inner="kvikio")

# A read that fails, and what is said of its page.
READ_FAULTS = [
    (Fault.EIO, PageStatus.IO_ERROR),
    (Fault.SHORT, PageStatus.SHORT_READ),
    (Fault.FLIP, PageStatus.CHECKSUM),
]
