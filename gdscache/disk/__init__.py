"""The SSD tier's directory: its lock, its slab of extents, its catalogue, and what a restart reads of it."""
