"""An engine's resident memory, measured in fresh interpreters: one child process a figure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gdscache.commands.bench import measure
from gdscache.commands.bench.measure import target
from gdscache.errors import IOFailedError
from gdscache.sizes import MIB

TARGET = 150 * MIB
LAYERS, PAGE_TOKENS, PAGE_BYTES = 32, 4, 8192  # small pages: the figure does not grow with the pages' bytes
HOST_BUFFER = 16 * MIB


def engine_memory(directory: Path, pages: int) -> dict[str, Any]:
    """Resident bytes of an engine with `pages` stored pages, less its pools and an interpreter with torch imported. All
    pools are touched. `peak`: the largest resident size until then, less the same."""
    torch_only, engine = child("torch_only"), child("engine_with_pages", str(directory / "memory"), pages)
    beyond = engine["resident"] - engine["pools"] - torch_only["resident"]
    return {
        "pages": engine["pages"],
        "resident_bytes": engine["resident"],
        "peak_bytes": engine["peak"],
        "pool_bytes": engine["pools"],
        "torch_bytes": torch_only["resident"],
        "beyond_bytes": beyond,
        "beyond_bytes_peak": engine["peak"] - engine["pools"] - torch_only["resident"],
        **target(beyond, TARGET, at_least=False),
    }


def child(function: str, *arguments: object) -> dict[str, Any]:
    """Run a function of this module with plain arguments in a fresh interpreter. Returns its result."""
    return measure.child("memory", function, *arguments)


def resident() -> int:
    """This process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """This process's largest resident bytes so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# -- in the children ---------------------------------------------------------------------------------------------------


def torch_only() -> dict[str, int]:
    """Memory of an interpreter with torch imported."""
    import torch  # noqa: F401

    return {"resident": resident()}


def engine_with_pages(directory: str, pages: int) -> dict[str, int]:
    """Memory of an engine on the CPU that has stored `pages` pages and loaded them from each tier."""
    from gdscache import CacheEngine

    pool = pages * PAGE_BYTES
    model = {"name": "bench", "layers": LAYERS, "kv_heads": 1, "head_dim": 16, "page_tokens": PAGE_TOKENS}
    config = {
        "model": model,
        "gpu": {"device": "cpu", "capacity": pool + PAGE_BYTES},
        "cpu": {"capacity": pool},
        "ssd": {"path": directory, "capacity": pool + 128 * PAGE_BYTES, "transport": "posix"},
        "host_buffer": HOST_BUFFER,
        "store": {"queue": pool},
    }
    tokens = list(range(pages * PAGE_TOKENS + 1))
    with CacheEngine.from_config(config) as engine:
        with engine.sequence(tokens) as sequence:
            for layer in range(LAYERS):
                for plane in engine.gpu.planes(layer):
                    plane.fill_(layer)
            sequence.commit()
        engine.drain(600.0)
    with CacheEngine.from_config(config) as engine:
        for source in ("ssd", "cpu"):
            with engine.sequence(tokens) as sequence:
                for layer in range(LAYERS):
                    sequence.wait(layer, 600.0)
                loaded = sequence.load
                if loaded is None or loaded.result(600.0).bytes_by_tier != {source: pool}:
                    raise IOFailedError(f"the pages did not come from the {source} tier", "please report it")
                if source == "cpu":
                    sequence.commit()
        pools = engine.gpu.capacity + engine.stats()["tiers"]["cpu"]["capacity_bytes"] + HOST_BUFFER
        return {"resident": resident(), "peak": peak(), "pools": pools, "pages": len(engine.gpu.index)}
