"""`gdscache inspect` and `gdscache verify`: what they say is what is on disk, and they leave it as it was."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine, errors
from gdscache.commands.bench import machine
from gdscache.commands.inspect import reading, tables, verification
from gdscache.commands.inspect.owner import Owner, find_owner
from gdscache.commands.inspect.reading import inspect
from gdscache.commands.inspect.verification import verify
from gdscache.disk import directory
from gdscache.disk.catalog_file import NEW_NAME
from gdscache.disk.directory import LOCK_NAME, CacheDirectory
from gdscache.storage.base import PROBE_PREFIX
from tests.support.disk_parts import raw
from tests.support.helpers import drop_from, flip_file, layout_of, make_config, prompt, quiet, run, until

SLOTS = 12
Gdscache = Callable[..., tuple[int, str, str]]
Rows = dict[int, tuple[bytes, bytes, int]]  # slot -> key, parent, recency


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that a real engine left: two salts and none, some pages evicted."""
    path = tmp_path_factory.mktemp("built") / "cache"
    with CacheEngine.from_config(make_config(path, ssd=SLOTS)) as engine:
        for seed, salt, pages in [(1, "", 3), (2, "red", 4), (3, "", 2), (4, "blue", 4), (5, "red", 2)]:
            run(engine, prompt(seed, pages), salt)
    assert not (path / "catalog.sqlite-wal").exists()
    return path


@pytest.fixture
def cache(built: Path, tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    shutil.copytree(built, path)
    return path


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """As `cp` sees a directory under an engine that never closes: a log, and rows that are doomed."""
    source, path = tmp_path / "source", tmp_path / "killed"
    with CacheEngine.from_config(make_config(source, ssd=SLOTS)) as engine:
        run(engine, prompt(1, 4))
        run(engine, prompt(2, 3), "red")
        drop_from(engine, "ssd")
        assert not len(engine.manager.tiers["ssd"].index)
        subprocess.run(["cp", "-r", str(source), str(path)], check=True)
    assert (path / "catalog.sqlite-wal").stat().st_size
    return path


def rows(path: Path) -> Rows:
    with raw(path) as connection:
        found = connection.execute("SELECT place, key, parent, recency FROM pages")
        return {slot: tuple(rest) for slot, *rest in found}


def state(path: Path, *ignored: str) -> dict[str, tuple[str, int, int]]:
    """Bytes, time of the last change and mode of every file, and of the directory."""
    found = {
        file.name: (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns, file.stat().st_mode)
        for file in path.iterdir()
        if file.name not in ignored
    }
    return found if ignored else found | {".": ("", path.stat().st_mtime_ns, path.stat().st_mode)}


def extent() -> int:
    return layout_of(make_config()["model"]).extent_bytes


def named(report: dict[str, Any], what: str = "bad") -> dict[int, tuple[str, str, int | None]]:
    return {page["slot"]: (page["key"], page["cause"], page["layer"]) for page in report[what]}


def test_inspect_says_what_the_catalogue_has(cache: Path) -> None:
    before = state(cache)
    report = inspect(cache)
    assert state(cache) == before
    here = rows(cache)
    layout = layout_of(make_config()["model"])
    assert report["owner"]["state"] == "free"
    assert (report["format_version"], report["extent_bytes"], report["slots"]) == (6, layout.extent_bytes, SLOTS)
    assert (report["pages"], report["free_slots"]) == (len(here), SLOTS - len(here))
    assert report["bytes"] == len(here) * layout.page_bytes
    assert report["capacity_bytes"] == SLOTS * layout.extent_bytes
    assert {f["name"]: f["bytes"] for f in report["files"]} == {
        name: (cache / name).stat().st_size for name in ("slab-0.bin", "catalog.sqlite")
    }
    assert report["unusable_rows"] == {}
    assert not report["suspect"]
    assert json.loads(json.dumps(report)) == report


def test_namespaces_have_their_fields_pages_and_order(cache: Path) -> None:
    found = inspect(cache)["namespaces"]
    salts = {n["fields"]["request_salt"]: n for n in found if n["fields"]}
    assert set(salts) == {"", "red", "blue"}
    used = []
    with raw(cache) as connection:
        for namespace in found:
            select = (
                "SELECT count(*), coalesce(sum(length), 0), max(recency) FROM pages "
                "JOIN namespaces ON namespace = id WHERE digest = ?"
            )
            pages, size, last = connection.execute(select, (bytes.fromhex(namespace["digest"]),)).fetchone()
            assert (namespace["pages"], namespace["bytes"]) == (pages, size), namespace
            assert namespace["fields"]["name"] == "tiny"
            used.append(last if pages else -(1 << 63))
    assert used == sorted(used, reverse=True)
    assert len(set(used)) > 1


def test_inspect_beside_an_engine_and_a_store_that_runs(tmp_path: Path, gdscache: Gdscache) -> None:
    path = tmp_path / "cache"
    with CacheEngine.from_config(make_config(path, ssd=200, gpu=8, cpu=8)) as engine:
        run(engine, prompt(1, 3))
        quiet(engine)
        files = [path / name for name in ("catalog.sqlite", "catalog.sqlite-wal", "slab-0.bin", "lock")]
        before = [(f.stat().st_mtime_ns, f.stat().st_size) for f in files]
        until(lambda: inspect(path)["pages"] == 3, "the commit is seen")
        report = inspect(path)
        assert [(f.stat().st_mtime_ns, f.stat().st_size) for f in files] == before
        assert (report["owner"]["state"], report["owner"]["pid"]) == ("in use", os.getpid())
        assert report["owner"]["command"]
        assert (report["slots"], report["free_slots"], report["extent_bytes"]) == (200, 197, extent())
        assert report["capacity_bytes"] == 200 * extent()
        assert (report["retention"]["priorities"], len(report["namespaces"])) == ({"0": 3}, 1)
        status, out, err = gdscache("inspect", path)
        assert (status, err) == (0, "")
        assert f"in use by process {os.getpid()}" in out
        assert any(line.split()[:2] == ["pages", "3,"] for line in out.splitlines())
        for seed in range(2, 12):
            run(engine, prompt(seed, 3), f"salt {seed % 3}")
            inspect(path)
        until(lambda: inspect(path)["pages"] == 33, "the later commits are seen")
        assert run(engine, prompt(11, 3), f"salt {11 % 3}") == 8  # the engine does not mind
    assert inspect(path)["pages"] == 33
    assert not (path / "status").exists()
    assert verify(path)["good_pages"] == 33


def test_a_killed_owners_log_is_read_and_left(killed: Path) -> None:
    before = state(killed)
    report = inspect(killed)
    assert state(killed) == before
    assert report["owner"]["state"] == "free"
    assert {f["name"]: f["bytes"] for f in report["files"]} == {
        name: (killed / name).stat().st_size for name in ("slab-0.bin", "catalog.sqlite", "catalog.sqlite-wal")
    }
    assert report["pages"] == 7  # doomed, and not deleted yet
    checked = verify(killed)
    assert state(killed, LOCK_NAME) == {name: s for name, s in before.items() if name not in (LOCK_NAME, ".")}
    assert (checked["pages"], checked["good_pages"], checked["bad"]) == (7, 7, [])
    flip_file(killed / "slab-0.bin", 2 * extent())
    assert set(named(verify(killed))) == {2}


def test_a_catalogue_that_is_opened_while_it_is_read_is_read_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a log the file counts as unchanging: a commit in that time must not be half seen."""
    genuine, calls = reading.read_contents, []

    def slow(*arguments: Any) -> Any:
        found = genuine(*arguments)
        calls.append(len(found.pages))
        if len(calls) == 1:
            with CacheEngine.from_config(make_config(cache, ssd=SLOTS)) as engine:
                assert engine.clear()
        return found

    monkeypatch.setattr(reading, "read_contents", slow)
    assert inspect(cache)["pages"] == 0
    assert len(calls) == 2
    assert calls[0] > 0


def test_the_owner_is_found_without_taking_the_lock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = fcntl.flock

    def refused(*arguments: Any) -> None:
        raise AssertionError("a lock was taken")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert inspect(cache)["owner"]["state"] == "free"
    monkeypatch.setattr(fcntl, "flock", genuine)
    with CacheDirectory.open(cache):
        monkeypatch.setattr(fcntl, "flock", refused)
        assert inspect(cache)["owner"]["pid"] == os.getpid()
        (cache / LOCK_NAME).write_bytes(b"[")  # its holder has not said its name
        assert find_owner(cache) == Owner("in use", os.getpid())
        monkeypatch.setattr(fcntl, "flock", genuine)
    lock = {"pid": 1, "host": "elsewhere.example", "started": "then", "command": "x"}
    (cache / LOCK_NAME).write_text(json.dumps(lock))
    (cache / "catalog.sqlite-wal").touch()
    assert find_owner(cache).state == "unknown"  # a container's, whose locks are not shown
    (cache / "catalog.sqlite-wal").unlink()
    assert find_owner(cache).state == "free"
    assert find_owner(cache, cache / "none").state == "unknown"
    (cache / LOCK_NAME).write_text(json.dumps(lock | {"pid": float("inf")}))  # which is no process's number
    assert find_owner(cache).state == "free"
    (cache / LOCK_NAME).unlink()
    assert find_owner(cache).state == "free"
    (cache / LOCK_NAME).mkdir()
    assert find_owner(cache).state == "unknown"


def test_verify_of_a_good_directory_changes_the_lock_only(cache: Path) -> None:
    probe = cache / f"{PROBE_PREFIX}left"
    probe.write_bytes(b"of a killed owner")
    before = state(cache, LOCK_NAME)
    calls: list[tuple[int, int]] = []
    report = verify(cache, lambda done, total, text: calls.append((done, total)))
    assert state(cache, LOCK_NAME) == before
    pages = len(rows(cache))
    assert (report["pages"], report["good_pages"], report["bad_pages"], report["unchecked_pages"]) == (
        pages, pages, 0, 0,
    )  # fmt: skip
    assert report["bytes"] == pages * extent()
    assert report["gb_per_second"] > 0
    assert calls[-1] == (pages, pages)
    assert json.loads(json.dumps(report)) == report
    with CacheDirectory.open(cache):  # it was given back
        pass


@pytest.mark.parametrize("piece", [1, 3 * extent(), 8 << 20])
def test_verify_names_exactly_the_damaged_pages(cache: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "PIECE_BYTES", piece)
    here = rows(cache)
    bounds = layout_of(make_config()["model"]).layer_bounds
    slots = sorted(here)
    damage = {slots[0]: (0, bounds[0][0]), slots[2]: (1, bounds[1][1] - 1), slots[-1]: (2, bounds[2][0])}
    for slot, (_, offset) in damage.items():
        flip_file(cache / "slab-0.bin", slot * extent() + offset)
    flip_file(cache / "slab-0.bin", slots[2] * extent() + bounds[2][0])  # only the first bad layer is named
    flip_file(cache / "slab-0.bin", slots[1] * extent() + bounds[-1][1])  # padding
    for slot in set(range(SLOTS)) - set(slots):
        flip_file(cache / "slab-0.bin", slot * extent())  # a free slot
    report = verify(cache)
    assert named(report) == {s: (here[s][0].hex()[:16], "checksum", layer) for s, (layer, _) in damage.items()}
    assert report["bad_pages"] == 3
    assert report["good_pages"] == len(here) - 3


@pytest.mark.parametrize("cut", [1, extent() - 1, extent(), 5 * extent() + 17])
def test_pages_that_a_torn_slab_lacks_are_bad(cache: Path, cut: int) -> None:
    size = SLOTS * extent() - cut
    os.truncate(cache / "slab-0.bin", size)
    whole = size // extent()
    lost = {slot for slot in rows(cache) if slot >= whole}
    assert lost
    report = verify(cache)
    assert {(slot, cause) for slot, (_, cause, _) in named(report).items()} == {(slot, "slot") for slot in lost}
    seen = inspect(cache)
    assert (seen["slots"], seen["unusable_rows"]) == (whole, {"slot": len(lost)})
    assert seen["pages"] + len(lost) == len(rows(cache))


def test_a_slab_that_ends_under_the_reader_is_a_short_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine, here = os.preadv, rows(cache)

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        return genuine(descriptor, [b[: max(0, 2 * extent() - offset)] for b in buffers], offset)

    monkeypatch.setattr(os, "preadv", short)
    found = named(verify(cache))
    assert {slot: cause for slot, (_, cause, _) in found.items()} == {s: "short_read" for s in here if s >= 2}


def test_only_the_page_that_cannot_be_read_is_bad(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine, broken = os.preadv, sorted(rows(cache))[3]

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if offset <= broken * extent() < offset + sum(map(len, buffers)):
            raise OSError(5, "Input/output error")
        return genuine(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    report = verify(cache)
    assert {slot: cause for slot, (_, cause, _) in named(report).items()} == {broken: "io_error"}
    assert report["bytes"] == report["good_pages"] * extent()


def test_rows_that_the_next_engine_would_delete_are_bad_and_counted_alike(cache: Path) -> None:
    slots = sorted(rows(cache))
    with raw(cache) as connection:
        change = "UPDATE pages SET {} WHERE place = ?"
        connection.execute(change.format("key = x'00'"), slots[0:1])
        connection.execute(change.format("length = 0"), slots[1:2])
        connection.execute(change.format("namespace = 999"), slots[2:3])
        connection.execute(
            change.format(f"recency = -9, key = (SELECT key FROM pages WHERE place = {slots[4]})"), slots[3:4]
        )
        connection.execute("UPDATE pages SET place = 10000 WHERE place = ?", slots[5:6])
        connection.execute("UPDATE pages SET place = -4 WHERE place = ?", slots[6:7])
        connection.execute("DELETE FROM checksums WHERE place = ?", slots[7:8])
        connection.execute("UPDATE checksums SET sums = x'0011223344556677' WHERE place = ?", slots[8:9])
    report = verify(cache)
    assert {slot: cause for slot, (_, cause, _) in named(report).items()} == {
        slots[0]: "row",
        slots[1]: "length",
        slots[2]: "namespace",
        slots[3]: "duplicate",
        10000: "slot",
        -4: "slot",
        slots[7]: "no_checksums",
        slots[8]: "no_checksums",
    }
    counted = inspect(cache)["unusable_rows"]
    with CacheEngine.from_config(make_config(cache, ssd=SLOTS)) as engine:
        lost = engine.stats()["tiers"]["ssd"]["lost_at_recovery"]
    assert counted == lost


def test_pages_without_a_description_are_checked_by_a_layout_beside_them_or_said_to_be_unchecked(
    cache: Path, gdscache: Gdscache
) -> None:
    here = rows(cache)
    with raw(cache) as connection:
        select = "SELECT place FROM pages JOIN namespaces ON namespace = id WHERE description LIKE ?"
        red = [slot for (slot,) in connection.execute(select, ('%"request_salt": "red"%',))]
        connection.execute("UPDATE namespaces SET description = '{}' WHERE description LIKE '%\"red\"%'")
    assert red
    assert verify(cache)["good_pages"] == len(here)
    flip_file(cache / "slab-0.bin", red[0] * extent())
    report = verify(cache)
    assert (set(named(report)), set(named(report, "unchecked"))) == (set(), {red[0]})
    assert gdscache("verify", cache)[0] == 2
    with raw(cache) as connection:  # one that says another thing than its digest, and one that is no text
        connection.execute("UPDATE namespaces SET description = replace(description, '\"layers\": 3', '\"layers\": 2')")
        connection.execute("UPDATE namespaces SET description = CAST(x'ff00' AS TEXT) WHERE description = '{}'")
    report = verify(cache)
    assert (report["good_pages"], report["bad"], report["unchecked_pages"]) == (0, [], len(here))
    assert all(n["fields"] is None for n in inspect(cache)["namespaces"])
    flip_file(cache / "slab-0.bin", red[0] * extent())


def test_verify_drops_what_it_read_from_the_page_cache(cache: Path) -> None:
    slab = cache / "slab-0.bin"
    machine.drop_cached([slab])
    if machine.resident_bytes(slab):
        pytest.skip("this file system keeps its files in memory")
    assert slab.read_bytes()
    assert machine.resident_bytes(slab)  # what reading leaves
    machine.drop_cached([slab])
    assert verify(cache)["bytes"]
    assert machine.resident_bytes(slab) == 0


def test_verify_keeps_engines_out_and_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "VERIFICATION_S", 0.1)
    seen: list[str] = []

    def progress(done: int, total: int, text: str) -> None:
        if not seen:
            assert inspect(cache)["owner"]["pid"] == os.getpid()
            with pytest.raises(errors.DirectoryInUseError) as caught:
                CacheEngine.from_config(make_config(cache, ssd=SLOTS))
            seen.append(str(caught.value))

    assert verify(cache, progress)["bad"] == []
    assert seen


def test_a_directory_in_use_is_refused_and_left(tmp_path: Path, gdscache: Gdscache) -> None:
    path = tmp_path / "cache"
    with CacheEngine.from_config(make_config(path)) as engine:
        run(engine, prompt(1, 2))
        lock = (path / LOCK_NAME).read_bytes()
        status, out, err = gdscache("verify", path)
        assert (status, out) == (2, "")
        assert err.startswith(f"error: {path} is in use by this process (pid {os.getpid()} ")
        assert (path / LOCK_NAME).read_bytes() == lock
        with pytest.raises(errors.DirectoryInUseError):  # the engine still has its lock
            CacheDirectory.open(path)


def sql(text: str, *, fresh: bool = False) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        if fresh:
            (path / "catalog.sqlite").unlink()
        with raw(path) as connection:
            connection.execute(text)

    return change


def linked(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).rename(path / "real")
        (path / name).symlink_to("real")

    return change


DAMAGE: dict[str, tuple[Callable[[Path], object], type[errors.GdsCacheError], str]] = {
    "not a database": (lambda p: (p / "catalog.sqlite").write_bytes(b"x" * 9000), errors.IOFailedError, "corrupt"),
    "empty": (lambda p: os.truncate(p / "catalog.sqlite", 0), errors.IOFailedError, "catalog"),
    "cut": (lambda p: os.truncate(p / "catalog.sqlite", 8192), errors.IOFailedError, "corrupt"),
    "version": (
        sql("UPDATE meta SET value = 7 WHERE name = 'format_version'"),
        errors.CatalogVersionError,
        "format version 7",
    ),
    "extent": (sql("UPDATE slabs SET extent_bytes = -4096"), errors.IOFailedError, "extent_bytes -4096"),
    "foreign database": (sql("CREATE TABLE mine(x)", fresh=True), errors.IOFailedError, "not a catalogue"),
    "lost table": (sql("DROP TABLE checksums"), errors.IOFailedError, "does not have the tables"),
    "no slab": (lambda p: (p / "slab-0.bin").unlink(), errors.IOFailedError, "slab-0.bin does not exist"),
    "linked slab": (linked("slab-0.bin"), errors.NotARegularFileError, "slab-0.bin"),
    "linked catalogue": (linked("catalog.sqlite"), errors.NotARegularFileError, "catalog.sqlite"),
    "no catalogue": (lambda p: (p / "catalog.sqlite").unlink(), errors.IOFailedError, "no catalog.sqlite is in it"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("look", [inspect, verify], ids=["inspect", "verify"])
def test_a_directory_that_is_not_right_is_refused_with_its_cause(
    cache: Path, look: Callable[[Path], Any], damage: str
) -> None:
    change, error, says = DAMAGE[damage]
    change(cache)
    before = state(cache, LOCK_NAME)
    with pytest.raises(error, match=says) as caught:
        look(cache)
    assert caught.value.hint
    assert state(cache, LOCK_NAME) == before


@pytest.mark.parametrize("seed", range(40))
def test_no_damage_of_the_catalogue_is_a_traceback(cache: Path, seed: int) -> None:
    path = cache / "catalog.sqlite"
    offset = int.from_bytes(hashlib.blake2b(bytes([seed]), digest_size=4).digest(), "little") % path.stat().st_size
    for at in range(offset, min(offset + 1 + seed * 8, path.stat().st_size)):
        flip_file(path, at, seed % 8)
    for look in (inspect, verify):
        with contextlib.suppress(errors.GdsCacheError):
            report = look(cache)
            for table in (tables.inspect_tables if look is inspect else tables.verify_tables)(report):
                assert table.lines(80)


@pytest.mark.parametrize("look", [inspect, verify], ids=["inspect", "verify"])
def test_a_path_that_is_no_cache_is_refused_and_left_alone(tmp_path: Path, look: Callable[[Path], Any]) -> None:
    with pytest.raises(errors.IOFailedError, match="does not exist"):
        look(tmp_path / "none")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(errors.NotADirectoryPathError):
        look(file)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / NEW_NAME).write_text("x")
    with pytest.raises(errors.IOFailedError, match=r"no catalog\.sqlite is in it"):
        look(foreign)
    assert [f.name for f in foreign.iterdir()] == [NEW_NAME]  # and no lock


def test_exit_statuses_and_json(cache: Path, gdscache: Gdscache) -> None:
    status, out, err = gdscache("inspect", cache, "--json")
    assert (status, err, json.loads(out)) == (0, "", inspect(cache) | {"path": str(cache)})
    status, out, err = gdscache("verify", cache, "--json")
    said = json.loads(out)
    assert (status, err, said["schema"], said["bad"]) == (0, "", "gdscache.verify/2", [])
    slot, (key, _, _) = sorted(rows(cache).items())[1]
    flip_file(cache / "slab-0.bin", slot * extent())
    status, out, err = gdscache("verify", cache, "--json")
    assert (status, err) == (1, "")
    assert [(p["slot"], p["key"], p["layer"]) for p in json.loads(out)["bad"]] == [(slot, key.hex()[:16], 0)]
    status, out, _ = gdscache("verify", cache)
    assert status == 1
    assert any(line.split()[:2] == [str(slot), key.hex()[:16]] for line in out.splitlines())
    for command in ("inspect", "verify"):
        status, out, err = gdscache(command, cache / "none")
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert "hint: " in err


def test_tables_fit_and_obey_nothing(tmp_path: Path, gdscache: Gdscache) -> None:
    path = tmp_path / "cache"
    config = make_config(path, ssd=SLOTS)
    config["model"] |= {"name": "[red]m[/] " + "n" * 200, "weights": "w" * 200, "salt": "s\x1b[2J" * 20}
    with CacheEngine.from_config(config) as engine:
        run(engine, prompt(1, 3))
        run(engine, prompt(2, 3), "t\n\x1b]0;x\x07" * 30)
    with raw(path) as connection:
        connection.execute("UPDATE pages SET recency = recency - ?", (1 << 62,))
        connection.execute("UPDATE pages SET recency = recency + 9223372036854775000 WHERE place % 2")
        connection.execute("INSERT INTO pages VALUES (99, zeroblob(32), zeroblob(32), 1, 1, 1, 0)")
    flip_file(path / "slab-0.bin", 0)
    for command, status in (("inspect", 0), ("verify", 1)):
        got, out, err = gdscache(command, path)
        assert (got, err) == (status, "")
        assert "\x1b" not in out
    for table in (*tables.inspect_tables(inspect(path)), *tables.verify_tables(verify(path))):
        lines = table.lines(80)
        assert max(map(len, lines)) <= 80
        assert all(word in "\n".join(table.lines()) for line in lines for word in line.split() if word.isdecimal())
    assert "[red]m" in gdscache("inspect", path)[1]


def test_an_interrupted_verify_is_not_a_verdict(
    cache: Path, gdscache: Gdscache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verification._Check, "run", interrupted)
    status, out, err = gdscache("verify", cache)
    assert (status, out) == (130, "")
    assert "interrupted" in err
    with CacheDirectory.open(cache):
        pass
