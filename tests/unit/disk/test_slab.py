"""The slab file: allocated in full, cut and grown, and never trusted beyond the bytes it had."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections import namedtuple
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache import errors
from gdscache.disk import slab as slab_module
from gdscache.disk.directory import CacheDirectory
from gdscache.disk.slab import Slab, SlabIO
from gdscache.sizes import about

EXTENT = 8192
Usage = namedtuple("Usage", "total used free")


def fill(slab: Slab) -> bytes:
    data = os.urandom(slab.nbytes)
    slab.path.write_bytes(data)
    return data


def test_a_new_slab_is_allocated_in_full_and_private(tmp_path: Path) -> None:
    slab = Slab.open(tmp_path, EXTENT, 5)
    status = slab.path.stat()
    assert slab.path == tmp_path / "slab-0.bin"
    assert slab.files == (slab.path,)
    assert status.st_size == slab.nbytes == 5 * EXTENT
    assert status.st_blocks * 512 >= 5 * EXTENT
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert (slab.slots, slab.extent_bytes, slab.valid_slots) == (5, EXTENT, 0)


def test_slots_lie_one_after_another_and_nowhere_else(tmp_path: Path) -> None:
    slab = Slab.open(tmp_path, EXTENT, 3)
    assert [slab.locate(i)[1] for i in range(3)] == [0, EXTENT, 2 * EXTENT]
    assert slab.locate(2) == (0, 2 * EXTENT)
    for slot in (-1, 3, 1 << 40):
        with pytest.raises(errors.SlotRangeError, match=str(slot)):
            slab.locate(slot)[1]


@pytest.mark.parametrize(("size", "valid"), [(0, 0), (1, 0), (EXTENT - 1, 0), (EXTENT, 1), (3 * EXTENT - 1, 2)])
def test_a_truncated_slab_is_valid_as_far_as_whole_slots_go(tmp_path: Path, size: int, valid: int) -> None:
    data = fill(Slab.open(tmp_path, EXTENT, 4))
    os.truncate(tmp_path / "slab-0.bin", size)
    slab = Slab.open(tmp_path, EXTENT, 4)
    assert slab.valid_slots == valid
    assert slab.path.read_bytes() == data[:size] + bytes(4 * EXTENT - size)


def test_holes_are_filled(tmp_path: Path) -> None:
    with open(tmp_path / "slab-0.bin", "wb") as file:
        file.truncate(64 * EXTENT)
    slab = Slab.open(tmp_path, EXTENT, 64)
    assert slab.path.stat().st_blocks * 512 >= slab.nbytes


@pytest.mark.parametrize(("extent", "slots"), [(EXTENT, 0), (EXTENT, -1), (0, 4)])
def test_a_slab_of_nothing_is_refused(tmp_path: Path, extent: int, slots: int) -> None:
    with pytest.raises(errors.CapacityError, match=r"ssd\.capacity"):
        Slab.open(tmp_path, extent, slots)
    assert not list(tmp_path.iterdir())


def test_more_than_the_disk_has_is_refused_before_writing(tmp_path: Path) -> None:
    slots = shutil.disk_usage(tmp_path).total * 2 // EXTENT
    with pytest.raises(errors.NoSpaceError, match=r"needs .* in all") as caught:
        Slab.open(tmp_path, EXTENT, slots)
    assert "ssd.capacity" in caught.value.hint
    assert not list(tmp_path.iterdir())
    with pytest.raises(errors.NoSpaceError):  # far beyond what an offset can say
        Slab.open(tmp_path, 1 << 40, 1 << 40)


def test_both_figures_count_what_the_slab_already_occupies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = fill(Slab.open(tmp_path, EXTENT, 4))
    monkeypatch.setattr(slab_module.shutil, "disk_usage", lambda _: Usage(1, 0, EXTENT))
    assert Slab.open(tmp_path, EXTENT, 5).valid_slots == 4  # one more slot fits exactly
    monkeypatch.setattr(slab_module.shutil, "disk_usage", lambda _: Usage(1, 0, EXTENT - 1))
    with pytest.raises(errors.NoSpaceError, match=f"needs {about(EXTENT)} more .* {about(EXTENT - 1)} free") as caught:
        Slab.open(tmp_path, EXTENT, 6)
    assert "free 1 MiB there" in caught.value.hint  # a part of ssd.capacity: its bytes say nothing of the whole
    slab = Slab.open(tmp_path, EXTENT, 5)
    assert slab.path.read_bytes() == data + bytes(EXTENT)
    monkeypatch.setattr(slab_module.shutil, "disk_usage", lambda _: Usage(1, 0, 0))
    assert Slab.open(tmp_path, EXTENT, 5).valid_slots == 5  # a full disk does not keep a slab from reopening
    monkeypatch.setattr(slab_module.shutil, "disk_usage", lambda _: Usage(0, 0, 0))
    assert Slab.open(tmp_path, EXTENT, 6).slots == 6  # ramfs does not report its size


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, errors.NoSpaceError), (errno.EDQUOT, errors.NoSpaceError), (errno.EFBIG, errors.IOFailedError)],
)
def test_an_allocation_that_fails_half_way_leaves_things_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    def half(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, max(os.fstat(fd).st_size, length // 2))
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(slab_module.os, "posix_fallocate", half)
        with pytest.raises(error, match=re.escape(os.strerror(number))):
            Slab.open(tmp_path, EXTENT, 8)
        assert not list(tmp_path.iterdir())
    data = fill(Slab.open(tmp_path, EXTENT, 4))
    descriptors = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(slab_module.os, "posix_fallocate", half)
        with pytest.raises(error):
            Slab.open(tmp_path, EXTENT, 64)
    assert (tmp_path / "slab-0.bin").read_bytes() == data
    assert set(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("make", ["link", "directory", "fifo", "device"])
def test_only_a_regular_file_will_do(tmp_path: Path, make: str) -> None:
    victim, cache = tmp_path / "victim", tmp_path / "cache"
    victim.write_text("precious")
    cache.mkdir()
    path = cache / "slab-0.bin"
    if make == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
            os.close(os.open(path, os.O_RDWR))
        except PermissionError:
            pytest.skip("this user may not make or open device nodes here")
    else:
        {"link": lambda: path.symlink_to(victim), "directory": path.mkdir, "fifo": lambda: os.mkfifo(path)}[make]()
    with pytest.raises(errors.NotARegularFileError, match=r"slab-0\.bin"):
        Slab.open(cache, EXTENT, 4)
    assert victim.read_text() == "precious"


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(errors.DirectoryNotWritableError):
        Slab.open(tmp_path / "gone", EXTENT, 4)


# -- several directories ----------------------------------------------------------------------------------------------

MANY = 1 << 20  # bytes of an extent: four to a stretch


def directories(tmp_path: Path, count: int = 3) -> list[Path]:
    paths = [tmp_path / f"disk{i}" for i in range(count)]
    for path in paths:
        path.mkdir()
    return paths


@given(st.integers(2, 5), st.integers(1, 80), st.sampled_from([4096, 1 << 20, 3 << 20, 4 << 20, 5 << 20]))
def test_slots_fill_the_files_exactly_and_neighbours_stay_together(count: int, slots: int, extent: int) -> None:
    stretch = -(-(4 << 20) // extent)
    assert stretch == slab_module.stretch_slots(extent)
    slab = Slab(tuple(Path(f"slab-{i}.bin") for i in range(count)), extent, slots, slots, stretch)
    places = [slab.locate(slot) for slot in range(slots)]
    for number in range(count):
        offsets = [offset for file, offset in places if file == number]
        assert offsets == [i * extent for i in range(len(offsets))]  # in order, no gap: its share fills the file
        assert len(offsets) == slab_module._share(number, count, stretch, slots)
    for slot in range(1, slots):
        (before, at), (file, offset) = places[slot - 1], places[slot]
        assert (file, offset) == (before, at + extent) if slot % stretch else file == (before + 1) % count


@pytest.mark.parametrize(("file", "left", "valid"), [(0, 8, 17), (0, 7, 15), (1, 0, 4), (1, 4, 16), (2, 3, 11)])
def test_what_a_file_lacks_voids_all_slots_from_there(tmp_path: Path, file: int, left: int, valid: int) -> None:
    first, *others = directories(tmp_path)
    slab = Slab.open(first, MANY, 17, others)
    os.truncate(slab.files[file], left * MANY)
    assert Slab.open(first, MANY, 17, others).valid_slots == valid


@pytest.mark.parametrize(("before", "after"), [(13, 30), (30, 13), (12, 13)])
def test_growing_and_shrinking_keep_the_bytes_of_each_slot(tmp_path: Path, before: int, after: int) -> None:
    first, *others = directories(tmp_path)
    slab = Slab.open(first, MANY, before, others)
    for slot in range(before):
        number, offset = slab.locate(slot)
        with open(slab.files[number], "r+b") as file:
            file.seek(offset)
            file.write(bytes([slot]) * 64)
    again = Slab.open(first, MANY, after, others)
    assert again.valid_slots == min(before, after)
    assert sum(path.stat().st_size for path in again.files) == MANY * max(before, after)
    again.cut()
    assert sum(path.stat().st_size for path in again.files) == MANY * after
    for slot in range(again.valid_slots):
        number, offset = again.locate(slot)
        with open(again.files[number], "rb") as file:
            file.seek(offset)
            assert file.read(64) == bytes([slot]) * 64


def test_one_directory_that_is_too_small_undoes_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = directories(tmp_path)
    usage = lambda path: Usage(1, 0, 0 if path == others[1] else 1 << 40)  # noqa: E731
    monkeypatch.setattr(slab_module.shutil, "disk_usage", usage)
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.NoSpaceError, match="disk2"):
        Slab.open(first, MANY, 17, others)
    assert [list(path.iterdir()) for path in (first, *others)] == [[], [], []]
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_an_open_that_is_refused_cuts_no_file(tmp_path: Path) -> None:
    first, *others = directories(tmp_path)
    slab = Slab.open(first, MANY, 30, others)
    before = [path.stat().st_size for path in slab.files]
    os.link(slab.files[1], tmp_path / "link")
    with pytest.raises(errors.NotARegularFileError):
        Slab.open(first, MANY, 13, others)
    assert [path.stat().st_size for path in slab.files] == before


def test_the_directories_of_files_that_were_made_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(slab_module, "flush_directory", flushed.append)
    first, *others = directories(tmp_path)
    slab = Slab.open(first, MANY, 17, others)
    assert flushed == [first, *others]
    slab.files[1].unlink()
    Slab.open(first, MANY, 17, others)
    assert flushed[3:] == others[:1]


def test_a_small_slab_leaves_later_directories_empty(tmp_path: Path) -> None:
    first, *others = directories(tmp_path)
    assert len(others) == 2
    stretch = slab_module.stretch_slots(MANY)
    for slots, shares in ((1, [1, 0, 0]), (stretch, [stretch, 0, 0]), (stretch + 1, [stretch, 1, 0])):
        slab = Slab.open(first, MANY, slots, others)
        assert [path.stat().st_size for path in slab.files] == [share * MANY for share in shares]
        assert slab.check() == []
        assert Slab.open(first, MANY, slots, others).valid_slots == slots


def test_what_became_of_the_files_is_told(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    slab = Slab.open(directories[0], EXTENT, 5000, directories[1:])
    first, second = slab.files
    assert slab.check() == []
    os.truncate(second, second.stat().st_size - 1)
    assert [str(second) in problem and "bytes of" in problem for problem in slab.check()] == [True]
    os.truncate(second, second.stat().st_size + 1)
    assert slab.check() == []
    copy = first.with_name("copy")
    shutil.copy(first, copy)
    copy.replace(first)
    assert [("replaced" in problem, str(first) in problem) for problem in slab.check()] == [(True, True)]
    first.unlink()
    assert [("is gone" in problem, str(first) in problem) for problem in slab.check()] == [(True, True)]


def test_shards_have_files_of_their_own_with_the_same_slots(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    stretch = slab_module.stretch_slots(EXTENT)
    slots = stretch + 3
    slab = Slab.open(directories[0], EXTENT, slots, directories[1:], shards=3)
    names = ["slab-0.bin", "slab-1.bin", "slab-0.0.1.bin", "slab-1.0.1.bin", "slab-0.0.2.bin", "slab-1.0.2.bin"]
    assert [file.name for file in slab.files] == names
    assert [file.parent for file in slab.files] == directories * 3
    assert [file.stat().st_size for file in slab.files] == [stretch * EXTENT, 3 * EXTENT] * 3
    assert (slab.nbytes, slab.directories, slab.shards, slab.valid_slots) == (3 * slots * EXTENT, 2, 3, 0)
    assert slab.locate(stretch + 1) == (1, EXTENT)
    for shard in range(3):
        mine = slab.of(shard)
        assert (mine.files, mine.shards, mine.locate(stretch + 1)) == (slab.files[2 * shard :][:2], 1, (1, EXTENT))
        assert mine.check() == []
        again = Slab.open(directories[0], EXTENT, slots, directories[1:], shards=3, shard=shard)
        assert (again.files, again.inodes, again.valid_slots) == (mine.files, mine.inodes, slots)
    os.truncate(slab.files[5], EXTENT)
    assert (len(slab.check()), len(slab.of(2).check()), slab.of(1).check()) == (1, 1, [])
    assert Slab.open(directories[0], EXTENT, slots, directories[1:], shards=3).valid_slots == stretch + 1
    assert slab.check() == []


@pytest.mark.parametrize(("shards", "shard"), [(0, None), (2, 2), (2, -1)])
def test_shards_that_there_are_not(tmp_path: Path, shards: int, shard: int | None) -> None:
    with pytest.raises(errors.InvalidValueError):
        Slab.open(tmp_path, EXTENT, 2, shards=shards, shard=shard)
    assert not list(tmp_path.iterdir())


def test_a_slab_of_more_slots_than_a_place_can_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.CapacityError, match="at most 1,099,511,627,776 slots"):
        Slab.open(tmp_path, EXTENT, (1 << 40) + 1)
    assert not list(tmp_path.iterdir())


def test_a_shard_is_read_and_written_by_itself(tmp_path: Path) -> None:
    """What the transport opens is the files of one shard, and slots lie there as in any other."""
    slab = Slab.open(tmp_path, EXTENT, 4, shards=2)
    opened: list[str] = []
    transport = mock.Mock(open=lambda path: opened.append(path.name) or len(opened))
    io = SlabIO(slab, transport, 1)
    assert opened == ["slab-0.0.1.bin"]
    assert list(io.stretches(np.array([1, 2]), 1 << 20)) == [(1, EXTENT, 0, 2)]
    with pytest.raises(IndexError):
        SlabIO(slab, transport, 2)


def test_the_files_of_each_shard_are_locked(tmp_path: Path) -> None:
    Slab.open(tmp_path, EXTENT, 4, shards=2)
    with CacheDirectory.open(tmp_path) as owner:
        owner.hold_slabs(shards=(1,))
        for name, held in (("slab-0.bin", False), ("slab-0.0.1.bin", True)):
            with (tmp_path / name).open("rb") as file, contextlib.ExitStack() as expected:
                if held:
                    expected.enter_context(pytest.raises(BlockingIOError))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert owner.lost(thorough=True) == ""
        (tmp_path / "slab-0.0.1.bin").unlink()
        assert "slab-0.0.1.bin is gone" in owner.lost(thorough=True)
