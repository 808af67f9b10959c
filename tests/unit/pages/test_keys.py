"""Namespaces and page keys: equal exactly when the bytes are interchangeable."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdscache.errors import NativeCallError
from gdscache.native import chained_keys, keys_of
from gdscache.pages.keys import Page, PageNames, as_tokens, namespace_digest, page_keys

NAMESPACE = namespace_digest({"name": "m"})
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def slow_keys(namespace: bytes, tokens: list[int], page_tokens: int) -> list[bytes]:
    """The definition, written down again."""
    keys, parent = [], namespace
    for page in range(len(tokens) // page_tokens):
        ids = tokens[page * page_tokens : (page + 1) * page_tokens]
        text = parent + b"".join(struct.pack("<I", t) for t in ids)
        parent = hashlib.blake2b(text, digest_size=32, key=namespace).digest()
        keys.append(parent)
    return keys


@given(token_lists, st.integers(1, 12))
def test_keys_are_the_definition(tokens: list[int], page_tokens: int) -> None:
    assert page_keys(NAMESPACE, as_tokens(tokens), page_tokens) == slow_keys(NAMESPACE, tokens, page_tokens)


@pytest.mark.parametrize("page_tokens", [1, 8, 16, 23, 24, 25, 55, 56, 57, 64, 256, 1000])
@pytest.mark.parametrize("namespace", [b"n", NAMESPACE, NAMESPACE * 2])
def test_keys_of_pages_around_whole_blocks_are_the_definition(namespace: bytes, page_tokens: int) -> None:
    """BLAKE2b's blocks have 128 bytes; the first has 32 of the page before."""
    tokens = np.random.default_rng(page_tokens).integers(0, 1 << 32, 3 * page_tokens + 1, np.uint32)
    assert page_keys(namespace, tokens, page_tokens) == slow_keys(namespace, tokens.tolist(), page_tokens)


@given(st.lists(st.binary(min_size=1, max_size=64), max_size=4))
def test_keys_of_digests(digests: list[bytes]) -> None:
    assert keys_of(NAMESPACE, digests) == [hashlib.blake2b(d, digest_size=32, key=NAMESPACE).digest() for d in digests]


@pytest.mark.parametrize(("key", "digest"), [(b"", b"d"), (b"k" * 65, b"d"), (b"k", b""), (b"k", b"d" * 65)])
def test_keys_and_digests_of_no_sound_size_are_refused(key: bytes, digest: bytes) -> None:
    with pytest.raises(NativeCallError):
        keys_of(key, [digest])
    with pytest.raises(NativeCallError):
        chained_keys(key, digest, bytes(4), 4)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=24), st.lists(st.integers(0, 3), max_size=24), st.integers(1, 4)
)
def test_two_sequences_share_keys_exactly_as_far_as_they_share_pages(a: list[int], b: list[int], n: int) -> None:
    keys_a, keys_b = page_keys(NAMESPACE, as_tokens(a), n), page_keys(NAMESPACE, as_tokens(b), n)
    for i, (x, y) in enumerate(zip(keys_a, keys_b, strict=False)):
        assert (x == y) == (a[: (i + 1) * n] == b[: (i + 1) * n])


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=14), st.sampled_from([NAMESPACE, bytes(32)])), max_size=20),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 20),
)
def test_names_are_the_same_whatever_is_remembered(
    asked: list[tuple[list[int], bytes]], page_tokens: int, kept: int, most: int
) -> None:
    names = PageNames(page_tokens, kept, most)
    for tokens, namespace in asked:
        given_tokens = np.array(tokens, dtype="<u4")
        pages = names.of(namespace, given_tokens)
        given_tokens[:] = 7  # the caller's own
        keys = slow_keys(namespace, tokens, page_tokens)
        assert pages == [Page(key, parent, namespace) for key, parent in zip(keys, [namespace, *keys], strict=False)]
        pages.clear()  # the caller's own, too
        held = [len(sequence.keys) for sequence in names._known]
        assert len(held) <= kept
        assert len(held) <= 1 or sum(held) <= most


def test_what_is_remembered_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def counted(namespace: bytes, tokens: Any, page_tokens: int, parent: bytes | None = None) -> list[bytes]:
        hashed.append(len(tokens) // page_tokens)
        return page_keys(namespace, tokens, page_tokens, parent)

    monkeypatch.setattr("gdscache.pages.keys.page_keys", counted)
    names = PageNames(2)
    system, other = list(range(6)), [9, 9]
    for tokens, new in [
        (system, 3),
        (system[:5], 0),
        ([*system, *other], 1),
        ([*system, *system], 3),  # a second conversation with the same beginning
        ([*system, *other, 4, 4], 1),  # while the first goes on
        ([*system, *system, 5, 5], 1),
    ]:
        hashed.clear()
        names.of(NAMESPACE, as_tokens(tokens))
        assert sum(hashed) == new, tokens
    assert len(names._known) == 2
    names.forget()
    names.of(NAMESPACE, as_tokens(system))
    assert hashed[-1] == 3


@pytest.mark.parametrize(
    "make",
    [
        list,
        lambda t: np.array(t, np.int64),
        lambda t: np.array(t, ">i8"),
        lambda t: np.array(t, np.int64).repeat(2)[::2],
        lambda t: torch.tensor(t),
        lambda t: torch.tensor(t, dtype=torch.int32),
        lambda t: [np.int64(x) for x in t],
    ],
)
def test_every_way_to_give_tokens_gives_the_same_keys(make: Callable[[list[int]], Any]) -> None:
    tokens = [0, 1, 127, 128, 65536, 2**31 - 1, 5, 6]
    got = as_tokens(make(tokens))
    assert got.dtype == np.dtype("<u4")
    assert got.tolist() == tokens
