"""Hybrid models: groups of layers that keep different tokens of a prefix, and what a hit needs of each."""
