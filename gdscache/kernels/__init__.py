"""Gather and scatter of fragmented pages. One implementation for now: the torch reference, on CPU and GPU."""

from gdscache.kernels.reference import gather, scatter

__all__ = ["gather", "scatter"]
