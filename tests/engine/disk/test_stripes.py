"""A cache over several directories: what was stored comes back, and directories that are not its own are refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine, PageStatus
from gdscache.commands.inspect.reading import inspect
from gdscache.commands.inspect.verification import verify
from gdscache.config import Config
from gdscache.disk import slab
from gdscache.disk import slab as slab_module
from gdscache.disk.catalog import Catalog
from gdscache.disk.catalog_file import STRIPE_NAME
from gdscache.errors import DirectoryInUseError, GdsCacheError, InvalidValueError, NotARegularFileError, StripeError
from tests.support.helpers import OpenHost, flip_file, kept, make_config, tokens_of

STRETCH = 3  # slots
EXTENT = 8192


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "STRETCH_BYTES", STRETCH * EXTENT)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "cache", tmp_path / "second", tmp_path / "third"]


def options(paths: list[Path], **more: Any) -> dict[str, Any]:
    further = [str(path) for path in paths[1:]]
    return {"path": paths[0], "ssd": 20, "cpu": None, "ssd_options": {"stripes": further, **more}}


def filled(open_host: OpenHost, paths: list[Path]) -> list[int]:
    host, tokens = kept(open_host, 16, **options(paths))
    host.engine.close()
    return tokens


def snapshot(paths: list[Path]) -> dict[Path, bytes]:
    return {file: file.read_bytes() for path in paths for file in path.rglob("*") if file.name != "lock"}


def test_pages_come_back_from_all_directories(open_host: OpenHost, paths: list[Path]) -> None:
    tokens = filled(open_host, paths)
    host = open_host(**options(paths))
    slots = [host.engine.manager.ssd.index.get(page.key).slot for page in host.engine.pages(tokens)]  # type: ignore[union-attr]
    assert {slot // STRETCH % 3 for slot in slots} == {0, 1, 2}
    report = host.load(tokens)  # checks every byte
    assert set(report.pages) == {PageStatus.LOADED}
    assert host.engine.stats()["tiers"]["ssd"]["stripes"] == [str(path) for path in paths[1:]]
    assert not host.engine.check().problems


def test_what_lies_in_the_directories(open_host: OpenHost, paths: list[Path]) -> None:
    filled(open_host, paths)
    names = {path: {file.name for file in path.iterdir()} for path in paths}
    assert names[paths[0]] == {"lock", "slab-0.bin", "stripe.json", "catalog.sqlite"}
    assert names[paths[2]] == {"lock", "slab-2.bin", "stripe.json"}
    assert [(path / f"slab-{i}.bin").stat().st_size // EXTENT for i, path in enumerate(paths)] == [8, 6, 6]
    identities = [json.loads((path / "stripe.json").read_text()) for path in paths]
    assert [found.pop("number") for found in identities] == [0, 1, 2]
    assert identities[0] == identities[1] == identities[2]
    assert len(bytes.fromhex(identities[0].pop("set"))) == 16
    assert identities[0] == {"format": 1, "directories": [str(path) for path in paths]}
    for path in paths:
        assert stat.S_IMODE((path / "stripe.json").stat().st_mode) == 0o600


def test_a_page_that_is_bad_on_one_device_and_all_behind_a_cut_are_misses(
    open_host: OpenHost, paths: list[Path]
) -> None:
    tokens = filled(open_host, paths)
    host = open_host(**options(paths))
    ssd = host.engine.manager.ssd
    entry = ssd.index.get(host.engine.pages(tokens)[10].key)
    number, offset = ssd._slab.locate(entry.slot)
    flip_file(ssd._slab.files[number], offset)
    assert host.load(tokens).tokens == 10 * 4
    os.truncate(ssd._slab.files[1], 0)
    assert "slab-1.bin has 0 bytes" in host.engine.check().problems[0]
    host.engine.close()
    host = open_host(**options(paths))
    assert tokens_of(host.engine, tokens) == STRETCH * 4
    host.keep(tokens)  # an open gives up all slots from the first one on whose bytes are missing
    assert host.load(tokens).tokens == 16 * 4


def test_a_directory_with_a_cache_of_its_own_is_no_further_one(open_host: OpenHost, paths: list[Path]) -> None:
    tokens = filled(open_host, paths[1:2])
    before = snapshot(paths)
    with pytest.raises(StripeError, match="second holds a cache on this directory alone") as caught:
        CacheEngine.from_config(make_config(**options(paths)))
    assert caught.value.hint.startswith("take it out of ssd.stripes")
    assert snapshot(paths) == before
    assert open_host(**options(paths[1:2])).engine.peek(tokens) == len(tokens)


def lose(paths: list[Path]) -> None:
    shutil.rmtree(paths[1])


def empty(paths: list[Path]) -> None:
    shutil.rmtree(paths[2])
    paths[2].mkdir()


def swap(paths: list[Path]) -> None:
    paths[1].rename(paths[1].with_name("aside"))
    paths[2].rename(paths[1])
    paths[1].with_name("aside").rename(paths[2])


def damage(paths: list[Path]) -> None:
    (paths[1] / "stripe.json").write_text('{"format": 1')


def of_the_future(paths: list[Path]) -> None:
    data = json.loads((paths[1] / "stripe.json").read_text())
    (paths[1] / "stripe.json").write_text(json.dumps(data | {"format": 2}))


def name_nothing(paths: list[Path]) -> None:
    """A directory's name that no file system has."""
    data = json.loads((paths[1] / "stripe.json").read_text())
    data["directories"][1] += "\0"
    (paths[1] / "stripe.json").write_text(json.dumps(data))


def lose_the_name(paths: list[Path]) -> None:
    (paths[0] / "stripe.json").unlink()


@pytest.mark.parametrize("change", [lose, empty, swap, damage, of_the_future, name_nothing, lose_the_name])
def test_directories_that_are_not_what_they_were_are_refused_and_left(
    open_host: OpenHost, paths: list[Path], change: Callable[[list[Path]], None]
) -> None:
    filled(open_host, paths)
    change(paths)
    before = snapshot(paths)
    with pytest.raises(StripeError) as caught:
        CacheEngine.from_config(make_config(**options(paths)))
    assert "rm -r" in caught.value.hint
    assert str(paths[0].parent) in caught.value.message
    assert snapshot(paths) == before


def test_the_command_of_a_hint_deletes_these_directories_and_no_others(open_host: OpenHost, tmp_path: Path) -> None:
    """A shell takes a name with a blank for two, and one with a quote for the begin of a text."""
    paths = [tmp_path / "it's a cache", tmp_path / "the second"]
    neighbours = [tmp_path / name for name in ("it", "a", "cache", "the", "second")]
    filled(open_host, paths)
    for neighbour in neighbours:
        neighbour.mkdir()
    for wrong in (paths[:1], paths[1:], paths[::-1], [paths[0], tmp_path / "third"]):
        with pytest.raises(StripeError) as caught:
            CacheEngine.from_config(make_config(**options(wrong)))
        assert shlex.join(map(str, wrong)) in caught.value.hint
    damage([paths[0], paths[0]])
    for _ in paths:  # each names what it can
        with pytest.raises(StripeError) as caught:
            CacheEngine.from_config(make_config(**options(paths)))
        command = re.sub("^.*(?=rm -r)| and the other.*$", "", caught.value.hint)
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert open_host(**options(paths)).engine.check().ok
    assert all(neighbour.is_dir() for neighbour in neighbours)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_adding_and_removing_a_directory_is_refused(open_host: OpenHost, paths: list[Path], count: int) -> None:
    tokens = filled(open_host, paths)
    other = [*paths, paths[0].with_name("fourth")][:count]
    before = snapshot(paths)
    with pytest.raises(StripeError, match="3 directories"):
        CacheEngine.from_config(make_config(**options(other)))
    assert snapshot(paths) == before
    assert tokens_of(open_host(**options(paths)).engine, tokens) == len(tokens) // 4 * 4


def test_a_cache_in_one_directory_takes_no_further_ones(open_host: OpenHost, paths: list[Path]) -> None:
    tokens = filled(open_host, paths[:1])
    assert not (paths[0] / "stripe.json").exists()
    with pytest.raises(StripeError, match="alone"):
        CacheEngine.from_config(make_config(**options(paths)))
    assert tokens_of(open_host(**options(paths[:1])).engine, tokens) == len(tokens) // 4 * 4


def test_another_caches_directory_is_refused(open_host: OpenHost, paths: list[Path], tmp_path: Path) -> None:
    filled(open_host, paths)
    others = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    filled(open_host, others)
    for mixed in ([paths[0], paths[1], others[2]], [others[1], paths[1], paths[2]]):
        with pytest.raises(StripeError, match=r"another cache|not its first") as caught:
            CacheEngine.from_config(make_config(**options(mixed)))
        assert str((paths if mixed[0] == paths[0] else others)[0]) in caught.value.hint.split(", or start empty")[0]
    fresh = tmp_path / "fresh"
    with pytest.raises(StripeError, match="another cache"):
        CacheEngine.from_config(make_config(**options([fresh, paths[1]])))


def test_a_device_that_is_mounted_elsewhere_is_the_same(open_host: OpenHost, paths: list[Path]) -> None:
    tokens = filled(open_host, paths)
    moved = [paths[0], paths[1].with_name("elsewhere"), paths[2]]
    paths[1].rename(moved[1])
    host = open_host(**options(moved))
    assert host.load(tokens).tokens == 16 * 4
    identity = slab.read_stripe(moved[2])
    assert identity.directories == tuple(map(str, moved))


def test_a_kill_while_the_set_is_made_is_no_obstacle(
    open_host: OpenHost, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = Path.replace, []

    def killed(path: Path, target: Path) -> Path:
        if target.name == STRIPE_NAME:
            if len(written) == 2:
                raise KeyboardInterrupt
            written.append(target.parent)
        return real(path, target)

    for path in paths:
        path.mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):  # not in an engine, which would remove what it made
            slab.claim_stripes(paths)
    assert written == paths[:2]
    filled(open_host, paths)


def test_each_directory_is_owned(open_host: OpenHost, paths: list[Path], tmp_path: Path) -> None:
    host = open_host(**options(paths))
    with pytest.raises(DirectoryInUseError, match="second"):
        CacheEngine.from_config(make_config(**options([tmp_path / "other", paths[1]])))
    host.engine.close()
    filled(open_host, paths)


def test_the_same_directory_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_config(**options([tmp_path / "0", tmp_path / "1", tmp_path / "$RANK"]))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InvalidValueError, match="twice"):
        Config.from_dict(data)
    monkeypatch.setenv("RANK", "2")
    config = Config.from_dict(data)
    assert config.ssd.stripes == (tmp_path / "1", tmp_path / "2")
    assert Config.from_dict(config.dump()) == config


def test_an_identity_is_a_file(paths: list[Path], tmp_path: Path) -> None:
    for path in paths:
        path.mkdir()
    (paths[1] / "stripe.json").symlink_to(tmp_path / "victim")
    with pytest.raises(NotARegularFileError, match=r"stripe\.json"):
        slab.claim_stripes(paths)
    assert not (tmp_path / "victim").exists()


def test_a_catalogue_of_one_directory_is_refused_where_there_are_several(
    open_host: OpenHost, paths: list[Path], tmp_path: Path
) -> None:
    """And the other way round: to cut the first file to the whole capacity would cost what lies behind it."""
    filled(open_host, paths)
    with contextlib.closing(sqlite3.connect(paths[0] / "catalog.sqlite", isolation_level=None)) as connection:
        meta = dict(connection.execute("SELECT name, value FROM meta"))
        assert (meta["format_version"], meta["striped"]) == (6, 1)
        connection.execute("UPDATE meta SET value = 0 WHERE name = 'striped'")
        with pytest.raises(StripeError, match="single directory"):
            Catalog(paths[0], extent_bytes=EXTENT, durability="process")
        (paths[0] / "stripe.json").rename(tmp_path / "stripe.json")
        connection.execute("UPDATE meta SET value = 1 WHERE name = 'striped'")
        with pytest.raises(StripeError, match="missing"):
            Catalog(paths[0], extent_bytes=EXTENT, durability="process")


def test_inspect_and_verify_look_into_all_directories(open_host: OpenHost, paths: list[Path]) -> None:
    filled(open_host, paths)
    report = inspect(paths[0])
    assert (report["pages"], report["slots"], report["capacity_bytes"]) == (16, 20, 20 * EXTENT)
    assert [stripe["path"] for stripe in report["stripes"]] == [str(path) for path in paths]
    assert [stripe["bytes"] for stripe in report["stripes"]] == [8 * EXTENT, 6 * EXTENT, 6 * EXTENT]
    assert report["format_version"] == 6
    found = verify(paths[0])
    assert (found["good_pages"], found["bad_pages"]) == (16, 0)
    flip_file(paths[1] / "slab-1.bin", 1)
    flip_file(paths[2] / "slab-2.bin", EXTENT)
    assert [bad["slot"] for bad in verify(paths[0])["bad"]] == [3, 7]


def test_inspect_and_verify_name_a_directory_that_is_missing(open_host: OpenHost, paths: list[Path]) -> None:
    filled(open_host, paths)
    with pytest.raises(StripeError, match="not its first"):
        inspect(paths[1])
    shutil.rmtree(paths[2])
    for look in (inspect, verify):
        with pytest.raises(GdsCacheError, match="third"):
            look(paths[0])
    assert not os.path.exists(paths[2])
