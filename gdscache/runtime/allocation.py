"""Available memory, and the error that names the setting which asked for more."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from gdscache.errors import DeviceError, NoMemoryError
from gdscache.runtime.files import text_of
from gdscache.sizes import about

_CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def allocating(setting: str, nbytes: int, device: torch.device) -> Iterator[None]:
    """A block that allocates `nbytes` of `device`. `setting`: their key or purpose.

    Raises `NoMemoryError`. Host memory is checked before the allocation, since the kernel promises memory that it does
    not have, and kills the process that uses it.
    """
    if device.type == "cpu":
        there = host_bytes()
        if there is not None and nbytes > there:
            raise _refused(setting, nbytes, device)
    try:
        yield
    except (MemoryError, OverflowError, torch.cuda.OutOfMemoryError) as error:
        raise _refused(setting, nbytes, device, str(error)) from error
    except DeviceError as error:
        if "OUT_OF_MEMORY" not in error.message:
            raise
        raise _refused(setting, nbytes, device, error.message) from error
    except RuntimeError as error:  # raised by torch's allocator for host memory
        if "alloc" not in str(error):
            raise
        raise _refused(setting, nbytes, device, str(error)) from error


def host_bytes(groups: Iterable[Path] | None = None) -> int | None:
    """Bytes of host memory that this process may still take: the machine's, limited by its cgroups.

    `groups`: the directories of its memory cgroups; by default those visible from here. None if the system does not
    tell.
    """
    found = [_machine_bytes(), *map(_left, _groups() if groups is None else groups)]
    known = [nbytes for nbytes in found if nbytes is not None]
    return min(known, default=None)


def _refused(setting: str, nbytes: int, device: torch.device, cause: str = "") -> NoMemoryError:
    there, where = host_bytes(), "host memory"
    if device.type == "cuda":
        there, where = torch.cuda.mem_get_info(device)[0], f"memory on {device}"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    message = f"{setting} asks for {nbytes:,} bytes ({about(nbytes)}) of {where}"
    message += "" if there is None else f", {there:,} bytes ({about(there)}) are available"
    if device.type == "cpu" and limit != resource.RLIM_INFINITY:
        message += f", and the process may have {limit:,} in all (ulimit -v)"
    return NoMemoryError(message + (f": {cause}" if cause else ""), f"lower {setting}, or free memory")


def _machine_bytes() -> int | None:
    """The bytes that the kernel can give without swapping, and those it can swap."""
    lines = text_of(Path("/proc/meminfo")).splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["MemAvailable"] + kib.get("SwapFree", 0)) << 10 if "MemAvailable" in kib else None


def _groups() -> Iterator[Path]:
    """The directories of this process's memory cgroups, as far as they are visible."""
    for line in text_of(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            root = _CGROUPS if number == "0" else _CGROUPS / "memory"
            group = root / path.lstrip("/")
            while group != root and root in group.parents:
                yield group
                group = group.parent
            yield root


def _left(group: Path) -> int | None:
    """The rest of a cgroup's limit; file pages count as free, since the kernel drops them first."""
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if most.isdigit():
            files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            return max(0, int(most) - used + files)
    return None
