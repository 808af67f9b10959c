"""All of this machine's benches, in bounded time, in one page, and the changes between two reports beyond their noise.
Behind `gdscache bench report` and `bench compare`."""

from __future__ import annotations

import functools
import html
import io
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gdscache.commands.bench import copy, figures, kit, links, machine, ttft
from gdscache.commands.bench import io as bench_io
from gdscache.commands.bench.figures import RATE, series, spread
from gdscache.commands.bench.kit import cause_of
from gdscache.commands.console import Progress, Table, duration, figure, reason_of
from gdscache.errors import InvalidValueError
from gdscache.runtime.files import write_whole

SCHEMA = "gdscache.bench.report/1"
JSON_NAME, HTML_NAME = "report.json", "report.html"
PAGE_SHARE = 0.05  # of the time, for the plots
PAIRS = 10  # of copies, for a figure
QUIET = ("same", "unsure")  # words for no known change
_ROUNDS = 4  # in each report: with fewer rounds, spreads miss each other by chance in more than one of twenty cases
_CHOSEN = re.compile(r", \d+ threads.*")  # of the bare loop, whose best way differs from run to run
# Settings that change which figures there are, or how many rounds they have.
_HARMLESS = ("repeat", "pairs", "turns", "stages", "ways", "transports", "everything", "at_once", "disk", "python",
             "versions")  # fmt: skip
_LESS = ("s", "us", "bytes")  # units of which less is better; of `RATE` more is better
_text = functools.partial(html.escape, quote=False)
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem }
h1, h2 { line-height: 1.2 } h2 { border-top: 1px solid #8886; padding-top: 1.2rem; margin-top: 2rem }
.bottom { font-size: 1.1rem; border-left: 4px solid #3a7bd5; padding-left: .8rem }
pre { overflow-x: auto; font-size: .86rem } summary { cursor: pointer; margin: .6rem 0 }
figure { margin: .8rem 0; background: #fff; border-radius: 4px; overflow-x: auto }
figure svg { width: 100%; min-width: 34rem; height: auto }
.note { color: #a60; font-weight: 600 } footer, .quiet { color: #777; font-size: .86rem }
"""


class Part(NamedTuple):
    """A bench of the report. `share`: of the time. `options`: of its command. `lacks`: the cause if this machine cannot
    run it."""

    bench: kit.Bench
    title: str
    share: float
    options: Mapping[str, Any]
    lacks: str = ""


def parts(*, quick: bool) -> list[Part]:
    """The benches in reading order. They are measured in the other order: the short ones leave their time to the long
    ones."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    no_gpu = "" if gpus else "torch sees no CUDA device"
    one_link = no_gpu or ("" if gpus > 1 else "one GPU is here")
    device, pairs = {"device": "cuda:0" if gpus else "cpu"}, {} if quick else {"pairs": PAIRS}
    every = {"everything": True}
    return [
        Part(ttft.BENCH, "Time to first token", 0.4, device),
        Part(bench_io.BENCH, "The SSD tier and the disk", 0.4, every),
        Part(copy.BENCH, "Copies between host memory and the GPU", 0.15, every | pairs, no_gpu),
        Part(links.BENCH, "Links of several GPUs at once", 0.05, {}, one_link),
    ]


def measure(directory: Path, out: Path, seconds: float, progress: Progress, *, quick: bool) -> kit.Report:
    """Run all parts within `seconds`: each has its share of the time that the parts before it have left. The JSON is
    written after each case, the page at the end."""
    matplotlib = kit.require_matplotlib(Path("plot.svg"))
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine.describe(directory),
        "profile": "quick" if quick else "default",
        "began": time.time(),
        "benches": {},
        "cannot": {},
        "interrupted": False,
    }
    some = parts(quick=quick)
    until, shares = time.monotonic() + (1 - PAGE_SHARE) * seconds, sum(part.share for part in some if not part.lacks)
    for part in reversed(some):
        if part.lacks:
            found["cannot"][part.bench.name] = part.lacks
            continue
        began = time.monotonic()
        if found["interrupted"] or began >= until:
            found["cannot"][part.bench.name] = "interrupted" if found["interrupted"] else "no time left"
            continue
        share, shares = part.share / shares, shares - part.share
        try:
            settings = part.bench.settings.of(quick=quick, **part.options)
            place = part.bench.place(settings, directory)
            keep = functools.partial(_keep, out, found, part.bench.name, part.bench.head(settings, place))
            told = functools.partial(_told, progress, part.title)
            rows = part.bench.run(settings, place, told, keep, seconds=(until - began) * share)
        except kit.ERRORS as error:
            found["cannot"][part.bench.name] = cause_of(error)
            continue
        found["interrupted"] = rows["interrupted"]
    found["seconds"] = time.time() - found["began"]
    kit.write_json(out / JSON_NAME, found)
    write_whole(out / HTML_NAME, page(found, some, matplotlib).encode(), 0o644)
    return found


def _told(progress: Progress, title: str, done: int, total: int, text: str) -> None:
    progress(done, total, f"{title}: {text}")


def _keep(out: Path, found: dict[str, Any], name: str, head: kit.Report, rows: kit.Report) -> None:
    found["benches"][name] = {**head, **rows}
    kit.keep_json(out / JSON_NAME, found)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(found: kit.Report, parts: Sequence[Part], matplotlib: Any) -> str:
    """One self-contained HTML page: the machine, and each bench's sentences, plot and tables."""
    about, commit = found["machine"], found["machine"]["commit"]
    where = "" if commit is None else f", commit {commit['hash'][:10]}{' with changes' if commit['changed'] else ''}"
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found["began"]))
    body = [f"<h1>gdscache on {_text(kit.gpus(about) or about['cpu'] or 'this machine')}</h1>"]
    body.append(f"<p>{_text(kit.machine_line(about))}</p>")
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    line = f"{date}, {duration(found['seconds'])}{where}; {versions}"
    body.append(f'<p class="quiet">{_text(line)}</p>')
    if found["profile"] == "quick":
        body.append('<p class="note">--quick: these figures show that everything runs, and mean nothing.</p>')
    if found["interrupted"]:
        body.append('<p class="note">Interrupted: not all is measured.</p>')
    for part in (part for part in parts if part.bench.name in found["benches"]):
        bench, report = part.bench, found["benches"][part.bench.name]
        body.append(f"<h2>{_text(part.title)}</h2>")
        good = kit.counted(report)
        body += [f'<p class="bottom">{_text(line)}</p>' for line in bench.bottom(good)]
        body.append(f"<figure>{_svg(bench.panels(good), matplotlib)}</figure>")
        body += map(_part, bench.tables(report))
        if details := "".join(map(_part, bench.details(good))):
            body.append(f"<details><summary>For developers of gdscache</summary>{details}</details>")
        body += map(_part, kit.below(report))
    if found["cannot"]:
        titles = {part.bench.name: part.title for part in parts}
        lines = [f"<li>{_text(titles[name])}: {_text(cause)}</li>" for name, cause in found["cannot"].items()]
        body += ["<h2>Not measured here</h2>", "<ul>", *lines, "</ul>"]
    body.append(f"<footer>gdscache bench report; the figures are in {JSON_NAME}.</footer>")
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"<head>{meta}<title>gdscache bench report</title><style>{_STYLE}</style></head>"
    return "\n".join([f'<!doctype html>\n<html lang="en">{head}', "<body>", *body, "</body></html>", ""])


def _part(part: Table | str) -> str:
    """A table or a text as HTML; empty for a table without rows."""
    if isinstance(part, str):
        return f"<p>{_text(part)}</p>"
    return f"<pre>{_text(chr(10).join(part.lines()))}</pre>" if part.rows else ""


def _svg(panels: Sequence[figures.Ratios | figures.Values], matplotlib: Any) -> str:
    drawn, file = matplotlib.figure.Figure(layout="constrained"), io.StringIO()
    figures.draw(panels, drawn)
    drawn.savefig(file, format="svg")
    return file.getvalue()[file.getvalue().index("<svg") :]


# -- two reports -------------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A measured figure with its spread. `more`: whether more of it is better; None: unknown."""

    middle: float
    low: float
    high: float
    more: bool | None
    rounds: int


class Change(NamedTuple):
    """A figure of both reports. `ratio`: the second median divided by the first."""

    name: str
    before: Figure
    after: Figure

    @property
    def ratio(self) -> float:
        return self.after.middle / self.before.middle

    @property
    def word(self) -> str:
        """`same` if the spreads of all rounds meet, `unsure` if a report has fewer than four rounds; else `better` or
        `worse`, or `other` if the better direction is unknown."""
        if self.after.low <= self.before.high and self.before.low <= self.after.high:
            return "same"
        if min(self.before.rounds, self.after.rounds) < _ROUNDS:
            return "unsure"
        if self.before.more is None:
            return "other"
        return "better" if (self.ratio > 1) == self.before.more else "worse"


class Comparison(NamedTuple):
    """Two reports, A and B. `both`: figures of both, the largest changes first. `gone`, `new`: names of figures in A
    alone and in B alone. `unlike`: other conditions than these figures' rounds: a machine, a setting, a format."""

    both: list[Change]
    gone: list[str]
    new: list[str]
    unlike: list[str]

    def shown(self, *, everything: bool) -> tuple[Table, str]:
        """A table of the changes, with `everything` of all figures, and their numbers in sentences."""
        table = Table("", "figure", "A", "B", "B / A", "")
        for one in self.both:
            if everything or one.word not in QUIET:
                spread = [f"{figure(f.middle)} ({figure(f.low)} to {figure(f.high)})" for f in (one.before, one.after)]
                table.add_row(one.name, *spread, figure(one.ratio), one.word)
        words = [one.word for one in self.both]
        counts = [f"{words.count(word)} {word}" for word in ("better", "worse", "other", *QUIET) if word in words]
        alone = f"{len(self.gone)} are in A alone, {len(self.new)} in B alone"
        unlike = f" These differ, too: {'; '.join(self.unlike)}." if self.unlike else ""
        return table, f"{len(words)} figures are in both reports: {', '.join(counts)}. {alone}.{unlike}"


def compare(first: Path, second: Path) -> Comparison:
    """Raises `InvalidValueError` unless the files are reports of the same benches."""
    (a, given), (b, other) = _read(first), _read(second)
    both = [Change(name, a[name], b[name]) for name in a if name in b and a[name].middle and b[name].middle]
    if not both:
        raise InvalidValueError(f"{first} and {second} have no figure in common", "name two reports of one bench")
    both.sort(key=lambda change: (change.word in QUIET, -abs(change.ratio - 1)))
    unlike = [f"{key} {given[key]}, {other[key]}" for key in given if key in other and given[key] != other[key]]
    return Comparison(both, [name for name in a if name not in b], [name for name in b if name not in a], unlike)


def _read(path: Path) -> tuple[dict[str, Figure], dict[str, Any]]:
    """The figures of a report, and the conditions of its benches."""
    file = path / JSON_NAME if path.is_dir() else path
    try:
        report = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidValueError(
            f"{file} cannot be read: {reason_of(error)}", "name a report, or the folder of one"
        ) from None
    if not isinstance(report, dict) or not str(report.get("schema", "")).startswith("gdscache.bench."):
        raise InvalidValueError(f"{file} is no report of gdscache bench", "see gdscache bench --help")
    figures, given = dict[str, Figure](), dict[str, Any]()
    try:
        for name, bench in report.get("benches", {report["schema"].split(".")[2].partition("/")[0]: report}).items():
            for section, rows in kit.counted(bench).items():
                for row in (row for row in (rows if isinstance(rows, list) else ()) if isinstance(row, dict)):
                    figures |= {f"{name}: {key}": figure for key, figure in _of_row(section, row)}
            about = {
                "format": bench.get("schema"),
                **{key: bench.get("machine", {}).get(key) for key in ("cpu", "gpus")},
            }
            about |= {key: value for key, value in bench.get("settings", {}).items() if key not in _HARMLESS}
            given |= {f"{name}: {key}": value for key, value in about.items()}
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise InvalidValueError(f"{file} is damaged: {error}", "name another report") from None
    return figures, given


def _of_row(section: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """A row's ratio to its reference, if it has one: the ratio is steadier than the figure itself. Else its series."""
    words = [_CHOSEN.sub("", str(row[key])) for key in ("case", "what", "op", "against", "direction") if key in row]
    words += [f"{row[key]:,} B" for key in ("io_bytes", "page_bytes") if key in row]
    name = ", ".join(dict.fromkeys(words)) or section
    unit = row.get("unit", RATE if "gb_per_second" in row else "")  # such a row is of `bench copy`, format 5
    more = True if unit == RATE else False if unit in _LESS else None
    if "ratio" in row:
        rounds = row.get("figure", row.get("gb_per_second", {})).get("values", ())
        yield f"{name} (ratio)", _figure(row["ratio"], *spread(row), more, rounds)
        return
    served = {f"{key}_ms": found["ms"] for key, found in row.get("first", {}).items()}
    served |= {key: found for key, found in row.items() if key.endswith("_per_s")}
    for key, found in {**row, **{key: series(values) for key, values in served.items()}}.items():
        if isinstance(found, Mapping) and {"median", "min", "max"} <= found.keys():
            better = True if key.endswith("_per_s") else False if key.endswith(("_seconds", "_ms")) else more
            middle, low, high = (found[name] for name in ("median", "min", "max"))
            yield f"{name}, {key}", _figure(middle, low, high, better, found.get("values", ()))


def _figure(middle: Any, low: Any, high: Any, more: bool | None, rounds: Sequence[Any]) -> Figure:
    """Raises `ValueError` or `TypeError` for a figure that is no number."""
    if not all(map(math.isfinite, (middle, low, high))):
        raise ValueError(f"{middle} ({low} to {high}) is no figure")
    return Figure(middle, low, high, more, len(rounds))
