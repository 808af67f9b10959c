"""Log lines in an inference engine's own form."""

from __future__ import annotations

import logging


def follow(theirs: logging.Logger) -> None:
    """Send lines of `gdscache` to another logger's handlers, in its form and from its level on. Existing handlers and
    levels of `gdscache` stay. Call it after the inference engine has configured its logging."""
    ours = logging.getLogger("gdscache")
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = theirs.propagate
