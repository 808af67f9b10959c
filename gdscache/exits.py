"""Exit statuses of the commands."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended
