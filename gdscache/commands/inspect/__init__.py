"""Examine the directory of an SSD tier without an engine: `gdscache inspect` and `gdscache verify`.

Neither changes the directory, and neither trusts a value in it.
"""
