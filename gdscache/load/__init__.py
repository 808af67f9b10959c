"""Loads: the caller's handle, what a load moves, and the steps that have it moved."""
