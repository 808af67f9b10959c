"""Small traces: requests, their lines in a file, workloads that hypothesis draws."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import strategies as st

from gdscache.commands.replay.trace import Request, Workload, expand, read_trace

_CONVERSATION = os.environ.get("GDSCACHE_CONVERSATION_TRACE", "")
needs_conversation = pytest.mark.skipif(
    not _CONVERSATION, reason="GDSCACHE_CONVERSATION_TRACE does not name Mooncake's conversation_trace.jsonl"
)


def conversation() -> list[Request]:
    return read_trace([Path(_CONVERSATION)])


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
