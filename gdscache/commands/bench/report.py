"""Tables of `gdscache bench policy` and `replay --suite`, until they use `commands.console`."""

from __future__ import annotations

from rich.table import Table

from gdscache.commands.console import progress_bar as progress_bar
from gdscache.commands.console import verdict as verdict


def new_table(title: str, *columns: str) -> Table:
    """An empty table with a title and columns that are as wide as what is in them."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
