"""Hybrid models: groups of layers that keep different tokens of a prefix."""
