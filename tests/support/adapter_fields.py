"""What the stand-ins of both engines' settings share: the fields of a table, and a line that is taken out of the facts.

A line is a name among the facts, as `ModelConfig.dtype`. `Setup.change` gives that line alone another value. A mutation
(`without`) takes a line out of the facts: then its change must go unnoticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from gdscache.integrations.fields import FieldTable


def of_class(table: FieldTable, owner: str, *kinds: str) -> list[str]:
    known = table.kinds.items()
    return [name.split(".")[1] for name, kind in known if name.startswith(f"{owner}.") and kind in kinds]


@contextlib.contextmanager
def without(line: str, module: Any) -> Iterator[None]:
    """The mutation: that line is no fact. `module`: the one that calls `facts_of`."""
    kept = module.facts_of

    def some(*given: Any) -> dict[str, object]:
        return {name: value for name, value in kept(*given).items() if name != line}

    with mock.patch.object(module, "facts_of", some):
        yield
