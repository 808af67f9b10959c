"""The check of the SSD tier: directories, disks, GPUDirect Storage, transports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gdscache.commands.doctor.facts import Asked, Facts, Place
from gdscache.commands.doctor.report import Found, Row, Verdict, answer, comes_to
from gdscache.commands.doctor.trial import Moved
from gdscache.config import SsdConfig
from gdscache.sizes import about, format_size
from gdscache.storage.files import Mount

_VOLATILE = ("tmpfs", "ramfs", "overlay")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre")
_NO_RING = (
    "a container's seccomp rules may forbid io_uring_setup, io_uring_enter, io_uring_register; posix serves instead"
)
_GDS_DISKS = "GPUDirect Storage needs ext4 or XFS on NVMe, and nvidia-fs: gdscheck -p shows the missing parts"


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
    beside = [place for place in places if place is found or _same_file_system(place, found)]
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


def _same_file_system(one: Place, other: Place) -> bool:
    return one.mount.device == other.mount.device != ""


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
