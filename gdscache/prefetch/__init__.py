"""Prefetches: the caller's handle, the queue of requests, and the mover of their chunks."""
