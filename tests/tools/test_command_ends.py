"""How commands end when something around them fails: a line on stderr and a status, never a traceback."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gdscache.commands import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from gdscache.commands.replay import trace
from tests.support.places import ROOT

CONFIGS = ROOT / "configs"
CONFIG = CONFIGS / "cpu_only.yaml"
REQUEST = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(gdscache: Callable[..., tuple[int, str, str]]) -> Run:
    """Run a command: its status and what it said on stderr. `stdout` takes what it prints."""
    return lambda *arguments, **stdout: gdscache(*arguments, **stdout)[::2]


def refused(ended: tuple[int, str], *words: str) -> None:
    """A message of a few lines that begins with `error:` and has the words, no traceback; the status of refusals."""
    status, said = ended
    assert status == EXIT_REFUSED, said
    assert said.startswith("error: "), said[:300]
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 3, said[:2000]
    assert len(said) < 1000, len(said)
    for word in words:
        assert word in said, said


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(REQUEST)}\n")
    return file


@pytest.mark.parametrize(
    "command",
    [
        ("--version",), ("--help",), ("config", "print"), ("config", "check", "--json", str(CONFIG)),
        ("replay", "TRACE"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_full_disk_behind_stdout_is_said_and_the_status_is_no_verdict(
    run: Run, requests: Path, command: tuple[str, ...]
) -> None:
    command = tuple(str(requests) if part == "TRACE" else part for part in command)
    with open("/dev/full", "w") as full:
        refused(run(*command, stdout=full), "No space left")


@pytest.mark.suite
def test_nothing_is_said_when_the_process_ends_with_a_full_stdout() -> None:
    """What was buffered is not written again at the interpreter's end, where nobody could catch it."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gdscache", "--version"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    refused((done.returncode, done.stderr), "No space left")


@pytest.mark.suite
def test_a_reader_that_has_gone_is_told_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "gdscache", "config", "print"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (EXIT_FAILED, "")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_closed_output_changes_no_verdict(tmp_path: Path, closed: str) -> None:
    for file, status in ((CONFIG, 0), (tmp_path / "missing.yaml", EXIT_REFUSED)):
        command = [sys.executable, "-m", "gdscache", "config", "check", str(file)]
        done = subprocess.run(
            ["sh", "-c", f'"$@" {closed}', "sh", *command], stderr=subprocess.PIPE, text=True, timeout=120
        )
        assert done.returncode == status
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_output_cannot_encode_is_written_escaped(run: Run, tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "日本.yaml"
    file.write_text(CONFIG.read_text().replace("name: ", "name: 日本-"), encoding="utf-8")
    for more in ((), ("--json",)):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        assert run("config", "check", file, *more, stdout=out) == (0, "")
        out.flush()
        assert r"\u65e5\u672c-" in out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    refused(run("config", "check", tmp_path / "月.yaml", stdout=out))


@pytest.mark.suite
@pytest.mark.parametrize("command", [("config", "check"), ("replay",), ("replay", "TRACE", "--config")])
def test_a_file_without_an_end_is_refused(run: Run, requests: Path, command: tuple[str, ...]) -> None:
    refused(run(*(requests if part == "TRACE" else part for part in command), "/dev/zero"), "/dev/zero")


def test_a_pipe_without_an_end_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lines that are requests, each one right; packed too."""
    monkeypatch.setattr(trace, "MAX_TRACE_BYTES", 1 << 20)
    line = f"{json.dumps(REQUEST)}\n".encode()
    for name, block in (("plain", line * 100), ("packed", gzip.compress(line * 100))):
        pipe = tmp_path / name
        os.mkfifo(pipe)
        thread = threading.Thread(target=_pour, args=(pipe, block))
        thread.start()
        refused(run("replay", pipe), f"{name}:", "1,048,576")
        thread.join(20)
        assert not thread.is_alive()


def test_a_trace_from_a_pipe_is_read(run: Run, requests: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=pipe.write_bytes, args=(requests.read_bytes(),))
    thread.start()
    assert run("replay", pipe) == (0, "")
    thread.join(20)


def _pour(pipe: Path, block: bytes) -> None:
    try:
        with pipe.open("wb") as file:
            while True:
                file.write(block)
    except BrokenPipeError:
        pass


DEEP = pytest.param(100_000, marks=pytest.mark.suite)


@pytest.mark.parametrize("depth", [700, DEEP])
@pytest.mark.parametrize("begin", ["[", '{"a":', "- ", "a: &a [x]\nb: {k: "], ids=range(4))
def test_input_that_is_nested_too_deeply_is_refused(
    run: Run, tmp_path: Path, requests: Path, begin: str, depth: int
) -> None:
    text = begin + begin[begin.rfind("\n") + 1 :].removeprefix("b: ") * depth
    file = tmp_path / "deep"
    file.write_text(text)
    for command in (("config", "check", file), ("replay", file)):
        refused(run(*command), str(file))
    if "\n" not in text:
        refused(run("replay", requests, "--cpu", "1GiB", "--set", f"store.queue={text[:5000]}"), "--set")


@pytest.mark.parametrize("value", ["!!timestamp", "!!bool x", '!!int ""'])
def test_a_set_value_that_is_not_yaml_is_refused(run: Run, requests: Path, value: str) -> None:
    status, said = run("replay", requests, "--set", f"a={value}")
    assert (status, "is not YAML" in said, "Traceback" in said) == (EXIT_REFUSED, True, False)


@pytest.mark.parametrize("speed", ["--ssd-read-gbps", "--link-gbps", "--prefill-tokens-per-second"])
@pytest.mark.parametrize("later", [0.0, 1e-310])
def test_a_replay_of_any_speed_and_time_is_json_or_refused(
    run: Run, gdscache: Callable[..., tuple[int, str, str]], requests: Path, speed: str, later: float
) -> None:
    """JSON has no infinity."""
    second = REQUEST | {"timestamp": later, "hash_ids": [3, 4]}
    requests.write_text(f"{json.dumps(REQUEST)}\n{json.dumps(second)}\n")
    tiers = "--cpu", "128MiB", "--ssd", "1GiB", "--json"
    for value in ("1e-9", "1e308", "inf"):
        status, out, _ = gdscache("replay", requests, *tiers, speed, value)
        assert (status, json.loads(out, parse_constant=pytest.fail)["schema"]) == (0, "gdscache.replay/6")
    for value in ("1e-320", "0", "nan"):
        refused(run("replay", requests, *tiers, speed, value), speed)


CONTENTS = [b"", b"\xff\xfe\x00", b"\x00" * 100, b"nan", b'{"a": 1}', b"{", b"\x1f\x8b\x08"]
NAMES = ["a\0b", "~nobody-of-this-name/x", "", "x" * 5000, "\ud800", "/proc/self/mem"]


@pytest.mark.parametrize("given", [*CONTENTS, *NAMES])
def test_files_of_something_else_and_names_that_no_file_has_are_refused(
    run: Run, tmp_path: Path, given: bytes | str
) -> None:
    name = given if isinstance(given, str) else tmp_path / "file"
    if isinstance(given, bytes):
        (tmp_path / "file").write_bytes(given)
    for command in (("config", "check"), ("replay",)):
        status, said = run(*command, name)
        assert (status, "Traceback" in said) == (EXIT_REFUSED, False), (command, said[-500:])
        assert isinstance(given, str) or (said.startswith("error: ") and len(said) < 2000)


@pytest.mark.parametrize(
    "capacity", ["9" * 30, "1e999999999", "1e30%", "-1", "nan", "inf%", "1e-999999999", "x" * 5000]
)
def test_capacities_that_no_tier_has_are_refused(run: Run, requests: Path, capacity: str) -> None:
    refused(run("replay", requests, f"--cpu={capacity}"), "--cpu")


INTERRUPTED_IMPORT = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
sys.argv = ["gdscache", "config", "check", {config!r}]
import runpy
runpy.run_module("gdscache", run_name="__main__")
"""


LATER = [
    pytest.param(name, marks=pytest.mark.suite) for name in ("typer", "pydantic", "gdscache.commands.replay.trace")
]


@pytest.mark.parametrize("name", ["gdscache.commands.cli", "yaml", *LATER])
def test_ctrl_c_while_a_command_starts_ends_it_with_a_line(name: str) -> None:
    code = INTERRUPTED_IMPORT.format(name=name, config=str(CONFIG))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_INTERRUPTED, "", "interrupted\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RecursionError, MemoryError, OSError(5, "Input/output error")])
def test_what_breaks_off_a_command_ends_it_without_a_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException | type[BaseException]
) -> None:
    def broken(_: object) -> None:
        raise error

    monkeypatch.setattr("gdscache.commands.cli.load_any", broken)
    status, said = run("config", "check", CONFIG)
    assert "Traceback" not in said
    if error is KeyboardInterrupt:
        assert status == EXIT_INTERRUPTED
    else:
        refused((status, said))


def test_a_defect_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw is not hidden behind a line."""
    monkeypatch.setattr("gdscache.commands.cli.describe", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run("config", "check", CONFIG)
