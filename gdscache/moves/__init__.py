"""Moves of pages: what one is, and what carries it out. See `gdscache.moves.base`."""

from gdscache.moves.base import PLANES, End, Executor, Lane, Move, Moving, Priority, Steps, Wait, Way

__all__ = ["PLANES", "End", "Executor", "Lane", "Move", "Moving", "Priority", "Steps", "Wait", "Way"]
