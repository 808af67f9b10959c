"""The benchmarks: the commands as people run them, small, and the rules by which figures are made."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import typer

from gdscache.commands.bench import figures, io, kit, machine
from gdscache.errors import (
    CapacityError,
    InvalidValueError,
    IOFailedError,
    MissingPackageError,
    NoSpaceError,
    TransportUnavailableError,
)
from gdscache.storage.base import Op
from tests.support.toy_bench import SERIES, TOY, broken, interrupted, never, toy

pytestmark = pytest.mark.suite

MIB = 1 << 20


def test_a_case_that_fails_does_not_cost_the_others(tmp_path: Path) -> None:
    """A case whose transport this machine lacks is no failure."""

    def lacking() -> NoReturn:
        raise TransportUnavailableError("nixl cannot be imported", "install it")

    found = toy({"a": lambda: 1.0, "b": broken, "c": lambda: 3.0, "d": lacking}).run(kit.Settings(), tmp_path)
    assert [(row["case"], row["value"]) for row in found["r"]] == [("a", 1.0), ("c", 3.0)]
    assert (found["done"], found["failed"]) == (["a", "c"], [{"what": "b", "cause": "the disk is full"}])
    assert found["cannot"] == [{"what": "d", "cause": "nixl cannot be imported"}]
    assert (found["left"], found["complete"], found["interrupted"]) == ([], True, False)


def test_a_defect_is_raised_and_the_report_kept(tmp_path: Path) -> None:
    kept: list[Any] = []
    with pytest.raises(AssertionError, match="measured again"):
        toy({"a": lambda: 1.0, "b": never}).run(
            kit.Settings(), tmp_path, keep=lambda found: kept.append(len(found["r"]))
        )
    assert kept[-1] == 1


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), OSError(5, "out of memory"), MemoryError])
def test_an_error_outside_the_cases_fails_those_that_are_left(
    tmp_path: Path, error: BaseException | type[BaseException]
) -> None:
    """As of a model that the GPU's memory does not hold. One behind all cases is raised."""

    def broken_off(run: kit.Run, settings: kit.Settings, directory: Path) -> None:
        run.plan(["a", "b"])
        run.case("a", lambda: {"r": [TOY]})
        run.case("b", lambda: {"r": [TOY]}) if directory == Path() else None
        raise error

    bench = dataclasses.replace(toy({}), measure=broken_off)
    found = bench.run(kit.Settings(), tmp_path)
    assert (found["done"], [one["what"] for one in found["failed"]], found["left"]) == (["a"], ["b"], [])
    with pytest.raises(error if isinstance(error, type) else type(error)):
        bench.run(kit.Settings())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_a_bench_leave_no_files(tmp_path: Path, number: int) -> None:
    """Further ones do not break that off. With `nohup` it goes on."""

    def ended(run: kit.Run, settings: kit.Settings, directory: Path) -> None:
        try:
            with tempfile.TemporaryDirectory(dir=directory):
                signal.raise_signal(number)
        finally:
            signal.raise_signal(number)

    bench, before = dataclasses.replace(toy({}), measure=ended), signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit, match=str(128 + number)):
            bench.run(kit.Settings(), tmp_path)
        assert (list(tmp_path.iterdir()), signal.getsignal(number)) == ([], signal.default_int_handler)
        signal.signal(number, signal.SIG_IGN)
        bench.run(kit.Settings(), tmp_path)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_an_error_of_gdscache_outside_the_cases_costs_no_figure_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a pool that the GPU's memory does not hold, behind others."""

    def short(run: kit.Run, settings: kit.Settings, directory: Path) -> None:
        run.plan(["a", "b"])
        run.case("a", lambda: {"r": [TOY]})
        raise CapacityError("no room", "")

    with pytest.raises(typer.Exit) as ended:
        dataclasses.replace(toy({}), measure=short).command(directory=tmp_path)
    shown = capsys.readouterr().out
    assert (ended.value.exit_code, "load of a" in shown, "no room" in shown) == (1, True, True)


@dataclasses.dataclass(frozen=True)
class Large(kit.Settings):
    @property
    def needed(self) -> int:
        return 80 * MIB


@pytest.mark.parametrize(
    ("free", "memory", "fits"),
    [(64, None, False), (100, 1000, True), (100, None, True), (100, 100, False), (0, 0, None)],
)
def test_files_lie_on_a_ram_disk_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free: int, memory: int | None,
    fits: bool | None,
) -> None:  # fmt: skip
    """Containers have one of 64 MiB. Its bytes are host memory, of which the CPU tier takes as much. `fits` None: there
    is no RAM disk. The command says which directory it takes, and why, or nothing if the bench has no files."""
    ram, other = tmp_path / "ram", tmp_path / "other"
    for one in (ram, other):
        one.mkdir()
    monkeypatch.chdir(other)
    monkeypatch.setattr(kit, "RAM_DISK", ram)
    monkeypatch.setattr(kit, "host_bytes", lambda: None if memory is None else memory * MIB)
    monkeypatch.setattr(machine, "in_memory", lambda directory: directory == ram and fits is not None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(free if path == ram else 200) * MIB))
    bench = dataclasses.replace(toy({"a": lambda: 1.0}), settings=Large)
    bench.command(directory=None)
    said = capsys.readouterr().err.splitlines()[0]
    assert f"bench toy has its files, 80 MiB, in {ram if fits else other}: " in said
    assert said.endswith(
        "is no RAM disk that this user may write" if fits is None else f"{min(free, (memory or 1000) // 2)} MiB"
    )
    dataclasses.replace(bench, settings=kit.Settings).command(directory=None)
    assert capsys.readouterr().err.startswith("0 s, ")


def test_a_full_disk_is_said_with_the_option_that_names_another(tmp_path: Path) -> None:
    """In a case, and outside the cases."""

    def no_room(error: Exception, *, outside: bool) -> kit.Report:
        def case() -> NoReturn:
            raise error

        bench = toy({"a": lambda: 1.0, "b": case})
        if outside:
            bench = dataclasses.replace(bench, measure=lambda run, settings, directory: case())
        return bench.run(kit.Settings(), tmp_path)

    for error in (NoSpaceError("a slab needs more", "lower ssd.capacity"), OSError(28, "No space left on device")):
        [row] = no_room(error, outside=False)["failed"]
        assert row["cause"].endswith("--dir")
        with pytest.raises(NoSpaceError, match=r"(needs more|No space left)[^\n]*\n +hint: name a directory.*--dir"):
            no_room(error, outside=True)


def test_a_machine_that_does_not_name_its_processor(tmp_path: Path) -> None:
    """As those with ARM."""
    assert kit.machine_line(machine.describe(tmp_path) | {"cpu": None}).startswith("unknown processor, ")


def test_a_failed_case_has_no_figures_but_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(run: kit.Run, settings: kit.Settings, directory: Path) -> None:
        run.plan(["a", "b"])
        for name, why in (("a", ""), ("b", "other tokens")):
            run.add(name, {"r": [TOY]}, wrong=why)

    with pytest.raises(typer.Exit):
        dataclasses.replace(toy({}), measure=wrong).command(
            directory=tmp_path, json_file=tmp_path / "r.json", plot=tmp_path / "r.svg"
        )
    shown = capsys.readouterr().out
    assert ("load of a" in shown, "load of b" in shown, "toy <moves> 1 & more." in shown) == (True, False, True)
    drawn = (tmp_path / "r.svg").read_text()
    assert ("<!-- load of a -->" in drawn, "<!-- load of b -->" in drawn) == (True, False)
    assert [row["case"] for row in read(tmp_path / "r.json")["r"]] == ["a", "b"]


def test_a_run_that_does_not_begin_leaves_the_file_alone(tmp_path: Path) -> None:
    def refused(run: kit.Run, settings: kit.Settings, directory: Path) -> None:
        run.plan(["a"])
        raise CapacityError("no room", "")

    file = tmp_path / "r.json"
    file.write_text("an old report")
    with pytest.raises(CapacityError):
        dataclasses.replace(toy({}), measure=refused).command(directory=tmp_path, json_file=file)
    assert file.read_text() == "an old report"


def test_a_case_that_would_end_late_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case before says how long the next one takes."""
    now = [0.0]
    monkeypatch.setattr(kit.time, "monotonic", lambda: now[0])

    def lasting(seconds: float) -> Callable[[], float]:
        return lambda: now.__setitem__(0, now[0] + seconds) or 1.0

    bench = toy({"a": lasting(6.0), "b": lasting(1.0), "c": lasting(1.0)})
    for seconds, done in ((0.0, ""), (10.0, "a"), (13.0, "abc")):
        found = bench.run(kit.Settings(), tmp_path, seconds=seconds)
        assert (found["done"], found["left"]) == ([*done], [*"abc"[len(done) :]])
        left = [f"Not measured, no time left: {'; '.join(found['left'])}."] * bool(found["left"])
        assert [part for part in kit.below(found) if isinstance(part, str)] == left


def test_after_ctrl_c_the_file_has_each_case_that_was_measured(tmp_path: Path) -> None:
    file, seen = tmp_path / "r.json", []
    bench = toy(
        {"a": lambda: 1.0, "b": broken, "c": lambda: seen.append(len(read(file)["r"])) or 3.0, "d": interrupted}
    )
    with pytest.raises(typer.Exit) as ended:
        bench.command(directory=tmp_path, json_file=file)
    assert ended.value.exit_code == 130
    assert seen == [1]
    found = read(file)
    assert (found["interrupted"], found["complete"], found["left"]) == (True, False, ["d"])
    assert [row["value"] for row in found["r"]] == [1.0, 3.0]
    assert [what["what"] for what in found["failed"]] == ["b"]


@pytest.mark.parametrize("profile", ["quick", "default"])
def test_quick_prints_no_verdict(tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench = toy({"a": lambda: 1.0, "b": broken})
    with pytest.raises(typer.Exit) as ended:
        bench.command(quick=profile == "quick", directory=tmp_path, plot=tmp_path / "r.svg")
    assert ended.value.exit_code == 1
    out, err = capsys.readouterr()
    assert ("MISSED: at least 0.75" in out) == ("mean nothing" not in out) == (profile == "default")
    assert "the disk is full" in out
    assert [line.partition(", ")[2] for line in err.splitlines()] == ["0 of 2: a", "1 of 2: b"]
    drawn = (tmp_path / "r.svg").read_text()
    assert ("red: missed" in drawn) == ("figures mean nothing" not in drawn) == (profile == "default")


def test_a_line_has_the_figures_of_its_row() -> None:
    slow = {**TOY, "unit": "s", "ratio_low": 0.3, "ratio_high": 0.9}
    [fast, late] = figures.Ratios("", [("a toy", TOY), ("slow", slow)]).table().rows
    assert fast == ("a toy", "2.00 GB/s", "another: 4.00 GB/s", "0.500 (0.250 to 1.00)", "MISSED: at least 0.75")
    assert late == ("slow", "2.00 s", "another: 4.00 s", "0.500 (0.300 to 0.900)", "MISSED: at most 0.75")
    unjudged = figures.Ratios("", [("w", figures.compared("w", SERIES, "x", SERIES))])
    assert unjudged.table().columns[-1] == "ratio"


def test_panels_without_lines_are_not_drawn() -> None:
    import matplotlib.figure

    bars = [figures.Bar("a", [9.0, 8.0, 33.0], "0.6", 7.0), figures.Bar("b", [4.0, 7.5], "0.6")]
    values, ratios = figures.Values("v", bars, "ms", "{:.1f}".format), figures.Ratios("r", [("a toy", TOY)])
    assert values.table().rows == [("a", "9.0 (8.0 to 33.0)", ""), ("b", "5.8 (4.0 to 7.5)", "1.57")]
    for panels, titles in ([], []), ([values, figures.Ratios("none", []), ratios], ["v", "r"]):
        figure = matplotlib.figure.Figure()
        figures.draw(panels, figure)
        assert [axes.get_title() for axes in figure.axes] == titles
    above = figure.axes[0]
    assert [bar.get_width() for bar in above.patches] == [9.0, 5.75]
    assert [text.get_text() for text in above.texts] == ["9.0", "5.8"]
    assert [list(dots.get_xdata()) for dots in above.lines if len(dots.get_xdata()) > 1] == [
        [9.0, 8.0, 33.0], [7.0, 7.0], [4.0, 7.5],
    ]  # fmt: skip


def read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text()))


def test_a_report_replaces_a_file_in_one_step_and_goes_into_a_pipe(tmp_path: Path) -> None:
    """A write that fails leaves the old file, and nothing beside it."""
    file, pipe = tmp_path / "report.json", tmp_path / "pipe"
    kit.write_json(file, {"a": 1})
    file.chmod(0o640)
    with pytest.raises(TypeError):
        kit.write_json(file, {"a": object()})
    assert read(file) == {"a": 1}
    kit.write_json(file, {"a": 2})
    assert read(file) == {"a": 2}
    assert (file.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (0o640, [file])
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        kit.write_json(pipe, {"a": 1})
        assert json.load(reader) == {"a": 1}
    assert pipe.is_fifo()


def test_a_report_goes_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leads to is replaced, behind each case."""
    link, file = tmp_path / "link", tmp_path / "there" / "file"
    file.parent.mkdir()
    link.symlink_to(file)
    written: list[int] = []
    write = kit.write_json
    monkeypatch.setattr(kit, "write_json", lambda path, report: written.append(len(report["r"])) or write(path, report))
    for _ in range(2):  # the first one makes the file
        toy({"a": lambda: 1.0, "b": lambda: 2.0}).command(directory=tmp_path, json_file=link)
        assert (link.is_symlink(), len(read(file)["r"])) == (True, 2)
    assert written[0] == 1, "it is kept behind the first case"


def test_a_report_in_the_command_s_own_output_comes_behind_it(tmp_path: Path) -> None:
    """As of `--report /dev/stdout >> log`: nothing that is there goes."""
    link, log = tmp_path / "stdout", tmp_path / "log"
    link.symlink_to("/proc/self/fd/1")
    log.write_text("before\n")
    told = (
        "import sys; from pathlib import Path; from gdscache.commands.bench import kit; print('tables')\n"
        "kit.write_json(Path(sys.argv[1]), {}); print('end')"
    )
    with log.open("a") as out:
        subprocess.run([sys.executable, "-c", told, str(link)], stdout=out, check=True)
    assert (log.read_text(), link.is_symlink()) == ("before\ntables\n{}\nend\n", True)


def test_a_report_that_cannot_be_written_is_refused_before_and_told_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full for a while ends nothing."""
    file, write, full = tmp_path / "r.json", kit.write_whole, iter([OSError(28, "No space left on device")])

    def sometimes(*given: Any) -> None:
        for error in full:
            raise error
        write(*given)

    monkeypatch.setattr(kit, "write_whole", sometimes)
    toy({"a": lambda: 1.0, "b": lambda: 2.0}).command(directory=tmp_path, json_file=file)
    assert f"{file}: the report so far cannot be written: No space left on device" in capsys.readouterr().err
    assert (len(read(file)["r"]), read(file)["failed"]) == (2, [])
    file.unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)
    for place in (file, Path("/dev/full")):
        with pytest.raises(InvalidValueError, match="cannot be written"):
            kit.check_writable(place, "--report")


def test_matplotlib_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"gdscache\[plot\]"):
        kit.require_matplotlib(Path("a.png"))


def test_the_machine_and_the_commit_are_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = machine.describe(tmp_path)
    assert (said["cores"], said["kernel"]) == (len(os.sched_getaffinity(0)), os.uname().release)
    assert said["memory_bytes"] > MIB
    assert {"gdscache", "torch", "numpy", "xxhash"} <= said["versions"].keys()
    kind = said["storage"]["file_system"]
    assert kind in ("overlay", "btrfs") or kind[:3] == output("stat", "-f", "-c", "%T", tmp_path)[:3]
    root = Path(machine.__file__).resolve().parents[3]
    if (root / ".git").exists():
        assert said["commit"]["hash"] == output("git", "-C", root, "rev-parse", "HEAD")
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "gdscache" / "commands" / "bench" / "machine.py"))
    assert machine.commit() is None  # an installed wheel is no source tree


def output(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("io", "--dir", "{}/none"), "not a directory"),
        (("io", "--dir", "{}", "--report", "{}"), "--report"),
        (("io", "--dir", "{}", "--report", "{}/none/r.json"), "--report"),
        (("io", "--dir", "{}", "--report", "/dev/null/r.json"), "--report"),
        (("io", "--dir", "{}", "--plot", "{}/r.doc"), "r.doc"),
        (("io", "--dir", "{}", "--plot", "{}/none/r.png"), "--plot"),
        (("io", "--dir", "{}", "--transport", "gds"), "unknown transport 'gds'"),
        (("io", "--dir", "{}", "--total", "1MiB"), "use at least 16MiB"),
        (("io", "--dir", "{}", "--require-gds", "--transport", "posix"), "add --transport cufile"),
        (("copy", "--total", "much"), "--total is 'much'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    gdscache, arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    status, _, err = gdscache("bench", *(argument.format(tmp_path) for argument in arguments))
    assert (status, words in err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_commands_import_nothing_heavy() -> None:
    """What measures is imported by the command that runs it. (gdscache itself brings torch.)"""
    code = (
        "import sys, gdscache; before = set(sys.modules); import gdscache.commands.cli; "
        "names = ('matplotlib', 'gdscache.commands.bench.'); "
        "print(sorted(m for m in set(sys.modules) - before if m.startswith(names)))"
    )
    assert output(sys.executable, "-c", code) == "['gdscache.commands.bench.commands']"


def test_the_bare_loop_touches_every_part_once_and_reports_short_reads(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(8 * MIB))
    with contextlib.closing(io.BareLoop(file, 8 * MIB)) as loop:
        assert loop.run(Op.WRITE, io.Way(3, MIB)) > 0
        noise = bytes(loop._buffer.view)
        assert any(noise)
        assert file.read_bytes() == noise  # each part from memory of its own
        loop._buffer.view[:] = bytes(8 * MIB)
        assert loop.run(Op.READ, io.Way(2, MIB)) > 0
        assert loop._buffer.view == noise
        assert (len(loop.scout(Op.READ)), loop.total) == (io.KEPT, 8 * MIB)
        os.truncate(file, 7 * MIB)
        with pytest.raises(IOFailedError, match="moved less than 1048576"):
            loop.run(Op.READ, io.Way(2, MIB))
    with pytest.raises(InvalidValueError, match="shorter"):
        io.BareLoop(file, 8 * MIB)


def test_ways_take_turns() -> None:
    """Every other round in reverse order, with a heap that is frozen until the rounds are over."""
    order: list[str] = []
    ways = {name: (lambda name=name: order.append(name) or gc.get_freeze_count()) for name in "ab"}
    found = figures.in_turns(ways, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert all(frozen > 1000 for some in found.values() for frozen in some)
    assert gc.get_freeze_count() == 0
    row = figures.compared("", figures.series((1.0, 3.0, 5.0)), "", figures.series((2.0, 4.0, 6.0)))
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (0.75, 0.5, 5 / 6)


@pytest.mark.parametrize(
    ("count", "low", "high", "coverage"),
    [
        (1, 1, 1, 0.0),
        (3, 1, 3, 0.75),
        (5, 1, 5, 0.9375),  # all of them cover less than was asked for
        (6, 1, 6, 0.96875),
        (8, 1, 8, 0.9921875),
        (9, 2, 8, 0.9609375),
        (30, 10, 21, 0.957226),  # as in tables of the sign test
    ],
)
def test_intervals_are_order_statistics(count: int, low: int, high: int, coverage: float) -> None:
    values = [float(i) for i in range(1, count + 1)]
    random.Random(1).shuffle(values)
    expected = (count + 1) / 2, low, high, pytest.approx(coverage, abs=1e-6)
    assert figures.median_interval(values) == expected


def test_a_ratio_of_pairs_is_that_of_each_pair() -> None:
    ours, other = ([way * slow for slow in (2, 1, 1, 2, 4)] for way in (4.5, 5.0))
    row = figures.compared("", figures.series(ours), "", figures.series(other), 0.95, unit="s", pairs=True)
    slowing = {"ratio": 0.9, "ratio_low": 0.9, "ratio_high": 0.9, "coverage": 0.9375, "pairs": 5}
    assert row == row | slowing | {"unit": "s", "target": 0.95, "met": True}
