"""All of this machine's benches, in bounded time, in one page. Behind `gdscache bench report`."""

from __future__ import annotations

import dataclasses
import functools
import html
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gdscache.commands.bench import copy, kit, links, machine, ttft
from gdscache.commands.bench import io as bench_io
from gdscache.commands.bench.copy_gpu import Gpu
from gdscache.commands.bench.measure import cause_of
from gdscache.commands.bench.ttft_cells import Settings as TtftSettings
from gdscache.commands.console import Progress, Table, duration
from gdscache.errors import GdsCacheError
from gdscache.runtime.files import write_whole

SCHEMA = "gdscache.bench.report/1"
JSON_NAME, HTML_NAME = "report.json", "report.html"
PAGE_SHARE = 0.05  # of the time, for the plots
PAIRS = 10  # of copies, for a figure
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem }
h1, h2 { line-height: 1.2 } h2 { border-top: 1px solid #8886; padding-top: 1.2rem; margin-top: 2rem }
.bottom { font-size: 1.1rem; border-left: 4px solid #3a7bd5; padding-left: .8rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .86rem; margin: .6rem 0 }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid #8883; vertical-align: top }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 600 } summary { cursor: pointer; margin: .6rem 0 }
figure { margin: .8rem 0; background: #fff; border-radius: 4px; overflow-x: auto }
figure svg { width: 100%; min-width: 34rem; height: auto }
.note { color: #a60; font-weight: 600 } footer, .quiet { color: #777; font-size: .86rem }
"""


class Part(NamedTuple):
    """A bench of the report. `share`: of the time. `lacks`: the cause if this machine cannot run it."""

    name: str
    title: str
    share: float
    make: Callable[[], tuple[kit.Bench, kit.Settings, Path]]
    lacks: str = ""


def parts(directory: Path, *, quick: bool) -> list[Part]:
    """The benches in reading order. They are measured in the other order: the short ones leave their time to the long
    ones."""
    profile = "quick" if quick else "default"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    no_gpu = "" if gpus else "torch sees no CUDA device"

    def first_token() -> tuple[kit.Bench, kit.Settings, Path]:
        return ttft.BENCH, TtftSettings.of(profile, "cuda:0" if gpus else "cpu"), ttft.place(None)

    def disk() -> tuple[kit.Bench, kit.Settings, Path]:
        return bench_io.BENCH, bench_io.Settings.of(profile, everything=True), directory

    def copies() -> tuple[kit.Bench, kit.Settings, Path]:
        settings = copy.Settings.of(profile, everything=True)
        return copy.bench(Gpu()), dataclasses.replace(settings, pairs=min(settings.pairs, PAIRS)), Path()

    def between() -> tuple[kit.Bench, kit.Settings, Path]:
        return links.BENCH, links.Settings.of(profile), Path()

    return [
        Part("ttft", "Time to first token", 0.4, first_token),
        Part("io", "The SSD tier and the disk", 0.4, disk),
        Part("copy", "Copies between host memory and the GPU", 0.15, copies, no_gpu),
        Part(
            "links", "Links of several GPUs at once", 0.05, between, no_gpu or ("" if gpus > 1 else "one GPU is here")
        ),
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
    some, benches = parts(directory, quick=quick), dict[str, kit.Bench]()
    until, shares = time.monotonic() + (1 - PAGE_SHARE) * seconds, sum(part.share for part in some if not part.lacks)
    for part in reversed(some):
        if part.lacks:
            found["cannot"][part.name] = part.lacks
            continue
        began = time.monotonic()
        if found["interrupted"] or began >= until:
            found["cannot"][part.name] = "interrupted" if found["interrupted"] else "no time left"
            continue
        share, shares = part.share / shares, shares - part.share
        try:
            bench, settings, place = part.make()
            benches[part.name] = bench
            keep = functools.partial(_keep, out, found, part.name, bench.head(settings, place))
            named = _titled(progress, part.title)
            rows = bench.run(settings, place, named, keep, seconds=(until - began) * share)
        except GdsCacheError as error:
            found["cannot"][part.name] = cause_of(error)
            continue
        found["interrupted"] = rows["interrupted"]
    found["seconds"] = time.time() - found["began"]
    kit.write_json(out / JSON_NAME, found)
    titles = {part.name: part.title for part in some}
    write_whole(out / HTML_NAME, page(found, benches, titles, matplotlib).encode(), 0o644)
    return found


def _titled(progress: Progress, title: str) -> Progress:
    return lambda done, total, text: progress(done, total, f"{title}: {text}")


def _keep(out: Path, found: dict[str, Any], name: str, head: kit.Report, rows: kit.Report) -> None:
    found["benches"][name] = {**head, **rows}
    kit.write_json(out / JSON_NAME, found)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(found: kit.Report, benches: Mapping[str, kit.Bench], titles: Mapping[str, str], matplotlib: Any) -> str:
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
    for name, title in titles.items():
        bench, report = benches.get(name), found["benches"].get(name)
        if bench is None or report is None:
            continue
        body.append(f"<h2>{_text(title)}</h2>")
        body += [f'<p class="bottom">{_text(line)}</p>' for line in bench.bottom(report)]
        body.append(f"<figure>{_svg(bench.plot, report, matplotlib)}</figure>")
        body += map(_part, bench.tables(report))
        if details := "".join(map(_part, bench.details(report))):
            body.append(f"<details><summary>For developers of gdscache</summary>{details}</details>")
        body += map(_part, kit.below(report))
    if found["cannot"]:
        lines = [f"<li>{_text(titles[name])}: {_text(cause)}</li>" for name, cause in found["cannot"].items()]
        body += ["<h2>Not measured here</h2>", "<ul>", *lines, "</ul>"]
    body.append(f"<footer>gdscache bench report; the figures are in {JSON_NAME}.</footer>")
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"<head>{meta}<title>gdscache bench report</title><style>{_STYLE}</style></head>"
    return "\n".join([f'<!doctype html>\n<html lang="en">{head}', "<body>", *body, "</body></html>", ""])


def _text(text: str) -> str:
    return html.escape(text, quote=False)


def _part(table: Table | str) -> str:
    """A table or a text as HTML; empty for a table without rows."""
    if isinstance(table, str):
        return f"<p>{_text(table)}</p>"
    if not table.rows:
        return ""
    right = table.numeric()
    count = len(right)

    def row(cells: Sequence[str], tag: str) -> str:
        filled = [*cells, *[""] * (count - len(cells))]
        marks = [' class="n"' if of_numbers else "" for of_numbers in right]
        return "<tr>" + "".join(f"<{tag}{m}>{_text(c)}</{tag}>" for c, m in zip(filled, marks, strict=True)) + "</tr>"

    title = f"<caption>{_text(table.title)}</caption>" if table.title else ""
    head = f"<thead>{row(table.columns, 'th')}</thead>" if table.columns else ""
    foot = f'<p class="quiet">{_text(table.caption)}</p>' if table.caption else ""
    body = "".join(row(cells, "td") for cells in table.rows)
    return f'<div class="wide"><table>{title}{head}<tbody>{body}</tbody></table></div>{foot}'


def _svg(plot: Callable[[kit.Report, Any], None], report: kit.Report, matplotlib: Any) -> str:
    figure, file = matplotlib.figure.Figure(layout="constrained"), io.StringIO()
    plot(report, figure)
    figure.savefig(file, format="svg")
    return file.getvalue()[file.getvalue().index("<svg") :]
