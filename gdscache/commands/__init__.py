"""The commands. Nothing of the engine imports them; only `gdscache.cli` does."""
