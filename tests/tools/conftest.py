"""Fixtures of the tests of commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gdscache.commands.main import main


@pytest.fixture
def gdscache(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run the entry point: (exit status, stdout, stderr)."""

    def start(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gdscache", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, *capfd.readouterr()

    return start
