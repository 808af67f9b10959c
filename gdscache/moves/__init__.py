"""Moves of pages between tiers and planes, and their executors. See `gdscache.moves.base`."""

from gdscache.moves.base import (
    PLANES,
    End,
    Executor,
    Lane,
    Listener,
    Move,
    Moving,
    PageStatus,
    PrefetchEnd,
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
    "PrefetchEnd",
    "Priority",
    "Spent",
    "Steps",
    "Wait",
    "Way",
    "failure",
]
