"""Every way to lose a lock: a second owner is refused, or the first one stops; and it says so. And who may not come in.

At the public face: an engine, what others do to its files, a second engine in another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from gdscache import PageStatus
from gdscache.commands.inspect.reading import inspect
from gdscache.errors import (
    DirectoryInUseError,
    DirectoryPermissionsError,
    GdsCacheError,
    IOFailedError,
    NotARegularFileError,
)
from tests.support.helpers import WAIT, Host, make_config, prompt, quiet, until
from tests.support.processes import Child

TOKENS, OTHER = prompt(1, 3), prompt(2, 3)
NAMES = ("lock", "slab-0.bin", "catalog.sqlite", "catalog.sqlite-wal")


def _own(pipe: Connection) -> None:
    """Open the directories that are named, and close them where None is; what came of it."""
    logging.disable(logging.CRITICAL)
    host = None
    while True:
        path, answer = pipe.recv(), dict[str, object]()
        try:
            if path is not None:
                host = Host(make_config(path, cpu=None))
                answer["refused"] = ""
            elif host is not None:
                host.store(prompt(9, 3)).result(WAIT)  # what a second owner does
                answer["served"] = host.load(prompt(9, 3)).tokens
                host.engine.close()
                host = None
        except GdsCacheError as error:
            answer["refused"] = type(error).__name__
        pipe.send(answer)


class Second:
    """An engine in another process."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def ask(self, path: Path | None) -> dict[str, Any]:
        self._child.send(path)
        answer: dict[str, Any] = self._child.receive()
        return answer


@pytest.fixture(scope="module")
def second() -> Iterator[Second]:
    with Child(_own) as child:
        yield Second(child)


# -- the ways --------------------------------------------------------------------------------------------------------


def unlink(*names: str) -> Callable[[Path], None]:
    def way(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    way.__name__ = f"unlink {' and '.join(names)}"
    return way


def rename(name: str) -> Callable[[Path], None]:
    def way(path: Path) -> None:
        (path / name).rename(path / f"{name}.old")

    way.__name__ = f"rename {name}"
    return way


def replace(name: str) -> Callable[[Path], None]:
    def way(path: Path) -> None:
        copy = path / "copy"
        subprocess.run(["cp", "-p", path / name, copy], check=True)  # not in this process: SQLite's locks are its
        copy.replace(path / name)

    way.__name__ = f"replace {name} by a copy"
    return way


def link(name: str) -> Callable[[Path], None]:
    def way(path: Path) -> None:
        (path / name).rename(path.parent / name)
        (path / name).symlink_to(path.parent / name)

    way.__name__ = f"put a link in the place of {name}"
    return way


def move_directory(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def swap_directory(path: Path) -> None:
    subprocess.run(["cp", "-rp", path, path.with_name("copy")], check=True)
    path.rename(path.with_name("elsewhere"))
    path.with_name("copy").rename(path)


def empty_directory(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


WAYS: list[Any] = [
    *map(unlink, NAMES),
    *[
        pytest.param(how(name), marks=pytest.mark.suite, id=how(name).__name__)
        for how in (rename, replace, link)
        for name in NAMES
    ],
    unlink("lock", "slab-0.bin"),
    unlink("lock", "catalog.sqlite", "catalog.sqlite-wal"),
    unlink("lock", "slab-0.bin", "catalog.sqlite"),
    unlink("slab-0.bin", "catalog.sqlite", "catalog.sqlite-wal"),
    move_directory,
    swap_directory,
    empty_directory,
]


# Where the pages are afterwards, of ways that harm neither slab nor catalogue.
LEFT = {
    "unlink lock": "cache", "rename lock": "cache", "replace lock by a copy": "cache", "move_directory": "elsewhere",
    "swap_directory": "elsewhere",
}  # fmt: skip


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Host]:
    """An engine without a CPU tier, whose SSD tier has the pages of `TOKENS`."""
    host = Host(make_config(tmp_path / "cache", cpu=None))
    assert host.store(TOKENS).result(WAIT).dropped == {}
    quiet(host.engine)
    assert host.load(TOKENS).tokens == len(TOKENS)
    yield host
    host.engine.close()


def has_stopped(host: Host, hit: Any) -> None:
    """Loads are misses with a cause, stores are dropped and counted, and all of `stats`, `check` and the log say so."""
    until(lambda: host.engine.lookup(TOKENS).tokens == 0, "calls have it looked at, and go by what was found")
    blocks = host.take(len(hit.pages))
    report = host.engine.load(hit, blocks).result()  # of a hit from before
    assert report.tokens == 0
    assert set(report.pages) <= {PageStatus.LOCK_LOST}
    host.give(blocks)
    assert host.engine.lookup(TOKENS).tokens == 0
    before = host.engine.stats()["misses"]["lock_lost"]
    assert before >= 3
    dropped = host.store(OTHER).result(WAIT).dropped
    assert set(dropped.values()) == {"lock_lost"}
    quiet(host.engine)
    stats = host.engine.stats()
    assert stats["dropped"]["lock_lost"] == 3
    assert stats["tiers"]["ssd"]["quarantine"]["stopped"]
    problems = host.engine.check().problems
    assert any("the tier has stopped" in problem for problem in problems), problems


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_after_every_way_to_lose_a_lock_the_first_stops_or_a_second_is_refused(
    first: Host, second: Second, tmp_path: Path, way: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache"
    hit = first.engine.lookup(TOKENS)
    way(path)
    answer = second.ask(path)
    shared = [name for name in ("slab-0.bin", "catalog.sqlite") if answer["refused"] == "" and old(first, path / name)]
    assert not shared, f"two owners of {shared}"
    has_stopped(first, hit)
    assert "the SSD tier has stopped" in caplog.text
    first.engine.close()
    if answer["refused"] == "":
        assert second.ask(None)["served"] == len(OTHER), "the first one harmed the second"
    second.ask(None)
    if left := LEFT.get(way.__name__):
        again = Host(make_config(tmp_path / left, cpu=None))
        assert again.load(TOKENS).tokens == len(TOKENS)
        again.engine.close()


def old(host: Host, path: Path) -> bool:
    """Whether the engine has the file that the path names."""
    try:
        wanted = os.stat(path)
    except FileNotFoundError:
        return False
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found = os.stat(f"/proc/self/fd/{name}")
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


@pytest.mark.parametrize("name", ["lock", "slab-0.bin"])
@pytest.mark.parametrize("look", ["store", "check"])
def test_the_first_notices_before_it_writes(first: Host, tmp_path: Path, name: str, look: str) -> None:
    """Without a second owner, a load or a lookup in between."""
    (tmp_path / "cache" / name).unlink()
    if look == "store":
        assert set(first.store(OTHER).result(WAIT).dropped.values()) == {"lock_lost"}
    else:
        report = first.engine.check()
        assert any(name in problem for problem in report.problems)
        assert not report.ok


def descriptors(path: Path) -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == str(path):
                found.append(int(name))
    return found


@pytest.mark.parametrize("name", ["lock", "slab-0.bin"])
def test_a_lock_that_a_child_gave_up_is_taken_again_or_the_first_stops(
    first: Host, second: Second, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "cache"
    for descriptor in descriptors(path / name):
        unlock = f"import fcntl; fcntl.flock({descriptor}, fcntl.LOCK_UN)"
        subprocess.run([sys.executable, "-c", unlock], pass_fds=[descriptor], check=True)
    assert second.ask(path)["refused"] == "DirectoryInUseError"  # the other lock holds
    assert first.store(OTHER).result(WAIT).dropped == {}
    assert first.load(TOKENS).tokens == len(TOKENS)
    with (path / name).open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_foreign_reader_cannot_make_the_log_grow_nor_keep_the_engine_from_working(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    host = Host(make_config(path, cpu=None))
    host.store(TOKENS).result(WAIT)
    assert not (path / "catalog.sqlite-shm").exists()
    read = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], timeout=0.1); c.execute('BEGIN');"
        "print(c.execute('SELECT count(*) FROM pages').fetchone())"
    )
    done = subprocess.run([sys.executable, "-c", read, path / "catalog.sqlite"], capture_output=True, text=True)
    assert "locked" in done.stderr
    assert host.load(TOKENS).tokens == len(TOKENS)
    host.engine.close()


def test_a_catalogue_that_another_program_reads_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    Host(make_config(path, cpu=None)).engine.close()
    hold = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('BEGIN');"
        "print(c.execute('SELECT count(*) FROM pages').fetchone(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(path / "catalog.sqlite")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        reader.stdout.readline()
        with pytest.raises((DirectoryInUseError, IOFailedError)):
            Host(make_config(path, cpu=None))
        reader.communicate("")
    Host(make_config(path, cpu=None)).engine.close()


# -- who may not come in ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o720, 0o1777])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(DirectoryPermissionsError, match="chmod go-w"):
        Host(make_config(path))
    assert list(path.iterdir()) == []
    path.chmod(0o755)
    Host(make_config(path)).engine.close()


@pytest.mark.parametrize("name", [*NAMES, "status"])
def test_a_hard_link_is_refused_and_what_it_leads_to_is_left(tmp_path: Path, name: str) -> None:
    path, victim = tmp_path / "cache", tmp_path / "victim"
    Host(make_config(path)).engine.close()
    victim.write_bytes(b"precious" * 1000)
    (path / name).unlink(missing_ok=True)
    os.link(victim, path / name)
    with pytest.raises(NotARegularFileError, match="hard link"):
        Host(make_config(path))
    assert victim.read_bytes() == b"precious" * 1000
    (path / name).unlink()
    Host(make_config(path)).engine.close()


# -- catalogues that were set aside ----------------------------------------------------------------------------------


def test_catalogues_that_were_set_aside_stay_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    kept: list[str] = []
    for turn in range(6):
        Host(make_config(path)).engine.close()
        kept = [file["name"] for file in inspect(path)["set_aside"]]
        assert len(kept) == min(turn, 4)
        assert [(path / name).read_bytes() for name in kept] == [b"damage %d" % n for n in range(turn)][-4:]
        (path / "catalog.sqlite").write_bytes(b"damage %d" % turn)
    assert len(kept) == 4


def test_the_log_is_cut_when_a_transaction_made_it_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gdscache.disk import catalog_file

    monkeypatch.setattr(catalog_file, "WAL_BYTES", 64 << 10)
    path = tmp_path / "cache"
    host = Host(make_config(path, cpu=None, ssd=64))
    largest = 0
    for seed in range(12):
        host.store(prompt(seed, 4)).result(WAIT)
        largest = max(largest, (path / "catalog.sqlite-wal").stat().st_size)
    assert largest <= 2 * (64 << 10)
    host.engine.close()
    with contextlib.closing(sqlite3.connect(path / "catalog.sqlite")) as connection:
        assert connection.execute("SELECT count(*) FROM pages").fetchone() == (48,)


def test_the_copy_of_a_directory_in_use_opens(first: Host, tmp_path: Path) -> None:
    copy = tmp_path / "copied"
    shutil.copytree(tmp_path / "cache", copy, ignore=lambda *_: ["catalog.sqlite"])  # SQLite's locks are this process's
    subprocess.run(["cp", tmp_path / "cache" / "catalog.sqlite", copy], check=True)
    assert inspect(copy)["pages"] == 3
    host = Host(make_config(copy, cpu=None))
    assert host.load(TOKENS).tokens == len(TOKENS)
    host.engine.close()
