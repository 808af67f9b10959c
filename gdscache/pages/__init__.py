"""Pages: keys, the layout of their bytes, the planes they lie in, checksums."""
