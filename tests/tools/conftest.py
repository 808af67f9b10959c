"""Fixtures of the tests of commands."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import IO

import pytest
import typer.main

from gdscache.commands.main import main

typer.main.get_command = functools.cache(typer.main.get_command)  # which takes 40 ms, each time a command runs


@pytest.fixture
def gdscache(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run the entry point: (exit status, stdout, stderr). `stdout` takes what it prints."""

    def start(*arguments: str | Path, stdout: IO[str] | None = None) -> tuple[int, str, str]:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["gdscache", *map(str, arguments)])
            patched.setattr(sys, "stdout", stdout or sys.stdout)
            with pytest.raises(SystemExit) as caught:
                main()
        return caught.value.code, *capfd.readouterr()

    return start
