"""matplotlib under its old name, until all commands take it from `commands.console`."""

from gdscache.commands.console import require_matplotlib as require

__all__ = ["require"]
