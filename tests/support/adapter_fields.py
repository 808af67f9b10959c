"""What the stand-ins of both engines' settings share: the fields of a table.

A line is a name among the facts, as `ModelConfig.dtype`. `Setup.change` gives that line alone another value.
"""

from __future__ import annotations

from gdscache.integrations.fields import FieldTable


def of_class(table: FieldTable, owner: str, *kinds: str) -> list[str]:
    known = table.kinds.items()
    return [name.split(".")[1] for name, kind in known if name.startswith(f"{owner}.") and kind in kinds]
