"""Lines of the log that look like an inference engine's own."""

from __future__ import annotations

import logging


def follow(name: str) -> None:
    """Have lines of `gdscache` go where those of the logger `name` go, in its form and from its level on.

    Where somebody has given `gdscache` a handler or a level, that stays. For when the inference engine has configured
    its logging, which is before it makes a connector.
    """
    ours, theirs = logging.getLogger("gdscache"), logging.getLogger(name)
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = theirs.propagate
