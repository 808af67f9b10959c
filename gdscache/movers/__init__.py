"""Movers copy pages between extents and planes: in host memory, or on a GPU."""
