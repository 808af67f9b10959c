"""A terminal of a given width for a child process, and what the child writes there."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence


def on_terminal(arguments: Sequence[str], columns: int = 80) -> tuple[int, str]:
    """Run Python with these arguments, its standard output a terminal `columns` wide: (exit status, its text).

    Standard error goes nowhere, so that progress bars are not part of the text; colours are taken out.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen([sys.executable, *arguments], stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            written += chunk
    except OSError:  # Linux says EIO at the end of a terminal
        pass
    finally:
        os.close(ours)
        status = child.wait(60)
    return status, _without_colors(written.decode().replace("\r\n", "\n"))


def _without_colors(text: str) -> str:
    parts = text.split("\x1b[")
    return parts[0] + "".join(part.partition("m")[2] for part in parts[1:])
