"""The benches' shared kit. A bench is a `Bench`: its measurement and its display.

* **Cases.** `measure(run, settings, directory)` names its cases (`run.plan`) and measures them in order of importance.
  `run.case(name, action)` measures one case. Cases that take turns are measured in one `run.guarded(...)`; each is
  given to `run.add`. A run with a time ends before a case that would end late if it took as long as the one before.
* **Rows.** An action returns rows of plain data by their key in the report. A row has the measured quantity, its figure
  and spread over the rounds, its reference, the ratio of both, and a target if there is one (`figures.py`). Each row
  has the name of its case.
* **The report** grows with each case, and is written atomically after each. A failed case is listed with its cause, and
  the others continue; a case that cannot run here is listed too. After Ctrl-C the report has the cases so far.
* **Tables and bars.** `panels(report)` are its figures, each panel a table and a plot. They, `details(report)` (tables
  of `--all`) and `bottom(report)` (the results in sentences) show a report, also a partial one. With `--quick` rows
  lose their targets: it only shows that everything runs.
* **The exit status** is 0, 1 if a case failed, 130 after Ctrl-C, 2 if no case was measured.

Keys of each report: `schema`, `machine`, `settings`, `complete`, `interrupted`, `left` (names of planned cases without
a result), `done` (names of cases), `cannot` and `failed` (`what`, `cause`), and the bench's own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import typer

from gdscache.commands import EXIT_FAILED, EXIT_INTERRUPTED
from gdscache.commands.bench import machine
from gdscache.commands.bench.figures import Ratios, Row, Values, draw
from gdscache.commands.console import Progress, Table, progress_bar, reason_of, show, silent, terminable
from gdscache.cuda.host_memory import host_bytes
from gdscache.errors import (
    GdsCacheError,
    InvalidValueError,
    MissingPackageError,
    NoSpaceError,
    TransportUnavailableError,
)
from gdscache.runtime.files import write_whole
from gdscache.sizes import about

Report = Row
Keep = Callable[[dict[str, Any]], None]
"""Called with the report so far, after every case."""

ERRORS = (GdsCacheError, RuntimeError, OSError, MemoryError)
RAM_DISK = Path("/dev/shm")
ELSEWHERE = "name a directory with more room"
_PLOT_FORMATS = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A bench's extent. `profile`: `default` or `quick` (small, to see that it works). `everything`: with the figures
    that only gdscache's developers read."""

    profile: str = "default"
    everything: bool = False

    @classmethod
    def of(cls, **options: Any) -> Self:
        """The settings of a command's options: those of the profile, and in place of them those that were given."""
        found = {"profile": "quick" if options.get("quick") else "default", **cls.defaults(**options)}
        for field in dataclasses.fields(cls):
            if (value := options.get(field.name)) not in (None, (), []):
                found[field.name] = tuple(value) if isinstance(value, list) else value
        return cls(**found)

    @classmethod
    def defaults(cls, **options: Any) -> dict[str, Any]:
        """Settings of the options' profile that differ from the fields' defaults."""
        return {}

    def check(self) -> None:
        """Raises `InvalidValueError` for settings without a measurement."""

    @property
    def needed(self) -> int:
        """Bytes of the files, if a RAM disk may have them."""
        return 0


class NoTimeLeftError(Exception):
    """The next case of a run would end late."""


class Run:
    """The cases of a run. `found`: the growing report. `sections`: its own keys with their initial values."""

    def __init__(
        self,
        sections: Report,
        progress: Progress = silent,
        keep: Keep = lambda found: None,
        seconds: float = math.inf,
        *,
        judged: bool = True,
    ) -> None:
        """`seconds`: the time of all cases. `judged`: rows keep their targets."""
        self.found: dict[str, Any] = {"complete": False, "interrupted": False}
        self.found |= {"left": [], "done": [], "cannot": [], "failed": [], **copy.deepcopy(sections)}
        self.progress = progress
        self._keep = keep
        self._planned: list[str] = []
        self._judged = judged
        self._until, self._took = time.monotonic() + seconds, 0.0  # seconds of the cases before

    def plan(self, names: Sequence[str]) -> None:
        """The names of all cases."""
        self._planned = self.found["left"] = list(names)

    def case(self, name: str, action: Callable[[], Report]) -> None:
        """Measure a case. `action` returns rows by the key of the report."""
        self.say(name)
        with self.guarded(name):
            self.add(name, action())

    @contextlib.contextmanager
    def guarded(self, *names: str) -> Iterator[None]:
        """Measure these cases: an error fails the cases that were not added yet, and is not raised. A transport that
        this machine lacks is no failure. Raises `NoTimeLeftError`."""
        began = time.monotonic()
        if began + self._took >= self._until:
            raise NoTimeLeftError
        with self.failing(*names):
            yield
        self._took = time.monotonic() - began
        self.save()

    @contextlib.contextmanager
    def failing(self, *names: str) -> Iterator[None]:
        """Prepare these cases, whose own times count: an error fails those that were not added yet, as in `guarded`."""
        try:
            yield
        except ERRORS as error:
            kind = "cannot" if isinstance(error, TransportUnavailableError) else "failed"
            for name in (name for name in names if name not in self._over()):
                self.note(kind, name, cause_of(error))

    def add(self, name: str, rows: Report, *, wrong: str = "") -> None:
        """A case's result. `wrong`: the reason why its figures do not count: it has failed."""
        hidden = () if self._judged else ("target", "met")
        for key, some in rows.items():
            self.found[key] += [{"case": name} | {k: v for k, v in row.items() if k not in hidden} for row in some]
        if wrong:
            self.note("failed", name, wrong)
        else:
            self.found["done"].append(name)

    def note(self, kind: str, name: str, cause: str) -> None:
        """A case without a figure, or with a wrong one: it `failed`, or this machine `cannot` run it."""
        self.found[kind].append({"what": name, "cause": cause})

    def _over(self) -> set[str]:
        return {*self.found["done"], *(row["what"] for kind in ("failed", "cannot") for row in self.found[kind])}

    def say(self, text: str) -> None:
        self.progress(len(self._planned) - len(self.found["left"]), len(self._planned), text)

    def save(self) -> None:
        over = self._over()
        self.found["left"] = [name for name in self._planned if name not in over]
        self.found["complete"] = not self.found["left"] and not self.found["interrupted"]
        self._keep(self.found)


@dataclasses.dataclass(frozen=True)
class Bench:
    """A bench. `sections`: its keys of a report with their initial values: a list of rows, or None for one value.
    `bottom`: the results in sentences. `details`: tables of `--all`, for gdscache's developers."""

    name: str
    schema: str
    sections: Report
    settings: type[Settings]
    measure: Callable[[Run, Any, Path], None]
    panels: Callable[[Report], Sequence[Ratios | Values]]
    bottom: Callable[[Report], Sequence[str]]
    details: Callable[[Report], Sequence[Table]] = lambda report: ()

    def run(
        self,
        settings: Settings,
        directory: Path = Path(),
        progress: Progress = silent,
        keep: Keep = lambda found: None,
        seconds: float = math.inf,
    ) -> dict[str, Any]:
        """Measure, as plain data. An error outside the cases fails those that are left. Raises errors that precede the
        plan, and those of gdscache that precede the first measured case."""
        settings.check()
        run = Run(self.sections, progress, keep, seconds, judged=settings.profile != "quick")
        try:
            with terminable():
                self.measure(run, settings, directory)
        except NoTimeLeftError:
            pass  # the report names the cases that are left
        except KeyboardInterrupt:
            run.found["interrupted"] = True
        except ERRORS as error:
            if not run.found["left"] or (isinstance(error, GdsCacheError) and not run.found["done"]):
                if _is_full(error):
                    raise NoSpaceError(getattr(error, "message", str(error)), f"{ELSEWHERE}: --dir") from error
                raise
            for name in run.found["left"]:
                run.note("failed", name, cause_of(error))
        run.save()
        return run.found

    def place(self, settings: Settings, other: Path = Path()) -> Path:
        """A RAM disk with room for the files, else `other`. Says on stderr which, and why."""
        if not settings.needed:
            return other
        found, why = other.absolute(), f"{RAM_DISK} is no RAM disk that this user may write"
        if RAM_DISK.is_dir() and os.access(RAM_DISK, os.W_OK) and machine.in_memory(RAM_DISK):
            room, memory = shutil.disk_usage(RAM_DISK).free, host_bytes()
            room = room if memory is None else min(room, memory // 2)  # the CPU tier takes as much
            found = RAM_DISK if room >= settings.needed else found
            why = f"the RAM disk {RAM_DISK} has room for {about(room)}"
        said = f"bench {self.name} has its files, {about(settings.needed)}, in {found}: {why}"
        print(said, file=sys.stderr, flush=True)  # above a progress bar
        return found

    def command(
        self, directory: Path | None = Path(), json_file: Path | None = None, plot: Path | None = None, **options: Any
    ) -> None:
        """The command, by its options: a progress bar, tables, the JSON file, the plot, the exit status. `directory`:
        None for that of `place`."""
        settings = self.settings.of(**options)
        settings.check()
        directory = self.place(settings) if directory is None else directory
        matplotlib = None if plot is None else require_matplotlib(plot)
        check_writable(plot, "--plot")
        check_directory(directory, "--dir")
        check_writable(json_file, "--report")
        head = self.head(settings, directory)

        def keep(found: Report) -> None:
            if json_file is not None and _is_kept(json_file):
                keep_json(json_file, {**head, **found})

        with progress_bar(lines=True) as progress:
            found = self.run(settings, directory, progress, keep)
        report = {**head, **found}
        tables = self.tables(report, everything=settings.everything)
        above = ["--quick: these figures show that everything runs, and mean nothing."] if quick(report) else []
        show(machine_line(report["machine"]), *above, *tables, *below(report), *self.bottom(counted(report)))
        if json_file is not None:
            write_json(json_file, report)
        if matplotlib is not None:
            figure = matplotlib.figure.Figure(layout="constrained")
            draw(self.panels(counted(report)), figure)
            title = gpus(report["machine"]) or report["machine"]["cpu"] or ""
            figure.suptitle(f"{title} (--quick: figures mean nothing)" if quick(report) else title)
            figure.savefig(plot, dpi=150)
        if report["interrupted"]:
            raise typer.Exit(EXIT_INTERRUPTED)
        if report["failed"]:
            raise typer.Exit(EXIT_FAILED)

    def tables(self, report: Report, *, everything: bool = False) -> list[Table]:
        good = counted(report)
        return [*(panel.table() for panel in self.panels(good)), *(self.details(good) if everything else ())]

    def head(self, settings: Settings, directory: Path) -> dict[str, Any]:
        """A report's first keys."""
        return {"schema": self.schema, "machine": machine.describe(directory), "settings": dataclasses.asdict(settings)}


def cause_of(error: BaseException) -> str:
    """An error in one line; of a full file system also the option that names another."""
    message = error.message if isinstance(error, GdsCacheError) else str(error)
    line = " ".join(message.split()) or type(error).__name__
    return f"{line}; {ELSEWHERE}: --dir" if _is_full(error) else line


def _is_full(error: BaseException) -> bool:
    """Whether a file system has no room."""
    return isinstance(error, NoSpaceError) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def check_directory(path: Path, option: str) -> None:
    if not path.is_dir():
        raise InvalidValueError(f"{option} {path} is not a directory", "name a directory that exists")


def check_writable(path: Path | None, option: str) -> None:
    """Raise `InvalidValueError` before minutes of work if `path` cannot be a file."""
    if path is None:
        return
    there = path.exists() and not _is_kept(path)
    place = str(path) if there else f"{os.path.dirname(os.path.realpath(path))}/."
    if path.is_dir() or not os.access(place, os.W_OK):
        raise InvalidValueError(f"{option} {path} cannot be written", "name a file in a directory of yours that exists")


def _is_kept(path: Path) -> bool:
    """Whether a report is a plain file, which each newer one replaces. Pipes, devices and the command's own output get
    one."""
    return not path.exists() or (path.is_file() and not _is_output(path))


def _is_output(path: Path) -> bool:
    """Whether that is the command's own output, as /dev/stdout is."""
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except OSError:  # it does not exist, or the output has no file
        return False


def keep_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report that is not whole yet. An error is told, and ends nothing."""
    try:
        write_json(path, report)
    except OSError as error:
        typer.echo(f"{path}: the report so far cannot be written: {reason_of(error)}", err=True)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report atomically: a reader finds the old file or the new one, after a crash too. Pipes and devices are
    written to, the command's own output goes on with it, and of a link its target is replaced."""
    text = json.dumps(report, indent=2) + "\n"
    if _is_output(path):
        print(text, end="", flush=True)
    elif not _is_kept(path):
        path.write_text(text)
    else:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        write_whole(path.resolve(), text.encode(), mode)


def require_matplotlib(path: Path) -> ModuleType:
    """matplotlib, ready to draw into `path`; imported only here. Raises `MissingPackageError` without it, and
    `InvalidValueError` for an unknown file name suffix."""
    if path.suffix.lower() not in _PLOT_FORMATS:
        raise InvalidValueError(f"no plot can be written as {path.name!r}", f"use a name in {', '.join(_PLOT_FORMATS)}")
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingPackageError(
            f"a plot needs matplotlib, which cannot be imported: {error}", "install gdscache[plot]"
        ) from error
    return matplotlib


def counted(report: Report) -> dict[str, Any]:
    """A report without the rows of failed cases."""
    failed = {one["what"] for one in report.get("failed", ())}
    return {
        key: [one for one in found if not isinstance(one, dict) or one.get("case") not in failed]
        if isinstance(found, list)
        else found
        for key, found in report.items()
    }


def quick(report: Report) -> bool:
    """Whether a report's figures only show that everything runs."""
    return bool(report["settings"]["profile"] == "quick")


def gpus(machine: Report) -> str:
    """Each kind once, with its number if there are several."""
    return ", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in Counter[str](machine["gpus"]).items())


def machine_line(said: Report) -> str:
    storage = said["storage"]
    where = f"{storage['file_system']} on {storage['source']}"
    cpu = said["cpu"] or "unknown processor"
    return f"{cpu}, {said['cores']} cores, {about(said['memory_bytes'])}, {gpus(said) or 'no GPU'}; {where}"


def below(report: Report) -> list[Table | str]:
    """Cases without a figure, a row for each cause."""
    found: list[Table | str] = []
    for key, title in (("cannot", "Cannot be measured here"), ("failed", "Failed")):
        by_cause: dict[str, list[str]] = {}
        for row in report[key]:
            by_cause.setdefault(row["cause"], []).append(row["what"])
        table = Table(title, "what", "cause")
        for cause, names in by_cause.items():
            table.add_row(names[0] if len(names) == 1 else f"{names[0]}, and {len(names) - 1} more", cause)
        found.append(table)
    if left := report["left"]:
        why = "interrupted" if report["interrupted"] else "no time left"
        found.append(f"Not measured, {why}: {'; '.join(left)}.")
    return found
