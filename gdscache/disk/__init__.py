"""The SSD tier's directory: its locks, slab and catalogue, and their recovery."""
