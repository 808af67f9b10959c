"""Replay request traces on the index and policies of tiers. Behind `gdscache replay`."""
