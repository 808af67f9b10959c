"""What is below a directory, read from `/proc`, `/sys` and `/run`: each function takes their root, for tests."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from gdscache.commands.doctor.facts import DiskFacts, KernelSideFacts, LinkFacts, MountFacts

ROOT = Path("/")
OPEN_KERNEL_MODULE = "Open Kernel Module"
_P2PDMA_KERNEL = (6, 2)


def find_mount(directory: Path, root: Path = ROOT) -> MountFacts:
    """The mount that holds an absolute directory without links. Raises `OSError` without `/proc`."""
    best: tuple[int, MountFacts] | None = None
    for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 6 or len(kinds) < 2:
            continue
        point = Path(_unescaped(fields[4]))
        # A later mount covers an earlier one at the same point.
        if directory.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            options = ",".join(dict.fromkeys([*fields[5].split(","), *"".join(kinds[2:3]).split(",")])).strip(",")
            best = len(point.parts), MountFacts(kinds[0], _unescaped(kinds[1]), fields[2], options)
    if best is None:
        raise FileNotFoundError(f"{directory} is below no mount that the kernel lists")
    return best[1]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def find_disks(mount: MountFacts, root: Path = ROOT) -> tuple[DiskFacts, ...]:
    """The disks that hold a mount: of a partition its disk, of a RAID or a mapping all below; none for tmpfs."""
    block = root / "sys/dev/block" / mount.device
    if not block.exists() and mount.source.startswith("/dev/"):  # btrfs and others have a device number of their own
        block = root / "sys/class/block" / Path(os.path.realpath(mount.source)).name
    if not block.exists():
        return ()
    return tuple(_disk(disk, root) for disk in dict.fromkeys(_below(block.resolve())))


def _below(block: Path) -> Iterator[Path]:
    slaves = sorted((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if slaves:
        for slave in slaves:
            yield from _below(slave.resolve())
    else:
        yield block.parent if (block / "partition").exists() else block


def _disk(block: Path, root: Path) -> DiskFacts:
    rotational = {"0": False, "1": True}.get(_text(block / "queue/rotational"))
    place = _controller(block)
    link = next(filter(None, map(_link, _upwards(place, root))), None) if block.name.startswith("nvme") else None
    model = _text(block / "device/model") or _text(place / "model")
    return DiskFacts(block.name, model or None, rotational, link, _numa(place, root))


def _controller(block: Path) -> Path:
    """With NVMe multipath a disk belongs to a subsystem, which has links to its controllers: the first one's path."""
    if block.parent.name.startswith("nvme-subsys"):
        for entry in sorted(block.parent.iterdir()):
            if re.fullmatch(r"nvme\d+", entry.name):
                return entry.resolve()
    return block


def _upwards(place: Path, root: Path) -> Iterator[Path]:
    yield from (path for path in (place, *place.parents) if path.is_relative_to((root / "sys").resolve()))


def _link(device: Path) -> LinkFacts | None:
    speeds = [
        re.match(r"\d+(\.\d+)?", _text(device / name)) for name in ("current_link_speed", "max_link_speed")
    ]  # "16.0 GT/s PCIe"
    widths = [_text(device / name) for name in ("current_link_width", "max_link_width")]
    if not (speeds[0] and speeds[1] and all(width.isdecimal() for width in widths)):
        return None
    return LinkFacts(float(speeds[0][0]), int(widths[0]), float(speeds[1][0]), int(widths[1]))


def _numa(place: Path, root: Path) -> int | None:
    text = next(filter(None, (_text(path / "numa_node") for path in _upwards(place, root))), "")
    return int(text) if text.isdecimal() else None  # -1: the machine does not say


def gpu_numa_node(address: str, root: Path = ROOT) -> int | None:
    """The NUMA node of the GPU at a PCI address (`0000:18:00.0`); None where it is not known."""
    text = _text(root / "sys/bus/pci/devices" / address / "numa_node")
    return int(text) if text.isdecimal() else None


def find_kernel_side(device: str, root: Path = ROOT) -> KernelSideFacts:
    """nvidia-fs, P2PDMA, udev and the IOMMU. `device`: of the file system, as `major:minor`; may be empty."""
    modules = _text(root / "proc/modules")
    version = _text(root / "proc/driver/nvidia-fs/version")
    number = re.search(r"\d+(\.\d+)+", version)
    counts = {"0": False, "1": True, "N": False, "Y": True}.get(
        _text(root / "sys/module/nvidia_fs/parameters/rw_stats_enabled")
    )
    udev = root / "run/udev"
    groups = root / "sys/kernel/iommu_groups"
    arguments = [word for word in _text(root / "proc/cmdline").split() if re.match(r"(\w+_)?iommu(\.\w+)?=", word)]
    return KernelSideFacts(
        nvidia_fs=bool(re.search(r"^nvidia_fs\s", modules, re.MULTILINE)) or bool(version),
        nvidia_fs_version=number[0] if number else version,
        counts=counts,
        p2pdma=find_p2pdma(root),
        udev=udev.is_dir() and os.access(udev, os.R_OK),
        udev_record=bool(device) and (udev / "data" / f"b{device}").exists(),
        modules=(root / "proc/modules").exists(),
        iommu_groups=len(list(groups.iterdir())) if groups.is_dir() else 0,
        iommu=" ".join(arguments),
    )


def find_p2pdma(root: Path = ROOT) -> dict[str, bool | None]:
    """What GPUDirect Storage without nvidia-fs needs, as far as files show it; none of it proves that it works."""
    release = _text(root / "proc/sys/kernel/osrelease")
    version = re.match(r"(\d+)\.(\d+)", release)
    driver = _text(root / "proc/driver/nvidia/version")
    params = root / "proc/driver/nvidia/params"
    words = re.search(r"^RegistryDwords:(.*)$", _text(params), re.MULTILINE)
    multipath = _text(root / "sys/module/nvme_core/parameters/multipath")
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
        text = _text(root / "boot" / f"config-{release}")
    return bool(re.search(rf"^{name}=[ym]$", text, re.MULTILINE)) if text else None


def _text(path: Path) -> str:
    """A small file's content, stripped; empty where it is not there, or not for this user."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
