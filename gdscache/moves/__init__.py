"""Moves of pages: what one is, and what carries it out. See `gdscache.moves.base`."""

from gdscache.moves.base import (
    PLANES,
    End,
    Executor,
    Lane,
    Listener,
    Move,
    Moving,
    PageStatus,
    Priority,
    Spent,
    Steps,
    Wait,
    Way,
    failure,
)

__all__ = [
    "PLANES",
    "End",
    "Executor",
    "Lane",
    "Listener",
    "Move",
    "Moving",
    "PageStatus",
    "Priority",
    "Spent",
    "Steps",
    "Wait",
    "Way",
    "failure",
]
