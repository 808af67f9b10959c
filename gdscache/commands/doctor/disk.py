"""The disks and GPUDirect support below a directory, from `/proc`, `/sys` and `/run`. Functions take `root`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from gdscache.commands.doctor.report import Row, Verdict
from gdscache.runtime.files import text_of
from gdscache.storage.files import Mount

ROOT = Path("/")
_FLAGS = {"0": False, "1": True, "N": False, "Y": True}


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
