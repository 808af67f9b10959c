"""Where the tree is, and where tests have their files. Child processes have `ROOT` on PYTHONPATH, as the tests do."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

MEMORY, MEMORY_NEEDED = Path("/dev/shm"), 64 << 20

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]


def scratch() -> Path:
    """A new folder, in memory where there is room, so that nobody waits for a disk. It is the caller's to remove."""
    there = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_NEEDED
    return Path(tempfile.mkdtemp(prefix="gdscache-test-", dir=MEMORY if there else None))


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
