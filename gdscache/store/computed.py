"""Layers of a store that are still computed when it is accepted.

What a forward pass computes can leave the GPU layer by layer while the pass goes on, and finds its slots meanwhile. A
store that begins behind the pass instead is copied while the next tokens are decoded, which launch kernels by the
thousand, and wait for the same bus, the same locks and the same interpreter.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gdscache.errors import StepBrokenOffError

if TYPE_CHECKING:
    from gdscache.cuda.streams import Event


class ComputedLayers:
    """Groups of layers, in their order. Each has an event as soon as what computes it is queued. Thread-safe.

    `groups[n]` is what a `Move` has as its groups: of a store behind one event, all layers at once.
    """

    def __init__(self, groups: Sequence[tuple[range, ...]], events: Sequence[Event] = ()) -> None:
        self.groups = groups
        self.changed = threading.Condition()
        self._events = [*events]
        self._broken = False

    @classmethod
    def behind(cls, event: Event) -> ComputedLayers:
        """All layers are computed behind an event."""
        return cls([()], [event])

    @classmethod
    def still(cls, layers: int, parts: int) -> ComputedLayers:
        """None of so many layers is computed yet. They are in `parts` groups, or one each where they are fewer."""
        bounds = [layers * n // min(parts, layers) for n in range(min(parts, layers) + 1)]
        return cls([(range(a, b),) for a, b in itertools.pairwise(bounds)])

    @property
    def known(self) -> int:
        """How many groups have their event."""
        return len(self._events)

    @property
    def whole(self) -> bool:
        """Whether all groups have their event."""
        return self.known == len(self.groups)

    def event(self, group: int) -> Event:
        return self._events[group]

    def add(self, event: Event) -> None:
        """The next group is computed behind this event."""
        with self.changed:
            self._events.append(event)
            self.changed.notify_all()

    def finish(self, event: Event) -> None:
        """So are all that are left."""
        with self.changed:
            self._events += [event] * (len(self.groups) - self.known)
            self.changed.notify_all()

    def break_off(self) -> None:
        """What has no event will never be computed."""
        with self.changed:
            self._broken = True
            self.changed.notify_all()

    def settled(self, group: int) -> bool:
        """Whether a group has its event, or never will."""
        return self.known > group or self._broken

    def check(self, group: int) -> None:
        """Raise `StepBrokenOffError` where a group never will have its event."""
        if self._broken and self.known <= group:
            raise StepBrokenOffError(
                f"{len(self.groups) - self.known} of {len(self.groups)} groups of layers were not computed",
                "see the error that ended the step",
            )
