"""A circuit breaker for calls to another machine."""

from __future__ import annotations

import logging
import threading
from typing import Literal

State = Literal["connecting", "closed", "open", "ended"]
_log = logging.getLogger("gdscache.mooncake")


class Breaker:
    """Calls may begin while it is `closed`. Thread-safe; counts how often it opened."""

    def __init__(self, name: str) -> None:
        self.changed = threading.Condition()
        self.opened = 0
        self.state: State = "connecting"
        self._name = name

    @property
    def closed(self) -> bool:
        return self.state == "closed"

    def open(self, why: str) -> None:
        """No call may begin. May be called again."""
        with self.changed:
            if self.state != "closed":
                return
            self.state = "open"
            self.opened += 1
            self.changed.notify_all()
        _log.warning("the shared pool %s is left alone until it answers again: %s", self._name, why)

    def close(self) -> None:
        with self.changed:
            if self.state not in ("connecting", "open"):
                return
            was, self.state = self.state, "closed"
            self.changed.notify_all()
        _log.info("the shared pool %s %s", self._name, "is connected" if was == "connecting" else "answers again")

    def end(self) -> None:
        with self.changed:
            self.state = "ended"
            self.changed.notify_all()
