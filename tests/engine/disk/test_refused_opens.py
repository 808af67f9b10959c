"""An open that is refused has no effect: no page is lost, and a directory that had no cache has none."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine, HybridEngine, PageStatus
from gdscache.disk.catalog import Catalog
from gdscache.disk.slab import Slab
from gdscache.errors import GdsCacheError, NoSpaceError, NotARegularFileError
from gdscache.tiers import ssd as ssd_module
from tests.support.helpers import MHA, Host, OpenHost, make_config, prompt
from tests.support.hybrid import MODELS, hybrid_config

PAGES, FEWER = 10, 4
CAUSES = ("tier", "metrics", "status")


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "cache", tmp_path / "second"]


def options(paths: list[Path], ssd: int = 12, **more: Any) -> dict[str, Any]:
    return {"path": paths[0], "ssd": ssd, "ssd_options": {"stripes": [str(path) for path in paths[1:]]}, **more}


def refuse(cause: str, paths: list[Path], port: int, **more: Any) -> None:
    sections: dict[str, Any] = {"metrics": {"host": "127.0.0.1", "port": port}}
    if cause == "tier":
        sections = {"tiers": [{"tier": "nope:Nope", "capacity": 1 << 20}]}
    if cause == "status":
        sections = {}
        (paths[0] / "status").mkdir(parents=True)
        paths[0].chmod(0o700)
    with pytest.raises(GdsCacheError):
        CacheEngine.from_config(make_config(**options(paths, **sections, **more)))
    if cause == "status":
        (paths[0] / "status").rmdir()


def filled(paths: list[Path]) -> list[int]:
    host, tokens = Host(make_config(**options(paths, cpu=None))), prompt(1, PAGES)
    host.keep(tokens)
    host.engine.close()
    return tokens


def sizes(paths: list[Path]) -> list[int]:
    return [file.stat().st_size for path in paths for file in sorted(path.glob("slab-*"))]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("cause", CAUSES)
def test_a_lower_capacity_that_is_refused_costs_no_page(
    open_host: OpenHost,
    paths: list[Path],
    port: int,
    caplog: pytest.LogCaptureFixture,
    cause: str,
    count: int,
) -> None:
    paths = paths[:count]
    tokens, before = filled(paths), sizes(paths)
    for _ in range(2):
        refuse(cause, paths, port, ssd=FEWER)
    assert sizes(paths) == before
    assert "gave up pages" not in caplog.text
    host = open_host(**options(paths, cpu=None))
    assert host.engine.stats()["tiers"]["ssd"]["lost_at_recovery"] == {}
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES
    host.engine.close()
    host = open_host(**options(paths, ssd=FEWER, cpu=None))
    assert sum(sizes(paths)) == FEWER * host.layout.extent_bytes, "a capacity is a hard cap once the engine is open"
    assert host.engine.stats()["tiers"]["ssd"]["lost_at_recovery"] == {"slot": PAGES - FEWER}
    assert f"gave up pages: {PAGES - FEWER} (slot)" in caplog.text
    assert host.engine.check().ok


@pytest.mark.parametrize("cause", ["clean", "cut"])
def test_a_kill_while_the_slab_is_cut_leaves_no_row_without_its_bytes(
    open_host: OpenHost, paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """The directory is copied before and behind the step, and the copies opened with both capacities."""
    tokens, where, copies = filled(paths[:1]), {"clean": Catalog, "cut": Slab}[cause], list[Path]()
    genuine = getattr(where, cause)

    def copied(*given: Any) -> None:
        for step in (lambda: None, lambda: genuine(*given)):
            step()
            for _ in range(2):
                copies.append(tmp_path / f"copy {len(copies)}")
                shutil.copytree(paths[0], copies[-1])

    monkeypatch.setattr(where, cause, copied)
    open_host(**options(paths[:1], ssd=FEWER, cpu=None)).engine.close()
    monkeypatch.undo()
    assert len(copies) == 4
    for at, copy in enumerate(copies):
        host = open_host(**options([copy], ssd=(FEWER, 12)[at % 2], cpu=None))
        hit = host.engine.lookup(tokens)
        assert len(hit.pages) == (PAGES if (cause, at) == ("clean", 1) else FEWER)
        assert set(host.load(tokens).pages) == {PageStatus.LOADED}
        assert host.engine.check().ok


@pytest.mark.parametrize("cause", [*CAUSES, "capacity"])
def test_a_first_open_that_is_refused_binds_the_directory_to_nothing(
    open_host: OpenHost, paths: list[Path], port: int, cause: str
) -> None:
    if cause == "capacity":
        with pytest.raises(NoSpaceError):
            CacheEngine.from_config(make_config(**options(paths, ssd=1 << 36)))
    else:
        refuse(cause, paths, port)
    assert [[file.name for file in path.iterdir()] for path in paths] == [["lock"], ["lock"]]
    model = MHA | {"page_tokens": 4 * MHA["page_tokens"]}
    open_host(**options(paths[:1], ssd=3, model=model)).engine.close()
    assert (paths[0] / "catalog.sqlite").exists()


@pytest.mark.parametrize("removed", range(6))
def test_a_kill_while_the_files_of_a_refused_open_are_removed_is_no_obstacle(
    open_host: OpenHost, paths: list[Path], port: int, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    genuine = ssd_module.remove_files
    with monkeypatch.context() as patch:
        patch.setattr(ssd_module, "remove_files", lambda files: genuine([*files][:removed]))
        refuse("tier", paths, port)
    host, tokens = open_host(**options(paths, cpu=None)), prompt(1, PAGES)
    host.keep(tokens)
    assert host.load(tokens).pages == (PageStatus.LOADED,) * PAGES


def test_a_cache_that_an_engine_used_stays(open_host: OpenHost, paths: list[Path], port: int) -> None:
    """Also one that has no page, and the half of a set of directories that a kill has left."""
    open_host(**options(paths)).engine.close()
    (paths[1] / "slab-1.bin").unlink()
    refuse("metrics", paths, port)
    names = [{file.name for file in path.iterdir()} for path in paths]
    assert names == [{"lock", "catalog.sqlite", "stripe.json", "slab-0.bin"}, {"lock", "stripe.json"}]


def test_a_pool_of_groups_that_is_refused_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    config = hybrid_config(tmp_path / "cache", MODELS["apart"])
    HybridEngine.from_config(config).close()
    first, *_, last = sorted((tmp_path / "cache").iterdir())
    before = sizes([first])
    (last / "status").mkdir()
    config["ssd"]["capacity"] //= 2
    with pytest.raises(NotARegularFileError):
        HybridEngine.from_config(config)
    assert sizes([first]) == before
    for file in [*first.iterdir()]:
        file.unlink()
    with pytest.raises(NotARegularFileError):
        HybridEngine.from_config(config)
    assert [file.name for file in first.iterdir()] == ["lock"]
    (last / "status").rmdir()
    HybridEngine.from_config(config).close()
    assert 0 < sizes([first])[0] <= before[0] // 2 + 8192
