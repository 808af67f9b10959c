"""The SSD tier's directories: whether they are usable, their disks, and each transport's speed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gdscache.commands.doctor.facts import Asked, FreeSpace, Place, Ssd
from gdscache.commands.doctor.report import Found, Row, Verdict, attempt
from gdscache.commands.doctor.trial import Moved, Trial, try_transport
from gdscache.commands.inspect.owner import find_owner
from gdscache.commands.inspect.reading import caches_below
from gdscache.disk.catalog_file import FORMAT_VERSION, OLD_VERSION, format_version
from gdscache.errors import DirectoryNotWritableError
from gdscache.runtime.files import text_of
from gdscache.storage.base import Switch
from gdscache.storage.cufile import find_cufile
from gdscache.storage.files import Mount, find_mount, probe_direct_io
from gdscache.tiers import ssd_route as routes

SCRATCH_PREFIX = ".gdscache-doctor-"
TRANSPORTS = ("posix", "uring", "cufile", "kvikio", "nixl")
THREADS = 8
ROOT = Path("/")  # of /proc, /sys and /run, which tests replace
_FLAGS = {"0": False, "1": True, "N": False, "Y": True}


def find_ssd(asked: Asked, directory: Path, device: str, *, has_gpu: bool) -> Ssd:
    """Examine a directory and those of `ssd.stripes`, and move bytes in them. Removes its files.

    Every transport is tried in `directory`, the chosen one in all directories. `device`: `cpu`, `cuda:N`. A missing
    directory's nearest existing parent is examined and written to instead.
    """
    packages = {"libcufile": attempt(find_cufile)} | {name: find_package(name) for name in ("kvikio", "nixl")}
    ready = {name: packages[name].value is not None for name in ("kvikio", "nixl")}
    ready["cufile"] = packages["libcufile"].value is not None and device.startswith("cuda")
    trials: dict[str, Found[Moved]] = {}
    wanted = [name for name in TRANSPORTS if ready.get(name, True)]
    ssd = asked.config.ssd
    used = ssd.transport if ssd else ""

    def tried(transport: str, inside: Path) -> Found[Moved]:
        """`gds` is off if the configuration says off, else auto: the check compares "on" with the result."""
        gds: Switch = "off" if ssd and ssd.gds == "off" else "auto"
        with scratch(inside) as own:
            return try_transport(Trial(transport, str(own), device, ssd.threads if ssd else THREADS, gds))

    first = find_place(directory, 0, wanted, used, tried, trials)
    if used == "auto" and first.chosen and first.chosen.value:  # an engine chooses by ssd.path, for all directories
        used = first.chosen.value.name
    more = [find_place(path, number, (), used, tried, {}) for number, path in enumerate(asked.stripes, start=1)]
    chosen = first.chosen.value if first.chosen else None
    route = attempt(lambda: find_route(asked, chosen, device)) if chosen and ssd else None
    kernel = tuple(gds_rows(first.mount.device, has_gpu=has_gpu))
    return Ssd((first, *more), kernel, packages, trials, route)


def find_route(asked: Asked, chosen: Moved, device: str) -> str:
    """The result of `ssd.route`. Raises `TransportUnavailableError`."""
    assert asked.config.ssd is not None, "the configuration asks for an SSD tier"
    keep = asked.config.cpu is not None
    choice = routes.decided(asked.config.ssd.route, chosen.kinds, torch.device(device), keep=keep)
    if choice is None:
        return "direct or via_cpu: the faster one when the engine opens"
    return f"{choice.route} ({choice.reason})"


def find_place(
    directory: Path,
    number: int,
    transports: Sequence[str],
    used: str,
    tried: Callable[[str, Path], Found[Moved]],
    trials: dict[str, Found[Moved]],
) -> Place:
    """Examine directory `number` of a slab. Adds the result of each of `transports` there to `trials`. `used`: the
    transport chosen for the directory; empty for none."""
    place = nearest(directory)
    found = find_directory(directory, place)
    mount = find_mount(place)
    disks = attempt(lambda: tuple(disk_rows(mount)))
    direct: Found[str] | None = None
    chosen: Found[Moved] | None = None
    if not found.data["problem"]:
        with scratch(place) as inside:
            direct = attempt(lambda: probe_direct_io(inside))
            trials |= {name: tried(name, inside) for name in transports}
            if used:
                chosen = trials.get(used) or tried(used, inside)
    space = attempt(lambda: find_space(directory, place, number))
    return Place(found, space, mount, disks.value or (), direct, chosen)


def nearest(directory: Path) -> Path:
    """The directory, or the nearest existing parent (which may be no directory)."""
    directory = Path(os.path.abspath(directory))
    return next(path for path in (directory, *directory.parents) if os.path.lexists(path))


def find_directory(directory: Path, place: Path) -> Row:
    """Whether the directory is usable: makes and removes a directory in `place`."""
    problem = hint = holder = ""
    try:
        if not stat.S_ISDIR(place.stat().st_mode):
            problem, hint = f"{place} is not a directory", "set ssd.path to a directory"
        else:
            with scratch(place):
                pass
    except DirectoryNotWritableError as error:
        problem, hint = error.message, error.hint
    except OSError as error:
        problem, hint = f"{place} cannot be looked at: {error.strerror}", "set ssd.path to a directory"
    exists = place == Path(os.path.abspath(directory))
    caches = caches_below(place) if exists and not problem else []
    for owner in map(find_owner, caches):
        if owner.state == "in use":
            holder = f"process {owner.pid}" + (f": {owner.command}" if owner.command else "")
    versions = {version for one in caches if (version := format_version(one)) is not None}
    found = min(versions, key=lambda version: (version in (OLD_VERSION, FORMAT_VERSION), version), default=None)
    about = {"path": str(directory), "exists": exists, "place": str(place), "holder": holder, "problem": problem}
    return directory_row({**about, "hint": hint, "format": found})


def directory_row(about: dict[str, Any]) -> Row:
    """`place`: the directory, or its nearest existing parent. `holder`: the engine that uses the directory now.
    `problem`: the cause that makes it unusable. `format`: the cache's format version, if known without its log."""
    path, version = about["path"], about["format"]
    if about["problem"]:
        return Row("directory", f"{path}: {about['problem']}", "fail", about["hint"], about)
    if about["holder"]:
        hint = "an engine cannot open it meanwhile, and the measurements below share the disk with that process"
        return Row("directory", f"{path}: in use by {about['holder']}", "warn", hint, about)
    state = "exists" if about["exists"] else f"can be made in {about['place']}, which is looked at"
    hint = ""
    if version is not None:
        state += f", a cache of format {version}"
        if version == OLD_VERSION:
            state += f", which the next engine makes {FORMAT_VERSION}, with its pages"
        elif version != FORMAT_VERSION:
            hint = "an engine refuses it: use the gdscache that wrote it, or set another ssd.path"
    return Row("directory", f"{path}: {state}", "fail" if hint else "ok", hint, about)


@contextlib.contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """A temporary directory in `place`, removed at the end with its content. Raises `DirectoryNotWritableError` with
    the cause."""
    try:
        inside = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=place))
    except OSError as error:
        raise DirectoryNotWritableError(
            f"{place} cannot be written: {error.strerror}",
            "set ssd.path to a directory that this user may write, on a file system that is not read-only or full",
        ) from error
    try:
        yield inside
    finally:
        shutil.rmtree(inside)


def find_space(directory: Path, place: Path, number: int = 0) -> FreeSpace:
    """Free space for this user, and bytes of the slab files in directory `number`. Raises `OSError`."""
    system = os.statvfs(place)
    slab = 0
    for path in (file for own in caches_below(directory) for file in own.glob(f"slab-{number}.*bin")):  # of all shards
        with contextlib.suppress(OSError):
            slab += os.lstat(path).st_blocks * 512
    return FreeSpace(system.f_bavail * system.f_frsize, slab)


def find_package(name: str) -> Found[str]:
    """An installed package's version. Only the trial of its transport shows whether it works."""
    if importlib.util.find_spec(name) is None:
        return Found(None, f"{name} is not installed")
    names = importlib.metadata.packages_distributions().get(name, [])
    return Found(next(map(importlib.metadata.version, names), "of an unknown version"))


# -- the disks and GPUDirect Storage, from /proc, /sys and /run --------------------------------------------------------


def disk_rows(mount: Mount, root: Path = ROOT) -> Iterator[Row]:
    """The disks that hold a mount: a partition's disk, all disks below a RAID or a mapping. None for tmpfs."""
    block = root / "sys/dev/block" / mount.device
    if not block.exists() and mount.source.startswith("/dev/"):  # btrfs and others have their own device numbers
        block = root / "sys/class/block" / Path(os.path.realpath(mount.source)).name
    for disk in dict.fromkeys(_below(block.resolve())) if block.exists() else ():
        yield _disk_row(disk)


def _below(block: Path) -> Iterator[Path]:
    slaves = sorted((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if slaves:
        for slave in slaves:
            yield from _below(slave.resolve())
    else:
        yield block.parent if (block / "partition").exists() else block


def _disk_row(block: Path) -> Row:
    turns = {"0": False, "1": True}.get(text_of(block / "queue/rotational"))
    # With NVMe multipath the disk belongs to a subsystem, which has the model.
    model = text_of(block / "device/model") or text_of(block.parent / "model") or "model not known"
    kind = {True: "rotational", False: "not rotational", None: "rotational or not is not known"}[turns]
    hint = "use an SSD (a virtual disk may say so of itself and be one: see the rates)" if turns else ""
    verdict: Verdict = "info" if turns is None else "warn" if turns else "ok"
    return Row(f"disk {block.name}", f"{model}, {kind}", verdict, hint, {"model": model, "rotational": turns})


def gds_rows(device: str, *, has_gpu: bool, root: Path = ROOT) -> Iterator[Row]:
    """nvidia-fs, udev and `/proc/modules`. `device`: the file system's `major:minor`; may be empty."""
    version = text_of(root / "proc/driver/nvidia-fs/version")
    number = re.search(r"\d+(\.\d+)+", version)
    version = number[0] if number else version
    loaded = bool(re.search(r"^nvidia_fs\s", text_of(root / "proc/modules"), re.MULTILINE)) or bool(version)
    counts = _FLAGS.get(text_of(root / "sys/module/nvidia_fs/parameters/rw_stats_enabled"))
    data: dict[str, object] = {"loaded": loaded, "version": version, "counts": counts}
    if loaded and counts is False:
        hint = "without its statistics nothing proves GDS: echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled"
        yield Row("nvidia-fs", f"loaded, {version or 'of an unknown version'}; statistics off", "warn", hint, data)
    else:
        value = f"loaded, {version or 'of an unknown version'}" if loaded else "not loaded"
        yield Row("nvidia-fs", value, "ok" if loaded else "info", data=data)
    udev = root / "run/udev"
    present, record = udev.is_dir() and os.access(udev, os.R_OK), (udev / "data" / f"b{device}").exists()
    data = {"present": present, "record": bool(device) and record}
    if present and data["record"]:
        yield Row("/run/udev", "present, and knows the device", "ok", data=data)
    else:
        value = "present, but without a record of the device" if present else "missing"
        hint = "cuFile refuses files without it: give the container /run/udev (-v /run/udev:/run/udev:ro)"
        yield Row("/run/udev", value, "warn" if has_gpu else "info", hint if has_gpu else "", data)
    if not (root / "proc/modules").exists():
        yield Row("/proc/modules", "missing: cuFile would never answer, so it is not used")
