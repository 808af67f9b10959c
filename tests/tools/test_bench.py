"""The benchmarks: the commands as people run them, small, and the rules by which figures are made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdscache.commands.bench import bare, geometry, index, lookup, machine, measure, memory, plots, ssd_tier
from gdscache.commands.bench import engine as bench_engine
from gdscache.config import ModelConfig
from gdscache.errors import CapacityError, GdsCacheError, InvalidValueError, IOFailedError, MissingPackageError
from gdscache.moves import Priority
from gdscache.pages.keys import page_keys
from gdscache.storage.base import Op

pytestmark = pytest.mark.suite

MIB = 1 << 20


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "gdscache", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


# -- bench engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    path = tmp_path_factory.mktemp("engine")
    done = run("engine", "--quick", "--dir", path, "--json", path / "r.json", "--plot", path / "r.svg")
    assert done.returncode == 0, done.stderr
    return path, done


@pytest.fixture(scope="module")
def report(engine_run: tuple[Path, Any]) -> dict[str, Any]:
    return json.loads((engine_run[0] / "r.json").read_text())


def check_series(series: dict[str, Any], rounds: int) -> None:
    values = series["values"]
    assert len(values) == rounds
    assert all(value > 0 for value in values)
    assert (series["min"], series["max"]) == (min(values), max(values))
    assert series["median"] == pytest.approx(float(np.median(values)))


def test_the_engine_s_report_has_every_figure(report: dict[str, Any]) -> None:
    assert list(report) == ["schema", "machine", "settings", "ssd_tier", "end_to_end", "memory"]
    assert report["schema"] == "gdscache.bench.engine/1"
    settings = report["settings"]
    assert settings["quick"] is True
    assert [(r["page_bytes"], r["name"]) for r in report["ssd_tier"]] == [
        (size, name) for size in settings["pages"] for name in ("store", "load")
    ]
    for r in report["ssd_tier"]:
        check_series(r["gb_per_second"], settings["repeat"])
        check_series(r["bare_gb_per_second"], settings["repeat"])
        assert r["pages"] * r["page_bytes"] == r["bytes"] == settings["total"]
        assert r["bare"]["direct"] == r["direct"]  # both past the page cache, or both through it
        assert r["transport"] in ("uring", "posix")
        assert r["threads"] == settings["threads"]
        assert r["bare"]["threads"] in bare.THREADS
        assert r["bare"]["io_bytes"] in bare.IO_BYTES
        assert r["ratio"] == pytest.approx(r["gb_per_second"]["median"] / r["bare_gb_per_second"]["median"])
        assert r["ratio_min"] <= r["ratio_max"]
        assert r["met"] == (r["ratio"] >= r["target"] == 0.85)
        assert len(r["bare_others"]) == bare.KEPT - 1
        assert max(r["bare_others"].values()) <= r["bare_gb_per_second"]["median"]


def test_both_faces_are_measured_from_every_tier(report: dict[str, Any]) -> None:
    found = [(r["face"], r["name"], r["tier"], r["against"]) for r in report["end_to_end"]]
    assert found == [
        ("sequence", "store", "ssd", "bare loop"),
        ("sequence", "hit", "gpu", None),
        ("sequence", "load", "cpu", "copy"),
        ("sequence", "load", "ssd", "bare loop"),
        ("attached", "store", "ssd", "bare loop"),
        ("attached", "load", "cpu", "copy"),
        ("attached", "load", "ssd", "bare loop"),
    ]
    for r in report["end_to_end"]:
        check_series(r["gb_per_second"], report["settings"]["repeat"])
        assert r["bytes"] == report["settings"]["total"]
        assert r["transport"]
        if r["against"]:
            assert r["ratio"] == pytest.approx(r["gb_per_second"]["median"] / r["against_gb_per_second"]["median"])


def test_memory_is_what_two_children_say(report: dict[str, Any]) -> None:
    held = report["memory"]
    assert held["pages"] == report["settings"]["memory_pages"]
    assert held["beyond_bytes"] == held["resident_bytes"] - held["pool_bytes"] - held["torch_bytes"]
    assert held["pool_bytes"] == (2 * held["pages"] + 1) * memory.PAGE_BYTES + memory.HOST_BUFFER
    assert held["resident_bytes"] > held["pool_bytes"] + held["torch_bytes"]  # pools were touched
    assert held["resident_bytes"] <= held["peak_bytes"]
    assert held["met"] == (held["beyond_bytes"] <= 150 * MIB)


def test_the_machine_is_in_the_report(report: dict[str, Any], engine_run: tuple[Path, Any]) -> None:
    said = report["machine"]
    assert said["cores"] == len(os.sched_getaffinity(0))
    assert said["memory_bytes"] > MIB
    assert said["kernel"] == os.uname().release
    assert {"gdscache", "torch", "numpy", "xxhash"} <= said["versions"].keys()
    assert said["storage"] == machine.storage(engine_run[0])
    expected = subprocess.run(["stat", "-f", "-c", "%T", engine_run[0]], capture_output=True, text=True, check=True)
    kind = said["storage"]["file_system"]
    assert kind is not None
    assert kind in ("overlay", "btrfs") or kind[:3] == expected.stdout.strip()[:3]


def test_people_get_tables_and_the_directory_back(engine_run: tuple[Path, Any], report: dict[str, Any]) -> None:
    path, done = engine_run
    assert {p.name for p in path.iterdir()} == {"r.json", "r.svg"}
    assert (path / "r.svg").read_text().count("SSD tier") >= 1
    assert done.stderr == ""  # no terminal, no bar
    for words in ("SSD tier against", "Engine, from call to verdict", "Memory", "1MiB", "attached"):
        assert words in done.stdout
    for r in report["ssd_tier"]:
        assert f"{r['gb_per_second']['median']:.2f} ({r['gb_per_second']['min']:.2f}" in done.stdout
    missed = [r for r in measure.judged(report) if not r["met"]]
    assert done.stdout.count("MISSED") == len(missed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("engine", "--dir", "{}/none"), "not a directory"),
        (("engine", "--dir", "{}", "--pages", "many"), "--pages 'many'"),
        (("engine", "--dir", "{}", "--pages", "100KiB"), "no whole number of tokens"),
        (("engine", "--dir", "{}", "--total", "512KiB"), "holds no page of 1MiB"),
        (("engine", "--dir", "{}", "--json", "{}/none/r.json"), "--json"),
        (("engine", "--dir", "{}", "--plot", "{}/r.doc"), "r.doc"),
        (("index", "--dir", "{}", "--json", "{}"), "--json"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from gdscache import cli

    monkeypatch.setattr(sys, "argv", ["gdscache", "bench", *(a.format(tmp_path) for a in arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert words in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"gdscache\[plot\]"):
        plots.require(tmp_path / "r.png")


def test_commands_import_nothing_heavy() -> None:
    """What measures is imported by the command that runs it. (gdscache itself brings torch.)"""
    code = (
        "import sys, gdscache; before = set(sys.modules); import gdscache.cli; "
        "names = ('matplotlib', 'gdscache.commands.bench.'); "
        "print(sorted(m for m in set(sys.modules) - before if m.startswith(names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['gdscache.commands.bench.commands']"


# -- the parts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ssd_tier.TierUnderTest]:
    with ssd_tier.TierUnderTest(tmp_path, MIB, 6 * MIB, 2) as tier:
        yield tier


def test_the_tier_under_test_moves_real_bytes(tier: ssd_tier.TierUnderTest) -> None:
    before = tier._cpu.extents.rows[: tier.pages].clone()
    assert tier.store() > 0
    tier._cpu.extents.rows.zero_()
    assert tier.load() > 0
    after = tier._cpu.extents.rows[: tier.pages]
    assert sorted(bytes(row[:64].numpy()) for row in after) == sorted(bytes(row[:64].numpy()) for row in before)
    assert len(tier._cpu.index) == 0  # forgotten, so that the next load reads again


def test_a_load_of_damaged_bytes_is_no_figure(tier: ssd_tier.TierUnderTest) -> None:
    tier.store()
    tier.slab.write_bytes(bytes(tier.slab.stat().st_size))
    with pytest.raises(IOFailedError, match="were to come from the SSD"):
        tier.load()


def test_a_store_that_is_dropped_is_no_figure(tier: ssd_tier.TierUnderTest) -> None:
    tier._writer.close(drain=False)
    tier._writer._lane = tier._parts.executor.lane(Priority.DEMOTION, lambda: None)  # a thread again, that drops
    with pytest.raises(IOFailedError, match="closed"):
        tier.store()


def test_the_bare_loop_touches_every_part_once(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(8 * MIB))
    with bare.BareLoop(file, 8 * MIB) as loop:
        assert loop.run(Op.WRITE, bare.Way(3, MIB)) > 0
        noise = bytes(loop._buffer.view)
        assert any(noise)
        assert file.read_bytes() == noise  # each part from memory of its own
        loop._buffer.view[:] = bytes(8 * MIB)
        assert loop.run(Op.READ, bare.Way(2, MIB)) > 0
        assert loop._buffer.view == noise
        ways = loop.scout(Op.READ)
        assert len(ways) == bare.KEPT
        assert loop.total == 8 * MIB


def test_the_bare_loop_reports_short_reads(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(4 * MIB))
    with bare.BareLoop(file, 4 * MIB) as loop:
        os.truncate(file, 3 * MIB)
        with pytest.raises(IOFailedError, match="moved less than 1048576"):
            loop.run(Op.READ, bare.Way(2, MIB))
    with pytest.raises(InvalidValueError, match="shorter"):
        bare.BareLoop(file, 4 * MIB)


@pytest.mark.parametrize("size", [128 << 10, MIB, 4 * MIB, 64 * MIB])
def test_the_measured_model_has_pages_of_that_size(size: int) -> None:
    layout = ModelConfig(**geometry.model_of(size)).layout()
    assert layout.page_bytes == layout.extent_bytes == size


@pytest.mark.parametrize("size", [0, 1, 127 << 10, 129 << 10, 65 * MIB])
def test_other_page_sizes_are_refused(size: int) -> None:
    with pytest.raises(InvalidValueError):
        geometry.model_of(size)


def test_ways_take_turns() -> None:
    order: list[str] = []
    ways = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "ab"}
    found = measure.interleave(ways, 3)
    assert order == ["a", "b"] * 3
    assert found["a"].values == (1.0, 3.0, 5.0)
    assert found["b"].median == 4.0
    assert measure.ratio(found["a"], found["b"]) == {"ratio": 0.75, "ratio_min": 0.5, "ratio_max": 5 / 6}


def test_targets() -> None:
    assert measure.target(0.85, 0.85, at_least=True)["met"]
    assert not measure.target(0.84, 0.85, at_least=True)["met"]
    assert measure.target(3, 3, at_least=False)["met"]
    assert not measure.target(3.1, 3, at_least=False)["met"]
    assert len(measure.judged({"a": [{"met": True}, {"b": {"met": False}}], "c": 1})) == 2


def test_a_round_below_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="512KiB"):
        bench_engine.run(tmp_path, bench_engine.Settings(total=MIB // 2))
    assert not list(tmp_path.iterdir())


def test_a_child_that_fails_is_an_error() -> None:
    with pytest.raises(GdsCacheError, match="nothing_like_it"):
        memory.child("nothing_like_it")


# -- bench index -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("index")
    done = run("index", "--quick", "--pages", "3000", "--layers", "33", "--dir", path, "--json", path / "r.json")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in path.iterdir()] == ["r.json"]
    assert "lookup, numpy tokens" in done.stdout
    return json.loads((path / "r.json").read_text())


def test_the_index_s_report_has_every_figure(index_report: dict[str, Any]) -> None:
    assert list(index_report) == [
        "schema", "machine", "settings", "lookup", "catalog_recovery", "reopen", "memory",
    ]  # fmt: skip
    assert index_report["settings"] == {"pages": 3000, "layers": 33, "repeat": 1, "quick": True}
    found = index_report["lookup"]
    assert (found["tokens"], found["pages"], found["tiers"]) == (131_072, 2048, ["gpu", "cpu", "ssd"])
    check_series(found["hash_seconds"], 20)
    assert found["ratio"] == pytest.approx(found["numpy_seconds"]["median"] / found["hash_seconds"]["median"])
    check_series(found["again_seconds"], 20)
    assert found["met"] == (found["ratio"] <= 3)
    assert index_report["catalog_recovery"]["pages"] == index_report["reopen"]["pages"] == 3000
    check_series(index_report["reopen"]["seconds"], 1)
    held = index_report["memory"]
    # keys and parents, and 33 checksums of 8 bytes once they were read
    assert held["bytes_per_page_opened"] > 64
    assert held["bytes_per_page"] > held["bytes_per_page_opened"]


def test_lookups_that_are_timed_hash_their_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(namespace: bytes, tokens: Any, page_tokens: int, parent: bytes | None = None) -> list[bytes]:
        hashed.append(len(tokens) // page_tokens)
        return page_keys(namespace, tokens, page_tokens, parent)

    monkeypatch.setattr("gdscache.pages.keys.page_keys", counted)
    lookup.lookup(tmp_path, pages=8, rounds=2)
    # stored; 3 rounds of two ways and 2 timed ones; 16 and 2 in a row; those that are looked up again are not
    assert hashed.count(8) == 1 + 2 * (3 + 2) + (16 + 2)


def test_the_hash_loop_is_what_makes_keys() -> None:
    tokens = np.arange(5 * lookup.PAGE_TOKENS, dtype=np.uint32)
    namespace = bytes(range(32))
    assert lookup.hash_loop(namespace, tokens.tobytes()) == page_keys(namespace, tokens, lookup.PAGE_TOKENS)[-1]


def test_a_tier_that_lost_pages_is_no_figure(tmp_path: Path) -> None:
    with index.filled(20, 2, directory=tmp_path) as (path, _):
        assert index.reopen(path, 20, 2, 1)["pages"] == 20
        with pytest.raises(RuntimeError, match="20 of 21"):
            index.reopen(path, 21, 2, 1)
    assert not list(tmp_path.iterdir())


# -- the machine -------------------------------------------------------------------------------------------------------


def test_the_commit_is_the_tree_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(machine.__file__).resolve().parents[3]
    said = machine.commit()
    if not (root / ".git").exists():
        assert said is None
        return
    head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert said is not None
    assert said["hash"] == head.stdout.strip()
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "gdscache" / "commands" / "bench" / "machine.py"))
    assert machine.commit() is None  # an installed wheel is no source tree
