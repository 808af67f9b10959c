"""`gdscache bench ttft`: every cell has a figure or a cause, its arithmetic, and that it goes on where it was ended."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gdscache.commands.bench import ttft
from gdscache.commands.bench.ttft import BENCH, judge
from gdscache.commands.bench.ttft_cells import (
    CACHED,
    NOWHERE,
    Answer,
    Cell,
    Settings,
    cached_tokens,
    cell_of,
    cells,
    chosen,
    compare,
    transfer_seconds,
    worst,
)
from gdscache.commands.bench.ttft_transformers import TransformersClient, _Layers
from gdscache.commands.console import duration
from gdscache.errors import InvalidValueError, IOFailedError
from tests.support.terminal import on_terminal

pytestmark = pytest.mark.suite

SMALL = dataclasses.replace(
    Settings.of(quick=True, device="cpu", everything=True), prompts=(96,), page_tokens=8, repeat=1
)
KEYS = [
    "schema", "machine", "settings", "complete", "interrupted", "left", "done", "cannot", "failed",
    "model", "cells",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small gain nothing from a second thread, and wait for it where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A quick run on the CPU: its directory, its report and what a terminal of 80 columns showed."""
    path = tmp_path_factory.mktemp("ttft")
    files = ("--dir", str(path), "--report", str(path / "r.json"), "--plot", str(path / "r.svg"))
    line = ["-W", "error", "-m", "gdscache", "bench", "ttft", "--all", "--quick", "--device", "cpu", "--repeat", "1"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")  # as in `_one_thread`
        status, shown = on_terminal([*line, *files])
    assert status == 0, shown
    return path, json.loads((path / "r.json").read_text()), shown


def test_every_cell_has_a_figure_or_a_cause(quick: tuple[Path, dict[str, Any], str]) -> None:
    path, report, printed = quick
    assert list(report) == KEYS
    assert (report["schema"], report["complete"], report["left"]) == ("gdscache.bench.ttft/9", True, [])
    wanted = [cell.label for cell in cells(Settings.of(quick=True, device="cpu"))]
    listed = [row["what"] for name in ("cannot", "failed") for row in report[name]]
    assert sorted([*(cell_of(row).label for row in report["cells"]), *listed]) == sorted(wanted)
    assert report["failed"] == []
    assert report["cannot"] == []
    assert max(map(len, printed.splitlines())) <= 80
    for row in report["cells"]:
        assert duration(row["ttft_seconds"]["median"]) in printed
    assert not {"met:", "MISSED:", "…"} & set(printed.split())
    assert (path / "r.svg").stat().st_size > 1000
    assert sorted(file.name for file in path.iterdir()) == ["r.json", "r.svg"]  # the tier's files are gone


def test_the_figures_are_what_they_say(quick: tuple[Path, dict[str, Any], str]) -> None:
    _, report, _ = quick
    for row in report["cells"]:
        assert row["tokens"] == "same"
        for name in ("ttft_seconds", "recompute_seconds"):
            series = row[name]
            assert len(series["values"]) == 1
            assert 0 < series["min"] <= series["median"] <= series["max"]
        if row["where"] == NOWHERE:
            assert row["added"] == row["ttft_seconds"]["median"] / row["recompute_seconds"]["median"] - 1
            continue
        cached = row["cached_tokens"]
        assert cached == 256 * row["cached_percent"] // 100 // 16 * 16
        page_bytes = 16 * 2 * 4 * 4 * 64 * 4  # tokens, planes, layers, heads, head_dim, bytes
        assert sum(row["bytes"].values()) == (0 if row["where"] == "gpu" else cached // 16 * page_bytes)
        rates = {name: series["median"] for name, series in row["gb_per_second"].items()}
        assert row["transfer_seconds"] == transfer_seconds(row["bytes"], rates)
        assert row["ideal_seconds"] == max(row["resident_seconds"]["median"], row["transfer_seconds"])
        assert row["ideal_ratio"] == row["ideal_seconds"] / row["ttft_seconds"]["median"]
        if not row["gate"]:
            names = {"gpu": {"pool"}, "cpu": {"cpu"}, "ssd_via_cpu": {"ssd"}}
            assert set(row["sources"]) == names[row["where"]]
            assert sum(row["sources"].values()) == cached
            overlaps = row["overlap"] and row["where"] != "gpu"
            assert (row["wait_seconds"] is not None) == overlaps
    assert not any("met" in row for row in report["cells"])  # the targets are those of a GPU


def test_the_bottom_line_is_what_a_user_has_of_it(quick: tuple[Path, dict[str, Any], str]) -> None:
    _, report, printed = quick
    [said] = ttft.bottom(report)
    assert " ".join(printed.split()).endswith(said)
    some = [row for row in report["cells"] if row["overlap"] and not row["gate"]]
    rows = {row["where"]: row for row in some if row["cached_percent"] == 90}
    for where, words in (("cpu", "from the CPU tier"), ("ssd_via_cpu", "from the SSD")):
        assert f"{duration(rows[where]['ttft_seconds']['median'])} {words}" in said
    assert f"{duration(rows['cpu']['recompute_seconds']['median'])} where all of it is computed" in said
    assert "A prompt that hits nothing takes" in said
    assert ttft.bottom({**report, "cells": []}) == []
    shown = [line for table in BENCH.tables(report) for line in table.lines(80)]
    assert len(shown) < 40
    assert not any("gate" in line for line in shown)
    assert any("gate" in line for table in ttft.details(report) for line in table.lines(80))


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Measure these cells only, for which the others are left out."""

    def only(*wanted: Cell) -> None:
        everything = cells(SMALL)
        assert set(wanted) <= set(everything)
        monkeypatch.setattr(ttft, "chosen", lambda _: list(wanted))

    return only


def a_cell(where: str = "cpu", cached: int = 50, *, overlap: bool = True, gate: bool = False) -> Cell:
    return Cell(96, cached, where, overlap, gate)


def test_other_tokens_and_errors_are_failures(
    tmp_path: Path, some: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C in the last cell."""
    wrong, elsewhere, far = a_cell("cpu"), a_cell("cpu", overlap=False), a_cell("ssd_via_cpu", 90)
    good, broken = a_cell("ssd_via_cpu"), a_cell("ssd_via_cpu", overlap=False)
    some(wrong, elsewhere, good, broken, far)
    plain = TransformersClient.hit
    bad: dict[Cell, Callable[[Answer], Answer]] = {
        wrong: lambda answer: dataclasses.replace(answer, tokens=tuple(token + 1 for token in answer.tokens)),
        elsewhere: lambda answer: dataclasses.replace(answer, sources={"ssd": 48}),
        broken: Mock(side_effect=IOFailedError("the disk is on fire", "leave")),
        far: Mock(side_effect=KeyboardInterrupt),
    }

    def hit(self: TransformersClient, cell: Cell) -> Answer:
        return bad.get(cell, lambda answer: answer)(plain(self, cell))

    monkeypatch.setattr(TransformersClient, "hit", hit)
    found = BENCH.run(SMALL, tmp_path)
    assert {row["what"]: row["cause"] for row in found["failed"]} == {
        wrong.label: "it gave other tokens than without a cache",
        broken.label: "the disk is on fire",
        elsewhere.label: "tokens came from {'ssd': 48}",
    }
    assert (found["interrupted"], found["complete"], found["left"]) == (True, False, [far.label])
    assert {cell_of(row) for row in found["cells"]} == {wrong, good, elsewhere}
    assert not any(tmp_path.iterdir())


def test_a_miss_with_other_tokens_is_a_failure_and_rounds_have_a_frozen_heap(
    tmp_path: Path, some: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    some(a_cell(NOWHERE, 0), a_cell())
    plain, frozen = TransformersClient.miss, []

    def miss(self: TransformersClient, cell: Cell, *, cached: bool) -> Answer:
        found = plain(self, cell, cached=cached)
        return dataclasses.replace(found, tokens=(-1,)) if cached else found

    monkeypatch.setattr(TransformersClient, "miss", miss)
    hit = TransformersClient.hit
    monkeypatch.setattr(
        TransformersClient, "hit", lambda *given: frozen.append(gc.get_freeze_count() > 0) or hit(*given)
    )
    found = BENCH.run(SMALL, tmp_path)
    assert found["failed"] == [{"what": a_cell(NOWHERE, 0).label, "cause": ttft.OTHER_TOKENS}]
    assert frozen == [True] * 2


def test_labels_are_what_is_cached() -> None:
    """Down to a page: on a CPU a prompt of 512 tokens had as many of them with 90 % as with 99 %."""
    for device in ("cuda:0", "cpu"):
        settings = Settings.of(device=device)
        for cell in chosen(settings):
            cached = cached_tokens(cell.prompt_tokens, cell.cached_percent, settings.page_tokens)
            assert 100 * cached / cell.prompt_tokens == pytest.approx(cell.cached_percent, abs=3.2)


@pytest.mark.parametrize("step", ["prime", "plain"])
def test_a_failing_baseline_fails_its_cells(
    tmp_path: Path, some: Callable[..., None], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    some(a_cell(), a_cell(overlap=False))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TransformersClient, step, fail)
    found = BENCH.run(SMALL, tmp_path)
    assert [row["cause"] for row in found["failed"]] == ["out of memory"] * 2
    assert (found["cells"], found["left"]) == ([], [])


@pytest.fixture(params=[SMALL])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TransformersClient]:
    made = TransformersClient(request.param, tmp_path)
    try:
        assert made.prime(96) > 0
        yield made
    finally:
        made.close()


def test_the_gates_learn_and_decide(client: TransformersClient) -> None:
    client.learn(96)
    for overlap in (True, False):
        client.install(overlap=overlap, gate=True)
        costs = client.cache.manager.costs
        assert costs.measured(("cpu", "ssd")), "prefills and loads were reported"
        assert costs.prefill.observations >= 4
    assert client.cache.gate.mode == "enforcing"
    figures = client.cache.manager.costs  # of the runs without overlap
    before = figures.prefill.observations
    client.hit(a_cell(overlap=False))
    assert figures.prefill.observations == before + 1
    for _ in range(8):  # loads that take forever
        figures.observe_load("cpu", 1 << 20, 100.0)
    assert client.hit(a_cell(overlap=False, gate=True)).sources == {}
    assert client.hit(a_cell(overlap=False)).sources == {"cpu": 48}
    hit = client.hit(a_cell(overlap=True))
    assert (hit.sources, len(hit.waits)) == ({"cpu": 48}, 4), "a wait for each layer"


def test_a_miss_finds_nothing_and_leaves_nothing(client: TransformersClient) -> None:
    before = client.cache.manager.stats()["tiers"]["cpu"]["pages"]
    for cached in (True, False):
        answer = client.miss(a_cell(NOWHERE, 0), cached=cached)
        assert (answer.sources, len(answer.tokens)) == ({}, 1)
        assert answer.ttft > 0
    client.cache.drain(30)
    assert client.cache.manager.stats()["tiers"]["cpu"]["pages"] == before
    assert client.cache.stats()["gate"]["hits"]["unmeasured"] == 0


def test_pages_that_are_not_where_they_are_needed(client: TransformersClient) -> None:
    tokens, cached = client.of(a_cell())
    assert cached == 48
    client.cache.clear()
    with pytest.raises(IOFailedError, match="pages are not where ssd_via_cpu needs them"):
        client.place(tokens, cached, "ssd_via_cpu")


def test_tokens_depend_on_the_pages(client: TransformersClient) -> None:
    """Else comparing them would prove nothing."""
    cell = a_cell("gpu")
    plain = client.plain(cell)
    assert compare([client.resident(cell)], [plain], 0.0) == "same"
    differ = 0
    for page in range(6):
        block, planes = client._document[page], [*itertools.chain(*client.planes)]
        for plane in planes:
            plane[block].neg_()
        differ += client.resident(cell).tokens != plain.tokens
        for plane in planes:
            plane[block].neg_()
    assert differ >= 4


@pytest.mark.parametrize("client", [dataclasses.replace(SMALL, dtype="bfloat16", pack=True)], indirect=True)
def test_packed_pages_and_those_that_cannot_be_are_measured_where_they_lie(
    client: TransformersClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed ones give the same tokens. A page of random bits lies plain beside them, in memory and on the SSD."""
    layout = client.cache.layout
    assert layout.packed
    for where in ("cpu", "ssd_via_cpu"):
        assert compare([client.hit(a_cell(where))], [client.resident(a_cell(where))], 0.0) == "same"
    written = _Layers.write_pages

    def write(self: _Layers, start: int, blocks: list[int]) -> None:
        written(self, start, blocks)
        for plane in itertools.chain(*client.planes):
            plane[blocks[2]].view(torch.int16).random_(-(1 << 15), 1 << 15)

    monkeypatch.setattr(_Layers, "write_pages", write)
    client.cache.clear()
    client.prime(96)
    for where, tier in (("ssd_via_cpu", "ssd"), ("cpu", "cpu"), ("ssd_via_cpu", "ssd")):
        answer = client.hit(a_cell(where))
        assert answer.placed == {tier: 5 * layout.page_bytes, f"{tier}_plain": layout.plane_bytes}
        assert answer.sources == {tier: 40, f"{tier}_plain": 8}


def test_a_bad_page_is_said(client: TransformersClient) -> None:
    """The forward pass that read it is no figure: `bench ttft` lists the cell as failed."""
    tokens, cached = client.of(a_cell())
    client.place(tokens, cached, "cpu")
    cpu = client.cache.manager.cpu
    for page in client.cache.pages(tokens)[2:3]:
        entry = cpu.index.get(page.key)
        cpu.extents.memory(entry.slot)[100] ^= 64
    answer = client._load_and_compute(tokens, overlap=True)
    assert answer.recomputed == cached - 16


def test_without_transformers_it_names_the_extra(gdscache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, TransformersClient.__module__)
    status, _, err = gdscache("bench", "ttft", "--quick", "--device", "cpu", "--dir", tmp_path)
    assert status == 2
    assert err.startswith("error: bench ttft measures transformers, which cannot be imported")
    assert "install gdscache[hf]" in err


def test_what_is_measured_unasked() -> None:
    for device in ("cuda:0", "cpu"):
        default, everything = (Settings.of(device=device, everything=all_) for all_ in (False, True))
        wanted = chosen(default)
        assert {cell.prompt_tokens for cell in wanted} == set(sorted(default.prompts)[:2])
        assert {cell.where for cell in wanted} == {NOWHERE, "gpu", "cpu", "ssd_via_cpu"}
        assert all(cell.overlap and not cell.gate for cell in wanted)
        assert len(wanted) == 2 * (1 + 3 * 3)
        assert chosen(everything) == cells(everything)
    assert {cell.prompt_tokens for cell in chosen(Settings.of(quick=True, device="cpu"))} == {256}
    assert Settings.of(device="cuda:0").preset == "8b"
    assert [Settings.of(device="cpu", pack=pack).dtype for pack in (None, True)] == ["float32", "bfloat16"]
    assert Settings.of(device="cuda:0").prompts == (32768, 8192, 131072)
    whole = cells(Settings.of(device="cuda:0"))
    assert len(whole) == len(set(whole)) == 3 * (1 + 3 * (1 + 2 * 2 * 2))
    assert [cell_of(cell._asdict()) for cell in whole] == whole
    groups = [cell.group for cell in whole]
    assert len(set(groups)) == sum(a != b for a, b in zip([None, *groups], groups, strict=False))  # each in one piece
    assert {cell.cached_percent for cell in whole} == set(CACHED)


def test_the_ceiling_of_a_transfer() -> None:
    rates = {"copy": 50.0, "onward": 5.0}
    ssd = {"ssd": 10 * 10**9}
    assert transfer_seconds(ssd, rates) == 2.0  # the disk, and the copies behind it
    assert transfer_seconds(ssd, rates | {"copy": 2.5}) == 4.0  # the bus, by which all of it goes
    assert transfer_seconds({"ssd": 9 * 10**9, "ssd_plain": 10**9}, rates) == 2.0
    assert transfer_seconds({"cpu": 10**10}, {"copy": 50.0}) == 0.2
    assert transfer_seconds({}, rates) == 0.0
    assert transfer_seconds(ssd, {"copy": 50.0}) is None


def made_up(cell: Cell, ttft_seconds: float, c: float = 1.0, t: float = 0.5, plain: float = 2.0) -> dict[str, Any]:
    return {
        **cell._asdict(),
        "ttft_seconds": {"median": ttft_seconds},
        "recompute_seconds": {"median": plain},
        "resident_seconds": {"median": c},
        "transfer_seconds": t,
        "ideal_ratio": max(c, t) / ttft_seconds,
        "added": ttft_seconds / plain - 1,
    }


def judged(row: dict[str, Any], *, ram: bool = True) -> bool | None:
    """Whether the row's target is met; None without one."""
    assert "met" not in judge(row, torch.device("cpu"), ram=ram)
    return judge(row, torch.device("cuda"), ram=ram).get("met")


def test_the_verdict_on_hits_and_misses() -> None:
    def row(where: str, seconds: float, prompt: int = 32768, cached: int = 50, **switches: bool) -> dict[str, Any]:
        return made_up(Cell(prompt, cached, where, **{"overlap": True, "gate": False, **switches}), seconds)

    assert (judged(row("cpu", 1 / 0.901)), judged(row("cpu", 1 / 0.89))) == (True, False)
    assert (judged(row("ssd_via_cpu", 1 / 0.86)), judged(row("ssd_via_cpu", 1 / 0.84))) == (True, False)
    assert judged(row("ssd_via_cpu", 1 / 0.84), ram=False) is None
    assert judged(row("cpu", 2.0, prompt=8192)) is None
    assert judged(row("cpu", 2.0, prompt=131072, cached=99)) is False
    for other in (row("gpu", 2.0), row("cpu", 2.0, gate=True), row("cpu", 2.0, overlap=False)):
        assert judged(other) is None
    assert (judged(row(NOWHERE, 2.03, cached=0)), judged(row(NOWHERE, 2.06, cached=0))) == (True, False)


def test_tokens_are_compared() -> None:
    def answer(*tokens: int, margin: float = 0.5) -> Answer:
        return Answer(1.0, tokens, (0.5, margin, 0.5), {}, (), 0)

    plain = answer(1, 2, 3, margin=0.01)
    assert compare([plain, plain], [plain, plain], 0.0) == "same"
    assert compare([plain, answer(1, 4, 5)], [plain, plain], 0.05) == "near tie"
    assert compare([plain, answer(1, 4, 5)], [plain, plain], 0.0) == "other"
    assert compare([answer(9, 2, 3), answer(1, 4, 5)], [plain, plain], 0.05) == "other"
    wide = answer(1, 2, 3, margin=0.15)  # the same sums in another order may be so far off, the same sums may not
    other = answer(1, 4, 5)
    assert worst([other], [wide], [other], 0.05, gated=False) == "near tie"
    assert worst([other], [wide], [wide], 0.05, gated=False) == "other"
    assert worst([other], [wide], [wide], 0.05, gated=True) == "near tie"
    assert worst([wide], [wide], [wide], 0.0, gated=False) == "same"


def test_settings_that_measure_nothing() -> None:
    SMALL.check()
    with pytest.raises(InvalidValueError, match="unknown preset '90b'"):
        dataclasses.replace(SMALL, preset="90b").check()
    with pytest.raises(InvalidValueError, match="a prompt of 63 tokens"):
        dataclasses.replace(SMALL, prompts=(63,), page_tokens=16).check()


@pytest.mark.gpu
def test_a_quick_run_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    settings = dataclasses.replace(Settings.of(quick=True, device="cuda:0"), repeat=1)
    found = BENCH.run(settings, tmp_path)
    assert (found["failed"], found["left"]) == ([], [])
    assert found["cannot"] == []
    assert {row["tokens"] for row in found["cells"]} <= {"same", "near tie"}
