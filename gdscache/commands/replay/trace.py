"""Request traces in the open Mooncake format: JSON lines, plain or gzip, in one or several files.

A line is one request: `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, one id for each
block of 512 tokens of the input; the last block may be partial. Equal ids mean equal prefixes: an id stands for its
block and all blocks before it. Other keys are ignored. A `Workload` has the pages of
each request's prompt.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from gdscache.arguments import shown
from gdscache.commands.console import reason_of
from gdscache.errors import GdsCacheError, InvalidValueError
from gdscache.limits import KEY_BYTES
from gdscache.pages.keys import Page, namespace_digest

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
                    line = line if number else line.removeprefix(codecs.BOM_UTF8)
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


# -- the pages of the prompts ------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """A request: its pages' numbers in order, and its input tokens."""

    pages: list[int]
    tokens: int


class Workload(NamedTuple):
    """Prompts in order of arrival. Page `i` has the name `names[i]`, in order of first use."""

    page_tokens: int
    prompts: list[Prompt]
    names: list[Page]
    namespace: bytes

    @property
    def references(self) -> int:
        """Pages of all prompts, each use counted."""
        return sum(len(prompt.pages) for prompt in self.prompts)

    @property
    def tokens(self) -> int:
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def repeated(self) -> int:
        """Pages that tiers of infinite size find: of each prompt those before its first new one."""
        seen, found = bytearray(len(self.names)), 0
        for pages, _ in self.prompts:
            hits = next((i for i, page in enumerate(pages) if not seen[page]), len(pages))
            found += hits
            for page in pages[hits:]:
                seen[page] = 1
        return found


def expand(requests: Sequence[Request], page_tokens: int = BLOCK_TOKENS) -> Workload:
    """Every request's full pages of `page_tokens` tokens: the pages that an engine stores.

    A page's key is BLAKE2b-256 of the previous key, the block's id and the page's place in the block: like keys of
    tokens, it names the whole prefix. Raises `InvalidValueError` for a `page_tokens` that does not divide a block.
    """
    if page_tokens < 1 or BLOCK_TOKENS % page_tokens:
        raise InvalidValueError(
            f"pages of {page_tokens} tokens do not divide the trace's blocks of {BLOCK_TOKENS}",
            "set model.page_tokens to 1, 2, 4, ... 512",
        )
    namespace = namespace_digest({"replay": "mooncake", "page_tokens": page_tokens})
    keyed = hashlib.blake2b(digest_size=KEY_BYTES, key=namespace)  # a copy costs half of a new one
    names: list[Page] = []
    numbers: dict[int, list[int]] = {}  # block -> its pages used so far
    prompts = []
    for request in requests:
        pages: list[int] = []
        left = request.input_tokens // page_tokens * page_tokens
        for block in request.blocks:
            wanted = min(left, BLOCK_TOKENS) // page_tokens
            left -= min(left, BLOCK_TOKENS)
            known = numbers.setdefault(block, [])
            for place in range(len(known), wanted):
                above = known[-1] if known else pages[-1] if pages else None
                known.append(len(names))
                parent, digest = namespace if above is None else names[above].key, keyed.copy()
                digest.update(b"%b %d %d" % (parent, block, place))
                names.append(Page(digest.digest(), parent, namespace))
            pages += known if len(known) == wanted else known[:wanted]
        prompts.append(Prompt(pages, request.input_tokens))
    return Workload(page_tokens, prompts, names, namespace)
