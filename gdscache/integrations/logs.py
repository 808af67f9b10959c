"""Lines of the log that look like an inference engine's own."""

from __future__ import annotations

import logging


def follow(theirs: logging.Logger) -> None:
    """Have lines of `gdscache` go where those of another logger go, in its form and from its level on.

    Where somebody has given `gdscache` a handler or a level, that stays. For when the inference engine has configured
    its logging, which is before it makes a connector.
    """
    ours = logging.getLogger("gdscache")
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = theirs.propagate
