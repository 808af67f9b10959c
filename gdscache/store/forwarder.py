"""Hands pages in slots of the CPU tier, or of the bounce reserve, to the writers of the tiers of files."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

from gdscache.index.free_slots import SlotShare
from gdscache.moves import Executor
from gdscache.runtime.threads import Bell, failure_of, in_turn, log_failure
from gdscache.store.outlets import Outlet
from gdscache.store.parcel import Parcel
from gdscache.store.plan import StorePlanner
from gdscache.store.writer import TierWriter
from gdscache.tiers.manager import TierManager


class Forwarder:
    """Hands pages to the writers, and frees their slots afterwards. The manager's lock is held.

    `writers`: by tier name. `spare`: slots of the bounce reserve. `idle` rings when nothing is queued.
    """

    def __init__(
        self,
        manager: TierManager,
        planner: StorePlanner,
        executor: Executor,
        spare: SlotShare | None,
        deadline: float,
        idle: Bell,
    ) -> None:
        self.planner, self.spare, self.idle = planner, spare, idle
        self.writers: dict[str, TierWriter] = {}
        self._open = True
        with contextlib.ExitStack() as undo:
            undo.callback(self.close, drain=False)
            for outlet in planner.outlets if planner.writes else ():
                self.writers[outlet.tier.name] = TierWriter(
                    manager, outlet, executor, planner.extent_bytes, deadline, self._written, self._released
                )
            undo.pop_all()

    def begin_close(self, *, drain: bool) -> None:
        """Before the end of the storer's own thread, as is `close` behind it. The manager's lock is not held here."""
        for writer in self.writers.values():
            writer.begin_close(drain=drain)

    def close(self, *, drain: bool) -> None:
        with self.planner.lock:
            self._open = False
        in_turn(*(functools.partial(writer.close, drain=drain) for writer in self.writers.values()))

    def demote(self, parcels: Sequence[Parcel]) -> int:
        """Send pages of the landing tier on without a store. Returns their number."""
        if not parcels:
            return 0
        try:
            self.send(parcels)
        except BaseException:
            self.abandon(parcels)
            raise
        return sum(map(len, parcels))

    def send(self, parcels: Sequence[Parcel]) -> None:
        """Hand pages in slots to the writers. Raises only if no writer has taken any."""
        taken = False
        for outlet in self.planner.outlets if parcels else ():
            some = [parcel for parcel in parcels if outlet in parcel.to]
            writer = self.writers.get(outlet.tier.name)
            if writer is None or not self._open:  # a load may offer pages while the engine closes
                self._turn_away(some, outlet, "closed")
                continue
            error = failure_of(functools.partial(writer.put, some))
            if error is not None and not taken:
                raise error
            if error is not None:
                log_failure(error)
                self._turn_away(some, outlet, "error")
            taken = taken or bool(some)

    def abandon(self, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            self.planner.abandon(parcel)
            self._give_bounce(parcel, parcel.rows)
        self.tell_idle()

    def without(self, parcel: Parcel, rows: Sequence[int]) -> Parcel:
        """A parcel that is not sent yet, without pages that do not fit into packed extents."""
        left = self.planner.without(parcel, rows)
        self._give_bounce(parcel, rows)
        return left

    def tell_idle(self) -> None:
        if not self.planner.queued:
            self.idle.ring()

    def _turn_away(self, parcels: Sequence[Parcel], outlet: Outlet, cause: str) -> None:
        for parcel in parcels:
            self._written(parcel, outlet, parcel.rows, cause)
            self._released(parcel, outlet, parcel.rows)

    def _written(self, parcel: Parcel, outlet: Outlet, rows: Sequence[int], cause: str) -> Sequence[int]:
        ended = self.planner.written(parcel, outlet, rows, cause)
        self.tell_idle()
        return ended

    def _released(self, parcel: Parcel, outlet: Outlet, rows: Sequence[int]) -> None:
        self._give_bounce(parcel, self.planner.released(parcel, outlet, rows))

    def _give_bounce(self, parcel: Parcel, rows: Sequence[int]) -> None:
        if parcel.entries is None and self.spare is not None and rows:
            self.spare.give([parcel.slots[row] for row in rows])
