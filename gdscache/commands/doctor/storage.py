"""The SSD tier's directory: can it be used, what is below it, and how fast does each transport move bytes there?"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import mmap
import os
import pwd
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gdscache.commands.doctor import disk
from gdscache.commands.doctor.facts import (
    AlignmentFacts,
    Asked,
    DirectoryFacts,
    Found,
    MountFacts,
    SpaceFacts,
    SsdFacts,
    StripeFacts,
    TrialFacts,
    attempt,
)
from gdscache.commands.doctor.trial import DEADLINE_S, Trial, run_child, try_transport
from gdscache.commands.inspect.owner import find_owner
from gdscache.disk.slab import slab_name
from gdscache.errors import DirectoryNotWritableError, TransportUnavailableError
from gdscache.storage.cufile_library import find_cufile
from gdscache.storage.files import probe_direct_io
from gdscache.tiers import ssd_route as routes

SCRATCH_PREFIX = ".gdscache-doctor-"
TRANSPORTS = ("posix", "uring", "cufile", "kvikio", "nixl")
IMPORT_DEADLINE_S = 30.0
THREADS = 8

_STATX_DIOALIGN = 0x2000
_AT_FDCWD = -100
_STATX_BYTES = 256
_MASK_AT, _DIO_AT = 0, 152  # in struct statx: stx_mask; stx_dio_mem_align and stx_dio_offset_align


def find_ssd(asked: Asked, directory: Path, device: str, deadline_s: float = DEADLINE_S) -> SsdFacts:
    """Look at a directory and those of `ssd.stripes`, and move bytes in them; leaves nothing there.

    Each transport is tried in `directory`, the one that would be used in all of them. `device`: `cpu`, `cuda:N`. Where
    a directory does not exist, its nearest parent is looked at and written to instead.
    """
    kvikio, nixl = (find_package(name) for name in ("kvikio", "nixl"))
    cufile = attempt(find_cufile)
    ready = {
        "cufile": cufile.value is not None and device.startswith("cuda"),
        "kvikio": kvikio.value is not None,
        "nixl": nixl.value is not None,
    }
    wanted = [name for name in TRANSPORTS if ready.get(name, True)]
    found, trials = find_stripe(asked, directory, 0, wanted, device, deadline_s)
    used = _decided(asked, found.chosen)  # an engine chooses in ssd.path, for all directories
    more = [find_stripe(used, path, n, (), device, deadline_s)[0] for n, path in enumerate(asked.stripes, start=1)]
    return SsdFacts(
        directory=found.directory,
        space=found.space,
        mount=found.mount,
        disks=found.disks,
        direct_io=found.direct_io,
        alignment=found.alignment,
        chosen=found.chosen,
        gpu_numa_node=attempt(lambda: find_gpu_node(device)).value,
        kernel=disk.find_kernel_side(_device_number(found.mount)),
        cufile=cufile,
        kvikio=kvikio,
        nixl=nixl,
        trials=trials,
        stripes=tuple(more),
        route=attempt(lambda: find_route(asked, found.chosen, device)),
    )


def _decided(asked: Asked, chosen: Found[TrialFacts]) -> Asked:
    """What is asked for, with `auto` replaced by the transport that it came to."""
    ssd = asked.config.ssd
    if ssd is None or ssd.transport != "auto" or chosen.value is None:
        return asked
    decided = ssd.model_copy(update={"transport": chosen.value.name})
    return dataclasses.replace(asked, config=asked.config.model_copy(update={"ssd": decided}))


def find_route(asked: Asked, chosen: Found[TrialFacts], device: str) -> str:
    """What `ssd.route` comes to. Raises `TransportUnavailableError` where it cannot be had."""
    ssd = asked.config.ssd if asked.given else None
    if ssd is None or chosen.value is None:
        raise TransportUnavailableError("there is no SSD tier, or no transport for it", "set ssd.transport to posix")
    keep = asked.config.cpu is not None
    choice = routes.decided(ssd.route, chosen.value.kinds, torch.device(device), keep=keep)
    if choice is None:
        return "direct or via_cpu, whichever is faster when the engine opens"
    return f"{choice.route} ({choice.reason})"


def find_stripe(
    asked: Asked, directory: Path, number: int, transports: Sequence[str], device: str, deadline_s: float
) -> tuple[StripeFacts, dict[str, Found[TrialFacts]]]:
    """Look at directory `number` of a slab, try the `transports` there and the one that would be used."""
    place = nearest(directory)
    found = find_directory(directory, place)
    mount = attempt(lambda: disk.find_mount(place.resolve()))
    disks = attempt(lambda: disk.find_disks(mount.value) if mount.value else ())
    direct: Found[str] = Found(None, "not tried: the directory takes no file")
    alignment: Found[AlignmentFacts] = Found(None, direct.cause)
    trials: dict[str, Found[TrialFacts]] = {}
    chosen: Found[TrialFacts] = Found(None, direct.cause)
    if not found.problem:
        with scratch(place) as inside:
            direct = attempt(lambda: probe_direct_io(inside))
            if direct.value == "":
                alignment = attempt(lambda: find_alignment(inside))
            trials, chosen = find_trials(asked, transports, inside, device, deadline_s)
    space = attempt(lambda: find_space(directory, place, number))
    return StripeFacts(found, space, mount, disks.value or (), direct, alignment, chosen), trials


def nearest(directory: Path) -> Path:
    """The directory, or the nearest parent that exists (which may be no directory)."""
    directory = Path(os.path.abspath(directory))
    return next(path for path in (directory, *directory.parents) if os.path.lexists(path))


def find_directory(directory: Path, place: Path) -> DirectoryFacts:
    """Whether it can be used; found out by making a directory in `place`, which goes at once."""
    problem = hint = user = mode = holder = ""
    try:
        status = place.stat()
        mode = stat.filemode(status.st_mode)
        user = _user_name(status.st_uid)
        if not stat.S_ISDIR(status.st_mode):
            problem, hint = f"{place} is not a directory", "set ssd.path to a directory"
        else:
            with scratch(place):
                pass
    except DirectoryNotWritableError as error:
        problem, hint = error.message, error.hint
    except OSError as error:
        problem, hint = f"{place} cannot be looked at: {error.strerror}", "set ssd.path to a directory"
    exists = place == Path(os.path.abspath(directory))
    if exists and not problem:
        owner = find_owner(place, catalog_open=False)
        if owner.state == "in use":
            holder = f"process {owner.pid}" + (f": {owner.command}" if owner.command else "")
    return DirectoryFacts(str(directory), exists, str(place), user, mode, holder, problem, hint)


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # usual in containers
        return str(number)


@contextlib.contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """A directory of our own in `place`, removed at the end with all that is in it.

    Raises `DirectoryNotWritableError` with the cause where `place` takes none.
    """
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


def find_space(directory: Path, place: Path, number: int = 0) -> SpaceFacts:
    """Free space for this user, and what the slab's file `number` holds if it is there. Raises `OSError`."""
    system = os.statvfs(place)
    try:
        slab = os.lstat(directory / slab_name(number)).st_blocks * 512
    except OSError:
        slab = 0
    return SpaceFacts(system.f_bavail * system.f_frsize, system.f_favail if system.f_files else None, slab)


def find_alignment(inside: Path) -> AlignmentFacts:
    """What O_DIRECT demands of a file in a directory where it works: asked of the kernel, else tried."""
    with tempfile.NamedTemporaryFile(dir=inside) as file:
        file.write(bytes(16384))
        file.flush()
        told = statx_alignment(file.name)
        if told is not None:
            return AlignmentFacts(told[0], told[1], "statx")
        return AlignmentFacts(None, _smallest_offset(file.name), "trial")


def statx_alignment(path: str) -> tuple[int, int] | None:
    """(of memory, of offsets) in bytes; None where the kernel (before 6.1), the C library or the file system do not
    say."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "statx"):
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if library.statx(_AT_FDCWD, os.fsencode(path), 0, ctypes.c_uint(_STATX_DIOALIGN), answer) != 0:
        return None
    mask = struct.unpack_from("I", answer.raw, _MASK_AT)[0]
    memory, offset = struct.unpack_from("II", answer.raw, _DIO_AT)
    return (memory, offset) if mask & _STATX_DIOALIGN and memory and offset else None


def _smallest_offset(path: str) -> int:
    """The smallest power of two at which a read with O_DIRECT of as many bytes works. Raises `OSError` for none."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, 16384) as memory, memoryview(memory) as view:
            for size in (512, 1024, 2048, 4096):
                with view[:size] as part:
                    try:
                        os.preadv(file, [part], size)
                    except OSError:
                        continue
                    return size
    finally:
        os.close(file)
    raise OSError("no read with O_DIRECT at an offset below 8192 works")


def find_package(name: str) -> Found[str]:
    """The version of a Python package that can be imported, tried in a child process; else why not."""
    if importlib.util.find_spec(name) is None:
        return Found(None, f"{name} is not installed")
    status, output = run_child(f"import {name}", [], IMPORT_DEADLINE_S)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if status is None:
        return Found(None, f"its import gives no answer within {IMPORT_DEADLINE_S:g} s: killed")
    if status:
        return Found(None, f"{lines[-1] if lines else 'no message'} (exit status {status})")
    names = importlib.metadata.packages_distributions().get(name, [])
    return Found(next((importlib.metadata.version(package) for package in names), "of an unknown version"))


def find_gpu_node(device: str) -> int | None:
    """The NUMA node of `cuda:N`, where torch and the kernel tell it."""
    if not device.startswith("cuda"):
        return None
    told: Any = torch.cuda.get_device_properties(torch.device(device))
    if not hasattr(told, "pci_bus_id"):  # older torch
        return None
    return disk.gpu_numa_node(f"{told.pci_domain_id:04x}:{told.pci_bus_id:02x}:{told.pci_device_id:02x}.0")


def find_trials(
    asked: Asked, transports: Sequence[str], inside: Path, device: str, deadline_s: float
) -> tuple[dict[str, Found[TrialFacts]], Found[TrialFacts]]:
    """A trial for each transport; and for what `ssd.transport` comes to, where a configuration asks for a tier.

    `direct_io` and `gds` are off where the configuration has them off, else auto: that they are on is checked on what
    came out.
    """
    ssd = asked.config.ssd if asked.given else None

    def tried(transport: str) -> Found[TrialFacts]:
        with scratch(inside) as own:
            return try_transport(
                Trial(
                    transport,
                    str(own),
                    device,
                    ssd.threads if ssd else THREADS,
                    "off" if ssd and ssd.direct_io == "off" else "auto",
                    "off" if ssd and ssd.gds == "off" else "auto",
                ),
                deadline_s,
            )

    trials = {name: tried(name) for name in transports}
    if ssd is None:
        return trials, Found(None, "no SSD tier is asked for")
    return trials, trials[ssd.transport] if ssd.transport in trials else tried(ssd.transport)


def _device_number(mount: Found[MountFacts]) -> str:
    return mount.value.device if mount.value else ""
