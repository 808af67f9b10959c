"""Small traces: requests, their lines in a file, workloads that hypothesis draws."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from gdscache.commands.replay.trace import Request
from gdscache.commands.replay.workload import Workload, expand


def request(blocks: Sequence[int], tokens: int | None = None, timestamp: float = 0) -> Request:
    return Request(timestamp, 512 * len(blocks) if tokens is None else tokens, 1, tuple(blocks))


def workload(*prompts: Sequence[int], page_tokens: int = 512) -> Workload:
    return expand([request(blocks) for blocks in prompts], page_tokens)


def line(blocks: Sequence[int], tokens: int | None = None, timestamp: float = 0) -> dict[str, object]:
    r = request(blocks, tokens, timestamp)
    return {"timestamp": r.timestamp, "input_length": r.input_tokens, "output_length": 1, "hash_ids": list(blocks)}


def write(path: Path, *lines: dict[str, object]) -> Path:
    text = "".join(json.dumps(fields) + "\n" for fields in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@st.composite
def workloads(draw: st.DrawFn, requests: int = 7, depth: int = 3, page_tokens: int = 512) -> Workload:
    """Prompts that are paths from the root of a small tree."""
    paths = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=depth), min_size=1, max_size=requests))
    ids: dict[tuple[int, ...], int] = {}
    prompts = [[ids.setdefault(tuple(p[: i + 1]), len(ids)) for i in range(len(p))] for p in paths]
    return workload(*prompts, page_tokens=page_tokens)
