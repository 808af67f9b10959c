"""Child processes for tests: forked from a server that has all of an engine loaded, so that one costs milliseconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from unittest import mock

from tests.support.helpers import WAIT

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "pytest", "tests.support.helpers"])  # with all of an engine
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Failure:
    """What a child sends in place of an answer when it broke off."""

    def __init__(self, text: str) -> None:
        self.text = text


class Child:
    """A process that runs `target(pipe, *arguments)`. At the end of the block it has ended, by force if need be."""

    def __init__(self, target: Callable[..., None], *arguments: Any, daemon: bool = True) -> None:
        with mock.patch.dict(os.environ, ONE_THREAD):  # a server with threads of its own had better not fork
            forkserver.ensure_running()
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs, target, arguments), daemon=daemon)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def send(self, what: object) -> None:
        self.pipe.send(what)

    def receive(self, seconds: float = WAIT) -> Any:
        """The child's next answer. Fails when there is none in time, or when the child broke off."""
        assert self.pipe.poll(seconds), f"a child said nothing for {seconds} s"
        answer = self.pipe.recv()
        assert not isinstance(answer, Failure), f"a child broke off:\n{answer.text}"
        return answer

    def kill(self) -> None:
        """SIGKILL; the child must have been alive and well until then."""
        self.process.kill()
        self.killed()

    def killed(self) -> None:
        """Wait for the child's end, which must be by SIGKILL and without a failure before it."""
        self._read_on()
        assert self.process.exitcode == -signal.SIGKILL, f"the child was not killed: it ended {self.process.exitcode}"

    def end(self) -> None:
        """Wait for the child's own end, which must be without a failure."""
        self._read_on()
        assert self.process.exitcode == 0, f"the child ended with {self.process.exitcode}"

    def _read_on(self) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                self.receive()
        self.join()

    def join(self, seconds: float = WAIT) -> None:
        self.process.join(seconds)
        assert self.process.exitcode is not None, "a child does not end"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        self.pipe.close()


class _Reporting:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self._pipe.send(Failure("".join(traceback.format_exception(error))))


def _serve(pipe: Connection, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with _Reporting(pipe):
        target(pipe, *arguments)


def program(*arguments: str, cwd: Path, seconds: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """What `python -W error ARGUMENTS` does: a script, or `-c` and code. The server has imported torch before, without
    warnings, and `atexit` knows nothing of the end. Temporary files that it leaves are removed."""
    with tempfile.TemporaryDirectory() as folder, Child(_run, arguments, cwd, folder, env, daemon=False) as child:
        child.join(seconds)
        said = [Path(folder, name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(arguments, child.process.exitcode or 0, *said)


def _run(_: Connection, arguments: tuple[str, ...], cwd: Path, folder: str, env: dict[str, str]) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.update({"TMPDIR": folder} | env)
    tempfile.tempdir = env.get("TMPDIR", folder)  # the server has asked for it before
    warnings.simplefilter("error")
    sys.argv = [*arguments[:1], *arguments[2 if arguments[0] == "-c" else 1 :]]
    if arguments[0] == "-c":
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(arguments[0], run_name="__main__")
