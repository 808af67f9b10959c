"""The SSD tier's directories: whether they are usable, their disks, GPUDirect Storage, and each transport's speed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from gdscache.commands.doctor.facts import (
    Asked,
    Facts,
    Found,
    FreeSpace,
    Moved,
    Place,
    Row,
    Ssd,
    Verdict,
    answer,
    attempt,
    comes_to,
)
from gdscache.commands.inspect.owner import find_owner
from gdscache.commands.inspect.reading import caches_below
from gdscache.config import SsdConfig
from gdscache.disk.catalog_file import FORMAT_VERSION, OLD_VERSION, format_version, system_errors
from gdscache.errors import DirectoryNotWritableError, GdsCacheError, IOFailedError
from gdscache.runtime.files import free_space, located, text_of
from gdscache.sizes import MIB, about, format_size
from gdscache.storage import choose_and_open
from gdscache.storage.base import Switch
from gdscache.storage.cufile import find_cufile
from gdscache.storage.files import Mount, find_mount, probe_direct_io
from gdscache.storage.probe import gds_operations, run_child, write_and_read
from gdscache.tiers import ssd_route as routes

SCRATCH_PREFIX = ".gdscache-doctor-"
TRANSPORTS = ("posix", "uring", "cufile", "kvikio", "nixl")
THREADS = 8
TRIAL_BYTES = 32 * MIB
DEADLINE_S = 60.0  # opening may wait for two probes of 20 s
FILE_NAME = "trial.bin"
_ANSWER = "answer: "
ROOT = Path("/")  # of /proc, /sys and /run, which tests replace
_FLAGS = {"0": False, "1": True, "N": False, "Y": True}
_VOLATILE = ("tmpfs", "ramfs", "overlay")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre")
_NO_RING = (
    "a container's seccomp rules may forbid io_uring_setup, io_uring_enter, io_uring_register; posix serves instead"
)
_GDS_DISKS = "GPUDirect Storage needs ext4 or XFS on NVMe, and nvidia-fs: gdscheck -p shows the missing parts"


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
            return try_transport(transport, own, device, ssd.threads if ssd else THREADS, gds)

    def examined(path: Path, number: int) -> Place:
        place = nearest(path)
        found, mount = find_directory(path, place), find_mount(place)
        disks, direct, chosen = attempt(lambda: tuple(disk_rows(mount))), None, None
        if not found.data["problem"]:
            with scratch(place) as inside:
                direct = attempt(lambda: probe_direct_io(inside))
                here = {} if number else {name: tried(name, inside) for name in wanted}
                trials.update(here)
                if used:
                    chosen = here.get(used) or tried(used, inside)
        space = attempt(lambda: find_space(path, place, number))
        return Place(found, space, mount, disks.value or (), direct, chosen)

    first = examined(directory, 0)
    if used == "auto" and first.chosen and first.chosen.value:  # an engine chooses by ssd.path, for all directories
        used = first.chosen.value.name
    more = [examined(path, number) for number, path in enumerate(asked.stripes, start=1)]
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


def nearest(directory: Path) -> Path:
    """The directory, or the nearest existing parent (which may be no directory)."""
    directory = located(directory)
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
    exists = place == located(directory)
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
    hint = "set ssd.path to a directory that this user may write, on a file system that is not read-only or full"
    with system_errors(place, "written", hint, DirectoryNotWritableError):
        inside = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=place))
    try:
        yield inside
    finally:
        shutil.rmtree(inside)


def find_space(directory: Path, place: Path, number: int = 0) -> FreeSpace:
    """Free space for this user, and the slab's bytes in directory `number`. Raises `OSError`, `IOFailedError`."""
    free = free_space(place)
    if free is None:
        raise IOFailedError("the file system does not report its size", "see by other means that the slab fits")
    slab = 0
    for path in (file for own in caches_below(directory) for file in own.glob(f"slab-{number}.*bin")):  # of all shards
        with contextlib.suppress(OSError):
            slab += os.lstat(path).st_blocks * 512
    return FreeSpace(free, slab)


def find_package(name: str) -> Found[str]:
    """An installed package's version. Only the trial of its transport shows whether it works."""
    if importlib.util.find_spec(name) is None:
        return Found(None, f"{name} is not installed")
    names = importlib.metadata.packages_distributions().get(name, [])
    return Found(next(map(importlib.metadata.version, names), "of an unknown version"))


# -- trials of transports: a child process with a deadline writes and reads back some MiB in the real directory --------


def try_transport(
    transport: str,
    directory: Path,
    device: str,
    threads: int,
    gds: Switch,
    *,
    nbytes: int = TRIAL_BYTES,
    deadline_s: float = DEADLINE_S,
) -> Found[Moved]:
    """Run `carry_out` in a child. After `deadline_s` seconds the child and its descendants are killed."""
    asked = json.dumps([transport, str(directory), device, threads, gds, nbytes])
    code = f"import json; from gdscache.commands.doctor import storage; storage.answer_trial(*json.loads({asked!r}))"
    ended = run_child(code, [], deadline_s)
    answers = [line.removeprefix(_ANSWER) for line in ended.lines if line.startswith(_ANSWER)]
    if ended.cause or len(answers) != 1:
        hint = "cuFile may hang or crash where the kernel or the container lacks something: set ssd.transport to posix"
        return Found(None, ended.cause or "a child process gave no answer", hint)
    moved, cause, hint = json.loads(answers[0])
    return Found(None, cause, hint) if cause else Found(Moved(**moved | {"kinds": tuple(moved["kinds"])}))


def answer_trial(transport: str, directory: str, device: str, threads: int, gds: Switch, nbytes: int) -> None:
    """In the child: print a trial's result, or the cause and the hint of its error, in one line."""
    moved, cause, hint = None, "", ""
    try:
        moved = dataclasses.asdict(carry_out(transport, Path(directory), device, threads, gds, nbytes))
    except GdsCacheError as error:
        cause, hint = error.message, error.hint
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cause, hint = str(error), f"free {about(nbytes)} there, or set another ssd.path" if full else ""
    except (RuntimeError, MemoryError) as error:
        cause, hint = str(error) or type(error).__name__, "run it alone to see"
    said = moved, " ".join(cause.split()), hint
    print(f"\n{_ANSWER}{json.dumps(said)}", flush=True)  # libraries print too


def carry_out(transport: str, directory: Path, device: str, threads: int, gds: Switch, nbytes: int) -> Moved:
    """Write and read `nbytes`, a multiple of 1 MiB, in a file `trial.bin` of the directory. The file stays. Raises as
    `open_transport`, whose arguments these are, and `write_and_read` do."""
    opened, reason = choose_and_open(transport, directory, device, threads, "auto", gds)
    with opened:
        kinds = opened.memory_kinds
        where = device if device.startswith("cuda") and "cuda" in kinds else "cpu"
        before = gds_operations()
        write_s, read_s = write_and_read(opened, directory / FILE_NAME, where, nbytes)
        counted = all(new > old for old, new in zip(before, gds_operations(), strict=True))
        kind: Literal["host", "cuda"] = "host" if where == "cpu" else "cuda"
        word = word_for(kind, opened.describe(), counted=counted)
        return Moved(opened.name, kind, word, opened.direct, nbytes, write_s, read_s, reason, tuple(sorted(kinds)))


def word_for(kind: str, described: dict[str, object], *, counted: bool) -> Literal["gds", "compat", "host"]:
    """`host` for host memory. `gds` if nvidia-fs `counted` reads and writes meanwhile, unless the transport's
    `describe()` says that it stays off cuFile: another process did these."""
    if kind == "host":
        return "host"
    off = described.get("compat") == "on" or described.get("gds") is False
    return "gds" if counted and not off else "compat"


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


# -- the check ---------------------------------------------------------------------------------------------------------


def ssd_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    """Rows for directories, file systems, disks, GPUDirect Storage, transports and the keys of `ssd`."""
    found, ssd = facts.ssd, asked.config.ssd
    if found is None:
        yield Row("directory", "not looked at: none was given (--dir DIR, or ssd.path of --config)")
        return
    first, *more = found.places
    yield from _place_rows(first, found.places, ssd)
    yield from found.kernel
    for name, package in found.packages.items():
        yield from answer(name, package, "info")
    for name, trial in found.trials.items():
        yield _trial_row(name, trial, facts.has_gpu)
    yield from _key_rows(first, ssd)
    if ssd and found.route is not None:
        route = found.route.value
        value = comes_to(ssd.route, route or found.route.cause)
        data = (route or "").partition(" (")[0] or None
        yield Row("ssd.route", value, "ok" if route else "fail", found.route.hint, data)
    for number, place in enumerate(more, start=1):
        for row in (*_place_rows(place, found.places, ssd), *_key_rows(place, ssd)):
            hint = row.next_step.replace("ssd.path", "ssd.stripes")
            yield dataclasses.replace(row, name=f"{row.name}, stripe {number}", next_step=hint)


def _place_rows(found: Place, places: Sequence[Place], ssd: SsdConfig | None) -> Iterator[Row]:
    yield found.directory
    yield _mount_row(found.mount)
    yield from found.disks
    yield from _space_row(found, places, ssd)
    if found.direct_io and found.direct_io.value:
        hint = "reads and writes go through the page cache: use ext4 or XFS on a disk"
        yield Row("O_DIRECT", f"does not work: {found.direct_io.value}", "warn", hint, {"works": False})
    else:
        for row in answer("O_DIRECT", found.direct_io, "warn", "see the system log for the device"):
            yield dataclasses.replace(row, value=row.value or "works", data={"works": row.verdict == "ok"})


def _mount_row(mount: Mount) -> Row:
    hint = ""
    if not mount.file_system:
        return Row("file system", "not known: the kernel lists no mounts here")
    if mount.file_system in _REMOTE:
        hint = "set ssd.path to a directory on a local file system"
    elif mount.file_system in _VOLATILE:
        hint = "this is not a disk of its own: mount an SSD for ssd.path"
    value = f"{mount.file_system} on {mount.source}: {mount.options}"
    return Row("file system", value, "warn" if hint else "ok", hint, dataclasses.asdict(mount))


def _space_row(found: Place, places: Sequence[Place], ssd: SsdConfig | None) -> Iterator[Row]:
    """Whether the slab's part fits. Parts on one file system must fit together. Parts differ by 4 MiB."""
    space = found.space.value
    if space is None:
        yield from answer("free space", found.space, "warn", "see the system log for the device")
        return
    beside = [place for place in places if place is found or place.mount.device == found.mount.device != ""]
    needed = ssd.capacity * len(beside) // len(places) if ssd else None
    slab = sum(place.space.value.slab for place in beside if place.space.value is not None)
    data = dataclasses.asdict(space) | {"capacity": needed}
    value = about(space.free) + (f", and {about(slab)} of the slab that is there" if slab else "")
    verdict: Verdict = "info" if ssd is None else "ok"
    hint = ""
    if ssd is not None and needed is not None:
        value += f"; ssd.capacity is {about(ssd.capacity)}"
        value += f", {about(needed)} of it here" if needed != ssd.capacity else ""
        if space.free + slab < needed:
            most = (space.free + slab) * len(places) // len(beside) >> 20 << 20
            verdict, hint = "fail", f"set ssd.capacity to {format_size(most)} or less, or free space there"
    elif not space.free:
        verdict, hint = "warn", "free space there, or give another directory"
    yield Row("free space", value, verdict, hint, data)


def _trial_row(name: str, trial: Found[Moved], has_gpu: bool) -> Row:
    facts = trial.value
    if facts is None:
        lack: Verdict = "fail" if name == "posix" else "warn" if has_gpu else "info"
        hint = _NO_RING if name == "uring" else trial.hint or "see the system log for the device"
        return Row(f"transport {name}", trial.cause, lack, hint if lack != "info" else "")
    write, read = (facts.nbytes / seconds / 1e9 for seconds in (facts.write_s, facts.read_s))
    data = dataclasses.asdict(facts) | {"write_gb_s": write, "read_gb_s": read}
    memory = "host memory" if facts.memory == "host" else f"GPU memory ({facts.word})"
    value = f"write {write:.2f} GB/s, read {read:.2f} GB/s: {about(facts.nbytes)} of {memory}, the same bytes read back"
    value += "" if facts.direct else ", through the page cache"
    return Row(f"transport {name}", value, "ok", data=data)


def _key_rows(found: Place, ssd: SsdConfig | None) -> Iterator[Row]:
    """`ssd.transport`, `ssd.gds`: their results with the chosen transport; no rows if none was tried."""
    if ssd is None or found.chosen is None:
        return
    chosen = found.chosen.value
    if chosen is None:
        hint = found.chosen.hint or "set ssd.transport to posix"
        yield Row("ssd.transport", f"{ssd.transport}: {found.chosen.cause}", "fail", hint)
    else:
        said = f" ({chosen.reason})" if chosen.reason not in ("", "configured") else ""
        yield Row("ssd.transport", comes_to(ssd.transport, chosen.name) + said, "ok", data=chosen.name)
    word = chosen.word if chosen else None
    if ssd.gds == "off":
        yield Row("ssd.gds", "off", data=word)
    elif word == "gds":
        yield Row("ssd.gds", f"{ssd.gds}: gds, nvidia-fs counted these reads and writes", "ok", data=word)
    else:
        value = f"{ssd.gds}: {f'{word}, not gds' if word else 'no transport works'}"
        fails = ssd.gds == "on"
        hint = f"set ssd.gds to auto; {_GDS_DISKS}" if fails else ""
        yield Row("ssd.gds", value, "fail" if fails else "info", hint, word)
