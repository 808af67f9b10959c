"""A trace from the cache's view: the pages of each request's prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from gdscache.commands.replay.trace import BLOCK_TOKENS, Request
from gdscache.errors import InvalidValueError
from gdscache.limits import KEY_BYTES
from gdscache.pages.keys import Page, namespace_digest


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
