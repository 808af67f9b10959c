"""Where libcufile is: in the system, or in a wheel."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gdscache.errors import TransportUnavailableError

ROOT = Path("/")
_LIBRARIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/local/cuda*/lib64",
    "usr/local/cuda*/targets/*/lib",
)


def find_cufile(root: Path = ROOT, paths: Sequence[str] | None = None) -> str:
    """The path of libcufile, in the system or in the wheels below `paths` (the import path). It is not loaded.

    Raises `TransportUnavailableError` where it is not found.
    """
    places = [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p] if root == ROOT else []
    places += [place for pattern in _LIBRARIES for place in sorted(root.glob(pattern))]
    for path in sys.path if paths is None else paths:
        places += [Path(path, "libcufile_cu12.libs"), *sorted(Path(path).glob("nvidia/*/lib"))]
    for place in places:
        if found := sorted(place.glob("libcufile.so*")):
            return str(found[0])
    raise TransportUnavailableError(
        "libcufile.so is not found", "install the CUDA toolkit's libcufile, or the wheel nvidia-cufile"
    )
