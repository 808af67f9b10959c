"""What is to be said of the SSD tier's directory, its disk, GPUDirect Storage and the transports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gdscache.commands.doctor.facts import (
    Asked,
    DiskFacts,
    Facts,
    Found,
    KernelSideFacts,
    SsdFacts,
    StripeFacts,
    TrialFacts,
)
from gdscache.commands.doctor.report import Row, Verdict, answer
from gdscache.config import SsdConfig
from gdscache.pages.layout import EXTENT_ALIGNMENT
from gdscache.sizes import about

_VOLATILE = ("tmpfs", "ramfs", "overlay")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre")
_NO_RING = (
    "a container's seccomp rules may forbid io_uring_setup, io_uring_enter, io_uring_register; posix serves instead"
)
_GDS_DISKS = "GPUDirect Storage needs ext4 or XFS on NVMe, and nvidia-fs: gdscheck -p shows what is missing"


def ssd_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    """The directory, its file system and disks, O_DIRECT, GPUDirect Storage, the transports; the keys of `ssd`."""
    found, ssd = facts.ssd, asked.config.ssd if asked.given else None
    if found is None:
        yield Row("directory", "not looked at: none was given (--dir DIR, or ssd.path of --config)")
        return
    parts = (found, *found.stripes)
    yield from _place_rows(found, parts, found.gpu_numa_node, ssd)
    yield from _gds_rows(found, facts.has_gpu)
    for name, trial in found.trials.items():
        yield _trial_row(name, trial, facts.has_gpu)
    if ssd is not None and not found.directory.problem:
        yield from _key_rows(found, ssd)
        if found.chosen.value is not None:
            yield _route_key(found.route, ssd)
    for number, stripe in enumerate(found.stripes, start=1):
        rows = [*_place_rows(stripe, parts, found.gpu_numa_node, ssd)]
        if ssd is not None and not stripe.directory.problem:
            rows += _key_rows(stripe, ssd)
        for row in rows:
            hint = row.next_step.replace("ssd.path", "ssd.stripes")
            yield dataclasses.replace(row, name=f"{row.name}, stripe {number}", next_step=hint)


def _place_rows(
    found: StripeFacts, parts: Sequence[StripeFacts], gpu_node: int | None, ssd: SsdConfig | None
) -> Iterator[Row]:
    """The directory, what is below it, and whether O_DIRECT works there; `parts` are all directories of the slab."""
    yield _directory_row(found)
    yield _mount_row(found)
    for disk in found.disks:
        yield from _disk_rows(disk, gpu_node)
    yield _space_row(found, parts, ssd)
    yield from _direct_rows(found)


def _directory_row(found: StripeFacts) -> Row:
    facts = found.directory
    data = dataclasses.asdict(facts)
    if facts.problem:
        return Row("directory", f"{facts.path}: {facts.problem}", "fail", facts.hint, data)
    if facts.holder:
        hint = "an engine cannot open it meanwhile, and what is measured below shares the disk with that process"
        return Row("directory", f"{facts.path}: in use by {facts.holder}", "warn", hint, data)
    whose = f"{facts.mode}, owner {facts.user}"
    state = f"exists, {whose}" if facts.exists else f"can be made in {facts.place} ({whose}), which is looked at"
    return Row("directory", f"{facts.path}: {state}", "ok", data=data)


def _mount_row(found: StripeFacts) -> Row:
    mount = found.mount.value
    if mount is None:
        return answer("file system", found.mount, "info")
    value, data = f"{mount.file_system} on {mount.source}: {mount.options}", dataclasses.asdict(mount)
    if mount.file_system in _REMOTE:
        return Row("file system", value, "warn", "set ssd.path to a directory on a local file system", data)
    if mount.file_system in _VOLATILE:
        return Row("file system", value, "warn", "this is not a disk of its own: mount an SSD for ssd.path", data)
    return Row("file system", value, "ok", data=data)


def _disk_rows(disk: DiskFacts, gpu_node: int | None) -> Iterator[Row]:
    data = dataclasses.asdict(disk)
    value = f"{disk.model or 'model not known'}, {_TURNS[disk.rotational]}"
    if disk.rotational:
        hint = "use an SSD (a virtual disk may say so of itself and be one: see the rates)"
        yield Row(f"disk {disk.name}", value, "warn", hint, data)
    else:
        yield Row(f"disk {disk.name}", value, "info" if disk.rotational is None else "ok", data=data)
    link = disk.link
    if link is not None:
        value = f"{link.speed:g} GT/s x{link.width} of {link.max_speed:g} GT/s x{link.max_width}"
        slow = link.speed < link.max_speed or link.width < link.max_width
        hint = "the disk could do more: use a slot with all its lanes and its generation" if slow else ""
        yield Row(f"PCIe link of {disk.name}", value, "warn" if slow else "ok", hint, dataclasses.asdict(link))
    elif disk.name.startswith("nvme"):
        yield Row(f"PCIe link of {disk.name}", "not known: no PCI device above it says")
    nodes = {"disk": disk.numa_node, "gpu": gpu_node}
    value = ", ".join(f"{name} {'not known' if node is None else node}" for name, node in nodes.items())
    apart = disk.numa_node is not None and gpu_node is not None and disk.numa_node != gpu_node
    hint = "bytes cross between the sockets: use a disk or a GPU (gpu.device) of the same node" if apart else ""
    verdict: Verdict = "warn" if apart else "info" if None in nodes.values() else "ok"
    yield Row(f"NUMA node of {disk.name}", value, verdict, hint, nodes)


_TURNS = {True: "rotational", False: "not rotational", None: "rotational or not is not known"}


def _space_row(found: StripeFacts, parts: Sequence[StripeFacts], ssd: SsdConfig | None) -> Row:
    """Whether the slab's part fits; what lies on one file system must fit there together. Parts differ by 4 MiB."""
    space = found.space.value
    if space is None:
        return answer("free space", found.space, "warn")
    beside = [part for part in parts if part is found or _same_file_system(part, found)]
    needed = ssd.capacity * len(beside) // len(parts) if ssd else None
    slab = sum(part.space.value.slab for part in beside if part.space.value is not None)
    data = dataclasses.asdict(space) | {"capacity": needed}
    value = about(space.free) + (f", and {about(slab)} of the slab that is there" if slab else "")
    if space.inodes == 0:
        return Row("free space", f"{value}, but no inode", "fail" if ssd else "warn", "remove files there", data)
    if ssd is None or needed is None:
        hint = "" if space.free else "free space there, or give another directory"
        return Row("free space", value, "info" if space.free else "warn", hint, data)
    value += f"; ssd.capacity is {about(ssd.capacity)}"
    if needed != ssd.capacity:
        value += f", {about(needed)} of it here"
    if space.free + slab < needed:
        most = (space.free + slab) * len(parts) // len(beside)
        hint = f"set ssd.capacity to {about(most)} or less, or free space there"
        return Row("free space", value, "fail", hint, data)
    return Row("free space", value, "ok", data=data)


def _same_file_system(one: StripeFacts, other: StripeFacts) -> bool:
    devices = [part.mount.value.device if part.mount.value else "" for part in (one, other)]
    return devices[0] == devices[1] != ""


def _direct_rows(found: StripeFacts) -> Iterator[Row]:
    direct = found.direct_io
    if direct.value is None:
        yield answer("O_DIRECT", direct, "info" if found.directory.problem else "warn")
        return
    if direct.value:
        hint = "reads and writes go through the page cache: use ext4 or XFS on a disk"
        yield Row("O_DIRECT", f"does not work: {direct.value}", "warn", hint, {"works": False})
        return
    alignment = found.alignment.value
    if alignment is None:
        yield Row("O_DIRECT", f"works; its alignment is not known: {found.alignment.cause}", "ok", "", {"works": True})
        return
    data = {"works": True, **dataclasses.asdict(alignment)}
    memory = "" if alignment.memory is None else f", of memory {about(alignment.memory)}"
    how = "as statx says" if alignment.by == "statx" else "the smallest that was tried and works"
    value = f"works; alignment of offsets {about(alignment.offset)}{memory} ({how})"
    if max(alignment.offset, alignment.memory or 0) > EXTENT_ALIGNMENT:
        hint = f"pages are aligned to {EXTENT_ALIGNMENT} bytes: use another file system or block size"
        yield Row("O_DIRECT", value, "warn", hint, data)
    else:
        yield Row("O_DIRECT", value, "ok", data=data)


def _gds_rows(found: SsdFacts, has_gpu: bool) -> Iterator[Row]:
    kernel = found.kernel
    data = {"loaded": kernel.nvidia_fs, "version": kernel.nvidia_fs_version, "counts": kernel.counts}
    if not kernel.nvidia_fs:
        yield Row("nvidia-fs", "not loaded", "info", data=data)
    else:
        value = f"loaded, {kernel.nvidia_fs_version or 'of an unknown version'}"
        hint = "without its statistics nothing proves GDS: echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled"
        if kernel.counts is False:
            yield Row("nvidia-fs", f"{value}; its statistics are off", "warn", hint, data)
        else:
            yield Row("nvidia-fs", value, "ok", data=data)
    yield Row("P2PDMA", _p2pdma(kernel), data=kernel.p2pdma)
    yield _udev_row(kernel, has_gpu)
    groups = f"{kernel.iommu_groups} groups" if kernel.iommu_groups else "no groups: off, or hidden from here"
    data_iommu = {"groups": kernel.iommu_groups, "arguments": kernel.iommu}
    yield Row("IOMMU", groups + (f"; kernel arguments {kernel.iommu}" if kernel.iommu else ""), data=data_iommu)
    if not kernel.modules:
        yield Row("/proc/modules", "missing: cuFile would never answer, so it is not used", "info")
    for name, package in (("libcufile", found.cufile), ("kvikio", found.kvikio), ("nixl", found.nixl)):
        yield answer(name, package, "info")


def _p2pdma(kernel: KernelSideFacts) -> str:
    lacks = [name for name, there in kernel.p2pdma.items() if there is False]
    unseen = [name for name, there in kernel.p2pdma.items() if there is None]
    parts = [f"lacks {', '.join(lacks)}"] if lacks else []
    parts += [f"cannot be seen: {', '.join(unseen)}"] if unseen else []
    return "; ".join(parts) or "all that files show is there, which proves nothing"


def _udev_row(kernel: KernelSideFacts, has_gpu: bool) -> Row:
    data = {"present": kernel.udev, "record": kernel.udev_record}
    if kernel.udev and kernel.udev_record:
        return Row("/run/udev", "present, and knows the device", "ok", data=data)
    value = "present, but without a record of the device" if kernel.udev else "missing"
    hint = "cuFile refuses files without it: give the container /run/udev (-v /run/udev:/run/udev:ro)"
    return Row("/run/udev", value, "warn" if has_gpu else "info", hint if has_gpu else "", data)


def _trial_row(name: str, trial: Found[TrialFacts], has_gpu: bool) -> Row:
    facts = trial.value
    if facts is None:
        lack: Verdict = "fail" if name == "posix" else "warn" if has_gpu else "info"
        if name == "uring" and lack != "info":  # nothing to set: auto takes posix by itself
            return Row(f"transport {name}", trial.cause, lack, _NO_RING)
        return answer(f"transport {name}", trial, lack, "see the system log for the device")
    write, read = (facts.nbytes / seconds / 1e9 for seconds in (facts.write_s, facts.read_s))
    data = dataclasses.asdict(facts) | {"write_gb_s": write, "read_gb_s": read}
    cache = "O_DIRECT" if facts.direct else "through the page cache"
    value = f"{facts.word}: {about(facts.nbytes)} of {facts.memory} memory, the same bytes read back, {cache}: "
    return Row(f"transport {name}", f"{value}write {write:.2f} GB/s, read {read:.2f} GB/s", "ok", data=data)


def _key_rows(found: StripeFacts, ssd: SsdConfig) -> Iterator[Row]:
    """`ssd.transport`, `ssd.gds`, `ssd.direct_io`: what each comes to with the transport that would be used."""
    chosen = found.chosen.value
    if chosen is None:
        hint = found.chosen.hint or "set ssd.transport to posix"
        yield Row("ssd.transport", f"{ssd.transport}: {found.chosen.cause}", "fail", hint)
    else:
        decided = ssd.transport == "auto" and chosen.reason == "configured"  # by what the first directory came to
        reason = f" ({chosen.reason})" if chosen.reason and not decided else ""
        yield Row("ssd.transport", f"{ssd.transport}: {chosen.name}{reason}", "ok", data=chosen.name)
    yield _gds_key(found, ssd)
    yield _direct_key(found, ssd)


def _gds_key(found: StripeFacts, ssd: SsdConfig) -> Row:
    chosen = found.chosen.value
    word = chosen.word if chosen else None
    if ssd.gds == "off":
        return Row("ssd.gds", "off", data=word)
    if word == "gds":
        return Row("ssd.gds", f"{ssd.gds}: gds, nvidia-fs counted these reads and writes", "ok", data=word)
    value = f"{ssd.gds}: {word or 'no transport works'}, not gds"
    if ssd.gds == "auto":
        return Row("ssd.gds", value, data=word)
    return Row("ssd.gds", value, "fail", f"set ssd.gds to auto; {_GDS_DISKS}", word)


def _route_key(route: Found[str], ssd: SsdConfig) -> Row:
    if route.value is None:
        return Row("ssd.route", f"{ssd.route}: {route.cause}", "fail", route.hint)
    return Row("ssd.route", f"{ssd.route}: {route.value}", "ok", data=route.value.partition(" (")[0])


def _direct_key(found: StripeFacts, ssd: SsdConfig) -> Row:
    chosen = found.chosen.value
    direct = chosen.direct if chosen else None
    if ssd.direct_io == "off":
        return Row("ssd.direct_io", "off: through the page cache", data=direct)
    if direct:
        return Row("ssd.direct_io", f"{ssd.direct_io}: O_DIRECT", "ok", data=direct)
    if chosen is None and found.direct_io.value == "":
        return Row("ssd.direct_io", f"{ssd.direct_io}: O_DIRECT works, but the transport does not", data=direct)
    value = f"{ssd.direct_io}: through the page cache"
    hint = "set ssd.direct_io to auto or off, or ssd.path to a file system with O_DIRECT"
    return Row("ssd.direct_io", value, "fail" if ssd.direct_io == "on" else "warn", hint, direct)
