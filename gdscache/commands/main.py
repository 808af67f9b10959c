"""The entry point of the commands. Imports a command's modules only when it runs."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys

from gdscache.commands import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from gdscache.errors import GdsCacheError


def main() -> None:
    """Run a command. An error ends it with a message of a line or two on stderr and a status, without a traceback.

    Errors of gdscache, failed input or output (also a full disk behind stdout), and input with too much nesting or size
    end it with `EXIT_REFUSED`. Ctrl-C, also during the start, ends it with `EXIT_INTERRUPTED`.
    """
    try:
        for name in ("stdout", "stderr"):  # None: the caller has closed it
            stream = getattr(sys, name) or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
            setattr(sys, name, stream)
            if isinstance(stream, io.TextIOWrapper):  # characters missing in its encoding are written as \u65e5
                stream.reconfigure(errors="backslashreplace")
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        from gdscache.commands.cli import app

        try:
            app(prog_name="gdscache")
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _end("interrupted", EXIT_INTERRUPTED)
    except GdsCacheError as error:
        _end(f"error: {error}", EXIT_REFUSED)
    except BrokenPipeError:
        _end("", EXIT_FAILED)  # the reader of stdout has gone, so no message
    except OSError as error:
        what = error.filename if error.filename is not None else "the output"
        _end(f"error: {what}: {error.strerror or error}", EXIT_REFUSED)
    except RecursionError:
        _end("error: the input is nested too deeply", EXIT_REFUSED)
    except MemoryError:
        _end("error: there is not enough memory", EXIT_REFUSED)


def _end(message: str, status: int) -> None:
    """Print the cause if stderr is open, and exit. Unwritable output of stdout is discarded."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
    with contextlib.suppress(OSError, AttributeError):
        if message:
            sys.stderr.write(f"{message}\n")
            sys.stderr.flush()
    sys.exit(status)
