"""What the kernel says of the machine, in small files below `/proc` and `/sys`."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path) -> str:
    """A small file's content, stripped; empty where it is not there, or not for this user."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
