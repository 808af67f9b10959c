"""The SSD section of `gdscache doctor`: what it finds below a directory, tries in it, and makes of that."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from gdscache.commands.doctor import storage
from gdscache.commands.doctor.facts import (
    Asked,
    Facts,
    Found,
    FreeSpace,
    Moved,
    Place,
    Row,
    Ssd,
    answer,
    attempt,
    defaults,
)
from gdscache.commands.doctor.storage import ssd_rows
from gdscache.config import Config
from gdscache.disk.directory import CacheDirectory
from gdscache.disk.slab import slab_name
from gdscache.errors import DirectoryNotWritableError, StorageError
from gdscache.sizes import GIB, MIB
from gdscache.storage.files import Mount, find_mount, probe_direct_io
from gdscache.storage.probe import Ended, run_child
from tests.support.doctor_facts import PLAIN, WHOLE, answered
from tests.support.helpers import WAIT, until
from tests.support.native_parts import has_ring
from tests.support.places import ROOT
from tests.support.posix_transport import PosixTransport
from tests.support.transport_parts import refuse_ring

pytestmark = pytest.mark.suite

MODEL = {"name": "m", "layers": 4, "kv_heads": 8, "head_dim": 128}
NO_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_the_command_leave_no_files(
    gdscache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def ended(place: Path) -> None:
        assert list(tmp_path.iterdir())
        signal.raise_signal(number)

    before = signal.signal(number, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(storage, "probe_direct_io", ended)
            status, _, _ = gdscache("doctor", "--dir", tmp_path)
    finally:
        signal.signal(number, before)
    assert (status, list(tmp_path.iterdir())) == (128 + number, [])


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def link(root: Path, name: str, target: str) -> None:
    """A relative link from `name` to `target`, both below `root`."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(root / target, path.parent))


MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw,data=ordered
22 21 259:1 / /mnt/nvme rw,noatime shared:1 - xfs /dev/nvme0n1p1 rw,attr2
23 21 0:30 / /mnt/nvme\\0402 rw - tmpfs tmpfs rw,size=1g
24 21 9:0 / /raid rw - ext4 /dev/md0 rw
25 21 0:40 / /dev/shm rw - tmpfs first rw
26 21 0:41 / /dev/shm rw - tmpfs second rw
"""
PCI = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"


def nvme(root: Path, name: str = "nvme0", pci: str = PCI) -> str:
    """An NVMe disk with a partition; the path of the disk."""
    block = f"{pci}/nvme/{name}/{name}n1"
    put(
        root,
        {
            f"{pci}/nvme/{name}/model": "FAST 9000   \n",
            f"{block}/queue/rotational": "0\n",
            f"{block}/{name}n1p1/partition": "1\n",
        },
    )
    link(root, f"{block}/device", f"{pci}/nvme/{name}")
    return block


def test_the_mount_is_the_innermost_and_the_last(tmp_path: Path) -> None:
    put(tmp_path, {"proc/self/mountinfo": MOUNTS})

    def mounted(path: str) -> tuple[str, str]:
        found = find_mount(Path(path), tmp_path)
        return found.file_system, found.device

    assert mounted("/mnt/nvme/a/b") == ("xfs", "259:1")
    assert mounted("/mnt/nvmes") == ("ext4", "254:0")  # a longer name is not inside
    assert mounted("/mnt/nvme 2/x") == ("tmpfs", "0:30")
    assert mounted("/dev/shm") == ("tmpfs", "0:41")
    assert find_mount(Path("/mnt/nvme"), tmp_path).options == "rw,noatime,attr2"
    assert find_mount(Path("/"), tmp_path / "none") == Mount()


def disks(root: Path, mount: Mount) -> dict[str, Row]:
    return {row.name: row for row in storage.disk_rows(mount, root)}


@pytest.mark.parametrize(("turns", "value", "verdict"), [("0", "not rotational", "ok"), ("1", "rotational", "warn")])
def test_a_partition_of_an_nvme_disk(tmp_path: Path, turns: str, value: str, verdict: str) -> None:
    block = nvme(tmp_path)
    put(tmp_path, {f"{block}/queue/rotational": turns})
    link(tmp_path, "sys/dev/block/259:1", f"{block}/nvme0n1p1")
    [(name, row)] = disks(tmp_path, Mount("xfs", "/dev/nvme0n1p1", "259:1", "")).items()
    assert (name, row.value, row.verdict) == ("disk nvme0n1", f"FAST 9000, {value}", verdict)
    assert bool(row.next_step) == (verdict == "warn")


def test_the_disks_of_a_raid(tmp_path: Path) -> None:
    put(tmp_path, {"sys/devices/virtual/block/md0/queue/rotational": "0"})
    for index in range(2):
        block = nvme(tmp_path, f"nvme{index}", f"sys/devices/pci0000:00/0000:0{index + 1}:00.0")
        link(tmp_path, f"sys/devices/virtual/block/md0/slaves/nvme{index}n1p1", f"{block}/nvme{index}n1p1")
    link(tmp_path, "sys/dev/block/9:0", "sys/devices/virtual/block/md0")
    assert list(disks(tmp_path, Mount("ext4", "/dev/md0", "9:0", ""))) == ["disk nvme0n1", "disk nvme1n1"]


def test_disks_of_a_subsystem_or_with_a_number_of_their_own_are_found(tmp_path: Path) -> None:
    subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    put(tmp_path, {f"{subsystem}/nvme0n1/queue/rotational": "0", f"{subsystem}/model": "FAST 9000"})
    link(tmp_path, "sys/dev/block/259:0", f"{subsystem}/nvme0n1")
    put(tmp_path, {"sys/class/block/vdz/queue/rotational": "1"})
    for mount, found in (
        (Mount("xfs", "/dev/nvme0n1", "259:0", ""), {"disk nvme0n1": "FAST 9000, not rotational"}),
        (Mount("btrfs", "/dev/vdz", "0:50", ""), {"disk vdz": "model not known, rotational"}),
        (Mount("tmpfs", "tmpfs", "0:41", ""), {}),
    ):
        assert {name: row.value for name, row in disks(tmp_path, mount).items()} == found


def kernel(root: Path, device: str = "259:1", *, has_gpu: bool = True) -> dict[str, Row]:
    return {row.name: row for row in storage.gds_rows(device, has_gpu=has_gpu, root=root)}


def test_what_the_kernel_shows_of_gds(tmp_path: Path) -> None:
    nothing = kernel(tmp_path, has_gpu=False)
    assert {row.verdict for row in nothing.values()} == {"info"}
    assert not any(row.next_step for row in nothing.values())
    assert nothing["nvidia-fs"].data == {"loaded": False, "version": "", "counts": None}
    assert nothing["/proc/modules"].value.startswith("missing")
    assert kernel(tmp_path)["/run/udev"].verdict == "warn"
    put(
        tmp_path,
        {
            "proc/modules": "nvidia_fs 323584 0 - Live 0x0\nnvidia 1 0 - Live 0x0\n",
            "proc/driver/nvidia-fs/version": "version: 2.26.6\n",
            "sys/module/nvidia_fs/parameters/rw_stats_enabled": "1\n",
            "run/udev/data/b259:1": "E:ID_FS_TYPE=xfs\n",
        },
    )
    found = kernel(tmp_path)
    assert {name for name, row in found.items() if row.verdict == "ok"} == {"nvidia-fs", "/run/udev"}
    assert found["nvidia-fs"].data == {"loaded": True, "version": "2.26.6", "counts": True}
    assert "/proc/modules" not in found
    for device in ("259:2", ""):
        assert (row := kernel(tmp_path, device)["/run/udev"]).verdict == "warn"
        assert "udev" in row.next_step
    put(tmp_path, {"proc/modules": "nvidia_fs_not 1 0\n", "sys/module/nvidia_fs/parameters/rw_stats_enabled": "0\n"})
    assert kernel(tmp_path)["nvidia-fs"].verdict == "warn"  # nothing is counted
    (tmp_path / "proc/driver/nvidia-fs/version").unlink()
    assert kernel(tmp_path)["nvidia-fs"].verdict == "info"


def test_libcufile_is_found_in_the_system_and_in_wheels(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"libcufile\.so is not found"):
        storage.find_cufile(tmp_path, [])
    put(tmp_path, {"wheels/nvidia/cu13/lib/libcufile.so.0": ""})
    assert storage.find_cufile(tmp_path, [str(tmp_path / "wheels")]).endswith("cu13/lib/libcufile.so.0")
    put(tmp_path, {"usr/local/cuda-13.0/targets/x86_64-linux/lib/libcufile.so.1.15": ""})
    assert storage.find_cufile(tmp_path, []).endswith("libcufile.so.1.15")


def look(asked: Asked, directory: Path) -> Ssd:
    return storage.find_ssd(asked, directory, "cpu", has_gpu=False)


class Tried(NamedTuple):
    transport: str
    directory: Path
    device: str
    threads: int
    gds: str


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> list[Tried]:
    """No child is started: what would be tried, each with an answer."""
    asked: list[Tried] = []

    def tried(*wanted: Any) -> Found[Moved]:
        asked.append(Tried(*wanted))
        asked[-1].directory.joinpath("left").touch()
        return answered(asked[-1].transport)

    monkeypatch.setattr(storage, "try_transport", tried)
    monkeypatch.setattr(storage, "find_package", lambda name: Found(None, f"{name} is not installed"))
    return asked


@pytest.mark.parametrize(
    ("route", "said"),
    [("auto", "direct or via_cpu: the faster one when the engine opens"), ("direct", "direct (configured)")],
)
def test_the_route_is_what_an_engine_would_take(route: str, said: str) -> None:
    asked = Asked(Config.from_dict({"model": MODEL, "ssd": {"path": "/x", "route": route}, "cpu": {}}))
    assert storage.find_route(asked, answered(kinds=("cuda", "host")).value, "cuda:0") == said


def test_a_directory_that_does_not_exist_is_not_made(no_children: list[Tried], tmp_path: Path) -> None:
    whole = look(defaults(), tmp_path / "a/b")
    found = whole.places[0]
    where = found.directory.data
    assert (where["exists"], where["place"], where["problem"]) == (False, str(tmp_path), "")
    assert list(tmp_path.iterdir()) == []
    assert [tried.transport for tried in no_children] == ["posix", "uring"]
    assert all(Path(tried.directory).is_relative_to(tmp_path) for tried in no_children)
    assert found.mount.file_system
    assert found.space.value
    assert found.direct_io
    json.dumps(dataclasses.asdict(whole))  # all of it is plain data


def test_a_file_in_the_way(no_children: list[Tried], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/below"):
        found = look(defaults(), path)
        assert "is not a directory" in found.places[0].directory.data["problem"]
        row = named(dataclasses.replace(PLAIN, ssd=found))["directory"]
        assert (row.verdict, bool(row.next_step)) == ("fail", True)
    assert no_children == []


@NO_ROOT
def test_a_directory_that_may_not_be_written(no_children: list[Tried], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    found = look(defaults(), tmp_path)
    assert "Permission denied" in found.places[0].directory.data["problem"]
    assert no_children == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_read_only_and_full(
    no_children: list[Tried], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    def refuses(**_: object) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(storage.tempfile, "mkdtemp", refuses)
    found = look(defaults(), tmp_path)
    assert os.strerror(code) in found.places[0].directory.data["problem"]
    assert found.trials == {}
    with pytest.raises(DirectoryNotWritableError, match=os.strerror(code)), storage.scratch(tmp_path):
        pass


def test_an_engine_in_the_directory_is_named(tmp_path: Path) -> None:
    if not Path("/proc/locks").exists():
        pytest.skip("the kernel shows no locks")
    with CacheDirectory.open(tmp_path):
        found = storage.find_directory(tmp_path, tmp_path)
    assert f"process {os.getpid()}" in found.data["holder"]
    assert storage.find_directory(tmp_path, tmp_path).data["holder"] == ""
    (tmp_path / "groups-1").mkdir()
    with CacheDirectory.open(tmp_path / "groups-1"):
        assert f"process {os.getpid()}" in storage.find_directory(tmp_path, tmp_path).data["holder"]


@pytest.mark.parametrize(("version", "said"), [("5", "format 5, which the next engine makes 6"), ("6", "format 6")])
def test_the_format_of_a_cache_is_told(version: str, said: str, tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "formats" / version / "closed.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    found = storage.find_directory(tmp_path / "a", tmp_path / "a")
    assert found.data["format"] == int(version)
    assert said in judged(directory=found)["directory"].value
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
    (tmp_path / "a").rename(tmp_path / "groups-0")
    (tmp_path / "groups-1").mkdir()
    assert storage.find_directory(tmp_path, tmp_path).data["format"] == int(version)
    (tmp_path / "groups-0").rename(tmp_path / "a")
    (tmp_path / "a" / "catalog.sqlite-wal").touch()
    assert storage.find_directory(tmp_path / "a", tmp_path / "a").data["format"] is None
    (tmp_path / "catalog.sqlite").write_bytes(b"no database")
    assert storage.find_directory(tmp_path, tmp_path).data["format"] is None


def test_free_space_counts_the_slab_that_is_there(tmp_path: Path) -> None:
    assert storage.find_space(tmp_path, tmp_path).slab == 0
    for number in (0, 2):
        with (tmp_path / slab_name(number)).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (number + 1) * MIB)
    assert storage.find_space(tmp_path, tmp_path).slab >= MIB
    assert storage.find_space(tmp_path, tmp_path, 1).slab == 0
    assert storage.find_space(tmp_path, tmp_path, 2).slab >= 3 * MIB
    with (tmp_path / slab_name(2, 1)).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 4 * MIB)
    assert storage.find_space(tmp_path, tmp_path, 2).slab >= 7 * MIB
    assert storage.find_space(tmp_path, tmp_path, 0).slab < 4 * MIB


def test_a_file_system_without_a_size_has_no_log_to_look_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=0, f_bfree=0, f_bavail=0, f_frsize=4096))
    space: Found[FreeSpace] = attempt(lambda: storage.find_space(tmp_path, tmp_path))
    [row] = answer("free space", space, "warn", "see the system log for the device")
    assert (row.value, row.verdict) == ("the file system does not report its size", "warn")
    assert "the slab fits" in row.next_step


def test_free_space_counts_the_slabs_of_all_pools_and_of_pages_that_do_not_fit(tmp_path: Path) -> None:
    for number, below in enumerate(("", "plain", "groups-0", "groups-1-2/plain"), start=1):
        (tmp_path / below).mkdir(parents=True, exist_ok=True)
        for name in (slab_name(0), slab_name(0, 1)):
            with (tmp_path / below / name).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, number * MIB)
    assert 20 * MIB <= storage.find_space(tmp_path, tmp_path).slab < 21 * MIB
    assert storage.find_space(tmp_path, tmp_path, 1).slab == 0


def test_what_is_tried_is_what_the_config_asks_for(no_children: list[Tried], tmp_path: Path) -> None:
    def tries(**ssd: Any) -> list[tuple[str, str, int]]:
        no_children.clear()
        asked = Asked(Config.from_dict({"model": MODEL, "ssd": {"path": str(tmp_path), **ssd}}))
        chosen = look(asked, tmp_path).places[0].chosen
        assert chosen
        assert chosen.value
        assert chosen.value.name == ssd.get("transport", "auto")
        return [(one.transport, one.gds, one.threads) for one in no_children]

    each = [(name, "auto", 3) for name in ("posix", "uring")]
    assert tries(transport="posix", threads=3) == each  # once, although it is the chosen one
    assert tries(transport="uring", threads=3) == each
    assert tries(gds="off") == [(name, "off", 8) for name in ("posix", "uring", "auto")]
    assert tries(transport="kvikio", gds="on")[2] == ("kvikio", "auto", 8)


def test_every_directory_of_the_slab_is_looked_at_with_the_transport_of_the_first(
    no_children: list[Tried], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths[:2]:
        path.mkdir()
    paths[2].touch()  # no directory
    answers = {"auto": answered("uring"), "uring": answered("uring", direct=False)}

    def tried(*wanted: Any) -> Found[Moved]:
        no_children.append(Tried(*wanted))
        return answers.get(no_children[-1].transport, answered(no_children[-1].transport))

    monkeypatch.setattr(storage, "try_transport", tried)
    ssd = {"path": str(paths[0]), "stripes": [str(path) for path in paths[1:]], "capacity": "64MiB"}
    asked = Asked(Config.from_dict({"model": MODEL, "ssd": ssd}))
    found = look(asked, paths[0])
    places = [(one.transport, one.directory.relative_to(tmp_path).parts[0]) for one in no_children]
    assert places == [("posix", "a"), ("uring", "a"), ("auto", "a"), ("uring", "b")]
    rows = named(dataclasses.replace(PLAIN, ssd=found), asked)
    assert rows["ssd.transport, stripe 1"].value == "auto: uring"
    assert rows["directory, stripe 2"].verdict == "fail"
    assert rows["directory, stripe 2"].next_step == "set ssd.stripes to a directory"
    assert "ssd.transport, stripe 2" not in rows
    assert [path.name for path in paths[0].iterdir()] == [path.name for path in paths[1].iterdir()] == []
    elsewhere = Asked(asked.config, directory=tmp_path)
    assert len(look(elsewhere, tmp_path).places) == 1
    json.dumps(dataclasses.asdict(found))


def a_trial(directory: Path, transport: str = "posix") -> Moved:
    return storage.carry_out(transport, directory, "cpu", 2, "off", 2 * MIB)


def in_a_child(directory: Path, transport: str = "posix", deadline_s: float = WAIT) -> Found[Moved]:
    return storage.try_transport(transport, directory, "cpu", 2, "off", nbytes=2 * MIB, deadline_s=deadline_s)


def test_a_trial_says_what_it_moved_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_ring(monkeypatch)
    found = a_trial(tmp_path, "auto")
    said = (found.name, found.memory, found.word, found.direct, found.nbytes)
    assert said == ("posix", "host", "host", not probe_direct_io(tmp_path), 2 * MIB)
    assert found.reason == "the device is cpu; no io_uring: io_uring_setup answers Operation not permitted"
    assert min(found.write_s, found.read_s) > 0


def test_counters_of_others_make_no_gds_of_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(100))
    monkeypatch.setattr(storage, "gds_operations", lambda: (n := next(counts), n))
    assert a_trial(tmp_path).word == "host"


@pytest.mark.parametrize(
    ("kind", "described", "counted", "word"),
    [
        ("cuda", {"compat": "off"}, True, "gds"),
        ("cuda", {"compat": "off"}, False, "compat"),
        ("cuda", {"compat": "on"}, True, "compat"),  # kvikio without cuFile: others were counted
        ("cuda", {"gds": False}, True, "compat"),
        ("cuda", {"gds": True}, True, "gds"),
        ("cuda", {}, False, "compat"),
        ("host", {"compat": "off", "gds": True}, True, "host"),
    ],
)
def test_gds_is_said_only_of_what_was_counted(kind: str, described: Any, counted: bool, word: str) -> None:
    assert storage.word_for(kind, described, counted=counted) == word


class Forgetful(PosixTransport):
    """Reads too little, and says that it did not."""

    name = "forgetful"

    def read(self, file: int, offset: int, memory: Any) -> int:
        moved = super().read(file, offset, memory)
        memory[5:9] = bytes(4)
        return moved


def test_bytes_that_differ_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the bytes read into memory are not those written, from "):
        a_trial(tmp_path, f"{__name__}:Forgetful")


HANGS = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with open(os.environ["PIDS"], "w") as file:
    file.write(f"{os.getpid()} {grandchild.pid}")
time.sleep(300)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_transport_that_hangs_is_killed_with_what_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(pids))
    monkeypatch.setattr(storage, "run_child", lambda code, arguments, seconds: run_child(HANGS, arguments, seconds))
    place = tmp_path / "ssd"
    place.mkdir()
    began = time.monotonic()
    with storage.scratch(place) as own:
        found = in_a_child(own, deadline_s=3.0)
    assert time.monotonic() - began < WAIT
    assert found.value is None
    assert "no answer within 3 s: killed" in found.cause
    assert found.hint
    assert list(place.iterdir()) == []
    left = [int(pid) for pid in pids.read_text().split()]  # it had come so far
    until(lambda: not any(map(alive, left)), "both are gone")


def test_an_error_in_the_child_keeps_its_cause_and_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_here(code: str, arguments: object, seconds: float) -> Ended:
        exec(code)
        return Ended(0, capsys.readouterr().out)

    monkeypatch.setattr(storage, "run_child", run_here)
    found = in_a_child(tmp_path, "broken.module:Class")
    assert found.value is None
    assert "broken.module:Class" in found.cause
    assert found.hint.startswith("name a subclass")
    assert "No such file" in in_a_child(tmp_path / "none").cause


# --- rows --------------------------------------------------------------------------------------------------------


def a_directory(**about: Any) -> Row:
    facts = {"path": "/mnt/nvme", "exists": True, "place": "/mnt/nvme", "holder": "", "problem": "", "hint": ""}
    return storage.directory_row({**facts, "format": None, **about})


PLACE = Place(
    directory=a_directory(),
    space=Found(FreeSpace(100 * GIB, 0)),
    mount=Mount("xfs", "/dev/nvme0n1", "259:0", "rw"),
    direct_io=Found(""),
    chosen=answered("kvikio", memory="cuda", word="gds", kinds=("cuda", "host")),
)
BEST = Ssd(
    places=(PLACE,),
    kernel=(),
    packages={"libcufile": Found("/usr/lib/libcufile.so"), "kvikio": Found("26.10"), "nixl": Found("1.5.1")},
    trials={"posix": answered(), "kvikio": answered("kvikio", memory="cuda", word="gds")},
    route=Found("direct (configured)"),
)


def wanting(**ssd: Any) -> Asked:
    return Asked(Config.from_dict({"model": MODEL, "ssd": {"path": "/mnt/nvme", **ssd}}))


def named(facts: Facts, asked: Asked | None = None) -> dict[str, Row]:
    rows = list(ssd_rows(facts, asked or defaults()))
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def judged(asked: Asked | None = None, stripes: tuple[Place, ...] = (), **changes: Any) -> dict[str, Row]:
    """Rows of the best machine, with fields of `Ssd` and of its first `Place` replaced."""
    mine = {name: changes.pop(name) for name in list(changes) if name in PLACE.__dataclass_fields__}
    places = (dataclasses.replace(PLACE, **mine), *stripes)
    return named(dataclasses.replace(WHOLE, ssd=dataclasses.replace(BEST, places=places, **changes)), asked)


def test_without_a_directory_the_section_says_so() -> None:
    (row,) = ssd_rows(WHOLE, defaults())
    assert (row.verdict, row.next_step) == ("info", "")
    assert "none was given" in row.value


def test_the_best_machine_gets_all_that_can_be_asked_for() -> None:
    rows = judged(wanting(transport="kvikio", gds="on"))
    assert {row.verdict for row in rows.values()} == {"ok"}
    assert rows["ssd.gds"].data == "gds"
    assert "32 MiB of GPU memory (gds)" in rows["transport kvikio"].value
    assert rows["transport posix"].data["write_gb_s"] == pytest.approx(3.3554432)


NOTHING = {"ssd.transport", "ssd.gds"}
COMPAT = answered("kvikio", memory="cuda", word="compat")
HELD = a_directory(holder="process 7")


@pytest.mark.parametrize(
    ("changes", "ssd", "verdict", "names"),
    [
        ({"chosen": COMPAT}, {"gds": "on"}, "fail", {"ssd.gds"}),
        ({"chosen": answered()}, {"gds": "on", "transport": "posix"}, "fail", {"ssd.gds"}),
        ({"chosen": COMPAT}, {"gds": "auto"}, "fail", set()),
        ({"route": Found(None, "the planes are on cpu", "set it to auto")}, {"route": "direct"}, "fail", {"ssd.route"}),
        ({"chosen": Found(None, "no answer")}, {"gds": "on"}, "fail", NOTHING),
        ({"chosen": Found(None, "no answer")}, {}, "fail", {"ssd.transport"}),
        ({"space": Found(FreeSpace(GIB, 0))}, {"capacity": "2GiB"}, "fail", {"free space"}),
        ({"space": Found(FreeSpace(GIB, GIB))}, {"capacity": "2GiB"}, "fail", set()),
        ({"directory": HELD}, {}, "warn", {"directory"}),
        ({"directory": a_directory(format=4)}, {}, "fail", {"directory"}),
        ({"directory": a_directory(format=5)}, {}, "fail", set()),
        ({"direct_io": Found("open answers EINVAL")}, {}, "warn", {"O_DIRECT"}),
        ({"mount": Mount("tmpfs", "tmpfs", "0:4", "rw")}, {}, "warn", {"file system"}),
        ({"mount": Mount("nfs4", "host:/x", "0:4", "rw")}, {}, "warn", {"file system"}),
        ({"trials": {"posix": Found(None, "No space left")}}, {}, "fail", {"transport posix"}),
        ({"trials": {"kvikio": Found(None, "no answer within 60 s: killed")}}, {}, "warn", {"transport kvikio"}),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(changes: dict[str, Any], ssd: dict[str, Any], verdict: str, names: set[str]) -> None:
    rows = judged(wanting(**ssd), **changes)
    assert {name for name, row in rows.items() if row.verdict == verdict} == names
    assert all(row.next_step for row in rows.values() if row.verdict in ("warn", "fail"))


def stripe(device: str, free: int, slab: int = 0) -> Place:
    """`free` and `slab` in GiB."""
    mount = Mount("xfs", "/dev/x", device, "rw")
    return Place(PLACE.directory, Found(FreeSpace(free * GIB, slab * GIB)), mount, (), Found(""), answered())


@pytest.mark.parametrize(
    ("stripes", "short"),
    [
        ([stripe("9:1", 4), stripe("9:2", 4)], []),
        ([stripe("9:1", 4), stripe("9:2", 3)], ["free space, stripe 2"]),
        ([stripe("9:1", 3, slab=1), stripe("9:2", 1, slab=3)], []),
        ([stripe("9:1", 7), stripe("9:1", 7)], ["free space, stripe 1", "free space, stripe 2"]),  # 8 on one device
        ([stripe("9:1", 6, slab=1), stripe("9:1", 6, slab=1)], []),
        ([stripe("", 4), stripe("", 4)], []),  # nobody knows the devices
        ([stripe("259:0", 99), stripe("9:1", 4)], []),
    ],
)
def test_each_directory_has_room_for_its_part_of_the_slab(stripes: list[Place], short: list[str]) -> None:
    rows = judged(wanting(capacity="12GiB"), stripes=tuple(stripes))
    assert [name for name, row in rows.items() if row.verdict == "fail"] == short
    assert all("ssd.capacity to" in rows[name].next_step for name in short)


def test_io_uring_that_is_forbidden_is_no_defect_of_the_configuration() -> None:
    lacks: Found[Moved] = Found(None, "io_uring_setup answers Operation not permitted", "set transport to posix")
    rows = judged(wanting(), trials={"posix": answered(), "uring": lacks})
    assert (rows["transport uring"].verdict, rows["transport uring"].value) == ("warn", lacks.cause)
    assert "seccomp" in rows["transport uring"].next_step
    assert rows["transport posix"].verdict == "ok"
    plain = named(dataclasses.replace(PLAIN, ssd=dataclasses.replace(BEST, trials={"uring": lacks})))
    assert (plain["transport uring"].verdict, plain["transport uring"].next_step) == ("info", "")


def test_nothing_of_gds_is_missed_where_there_is_no_gpu() -> None:
    lacks: Found[Any] = Found(None, "not installed", "install it")
    packages = {"libcufile": lacks, "kvikio": lacks, "nixl": lacks}
    ssd = dataclasses.replace(BEST, packages=packages, trials={"posix": answered(), "nixl": lacks})
    rows = named(dataclasses.replace(PLAIN, ssd=ssd))
    assert {row.verdict for row in rows.values()} == {"ok", "info"}
    assert not any(row.next_step for row in rows.values())


@pytest.fixture
def run(gdscache: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, Any]]:
    """Run `gdscache doctor --json`: (exit status, rows of the section SSD by name)."""

    def runs(*arguments: str | Path) -> tuple[int, Any]:
        status, out, _ = gdscache("doctor", "--json", *arguments)
        sections = {section["title"]: section["rows"] for section in json.loads(out)["sections"]}
        return status, {row["name"]: row for row in sections["SSD"]}

    return runs


def test_the_command_tries_a_directory_and_leaves_nothing(
    run: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(storage, "find_package", lambda name: Found(None, f"{name} is not installed"))
    status, rows = run("--dir", tmp_path / "none")
    assert (status, rows["directory"]["data"]["exists"]) == (0, False)
    assert rows["transport posix"]["data"]["word"] == "host"
    assert rows["transport posix"]["data"]["read_gb_s"] > 0
    assert rows["transport uring"]["verdict"] == ("ok" if has_ring() else "info")
    assert not has_ring() or rows["transport uring"]["data"]["read_gb_s"] > 0
    assert "transport kvikio" not in rows
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_children")
def test_dir_goes_before_the_path_of_the_config(run: Callable[..., tuple[int, Any]], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    settings = f"ssd: {{path: '{tmp_path}/there', capacity: 8MiB, gds: on, transport: posix}}\nhost_buffer: 8MiB\n"
    file.write_text("model: {name: m, layers: 4, kv_heads: 8, head_dim: 128}\n" + settings)
    status, rows = run("--config", file)
    assert rows["directory"]["data"]["path"] == str(tmp_path / "there")
    assert (status, rows["ssd.gds"]["verdict"], rows["ssd.transport"]["verdict"]) == (1, "fail", "ok")
    assert run("--config", file, "--dir", tmp_path / "here")[1]["directory"]["data"]["path"] == str(tmp_path / "here")
    assert sorted(tmp_path.iterdir()) == [file]
    assert set(run()[1]) == {"directory"}
