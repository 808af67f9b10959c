"""Pages named by hashes of the caller's: the same cache as by tokens, under keys of its own."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache import CacheEngine, PageHashes
from gdscache.errors import InvalidValueError, SlotCountError, TokensError
from gdscache.pages.keys import Page, as_tokens, namespace_digest, page_keys
from tests.support.helpers import WAIT, Host, OpenEngine, OpenHost, drop_from, make_config, prompt, quiet, settle

NAMESPACE = namespace_digest({"name": "m"})
OTHER = namespace_digest({"name": "n"})


def chained(tokens: Sequence[int], page_tokens: int = 4, seed: bytes = b"") -> list[bytes]:
    """What an engine that hashes its own blocks does: SHA-256 over the hash before and the tokens."""
    found, parent = [], seed
    for at in range(0, len(tokens) - page_tokens + 1, page_tokens):
        text = repr(tokens[at : at + page_tokens]).encode()
        parent = hashlib.sha256(parent + text).digest()
        found.append(parent)
    return found


def hashes_of(tokens: Sequence[int], page_tokens: int = 4) -> PageHashes:
    return PageHashes(chained(tokens, page_tokens), len(tokens))


# -- names -----------------------------------------------------------------------------------------------------------


def slow_pages(namespace: bytes, hashes: Sequence[bytes]) -> list[Page]:
    """The definition, written down again."""
    keys = [hashlib.blake2b(given, digest_size=32, key=namespace).digest() for given in hashes]
    return [Page(key, parent, namespace) for key, parent in zip(keys, [namespace, *keys], strict=False)]


def test_the_names_are_these_for_ever() -> None:
    """What lies on an SSD is found by these bytes: whoever changes them gives it up."""
    (first, second) = PageHashes([bytes(range(32)), bytes(32)]).pages(bytes(range(100, 132)))
    assert first.key.hex() == "0b1cdaace7b5df8abd925d386b74def52e4f7978fe4a3112b96d7e5edd306a63"
    assert second.key.hex() == "7f5f8fa94e1b8ad67cb62105c565e5efbafbc645d2955767242cef3dc4088861"
    assert first.parent == first.namespace == second.namespace == bytes(range(100, 132))
    assert second.parent == first.key


@given(st.lists(st.lists(st.binary(min_size=32, max_size=32), max_size=6), max_size=5), st.data())
def test_names_grow_with_the_request(parts: list[list[bytes]], data: st.DataObject) -> None:
    flat = list(dict.fromkeys(some for part in parts for some in part))
    hashes, given_so_far = PageHashes([]), 0
    while given_so_far < len(flat):
        more = data.draw(st.integers(1, len(flat) - given_so_far))
        hashes.extend(flat[given_so_far : given_so_far + more])
        given_so_far += more
        namespace = data.draw(st.sampled_from([NAMESPACE, OTHER]))
        pages = hashes.pages(namespace)
        assert pages == slow_pages(namespace, flat[:given_so_far])
        pages.clear()  # the caller's own
    assert hashes.pages(OTHER) == slow_pages(OTHER, flat)
    assert len(hashes) == len(flat)


def test_many_namespaces_of_one_request() -> None:
    hashes = PageHashes([b"a" * 32, b"b" * 32])
    spaces = [namespace_digest({"n": n}) for n in range(40)]
    for space in [*spaces, *spaces]:
        assert hashes.pages(space) == slow_pages(space, [b"a" * 32, b"b" * 32])
    assert len(hashes._named) <= 8


def test_growing_by_a_page_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = PageHashes([n.to_bytes(32, "big") for n in range(100)])
    before = hashes.pages(NAMESPACE)
    digests = []
    real = hashlib.blake2b

    def named(keys: list[bytes], parent: bytes, namespace: bytes) -> list[Page]:
        digests.extend(keys)
        return [Page(key, parent, namespace) for key in keys]

    monkeypatch.setattr("gdscache.pages.keys._pages", named)
    hashes.extend([b"x" * 32])
    after = hashes.pages(NAMESPACE)
    assert hashes.pages(NAMESPACE) == after
    assert digests == [real(b"x" * 32, digest_size=32, key=NAMESPACE).digest()]
    assert all(a is b for a, b in zip(before, after, strict=False)), "pages that have names are named once"


@given(st.binary(min_size=32, max_size=32), st.integers(1, 16))
def test_keys_of_hashes_are_none_of_tokens(given_hash: bytes, page_tokens: int) -> None:
    """Even where the tokens are the bytes of the hash, and the parent is, too."""
    (page,) = PageHashes([given_hash]).pages(NAMESPACE)
    tokens = as_tokens(list(memoryview(given_hash * 2).cast("I"))[:page_tokens])
    for parent in (None, given_hash, page.key):
        assert page.key not in page_keys(NAMESPACE, tokens, page_tokens, parent)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ((b"x" * 32 for _ in range(2)), "generator"),
        (b"x" * 64, "bytes"),
        (None, "NoneType"),
        ({b"x" * 32}, "set"),
        ([b"x" * 32, b"y" * 31], "page 1 of those given is 31 bytes"),
        ([b"x" * 32, "y" * 32], "page 1 of those given is of type str"),
        ([bytearray(32)], "of type bytearray"),
        ([b"x" * 32, b"y" * 32, b"x" * 32], "twice"),
    ],
)
def test_what_is_no_hash(bad: Any, told: str) -> None:
    with pytest.raises(InvalidValueError, match=told) as raised:
        PageHashes(bad)
    assert raised.value.hint
    if not isinstance(bad, (bytes, str, int, type(None))):
        bad = bad if isinstance(bad, list) else [7]
        hashes = PageHashes([b"z" * 32], 5)
        with pytest.raises(InvalidValueError):
            hashes.extend(bad)
        with pytest.raises(InvalidValueError, match="twice"):
            hashes.extend([b"z" * 32])
        assert (len(hashes), hashes.length(4)) == (1, 5), "a refused part changes nothing"


@pytest.mark.parametrize("tokens", [-1, True, 1.0, "8", 1 << 70])
def test_a_length_that_is_none(tokens: Any) -> None:
    with pytest.raises(InvalidValueError, match="tokens is"):
        PageHashes([], tokens)


@pytest.mark.parametrize(("pages", "tokens"), [(2, 7), (2, 12), (0, 4), (1, 0)])
def test_tokens_that_are_not_those_of_the_pages(open_host: OpenHost, pages: int, tokens: int) -> None:
    engine = open_host().engine
    hashes = PageHashes(chained(prompt(1, pages)), tokens)
    for call in (
        engine.lookup,
        engine.prefetch,
        engine.pages,
        lambda given: engine.pin(given, 1.0),
        lambda given: engine.store(given, []),
    ):
        with pytest.raises(TokensError, match=f"{pages} page hashes for {tokens} tokens"):
            call(hashes)


# -- an engine -------------------------------------------------------------------------------------------------------


def test_hashes_and_tokens_have_pages_of_their_own(open_host: OpenHost) -> None:
    host = open_host(cpu=20, ssd=40)
    tokens = prompt(1, 3, extra=2)
    host.keep(hashes_of(tokens))
    assert host.engine.lookup(tokens).tokens == 0
    assert host.engine.lookup(hashes_of(tokens), salt="other").tokens == 0
    assert host.engine.lookup(hashes_of(tokens)).tokens == 12
    host.store(tokens)
    host.store(hashes_of(tokens), salt="other")
    names = [set(host.engine.pages(face, salt)) for face in (tokens, hashes_of(tokens)) for salt in ("", "other")]
    assert len(set().union(*names)) == 12
    for face in (tokens, hashes_of(tokens)):
        assert host.load(face).tokens == 12
    assert host.load(hashes_of(tokens), salt="other").tokens == 12


def test_a_request_grows_and_is_stored_page_by_page(open_host: OpenHost) -> None:
    host = open_host(cpu=12)
    tokens = prompt(1, 6)
    hashes = PageHashes([])
    for page, given_hash in enumerate(chained(tokens)):
        hashes.extend([given_hash], tokens=4 * (page + 1) + 3)
        host.store(hashes, start=4 * page)
    assert host.load(hashes).tokens == 24
    with pytest.raises(SlotCountError):
        host.engine.store(hashes, [0, 1], start=20)
    with host.engine.pin(hashes, 10.0) as pin:
        assert pin.tokens == 24


def test_who_takes_tokens_alone_says_who_takes_hashes(open_engine: OpenEngine) -> None:
    hashes = hashes_of(prompt(1, 2))
    engine = open_engine()
    assert engine.lookup(hashes).tokens == 0
    for call in (engine.sequence, as_tokens):
        with pytest.raises(TokensError, match="2 page hashes were given") as raised:
            call(hashes)
        assert "lookup, store, prefetch, pin" in raised.value.hint
    with engine.sequence(prompt(2, 1)) as seq, pytest.raises(TokensError, match="2 page hashes"):
        seq.append(hashes)


# -- a model: hashes that are a function of the tokens are the tokens ------------------------------------------------

prompts = st.builds(
    lambda parts, tail: [token for part in parts for token in (part, 1, 2, 3)] + [9] * tail,
    st.lists(st.integers(0, 2), min_size=0, max_size=5),
    st.integers(0, 3),
)
starts = st.integers(0, 6).map(lambda page: 4 * page)
steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "load", "lookup", "prefetch", "pin", "drop", "restart"]),
        prompts,
        starts,
        st.sampled_from(["", "t"]),
    ),
    max_size=12,
)


@given(steps)
def test_what_happens_is_what_happens_with_tokens(actions: list[tuple[str, list[int], int, str]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        told = [_play(Path(directory) / name, actions, face) for name, face in (("a", list), ("b", hashes_of))]
    assert told[0] == told[1]


def _play(path: Path, actions: list[tuple[str, list[int], int, str]], face: Callable[[list[int]], Any]) -> list[Any]:
    told: list[Any] = []
    config = make_config(path, cpu=6, ssd=12, eviction="lru")  # orders that sample keys would tell the faces apart
    host = Host(config)
    for action, tokens, start, salt in [*actions, ("restart", [], 0, "")]:
        if action == "restart":
            settle(host.engine)
            host.engine.close()
            host = Host(config)
        else:
            told.append(_act(host, host.engine, action, face(tokens), start, salt))
            quiet(host.engine)
        told.append({name: tier["pages"] for name, tier in host.engine.stats()["tiers"].items()})
    host.engine.close()
    return told


def _act(host: Host, engine: CacheEngine, action: str, given_tokens: Any, start: int, salt: str) -> Any:
    if action == "store":
        return host.store(given_tokens, start, salt).result(WAIT)
    if action == "load":
        report = host.load(given_tokens, start, salt)
        return report.tokens, report.pages, report.bytes_by_tier
    if action == "lookup":
        hit = engine.lookup(given_tokens, start, salt)
        return hit.tokens, hit.tiers
    if action == "prefetch":
        brought = engine.prefetch(given_tokens, start, salt).result(WAIT)
        return brought.tokens, brought.pages, brought.end
    if action == "pin":
        with engine.pin(given_tokens, 10.0, salt) as pin:
            return pin.tokens
    drop_from(engine, "cpu")
    return None


# -- digests that are no chain ---------------------------------------------------------------------------------------


def digest(n: int) -> bytes:
    return hashlib.sha256(bytes([n])).digest()


@pytest.mark.parametrize("parent", [1, 2, 3])
def test_a_parent_among_its_own_pages_is_refused(parent: int) -> None:
    with pytest.raises(InvalidValueError, match="one of the 3 pages that follow it") as caught:
        PageHashes([digest(n) for n in (1, 2, 3)], parent=digest(parent))
    assert "before the first one" in caught.value.hint


def test_a_parent_that_comes_to_follow_itself_is_refused() -> None:
    hashes = PageHashes([digest(1)], parent=digest(2))
    with pytest.raises(InvalidValueError, match="one of the 2 pages"):
        hashes.extend([digest(2)])
    assert len(hashes) == 1
    hashes.extend([digest(3)])


@pytest.mark.parametrize(
    "options", [{"cpu": None}, {"cpu": 4}, {"cpu": 4, "store": {"write_policy": "write_back"}}], ids=str
)
@pytest.mark.timeout(60)
def test_circles_over_several_calls_keep_nobody_waiting(open_host: OpenHost, options: dict[str, Any]) -> None:
    host = open_host(ssd=12, **options)
    for hashes, parent in ([[1], 2], [[2], 1], [[3], 5], [[4], 3], [[5], 4]):
        host.keep(PageHashes([digest(n) for n in hashes], parent=digest(parent)))
    for seed in range(8):  # others need the room
        host.keep(PageHashes([digest(100 + 10 * seed + n) for n in range(3)]))
    assert host.load(PageHashes([digest(170 + n) for n in range(3)])).tokens == 12
    settle(host.engine)
    assert host.engine.check().problems == ()
    host.engine.close()
    host = open_host(ssd=12, **options)
    assert not host.engine.manager.ssd.lost  # type: ignore[union-attr]
