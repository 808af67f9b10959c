"""What a page is: its key, the layout of its bytes, the planes that it lies in, its checksums."""
