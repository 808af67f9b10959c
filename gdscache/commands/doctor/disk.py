"""The mount, disks and GPUDirect support below a directory, from `/proc`, `/sys` and `/run`. Functions take `root`."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from gdscache.commands.doctor.facts import Mount
from gdscache.commands.doctor.report import Row, Verdict
from gdscache.runtime.files import text_of

ROOT = Path("/")
OPEN_KERNEL_MODULE = "Open Kernel Module"
_P2PDMA_KERNEL = (6, 2)
_FLAGS = {"0": False, "1": True, "N": False, "Y": True}


def find_mount(directory: Path, root: Path = ROOT) -> Mount:
    """The mount that holds an absolute directory without links. Raises `OSError` without `/proc`."""
    best: tuple[int, Mount] | None = None
    for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 6 or len(kinds) < 2:
            continue
        point = Path(_unescaped(fields[4]))
        # A later mount covers an earlier one at the same point.
        if directory.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            options = ",".join(dict.fromkeys([*fields[5].split(","), *"".join(kinds[2:3]).split(",")])).strip(",")
            best = len(point.parts), Mount(kinds[0], _unescaped(kinds[1]), fields[2], options)
    if best is None:
        raise FileNotFoundError(f"{directory} is below no mount that the kernel lists")
    return best[1]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def disk_rows(mount: Mount, gpu_node: int | None, root: Path = ROOT) -> Iterator[Row]:
    """The disks that hold a mount: a partition's disk, all disks below a RAID or a mapping. None for tmpfs."""
    block = root / "sys/dev/block" / mount.device
    if not block.exists() and mount.source.startswith("/dev/"):  # btrfs and others have their own device numbers
        block = root / "sys/class/block" / Path(os.path.realpath(mount.source)).name
    for disk in dict.fromkeys(_below(block.resolve())) if block.exists() else ():
        yield from _disk_rows(disk, gpu_node, root)


def _below(block: Path) -> Iterator[Path]:
    slaves = sorted((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if slaves:
        for slave in slaves:
            yield from _below(slave.resolve())
    else:
        yield block.parent if (block / "partition").exists() else block


def _disk_rows(block: Path, gpu_node: int | None, root: Path) -> Iterator[Row]:
    name, place = block.name, _controller(block)
    turns = {"0": False, "1": True}.get(text_of(block / "queue/rotational"))
    model = text_of(block / "device/model") or text_of(place / "model") or "model not known"
    kind = {True: "rotational", False: "not rotational", None: "rotational or not is not known"}[turns]
    hint = "use an SSD (a virtual disk may say so of itself and be one: see the rates)" if turns else ""
    verdict: Verdict = "info" if turns is None else "warn" if turns else "ok"
    yield Row(f"disk {name}", f"{model}, {kind}", verdict, hint, {"model": model, "rotational": turns})
    if name.startswith("nvme"):
        yield from (row for row in (_link(path, name) for path in list(_upwards(place, root))) if row)
    node = _numa(place, root)
    if node is not None and gpu_node is not None:
        apart = node != gpu_node
        hint = "bytes cross between the sockets: use a disk or a GPU (gpu.device) of the same node" if apart else ""
        value, data = f"disk {node}, gpu {gpu_node}", {"disk": node, "gpu": gpu_node}
        yield Row(f"NUMA node of {name}", value, "warn" if apart else "ok", hint, data)


def _controller(block: Path) -> Path:
    """A disk with NVMe multipath belongs to a subsystem, which links to its controllers. Returns the first one's
    path."""
    if block.parent.name.startswith("nvme-subsys"):
        for entry in sorted(block.parent.iterdir()):
            if re.fullmatch(r"nvme\d+", entry.name):
                return entry.resolve()
    return block


def _upwards(place: Path, root: Path) -> Iterator[Path]:
    yield from (path for path in (place, *place.parents) if path.is_relative_to((root / "sys").resolve()))


def _link(device: Path, name: str) -> Row | None:
    """A PCIe link's current and greatest speed and width. Speeds are texts like "16.0 GT/s PCIe"."""
    now, most = (
        (re.match(r"\d+(\.\d+)?", text_of(device / f"{which}_link_speed")), text_of(device / f"{which}_link_width"))
        for which in ("current", "max")
    )
    if not (now[0] and most[0] and now[1].isdecimal() and most[1].isdecimal()):
        return None
    speed, width, max_speed, max_width = float(now[0][0]), int(now[1]), float(most[0][0]), int(most[1])
    slow = speed < max_speed or width < max_width
    hint = "the disk could do more: use a slot with all its lanes and its generation" if slow else ""
    value = f"{speed:g} GT/s x{width} of {max_speed:g} GT/s x{max_width}"
    data = {"speed": speed, "width": width, "max_speed": max_speed, "max_width": max_width}
    return Row(f"PCIe link of {name}", value, "warn" if slow else "ok", hint, data)


def _numa(place: Path, root: Path) -> int | None:
    text = next(filter(None, (text_of(path / "numa_node") for path in _upwards(place, root))), "")
    return int(text) if text.isdecimal() else None  # -1: unknown


def gds_rows(device: str, *, has_gpu: bool, root: Path = ROOT) -> Iterator[Row]:
    """nvidia-fs, P2PDMA, udev and the IOMMU. `device`: the file system's `major:minor`; may be empty."""
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
    needs = find_p2pdma(root)
    lacks, unseen = ([name for name, there in needs.items() if there is value] for value in (False, None))
    parts = [f"lacks {', '.join(lacks)}"] if lacks else []
    parts += [f"cannot be seen: {', '.join(unseen)}"] if unseen else []
    yield Row("P2PDMA", "; ".join(parts) or "all that files show is there, which proves nothing", data=needs)
    udev = root / "run/udev"
    present, record = udev.is_dir() and os.access(udev, os.R_OK), (udev / "data" / f"b{device}").exists()
    data = {"present": present, "record": bool(device) and record}
    if present and data["record"]:
        yield Row("/run/udev", "present, and knows the device", "ok", data=data)
    else:
        value = "present, but without a record of the device" if present else "missing"
        hint = "cuFile refuses files without it: give the container /run/udev (-v /run/udev:/run/udev:ro)"
        yield Row("/run/udev", value, "warn" if has_gpu else "info", hint if has_gpu else "", data)
    count = len(list((root / "sys/kernel/iommu_groups").glob("*")))
    arguments = " ".join(re.findall(r"(?:^|\s)((?:\w+_)?iommu(?:\.\w+)?=\S*)", text_of(root / "proc/cmdline")))
    value = f"{count} groups" if count else "no groups: off, or hidden from here"
    value += f"; kernel arguments {arguments}" if arguments else ""
    yield Row("IOMMU", value, data={"groups": count, "arguments": arguments})
    if not (root / "proc/modules").exists():
        yield Row("/proc/modules", "missing: cuFile would never answer, so it is not used")


def find_p2pdma(root: Path = ROOT) -> dict[str, bool | None]:
    """The requirements of GPUDirect Storage without nvidia-fs that files show. They do not prove that it works."""
    release = text_of(root / "proc/sys/kernel/osrelease")
    version = re.match(r"(\d+)\.(\d+)", release)
    driver = text_of(root / "proc/driver/nvidia/version")
    params = root / "proc/driver/nvidia/params"
    words = re.search(r"^RegistryDwords:(.*)$", text_of(params), re.MULTILINE)
    multipath = text_of(root / "sys/module/nvme_core/parameters/multipath")
    return {
        "kernel 6.2 or newer": (int(version[1]), int(version[2])) >= _P2PDMA_KERNEL if version else None,
        "CONFIG_PCI_P2PDMA": _kernel_option("CONFIG_PCI_P2PDMA", release, root),
        "open NVIDIA kernel module": OPEN_KERNEL_MODULE in driver if driver else None,
        "RMForceStaticBar1=1": "RMForceStaticBar1=1" in (words[1] if words else "") if params.exists() else None,
        "NVMe multipath off": multipath in ("N", "0") if multipath else None,
    }


def _kernel_option(name: str, release: str, root: Path) -> bool | None:
    try:
        packed = (root / "proc/config.gz").read_bytes()
        text = gzip.decompress(packed).decode(errors="replace")
    except (OSError, EOFError, zlib.error):
        text = text_of(root / "boot" / f"config-{release}")
    return bool(re.search(rf"^{name}=[ym]$", text, re.MULTILINE)) if text else None
