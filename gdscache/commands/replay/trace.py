"""Request traces in the open Mooncake format: JSON lines, plain or gzip, in one or several files.

A line is one request: `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, one id for each
block of 512 tokens of the input; the last block may be partial. Equal ids mean equal prefixes: an id stands for its
block and all blocks before it. Other keys are ignored.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from gdscache.arguments import shown
from gdscache.commands.console import reason_of
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
        raise TraceError(f"{path}: cannot be read{after}: {reason_of(error)}", "give a readable file") from error


class _Line(BaseModel):
    model_config = ConfigDict(strict=True)

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: NonNegativeInt
    output_length: NonNegativeInt
    hash_ids: list[NonNegativeInt]


def _request(where: str, line: bytes) -> Request:
    try:
        fields = _Line.model_validate_json(line)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        said = f"{place} is {shown(wrong['input'])}: {wrong['msg']}" if place else f"not a JSON object: {wrong['msg']}"
        raise TraceError(
            f"{where}: {f'no {place}' if wrong['type'] == 'missing' else said}",
            "a request is a JSON object with timestamp (ms), input_length and output_length (tokens), and hash_ids",
        ) from None
    tokens, blocks = fields.input_length, fields.hash_ids
    if len(blocks) != -(-tokens // BLOCK_TOKENS):
        raise TraceError(
            f"{where}: {len(blocks)} hash_ids for {tokens} tokens of input",
            f"one for each {BLOCK_TOKENS} tokens, and one for the rest",
        )
    return Request(fields.timestamp, tokens, fields.output_length, tuple(blocks))


def _name(block: int | None) -> str:
    return "nothing" if block is None else f"block {block}"
