"""Examine the directory of an SSD tier without an engine: `gdscache inspect` and `gdscache verify`.

Neither changes the directory, and neither trusts a value in it.
"""

from __future__ import annotations

from gdscache.commands.inspect.reading import directories_of, inspect
from gdscache.commands.inspect.tables import compare
from gdscache.commands.inspect.verification import verify

__all__ = ["compare", "directories_of", "inspect", "verify"]
