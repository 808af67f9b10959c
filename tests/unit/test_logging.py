"""Log lines: every logger has a documented name, and a command's warnings say whose they are and how bad."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gdscache

ROOT = Path(gdscache.__file__).parent


def loggers() -> Iterator[str]:
    """The names of the engine's loggers; commands have none that they log with."""
    for path in ROOT.rglob("*.py"):
        source = path.read_text()
        if "commands" in path.parts or "getLogger" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger":
                (name,) = node.args
                module = ".".join(("gdscache", *path.relative_to(ROOT).with_suffix("").parts))
                yield str(name.value) if isinstance(name, ast.Constant) else module


def test_the_names_of_loggers_are_documented() -> None:
    docs = "\n".join(path.read_text() for path in (ROOT.parent / "docs").rglob("*.md"))
    found = {name for name in loggers() if name.startswith("gdscache")}
    assert len(found) > 8
    assert {name for name in found if f"`{name}`" not in docs} == set()


def test_a_command_s_warnings_carry_the_logger_s_name_and_level() -> None:
    code = """
import logging, sys
from gdscache.commands import cli
from gdscache.commands.main import main
cli.app = lambda prog_name: logging.getLogger("gdscache.config").warning("ssd.endurance is %s", "9 pages")
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "WARNING gdscache.config: ssd.endurance is 9 pages\n"
