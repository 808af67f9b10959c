"""Prefetches: the caller's handle, whose turn it is, and who has chunks moved."""
