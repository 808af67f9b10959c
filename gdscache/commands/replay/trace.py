"""Request traces in the open Mooncake format: JSON lines, plain or gzip, in one or several files.

A line is one request: `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, one id for each
block of 512 tokens of the input; the last block may be partial. Equal ids mean equal prefixes: an id stands for its
block and all blocks before it. Other keys are ignored.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gdscache.arguments import shown
from gdscache.errors import GdsCacheError

BLOCK_TOKENS = 512
MAX_LINE_BYTES = 16 << 20  # 512 such blocks a KiB: far beyond any prompt
MAX_TRACE_BYTES = 1 << 30  # of an unpacked file: an endless one is a device or a pipe
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(GdsCacheError):
    """An unreadable trace. The message names the file, and the line if known."""


class Request(NamedTuple):
    """A request's time in ms, input and output tokens, and ids of the input's blocks."""

    timestamp: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(paths: Sequence[Path]) -> list[Request]:
    """The requests of all files by timestamp; equal timestamps in file order.

    Several files are parts of one trace: equal ids mean equal prefixes across them. Raises `TraceError` for an
    unreadable file, an invalid line, an id that follows different blocks in different places, and for files without any
    block.
    """
    before: dict[int, int | None] = {}  # each block's predecessor
    requests: list[Request] = []
    for path in paths:
        for number, line in _lines(path):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            request = _request(where, line)
            previous = None
            for block in request.blocks:
                if before.setdefault(block, previous) != previous:
                    raise TraceError(
                        f"{where}: block {block} follows {_name(previous)} here and {_name(before[block])} before",
                        "an id stands for its whole prefix; replay traces with ids of their own one by one",
                    )
                previous = block
            requests.append(request)
    if not before:
        names = ", ".join(map(str, paths))
        raise TraceError(f"{names}: no block in {len(requests)} requests", "give a trace with requests")
    requests.sort(key=lambda request: request.timestamp)
    return requests


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = total = 0
    try:
        with path.open("rb") as raw:
            packed = raw.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)  # a pipe cannot seek
            with gzip.GzipFile(fileobj=raw) if packed else raw as file:
                while line := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    total += len(line)
                    if len(line) > MAX_LINE_BYTES or total > MAX_TRACE_BYTES:
                        raise TraceError(
                            f"{path}:{number}: a line of more than {MAX_LINE_BYTES:,} bytes, or a trace of more than "
                            f"{MAX_TRACE_BYTES:,}",
                            "give a trace: one request a line, parts of a longer one by themselves",
                        )
                    yield number, line
    except (OSError, EOFError, ValueError, zlib.error) as error:
        after = f" after line {number}" if number else ""
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be read{after}: {reason}", "give a readable file") from error


def _request(where: str, line: bytes) -> Request:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON: {error}", "one JSON object a line") from None
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: {type(fields).__name__} instead of an object", "one JSON object a line")
    timestamp = _field(where, fields, "timestamp")
    if not _is_count(timestamp) and not (isinstance(timestamp, float) and 0 <= timestamp < float("inf")):
        raise TraceError(f"{where}: timestamp is {shown(timestamp)}", "it is milliseconds, not negative")
    lengths = [_field(where, fields, name) for name in ("input_length", "output_length")]
    for name, length in zip(("input_length", "output_length"), lengths, strict=True):
        if not _is_count(length):
            raise TraceError(f"{where}: {name} is {shown(length)}", "it is a number of tokens, not negative")
    blocks = _field(where, fields, "hash_ids")
    if not isinstance(blocks, list) or not all(map(_is_count, blocks)):
        raise TraceError(f"{where}: hash_ids is {shown(blocks)}", "it is a list of integers, not negative")
    if len(blocks) != -(-lengths[0] // BLOCK_TOKENS):
        raise TraceError(
            f"{where}: {len(blocks)} hash_ids for {lengths[0]} tokens of input",
            f"one for each {BLOCK_TOKENS} tokens, and one for the rest",
        )
    return Request(timestamp, lengths[0], lengths[1], tuple(blocks))


def _field(where: str, fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise TraceError(f"{where}: no {name}", "a request has timestamp, input_length, output_length and hash_ids")
    return fields[name]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _name(block: int | None) -> str:
    return "nothing" if block is None else f"block {block}"
