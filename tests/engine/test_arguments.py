"""Every argument of every public call, with values of a wrong kind: an error of gdscache that says what was wrong.

Nothing but a `GdsCacheError` may come out, it has a hint and a message that a line holds, and nothing is leaked: what
was held before is what is held after.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gdscache
from gdscache import CacheEngine
from gdscache.errors import GdsCacheError, InvalidValueError, PlanesError, SlotRangeError, TokensError
from gdscache.limits import MAX_SECONDS

from tests.support.helpers import WAIT, Host, make_config, prompt, settle  # isort: skip

Call = Callable[[Any], object]
PROMPT = prompt(1, 3)


class Hostile:
    """Answers every question about itself with an error."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")

    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __float__(self) -> float:
        raise RuntimeError("no float")

    def __len__(self) -> int:
        raise RuntimeError("no length")


META = torch.zeros(8, dtype=torch.int64, device="meta")
NUMBERS = [True, -1, 2.5, math.nan, math.inf, -math.inf, 1e10, 10**10, 10**400, 10**5000, -(10**5000), 1 << 63]
OTHERS = ["x", "", b"x", "\ud800", "nan", {}, {1: 2}, set(), iter([1]), object(), int, lambda: 1, Hostile(), 1j]
LISTS = [[1.5], ["a"], [None], [[1, 2], [3]], [1 << 40], [-1], [10**5000], [META[0]], [Hostile()], [[]]]
ARRAYS = [
    np.float64(2.5),
    np.array(["a"]),
    np.array([1j]),
    np.array([None]),
    np.array([1 << 60]),
    np.array([1.0]),
    np.zeros((2, 2), int),
    np.ma.masked_array([1, 2, 3, 4], [0, 1, 0, 0]),
    np.zeros(4, dtype=[("a", int)]),
    np.array([datetime.date(2020, 1, 1)], dtype="M8[D]"),
]
TENSORS = [
    META,
    META[0],
    torch.zeros(8, dtype=torch.bfloat16),
    torch.zeros(8, requires_grad=True),
    torch.zeros(8, dtype=torch.int64).to_sparse(),
    torch.zeros(8, dtype=torch.complex64),
    torch.zeros(8, dtype=torch.float8_e4m3fn),
    torch.tensor([1 << 40]),
    torch.tensor([True]),
    torch.zeros(4, 4, dtype=torch.int64),
]
WRONG = [None, *NUMBERS, *OTHERS, *LISTS, *ARRAYS, *TENSORS]


def name(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind}-{getattr(value, 'dtype', '')}" if kind in ("Tensor", "ndarray") else kind


def said(error: GdsCacheError, *words: str) -> None:
    """It says what was wrong, in a line, and what to do."""
    assert error.message
    assert error.hint
    assert len(str(error)) < 1000
    for word in words:
        assert word in str(error), str(error)


def tried(call: Call, values: list[Any]) -> list[GdsCacheError]:
    """The errors of the values that are refused; one that is not ours fails, with the value's kind."""
    errors = []
    for value in values:
        try:
            call(value)
        except GdsCacheError as error:
            said(error)
            errors.append(error)
        except Exception as error:
            raise AssertionError(f"a {name(value)} gets {type(error).__name__}: {error}") from error
    return errors


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One for all: what is refused changes nothing, so the next test finds what this one found."""
    host = Host(make_config(tmp_path_factory.mktemp("host")), blocks=16)
    with host.engine:
        host.store(PROMPT).result(WAIT)
        host.engine.drain(WAIT)
        yield host
        settle(host.engine)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[CacheEngine]:
    with CacheEngine.from_config(make_config(tmp_path / "own")) as engine:
        yield engine
        settle(engine)


def calls_of_an_attached(engine: CacheEngine) -> dict[str, Call]:
    """A call for each argument that a caller gives, of an engine with planes of its own."""
    hit = engine.lookup(PROMPT)
    load = engine.load(hit, [0, 1, 2])
    load.result(WAIT)
    handle = engine.store(PROMPT, [0])
    handle.result(WAIT)
    prefetch = engine.prefetch(PROMPT)
    prefetch.result(WAIT)
    return {
        "namespace.salt": engine.namespace,
        "pages.tokens": engine.pages,
        "pages.salt": lambda v: engine.pages(PROMPT, v),
        "lookup.tokens": engine.lookup,
        "lookup.start": lambda v: engine.lookup(PROMPT, v),
        "lookup.salt": lambda v: engine.lookup(PROMPT, 0, v),
        "observe.tokens": lambda v: engine.observe_prefill(v, 0, 1.0),
        "observe.cached": lambda v: engine.observe_prefill(4, v, 1.0),
        "observe.seconds": lambda v: engine.observe_prefill(4, 0, v),
        "observe.load_seconds": lambda v: engine.observe_prefill(4, 0, 1.0, v),
        "observe_load.tier": lambda v: engine.observe_load(v, 1, 1.0),
        "observe_load.nbytes": lambda v: engine.observe_load("cpu", v, 1.0),
        "observe_load.seconds": lambda v: engine.observe_load("cpu", 1, v),
        "observe_wait.seconds": lambda v: engine.observe_wait(v),
        "load.hit": lambda v: engine.load(v, [0]).result(WAIT),
        "load.slots": lambda v: engine.load(hit, v).result(WAIT),
        "load.after": lambda v: engine.load(hit, [0], v).result(WAIT),
        "load_many.requests": lambda v: engine.load_many(v).result(WAIT),
        "load_many.request": lambda v: engine.load_many([v]).result(WAIT),
        "store.tokens": lambda v: engine.store(v, [0]).result(WAIT),
        "store.slots": lambda v: engine.store(PROMPT, v).result(WAIT),
        "store.start": lambda v: engine.store(PROMPT, [0], v).result(WAIT),
        "store.salt": lambda v: engine.store(PROMPT, [0], 0, v).result(WAIT),
        "store.after": lambda v: engine.store(PROMPT, [0], 0, "", v).result(WAIT),
        "store.priority": lambda v: engine.store(PROMPT, [0], priority=v).result(WAIT),
        "store.ttl": lambda v: engine.store(PROMPT, [0], ttl=v).result(WAIT),
        "store_pages.slots": lambda v: engine.store_pages(engine.pages(PROMPT)[:1], v).result(WAIT),
        "store_pages.salt": lambda v: engine.store_pages(engine.pages(PROMPT)[:1], [0], v).result(WAIT),
        "prefetch.tokens": lambda v: engine.prefetch(v).result(WAIT),
        "prefetch.start": lambda v: engine.prefetch(PROMPT, v).result(WAIT),
        "prefetch.salt": lambda v: engine.prefetch(PROMPT, 0, v).result(WAIT),
        "pin.tokens": lambda v: engine.pin(v, 1).release(),
        "pin.seconds": lambda v: engine.pin(PROMPT, v).release(),
        "pin.salt": lambda v: engine.pin(PROMPT, 1, v).release(),
        "invalidate": engine.invalidate,
        "drain.seconds": engine.drain,
        "flush.seconds": engine.flush,
        "load.wait.layer": load.wait,
        "load.wait.seconds": lambda v: load.wait(0, v),
        "load.result.seconds": load.result,
        "load.settle.seconds": lambda v: load.settle(lambda _: None, v),
        "load.gaps.seconds": load.gaps,
        "load.release.wait": load.release_event.wait,
        "load.release.synchronize": load.release_event.synchronize,
        "store.result.seconds": handle.result,
        "store.release": handle.release_event.synchronize,
        "prefetch.result.seconds": prefetch.result,
        "prefetch.wait.seconds": prefetch.wait,
    }


def test_no_argument_of_an_attached_engine_gets_anything_but_our_errors(host: Host) -> None:
    for argument, call in calls_of_an_attached(host.engine).items():
        errors = tried(call, WRONG)
        kinds = {type(error).__name__ for error in errors}
        assert len(errors) >= len(WRONG) // 3, f"{argument} takes nearly anything: {kinds}"
        if "seconds" in argument or argument.endswith(("salt", "after", "priority", "ttl")):
            assert kinds == {"InvalidValueError"}, argument


def test_no_argument_of_a_sequence_gets_anything_but_our_errors(own: CacheEngine) -> None:
    def within(use: Callable[[gdscache.Sequence, Any], object]) -> Call:
        def call(value: Any) -> None:
            with own.sequence(PROMPT) as sequence:
                use(sequence, value)

        return call

    calls = {
        "tokens": lambda v: own.sequence(v).close(),
        "salt": lambda v: own.sequence(PROMPT, v).close(),
        "wait.layer": within(lambda s, v: s.wait(v)),
        "wait.seconds": within(lambda s, v: s.wait(0, v)),
        "verify": within(lambda s, v: s.verify(v)),
        "append": within(lambda s, v: s.append(v)),
        "priority": within(lambda s, v: s.commit(priority=v).result(WAIT)),
        "ttl": within(lambda s, v: s.commit(ttl=v).result(WAIT)),
        "planes.layer": own.gpu.planes,
    }
    for argument, call in calls.items():
        assert len(tried(call, WRONG)) >= len(WRONG) // 3, argument


def test_nothing_that_is_no_configuration_opens_an_engine(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    def opened(**arguments: Any) -> None:
        CacheEngine.from_config(**{"config": config, **arguments}).close()

    calls: dict[str, Call] = {
        "config": lambda v: opened(config=v),
        "constructor": lambda v: CacheEngine(v).close(),
        "planes": lambda v: opened(planes=v),
        "planes of a layer": lambda v: opened(planes=[v] * 3),
        "planes of layers": lambda v: opened(planes=[[v, v]] * 3),
        "timeline": lambda v: opened(timeline=v),
        "load_config": gdscache.load_config,
        "from_dict": gdscache.Config.from_dict,
        "model": lambda v: gdscache.Config.from_dict({"model": v}),
    }
    for argument, call in calls.items():
        values = [value for value in WRONG if value is not None or argument not in ("planes", "timeline")]
        assert len(tried(call, values)) == len(values), argument


# -- what the commonest mistakes are told ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (META, ("meta", "host memory")),
        (torch.zeros(8, dtype=torch.bfloat16), ("bfloat16",)),
        (torch.zeros(8, requires_grad=True), ("detach",)),
        (torch.zeros(8, dtype=torch.int64).to_sparse(), ("sparse", "dense")),
        (np.ma.masked_array([1, 2, 3, 4], [0, 1, 0, 0]), ("masked",)),
        ([META[0]], ("integers",)),
        ("text", ("shape",)),
        ([10**5000], ("integers",)),
    ],
)
def test_tokens_that_are_no_array_of_integers_are_refused_by_their_kind(
    host: Host, tokens: Any, words: tuple[str, ...]
) -> None:
    for call in (host.engine.lookup, host.engine.prefetch, lambda t: host.engine.store(t, [0])):
        with pytest.raises(TokensError) as caught:
            call(tokens)
        said(caught.value, *words)


@pytest.mark.gpu
def test_tokens_and_slots_on_a_gpu_are_refused(host: Host) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with pytest.raises(TokensError, match="cuda:0"):
        host.engine.lookup(torch.tensor(PROMPT, device="cuda", dtype=torch.int64))
    with pytest.raises(SlotRangeError, match="cuda:0"):
        host.engine.load(host.engine.lookup(PROMPT), torch.arange(3, device="cuda"))


@pytest.mark.parametrize("start", [np.uint8(252), np.int64(252), torch.tensor(252)])
def test_a_start_of_another_kind_is_taken_as_an_integer(tmp_path: Path, start: Any) -> None:
    """One of eight bits would count on from 0 behind token 255, and ranks' orders have integers of Python alone."""
    host, tokens = Host(make_config(tmp_path, cpu=160, queue=100), blocks=80), prompt(1, 70)
    host.keep(tokens)
    with host.engine.prefetch(tokens, start, pin=WAIT) as prefetch:
        prefetch.result(WAIT)
        for hit in (host.engine.lookup(tokens, start), prefetch.hit(), prefetch.hit(start)):
            assert (type(hit.start), hit.start, hit.tokens) == (int, 252, 28)
            assert [(one.first, one.stop) for one in hit.reasons()] == [(252, 280)]
    host.engine.close()


@pytest.mark.parametrize("start", ["4", 4.0, None, [4], True, 3, -4, math.nan, 1 << 63])
def test_a_start_that_is_no_page_boundary_is_refused(host: Host, start: Any) -> None:
    engine = host.engine
    for call in (
        lambda: engine.lookup(PROMPT, start),
        lambda: engine.prefetch(PROMPT, start),
        lambda: engine.store(PROMPT, [0], start),
    ):
        with pytest.raises(TokensError, match=r"start is .* 4 tokens") as caught:
            call()
        said(caught.value, "integer")
    assert engine.lookup(PROMPT, np.int64(4)).tokens == 8


def test_a_salt_is_a_text_in_whatever_order_they_come(tmp_path: Path) -> None:
    """1, True and 1.0 are one key of a dictionary and three namespaces on the SSD."""
    for number, first in enumerate((1, True, 1.0, None)):
        with CacheEngine.from_config(make_config(tmp_path / str(number), ssd=None)) as engine:
            for salt in (first, 1, True, 1.0):
                with pytest.raises(InvalidValueError, match="salt is") as caught:
                    engine.sequence(PROMPT, salt)
                said(caught.value, "not text")
            assert engine.namespace("1") != engine.namespace("")


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([0, 1, 16], ("0 ... 16", "0 ... 15", "opened with")),
        ([-1, 0, 1], ("-1 ... 1", "opened with")),
        ([0, 0, 1], ("twice",)),
        (META[:3], ("meta",)),
        (torch.zeros(3, dtype=torch.int64).to_sparse(), ("sparse",)),
        (np.ma.masked_array([1, 2, 3]), ("masked",)),
        ([META[0]] * 3, ("no array",)),
        ([1 << 70, 0, 1], ("object",)),
    ],
)
def test_slots_that_cannot_be_are_refused_with_a_hint(host: Host, slots: Any, words: tuple[str, ...]) -> None:
    hit = host.engine.lookup(PROMPT)
    for call in (lambda: host.engine.load(hit, slots), lambda: host.engine.store(PROMPT, slots)):
        with pytest.raises(SlotRangeError) as caught:
            call()
        said(caught.value, *words)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 4e9, 1e300, 10**400, "1", True, [1], 1j])
def test_a_wait_for_no_number_of_seconds_is_refused_by_every_call_that_waits(host: Host, seconds: Any) -> None:
    engine = host.engine
    calls = calls_of_an_attached(engine)
    waits = [call for argument, call in calls.items() if argument.endswith("seconds") and "observe" not in argument]
    assert len(waits) == 10
    for wait in [*waits, calls["load.release.wait"], calls["store.release"]]:
        with pytest.raises(InvalidValueError, match="seconds is") as caught:
            wait(seconds)
        said(caught.value)


def test_the_longest_wait_and_one_that_has_run_out_are_taken(host: Host) -> None:
    calls = calls_of_an_attached(host.engine)
    for seconds in (MAX_SECONDS, float(MAX_SECONDS), np.float32(20.0), np.int64(20), None, 0, -1, -1e300):
        for argument in ("drain.seconds", "load.result.seconds", "store.result.seconds", "load.wait.seconds"):
            calls[argument](seconds)


def test_planes_that_are_no_dense_tensors_are_refused(tmp_path: Path) -> None:
    planes = [[torch.zeros(4, 4, 4, 32, dtype=torch.bfloat16, device=kind) for _ in "kv"] for kind in ("meta",) * 3]
    for wrong in (planes, 5, {}, [5, 5, 5], "abc", [[None, None]] * 3):
        with pytest.raises(PlanesError) as caught:
            CacheEngine.from_config(make_config(tmp_path), planes=wrong)
        said(caught.value)
