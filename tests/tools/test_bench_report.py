"""`gdscache bench report` and `bench compare`: the page, going on with it, and what counts as a change."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdscache.commands.bench import figures, kit, report
from gdscache.commands.bench.figures import series
from gdscache.commands.cli import app
from gdscache.commands.console import silent
from gdscache.errors import InvalidValueError
from tests.support.toy_bench import broken, interrupted, never, toy

VOID = {"meta", "path", "use", "rect", "image", "circle", "line"}


class Checked(HTMLParser):
    """Notes tags that are closed in another order than they were opened, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not any(name in ("src", "href") and value and "://" in value for name, value in attrs), "from elsewhere"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have a report made of these toys, and of a bench that cannot run."""

    def put(**benches: dict[str, Callable[[], float]]) -> None:
        found = [report.Part(toy(of, name), f"The {name}", 0.5, {}) for name, of in benches.items()]
        lacking = toy({"g": lambda: pytest.fail("it cannot run")}, "gpu")
        found.append(report.Part(lacking, "The GPU", 0.5, {}, "torch sees no GPU"))
        monkeypatch.setattr(report, "parts", lambda *, quick: found)

    return put


def made(tmp_path: Path, *, seconds: float = 60.0) -> tuple[kit.Report, str]:
    found = report.measure(tmp_path, tmp_path, seconds, silent, quick=False)
    assert json.loads((tmp_path / report.JSON_NAME).read_text()) == found
    page = Checked((tmp_path / report.HTML_NAME).read_text())
    assert not page.open
    return found, " ".join(page.text)


def test_the_page_has_every_bench_and_says_what_is_missing(tmp_path: Path, some: Callable[..., None]) -> None:
    some(disk={"cold": lambda: 1.0, "full": broken}, copies={"warm": lambda: 3.0})
    found, text = made(tmp_path)
    assert [*found["benches"]] == ["copies", "disk"]
    assert found["cannot"] == {"gpu": "torch sees no GPU"}
    for words in ("The disk", "disk <moves> 1 & more.", "load of cold", "the disk is full", "torch sees no GPU"):
        assert words in text


@pytest.mark.parametrize("broken_off", [RuntimeError("out of memory"), OSError(5, "out of memory")])
def test_a_bench_that_breaks_off_costs_no_page(
    tmp_path: Path, some: Callable[..., None], monkeypatch: pytest.MonkeyPatch, broken_off: Exception
) -> None:
    def refuse(self: kit.Bench, *given: Any, **options: Any) -> None:
        raise broken_off

    some(disk={"cold": never})
    monkeypatch.setattr(kit.Bench, "run", refuse)
    found, text = made(tmp_path)
    assert "out of memory" in found["cannot"]["disk"]
    assert "out of memory" in text


def test_a_failed_case_is_no_figure_of_the_page(
    tmp_path: Path, some: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    some(disk={"cold": lambda: 1.0, "warm": lambda: 1.0})
    add = kit.Run.add
    wrong = {"warm": "other tokens"}
    monkeypatch.setattr(kit.Run, "add", lambda run, name, rows: add(run, name, rows, wrong=wrong.get(name, "")))
    found, text = made(tmp_path)
    assert len(found["benches"]["disk"]["r"]) == 2
    assert ("disk <moves> 1 & more." in text, "load of warm" in text) == (True, False)


def test_after_ctrl_c_the_page_has_what_was_measured(tmp_path: Path, some: Callable[..., None]) -> None:
    some(copies={"far": never}, disk={"cold": lambda: 1.0, "warm": interrupted})
    found, text = made(tmp_path)
    assert found["interrupted"]
    assert [row["case"] for row in found["benches"]["disk"]["r"]] == ["cold"]
    assert "copies" not in found["benches"]
    assert found["cannot"]["copies"] == "interrupted"
    assert "Interrupted: not all is measured." in text
    assert "Not measured, interrupted: warm." in text


def test_what_a_bench_leaves_of_its_time_goes_to_the_next(
    tmp_path: Path, some: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bench of the page is measured first; a case that no time is left for is named."""
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    said: list[str] = []

    def lasting(name: str, seconds: float) -> Callable[[], float]:
        return lambda: said.append(name) or now.__setitem__(0, now[0] + seconds) or 1.0

    some(disk={n: lasting(n, 30.0) for n in ("d1", "d2", "d3")}, copies={"c1": lasting("c1", 5.0)})
    found, text = made(tmp_path, seconds=0.0)
    assert found["cannot"] == dict.fromkeys(("copies", "disk"), "no time left") | {"gpu": "torch sees no GPU"}
    assert "no time left" in text
    found, text = made(tmp_path, seconds=100.0)
    assert said == ["c1", "d1", "d2"]
    assert found["benches"]["disk"]["left"] == ["d3"]
    assert "Not measured, no time left: d3." in text
    assert text.index("The disk") < text.index("The copies")


def test_this_machine_has_parts() -> None:
    found = report.parts(quick=True)
    assert [part.bench.name for part in found] == ["ttft", "io", "copy", "links"]
    assert sum(part.share for part in found) == pytest.approx(1)
    assert not any(part.lacks for part in found[:2])


def written(path: Path, name: str = "io", **values: tuple[float, ...]) -> Path:
    found = [
        {"case": case, **figures.compared(case, series(v), "x", series((1.0,) * len(v)))} for case, v in values.items()
    ]
    path.write_text(json.dumps({"schema": f"gdscache.bench.{name}/3", "comparisons": found}))
    return path


def test_changes_are_those_whose_spreads_do_not_meet(tmp_path: Path) -> None:
    steady, spread = (1.0, 1.01, 1.02, 1.03), (0.5, 1.0, 1.5, 2.0)
    a = written(tmp_path / "a", up=steady, down=steady, noisy=steady, few=(1.0, 1.0, 1.0), gone=steady)
    b = written(tmp_path / "b", up=(1.2,) * 4, down=(0.8,) * 4, noisy=spread, few=(2.0, 2.0, 2.0), new=steady)
    both, gone, new, _ = report.compare(a, b)
    words = {one.name.split(",")[0]: one.word for one in both}
    assert words == {"io: up": "better", "io: down": "worse", "io: noisy": "same", "io: few": "unsure"}
    assert ["gone" in name for name in gone] == ["new" in name for name in new] == [True]
    assert [one.word in report.QUIET for one in both] == [False, False, True, True]


def test_less_time_is_better(tmp_path: Path) -> None:
    def timed(path: Path, seconds: float) -> Path:
        cell = {"case": "8k tokens", "ttft_seconds": series((seconds,) * 4)}
        path.write_text(json.dumps({"schema": "gdscache.bench.ttft/4", "cells": [cell]}))
        return path

    ((one,), *_) = report.compare(timed(tmp_path / "a", 2.0), timed(tmp_path / "b", 1.0))
    assert (one.word, one.ratio) == ("better", 0.5)


def test_copies_of_the_format_before_are_compared_with_those_of_this_one(tmp_path: Path) -> None:
    """Their rates had another name, and no unit."""
    about = {"case": "load, gqa", "direction": "load", "page_tokens": 64}
    rates, plain = series((40.0,) * 4), series((50.0,) * 4)
    ratios = {"ratio": 0.8, "ratio_low": 0.8, "ratio_high": 0.8}
    old = {**about, "against": "memcpy", "gb_per_second": rates, "against_gb_per_second": plain, **ratios}
    new = about | figures.compared("load, gqa", plain, "memcpy", plain, pairs=True)
    for name, row, number in ("a", old, 5), ("b", new, 6):
        (tmp_path / name).write_text(json.dumps({"schema": f"gdscache.bench.copy/{number}", "copies": [row]}))
    ((one,), gone, came, _) = report.compare(tmp_path / "a", tmp_path / "b")
    assert (one.word, one.ratio, gone, came) == ("better", 1.25, [], [])


def test_the_best_way_of_the_bare_loop_may_differ(tmp_path: Path) -> None:
    for name, way in ("a", "4 threads, 4096 KiB"), ("b", "16 threads, 1024 KiB"):
        row = {"case": "io", **figures.compared("store", series((1.0,)), f"bare loop, {way}", series((1.0,)))}
        (tmp_path / name).write_text(json.dumps({"schema": "gdscache.bench.io/5", "comparisons": [row]}))
    ((one,), gone, came, _) = report.compare(tmp_path / "a", tmp_path / "b")
    assert (one.name, gone, came) == ("io: io, store, bare loop (ratio)", [], [])


def test_other_conditions_are_named(tmp_path: Path) -> None:
    """A figure of another model or of fewer tokens has not become better."""
    cell = {"case": "8k tokens", "ttft_seconds": series((1.0,) * 4)}
    for name, version, preset, repeat in ("a", 8, "1b", 5), ("b", 9, "8b", 4):
        about = {"settings": {"preset": preset, "repeat": repeat, "pack": False}, "machine": {"cpu": "C", "gpus": []}}
        made = {"schema": f"gdscache.bench.ttft/{version}", **about, "cells": [cell]}
        (tmp_path / name).write_text(json.dumps(made))
    found = report.compare(tmp_path / "a", tmp_path / "b")
    assert found.unlike == ["ttft: format gdscache.bench.ttft/8, gdscache.bench.ttft/9", "ttft: preset 1b, 8b"]
    assert "These differ, too: ttft: format" in found.shown(everything=False)[1]
    assert report.compare(tmp_path / "a", tmp_path / "a").unlike == []


def test_servers_are_compared_by_first_tokens_and_requests_a_second(tmp_path: Path) -> None:
    """But not those that failed."""
    for name, scale in ("a", 1.0), ("b", 2.0):
        rows = [
            {"case": case, "way": "none", "first": {"recomputed": {"ms": [20.0 * scale] * 4, "cached": [0] * 4}}}
            | {"shared_requests_per_s": [4.0 * scale] * 4, "shared_cached": [0.5] * 4}
            for case in ("no cache", "gdscache")
        ]
        failed = [{"what": "gdscache", "cause": "exit status 3"}]
        made = {"schema": "gdscache.bench.serving/3", "failed": failed, "rows": rows}
        (tmp_path / name).write_text(json.dumps(made))
    both, *_ = report.compare(tmp_path / "a", tmp_path / "b")
    assert {(one.name, one.word) for one in both} == {
        ("serving: no cache, recomputed_ms", "worse"), ("serving: no cache, shared_requests_per_s", "better"),
    }  # fmt: skip


def test_a_folder_that_cannot_be_written_is_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / report.JSON_NAME).mkdir()
    monkeypatch.setattr(report, "measure", lambda *_, **__: pytest.fail("measured"))
    answer = CliRunner().invoke(app, ["bench", "report", "--out", str(tmp_path)])
    assert (type(answer.exception), "--out" in str(answer.exception)) == (InvalidValueError, True)


def test_a_whole_report_is_compared_with_one_bench(tmp_path: Path) -> None:
    one = written(tmp_path / "one", up=(1.0,) * 4)
    whole = {"schema": report.SCHEMA, "benches": {"io": json.loads(written(tmp_path / "b", up=(2.0,) * 4).read_text())}}
    (tmp_path / report.JSON_NAME).write_text(json.dumps(whole))
    answer = CliRunner().invoke(app, ["bench", "compare", str(one), str(tmp_path), "--json"])
    assert answer.exit_code == 0
    (change,) = json.loads(answer.stdout)["changes"]
    assert (change["ratio"], change["word"]) == (2.0, "better")


@pytest.mark.parametrize(
    "damaged",
    [
        {"ratio": "x"}, {"ratio_min": None}, {"figure": [1]}, {"page_bytes": "x"}, {"ratio": float("inf")},
        {"ratio": 10**400}, {"first": 1}, {"shared_requests_per_s": []},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_report_is_refused(tmp_path: Path, damaged: dict[str, Any]) -> None:
    row = figures.compared("up", series((1.0,)), "x", series((1.0,))) | damaged
    if "first" in damaged or "shared_requests_per_s" in damaged:
        del row["ratio"]
    (tmp_path / "a").write_text(json.dumps({"schema": "gdscache.bench.io/5", "comparisons": [row]}))
    with pytest.raises(InvalidValueError, match="is damaged"):
        report.compare(tmp_path / "a", tmp_path / "a")


@pytest.mark.parametrize(
    "content", ["", "[" * 100_000, "[]", '{"schema": "gdscache.inspect/5"}', '{"schema": "gdscache.bench.io/3"}']
)
def test_what_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a").write_text(content)
    with pytest.raises(InvalidValueError):
        report.compare(tmp_path / "a", written(tmp_path / "b", up=(1.0,) * 4))


def test_a_missing_report_is_named_in_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"a cannot be read: No such file or directory\n"):
        report.compare(tmp_path / "a", tmp_path)
