"""`gdscache top`: the rates of running engines, from their status pages.

It reads a page of 8 KiB of each directory, takes no lock and writes nothing, so an engine that hangs can be watched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from gdscache.commands import EXIT_FAILED
from gdscache.commands.console import duration
from gdscache.config.pools import POOL_PREFIX
from gdscache.disk import status_page
from gdscache.disk.status_page import CAUSED, FRESH_S, HITS, STATUS_NAME, Status
from gdscache.errors import NotADirectoryPathError, printable
from gdscache.sizes import significant
from gdscache.tiers.measures import nested

SCHEMA = "gdscache.top/1"
WINDOW_S = 5.0  # seconds that a rate is measured over
SECOND_PAGE_S = 2.5  # seconds that --once waits for a second page, without which there are no rates
_COLUMN, _GAP, _BETWEEN = 38, "  ", " │ "  # least width of a column; between columns; between directories
_PLAIN = 80  # least columns of a pipe
_NAME, _BAR, _EIGHTHS = 10, 8, "▏▎▍▌▋▊▉"
_CAUSES, _LOADS, _RANKS = 6, 5, 4  # rows shown at most
_TITLE, _WARNING, _NOTE = "bold", "bold red", "dim"  # styles of rich

Report = Mapping[str, Any]
Section = list[tuple[str, str]]  # lines, each with its style


# -- the figures -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Watched:
    """A directory, and the pages that its engine wrote within `WINDOW_S`."""

    path: Path
    pages: deque[Status] = dataclasses.field(default_factory=deque)

    def look(self) -> dict[str, Any]:
        """Read the page. The report is plain data; `rates` is None without a second page, and if the last is late."""
        found, pages = status_page.read(self.path), self.pages
        if not isinstance(found, Status):
            pages.clear()
            state = "no status page" if found is None else f"a status page of format {found.format}"
            return {"path": str(self.path), "state": state, "late": False, "rates": None}
        if pages and (pages[-1].pid, pages[-1].opened) != (found.pid, found.opened):
            pages.clear()
        if not pages or pages[-1].number != found.number:
            pages.append(found)
        while len(pages) > 2 and found.written - pages[1].written >= WINDOW_S:
            pages.popleft()
        late, first = found.age > FRESH_S, pages[0]
        rates = None if late or found.written <= first.written else _rates(first, found)
        return {"path": str(self.path), **_described(found), "late": late, "rates": rates}


def watched(directories: Sequence[Path], known: Iterable[Watched] = ()) -> list[Watched]:
    """Each directory, or the directories below it of a hybrid model's pools. Those in `known` are kept."""
    paths: list[Path] = []
    for directory in directories:
        below = sorted(path for path in directory.glob(f"{POOL_PREFIX}*") if path.is_dir())
        paths += below if below and not (directory / STATUS_NAME).exists() else [directory, *below]
    by_path = {one.path: one for one in known}
    return [by_path.get(path) or Watched(path) for path in dict.fromkeys(paths)]


def _described(status: Status) -> dict[str, Any]:
    """A status page as plain data. Counts are totals since the engine was opened."""
    figures = status.figures
    return {
        **{name: getattr(status, name) for name in ("pid", "host", "command", "opened", "written", "number")},
        **{name: getattr(figures, name) for name in ("state", "evictions", "late_requests")},
        "age_seconds": status.age,
        "stopped": figures.stopped or None,
        "counts": {group: some.get("", some) for group, some in nested(figures.counts).items()},
        "causes": _by_group(status.causes),
        "latencies": {
            what: {"samples": found.samples, "median_seconds": found.median, "p99_seconds": found.slow}
            for what, found in figures.latencies.items()
        },
        "groups": figures.groups or None,
        "queues": figures.queues._asdict(),
        "tiers": [tier._asdict() | {"extent_bytes": figures.extent_of(tier.name)} for tier in figures.tiers],
        "slowest_loads": [load._asdict() for load in figures.slowest],
        "ranks": [{"rank": number, "pid": rank.pid, "state": rank.state} for number, rank in enumerate(figures.ranks)],
    }


def _by_group(by_cause: Mapping[tuple[str, str], float]) -> dict[str, dict[str, Any]]:
    return {group: {} for group in CAUSED} | nested(by_cause)


def _rates(first: Status, last: Status) -> dict[str, Any]:
    """A second, between two pages. A hit rate is a share of the pages looked up, None without any. Tiers that the page
    does not count by name have evictions alone."""
    seconds, then, now = last.written - first.written, first.figures.counts, last.figures.counts

    def rate(group: str, name: str) -> float:
        return max(0, now[group, name] - then[group, name]) / seconds

    def known(group: str, name: str, factor: float) -> float | None:
        return rate(group, name) * factor if (group, name) in now else None

    asked, nbytes = rate("lookups", "pages"), last.figures.extent_of
    evicted = {tier.name: tier.evictions for tier in first.figures.tiers}
    tiers = {
        tier.name: {
            "hit_rate": known("hits", tier.name, 1 / asked) if asked else None,
            "loaded_bytes": known("loaded", tier.name, nbytes(tier.name)),
            "stored_bytes": known("stored", tier.name, nbytes(tier.name)),
            "evicted_pages": max(0, tier.evictions - evicted.get(tier.name, tier.evictions)) / seconds,
        }
        for tier in last.figures.tiers
    }
    return {
        "over_seconds": seconds,
        "lookups": rate("lookups", "requests"),
        "lookup_pages": asked,
        "stores": rate("stores", "requests"),
        "hit_rate": known(*HITS, 1 / asked) if asked else None,
        "tiers": tiers,
        "causes": _by_group({c: max(0, n - first.causes.get(c, 0)) / seconds for c, n in last.causes.items()}),
    }


# -- the screen --------------------------------------------------------------------------------------------------------


def screen(reports: Sequence[Report], width: int) -> Text:
    """Directories beside each other as far as `width` allows, the others below them."""
    beside = max(1, min(len(reports), (width + len(_BETWEEN)) // (_COLUMN + len(_BETWEEN))))
    room = (width + len(_BETWEEN)) // beside - len(_BETWEEN)
    lines: list[Text] = []
    for at in range(0, len(reports), beside):
        blocks = [_directory(report, room) for report in reports[at : at + beside]]
        lines += [Text()] if lines else []
        lines += _side_by_side(blocks, room, _BETWEEN)
    return Text("\n", no_wrap=True, end="").join(lines)


def _directory(report: Report, room: int) -> list[Text]:
    """The lines of one directory: its state, and sections in as many columns as fit."""
    columns = (room + len(_GAP)) // (_COLUMN + len(_GAP)) or 1
    width = (room + len(_GAP)) // columns - len(_GAP)
    path = report["path"] if len(report["path"]) <= room else f"…{report['path'][1 - room :]}"
    about = [(line, style) for text, style in _about(report) for line in textwrap.wrap(text, room) or [""]]
    head = _lines([(path, _TITLE), *about], room)
    if "pid" not in report:
        return head
    filled: list[Section] = [[] for _ in range(columns)]
    for section in filter(None, _sections(report, width)):
        least = min(filled, key=len)
        least += [("", ""), *section] if least else section
    return head + _side_by_side([_lines(column, width) for column in filled], width, _GAP)


def _side_by_side(blocks: Sequence[Sequence[Text]], width: int, gap: str) -> list[Text]:
    empty = Text(" " * width)
    return [Text(gap, style=_NOTE).join(row) for row in itertools.zip_longest(*blocks, fillvalue=empty)]


def _lines(section: Section, width: int) -> list[Text]:
    lines = [Text(printable(text), style) for text, style in section]
    for line in lines:
        line.highlight_regex(f"[{_EIGHTHS}█]+", "cyan")
        line.truncate(width, overflow="ellipsis", pad=True)
    return lines


def _table(width: int, sizes: Sequence[int], titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Section:
    """A line of titles and the rows; nothing without rows. The first cells have the room that `sizes` leave."""
    room = width - sum(sizes)
    lines: Section = []
    for first, *cells in (titles, *rows):
        shown = first if len(first) <= room else f"{first[: room - 1]}…"
        line = "".join([shown.ljust(room), *(cell.rjust(size) for cell, size in zip(cells, sizes, strict=False))])
        lines.append((line, "" if lines else _TITLE))
    return lines if len(lines) > 1 else []


def _about(report: Report) -> Section:
    state, good = report["state"], report["state"] == "running" and not report["late"]
    if "pid" not in report:
        why = "no engine has it open, or this user may not read it"
        why = why if state == "no status page" else "look with the gdscache that has it open"
        return [(f"{state}: {why}", _WARNING)]
    age = f"page {report['age_seconds']:.1f} s old"
    said = (
        f"{age}: its process was killed or hangs, or the device hangs"
        if report["late"]
        else f"{state.replace('_', ' ')}, {age}"
    )
    lines = [(said, "green" if good else _WARNING)]
    lines += [(report["stopped"], _WARNING)] if report["stopped"] else []
    lines += [(f"{report['late_requests']:,} requests are late", _WARNING)] if report["late_requests"] else []
    lines += [(report["groups"], _NOTE)] if report["groups"] else []
    up = _ago(time.time() - report["opened"])
    return [*lines, (f"process {report['pid']} on {report['host']}, up {up}", _NOTE), ("", "")]


def _sections(report: Report, width: int) -> Iterator[Section]:
    """Tiers, rates, queues, latencies, slow loads, causes and ranks; a section of which nothing is known is empty."""
    table, rates, queues = functools.partial(_table, width), report["rates"], report["queues"]
    rows: list[tuple[str, ...]] = []
    for tier in report["tiers"]:
        share, size = tier["pages"] / (tier["slots"] or 1), tier["slots"] * tier["extent_bytes"]
        rows.append((_barred(tier["name"], share), _share(share), _bytes(size)))
    yield table((8, 12), ("TIER", "full", "of"), rows)
    if rates is None:
        yield [] if report["late"] else [("no rates yet: they need two pages", _NOTE)]
    else:
        rows = []
        for name, of in rates["tiers"].items():
            loaded, stored = _bytes(of["loaded_bytes"]), _bytes(of["stored_bytes"])
            rows.append((name, _share(of["hit_rate"]), loaded, stored, _number(of["evicted_pages"])))
        rows.append(("all", _share(rates["hit_rate"])))
        asked = f"{_number(rates['lookups'])} lookups/s of {_number(rates['lookup_pages'])} pages/s"
        flow = table((8, 9, 9, 8), ("FLOW", "hits", "load/s", "store/s", "evict/s"), rows)
        yield [*flow, (asked, ""), (f"{_number(rates['stores'])} stores/s", "")]
    if limit := queues["limit_bytes"]:  # none is known of an older page
        stores = {"stores": queues["store_bytes"], "to SSD": queues["to_ssd_bytes"]}
        rows = [(_barred(name, n / limit), _share(n / limit), _bytes(n)) for name, n in stores.items()]
        under_way = f"{queues['loads']:,} loads, {queues['prefetches']:,} prefetches"
        yield [*table((8, 12), ("QUEUES", "full", "bytes"), rows), (under_way, "")]
    rows = [
        (name.replace("_", " "), duration(one["median_seconds"]), duration(one["p99_seconds"]), str(one["samples"]))
        for name, one in report["latencies"].items()
        if one["samples"]
    ]
    yield table((9, 9, 9), ("TAKES", "median", "99 %", "samples"), rows)
    rows = [
        (duration(load["seconds"]), load["tier"], _bytes(load["nbytes"]), _ago(report["written"] - load["ended"]))
        for load in report["slowest_loads"][:_LOADS]
    ]
    yield table((10, 9, 7), ("SLOW LOADS", "", "", "ago"), rows)
    causes = [  # the most frequent ones of the last seconds, then of all time
        (0.0 if rates is None else rates["causes"][group][cause], pages, f"{group} {cause}")
        for group, some in report["causes"].items()
        for cause, pages in some.items()
    ]
    most = sorted(causes, reverse=True)[:_CAUSES]
    rows = [(name, "" if rates is None else _number(rate), f"{pages:,}") for rate, pages, name in most]
    yield table((8, 10), ("CAUSES", "pages/s", "in all"), rows)
    ranks = report["ranks"]
    bad = [f"rank {r['rank']}, process {r['pid']}: {r['state']}" for r in ranks if r["state"] != "running"]
    if len(ranks) > 1:
        run = f"{len(ranks) - len(bad)} of {len(ranks)} run"
        yield [("RANKS", _TITLE), (run, "" if bad else "green"), *((text, _WARNING) for text in bad[:_RANKS])]


def _barred(name: str, share: float) -> str:
    eighths = round(min(1.0, share) * _BAR * 8)
    whole, part = divmod(eighths, 8)
    return f"{name[: _NAME - 1]:<{_NAME}}" + "█" * whole + _EIGHTHS[part - 1 : part]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _number(value: float) -> str:
    return significant(value) if value >= 1 or not value else f"{value:.1g}"


def _bytes(nbytes: float | None) -> str:
    """With three digits and a unit: `0.98 MiB`."""
    if not nbytes:
        return "-" if nbytes is None else "0"
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while nbytes >= 1000 and (larger := next(units, "")):
        nbytes, unit = nbytes / 1024, larger
    return f"{significant(nbytes)} {unit}"


def _ago(seconds: float) -> str:
    """A time in its largest whole unit: `12 s`, `3 min`, `5 h`, `2 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# -- the command -------------------------------------------------------------------------------------------------------


def top(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="The ssd.path or status.path of a configuration, or several.")
    ],
    every: Annotated[
        float, typer.Option("--every", min=0.1, max=3600, help="Seconds from one look to the next.")
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit. Waits a second for rates.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each look.")] = False,
) -> None:
    """Watch engines: rates, tiers, queues, latencies, the slowest loads, and why pages are refused. Ctrl-C ends it.

    It reads the status pages alone, so it costs an engine nothing, and shows one that hangs. Engines rewrite their page
    every second; an engine without an SSD has one if the configuration names a status.path.

    With --once the exit status is 1 if an engine does not run, or its page is missing or late.
    """
    for directory in directories:
        if not directory.is_dir():
            raise NotADirectoryPathError(f"{directory} is not a directory", "name ssd.path or status.path of a config")
    engines = watched(directories)
    if once:
        reports = _once(engines)
        _print(reports, as_json=as_json)
        if any(report["state"] != "running" or report["late"] for report in reports):
            raise typer.Exit(EXIT_FAILED)
        return
    with contextlib.suppress(KeyboardInterrupt), _shown(as_json=as_json) as show:
        while True:
            show([one.look() for one in engines])
            time.sleep(every)
            engines = watched(directories, engines)


def _once(engines: Sequence[Watched]) -> list[dict[str, Any]]:
    """A look at each, after a second page where one comes."""
    end = time.monotonic() + SECOND_PAGE_S
    while True:
        reports = [one.look() for one in engines]
        wait = any("pid" in report and not report["late"] and report["rates"] is None for report in reports)
        if not wait or time.monotonic() >= end:
            return reports
        time.sleep(0.1)


@contextlib.contextmanager
def _shown(*, as_json: bool) -> Iterator[Callable[[Sequence[Report]], None]]:
    """The function that shows a frame: in place on a terminal, below the frame before it elsewhere."""
    if as_json or not sys.stdout.isatty():
        yield functools.partial(_print, as_json=as_json)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda reports: live.update(screen(reports, console.width), refresh=True)


def _print(reports: Sequence[Report], *, as_json: bool) -> None:
    if as_json:
        text = json.dumps({"schema": SCHEMA, "time": time.time(), "engines": reports})
    else:
        if sys.stdout.isatty():
            shown = screen(reports, os.get_terminal_size(sys.stdout.fileno()).columns or 80).plain
        else:  # one below the other, with whole paths
            shown = "\n\n".join(screen([one], max(_PLAIN, len(one["path"]))).plain for one in reports)
        text = "\n".join(line.rstrip() for line in shown.splitlines())
    print(text, flush=True)
