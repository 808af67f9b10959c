"""A terminal of a given width for a child process, and what the child writes there."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence

END = b"\0the child has ended"


def on_terminal(arguments: Sequence[str], columns: int = 80) -> tuple[int, str]:
    """Run Python with these arguments, its standard output a terminal `columns` wide: (exit status, its text).

    Standard error goes nowhere, so that progress bars are not part of the text; colours are taken out.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen([sys.executable, *arguments], stdout=theirs, stderr=subprocess.DEVNULL)

    def end() -> None:
        child.wait()
        os.write(theirs, END)

    # A terminal whose last writer closes it may lose what nobody has read yet, so this end stays open, and a mark
    # behind the child's output says that all of it has come.
    ender = threading.Thread(target=end)
    ender.start()
    written = b""
    try:
        while not written.endswith(END):
            written += os.read(ours, 1 << 16)
    finally:
        child.kill()  # where the reading was interrupted
        ender.join()
        os.close(theirs)
        os.close(ours)
    return child.wait(), _without_colors(written.removesuffix(END).decode().replace("\r\n", "\n"))


def _without_colors(text: str) -> str:
    parts = text.split("\x1b[")
    return parts[0] + "".join(part.partition("m")[2] for part in parts[1:])
