"""The inference engine of examples/engine.py: hits give the logits of a run without a cache, whatever goes wrong."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gdscache import CacheEngine
from gdscache.commands.toy_engine import (
    CheckpointError,
    EngineOptions,
    InferenceEngine,
    KVPool,
    ModelShape,
    Request,
    State,
    Transformer,
    fingerprint,
    load_checkpoint,
    random_model,
)
from gdscache.commands.toy_engine.report import Answer, differences, verdict_of
from gdscache.commands.toy_engine.shape import MlaShape, RopeScaling, shape_of_config
from gdscache.cuda.streams import Fence
from gdscache.errors import DeadlineError, PoolFullError, TokensError
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, settle
from tests.support.places import ROOT

pytestmark = pytest.mark.suite

PAGE, BLOCK, CHUNK, NEW, VOCAB = 8, 4, 16, 6, 61
FAULTY = "tests.support.faulty:FaultyTransport"
SHAPES = {
    "gqa": ModelShape("gqa", 3, 32, 4, 2, 8, 48, VOCAB, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 32)),
    "mha": ModelShape("mha", 3, 32, 4, 4, 8, 48, VOCAB, qk_norm=True, tied=True),
    "mla": ModelShape("mla", 3, 32, 4, 4, 0, 48, VOCAB, mla=MlaShape(24, rope_dim=8, nope_dim=12, v_dim=16)),
}
GPU_SHAPE = ModelShape("gpu", 3, 256, 8, 2, 64, 512, VOCAB)


class Bench:
    """A model, a pool and a cache attached to it. Whatever a load is to write is NaN before it."""

    def __init__(
        self,
        path: Path,
        shape: ModelShape,
        blocks: int = 64,
        device: str = "cpu",
        cpu: int | None = 64,
        **sections: Any,
    ) -> None:
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.model = random_model(shape, torch.device(device), self.dtype, seed=3)
        self.pool = KVPool(shape, blocks, BLOCK, torch.device(device), self.dtype)
        geometry = shape.cache_geometry(str(self.dtype).removeprefix("torch."))
        self.config: dict[str, Any] = {
            "model": {"name": "m", "weights": fingerprint(self.model), "page_tokens": PAGE, **geometry},
            "gpu": {"device": device, "staging": "16MiB"},
            "ssd": {"path": str(path), "capacity": "2MiB", "threads": 2, "transport": FAULTY},
            "host_buffer": "1MiB",
            "deadline": WAIT,
            **sections,
        }
        if cpu is not None:
            self.config["cpu"] = {"capacity": cpu * 8192}
        self.cache = self.open()

    def open(self) -> CacheEngine:
        cache = CacheEngine.from_config(self.config, planes=self.pool.planes)
        plain = cache.load

        def load(hit: Any, slots: Any, after: Any = None) -> Any:
            self.poison(slots)
            return plain(hit, slots, after)

        cache.load = load  # type: ignore[method-assign]
        return cache

    def poison(self, blocks: Any = slice(None)) -> None:
        for planes in self.pool.planes:
            for plane in planes:
                plane[blocks] = float("nan")

    def reopen(self) -> None:
        settle(self.cache)
        self.cache.close()
        self.cache = self.open()

    def engine(self, *, cached: bool = True, **options: Any) -> InferenceEngine:
        chosen = EngineOptions(
            **{"chunk_tokens": CHUNK, "share": False, "keep_logits": True, "deadline": WAIT, **options}
        )
        return InferenceEngine(self.model, self.pool, self.cache if cached else None, chosen)

    def ask(self, prompt: list[int], *, cached: bool = True, **options: Any) -> Request:
        """One request by an engine of its own, in a pool full of NaN where nothing is shared."""
        if not options.get("share"):
            self.poison()
        engine = self.engine(cached=cached, **options)
        request = engine.submit(prompt, NEW)
        engine.run()
        engine.close()
        assert all(bool(torch.isfinite(logits).all()) for logits in request.logits)
        if cached:
            self.cache.drain(WAIT)
        return request

    def drop(self, tier: str, tokens: list[int], *pages: int) -> None:
        """Evict pages from a tier."""
        with self.cache.manager.lock:
            index = self.cache.manager.tiers[tier].index
            for number in pages:
                entry = index.get(self.cache.pages(tokens)[number].key)
                assert entry is not None
                index.drop(entry)

    def offset(self, tokens: list[int], page: int) -> int:
        entry = self.cache.manager.tiers["ssd"].index.get(self.cache.pages(tokens)[page].key)
        assert entry is not None
        return entry.slot * self.cache.layout.extent_bytes


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small gain nothing from a second thread, and wait for it where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    opened: list[Bench] = []

    def opens(shape: str | ModelShape = "gqa", **options: Any) -> Bench:
        chosen = SHAPES[shape] if isinstance(shape, str) else shape
        opened.append(Bench(tmp_path / "cache", chosen, **options))
        return opened[-1]

    PLAN.reset()
    try:
        yield opens
        PLAN.reset()
        for made in opened:
            settle(made.cache)
            assert made.pool.available == made.pool.blocks, "blocks are lost"
    finally:
        PLAN.reset()
        for made in opened:
            made.cache.close()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def same(request: Request, plain: Request, *, exactly: bool) -> None:
    """The tokens and logits of a run without a cache: the same bits, or as near as the dtype allows."""
    assert request.state is State.DONE
    assert request.generated == plain.generated
    if exactly:
        assert all(torch.equal(a, b) for a, b in zip(request.logits, plain.logits, strict=True))
    else:
        torch.testing.assert_close(request.logits, plain.logits, atol=1e-4, rtol=1e-4)


# -- hits --------------------------------------------------------------------------------------------------------------


def place(bench: Bench, tokens: list[int], where: str) -> dict[str, int]:
    """Bring the stored pages to where they are to be hit; the sources that a hit should then name."""
    full = (len(tokens) - 1) // PAGE
    if where == "ssd":
        bench.reopen()
    elif where == "mixed":
        odd = [page for page in range(full) if page % 2]
        bench.drop("cpu", tokens, *odd)
        return {"cpu": (full - len(odd)) * PAGE, "ssd": len(odd) * PAGE}
    elif where == "cpu":
        bench.drop("ssd", tokens, *range(full))
    return {where: full * PAGE}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", ["cpu", "ssd", "mixed", "pool"])
@pytest.mark.parametrize("kind", list(SHAPES))
def test_a_hit_gives_the_logits_of_a_run_without_a_cache(
    bench: Callable[..., Bench], kind: str, where: str, overlap: bool
) -> None:
    made = bench(kind)
    # 65: what is cached ends where a chunk ends, so both runs make the same calls; 45: within one.
    for length, exactly in ((65, True), (45, False)):
        tokens = prompt(length, seed=length)
        plain = made.ask(tokens, cached=False)
        share = where == "pool"
        cold = made.ask(tokens, overlap=overlap, share=share)
        same(cold, plain, exactly=True)
        assert cold.sources == {}
        sources = place(made, tokens, where)
        hit = made.ask(tokens, overlap=overlap, share=share)
        assert hit.sources == sources
        assert hit.recomputed == 0
        same(hit, plain, exactly=exactly)


def test_pages_that_were_generated_are_hits_too(bench: Callable[..., Bench]) -> None:
    made = bench()
    first = made.ask(prompt(29))
    longer = first.tokens + prompt(7, seed=1)
    plain = made.ask(longer, cached=False)
    hit = made.ask(longer)
    assert hit.sources == {"cpu": 32}  # 29 + 6 - 1 tokens have rows, the last of them computed one by one
    same(hit, plain, exactly=False)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_pages_pass_through_where_there_is_no_cpu_tier(bench: Callable[..., Bench], kind: str) -> None:
    made = bench(kind, cpu=None)
    tokens = prompt(65)
    plain = made.ask(tokens, cached=False)
    made.ask(tokens)
    hit = made.ask(tokens)
    assert hit.sources == {"ssd": 64}
    same(hit, plain, exactly=True)


@pytest.mark.parametrize("kind", list(SHAPES))
def test_the_size_of_chunks_changes_nothing_but_rounding(bench: Callable[..., Bench], kind: str) -> None:
    made = bench(kind)
    tokens = prompt(50)
    whole = made.ask(tokens, cached=False, chunk_tokens=64)
    for number, chunk in enumerate((1, 7, 8, 16, 49, 50)):
        same(made.ask(tokens, cached=False, chunk_tokens=chunk), whole, exactly=False)
        hit = made.ask(tokens, chunk_tokens=chunk)
        assert hit.sources == ({"cpu": 48} if number else {})
        same(hit, whole, exactly=False)


def test_models_of_other_weights_share_nothing(bench: Callable[..., Bench]) -> None:
    shape = SHAPES["gqa"]
    models = [random_model(shape, torch.device("cpu"), torch.float32, seed) for seed in (0, 0, 1)]
    marks = [fingerprint(model) for model in models]
    assert marks[0] == marks[1] != marks[2]
    models[1].layers[2].mlp.down_proj.weight.mul_(1.5)
    assert fingerprint(models[1]) != marks[0]
    made = bench()
    tokens = prompt(45)
    made.ask(tokens)
    made.config["model"]["weights"] = "others"
    made.reopen()
    assert made.ask(tokens).sources == {}


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", [Fault.EIO, Fault.FLIP, Fault.SHORT])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_bad_page_costs_its_own_suffix_wherever_it_is(
    bench: Callable[..., Bench], kind: str, fault: Fault, overlap: bool
) -> None:
    made = bench(kind)
    tokens = prompt(45)
    plain = made.ask(tokens, cached=False)
    made.ask(tokens)
    for page in range(5):
        made.drop("cpu", tokens, *range(5))
        offset = made.offset(tokens, page)
        with PLAN.rule(Op.READ, fault, lambda at, offset=offset: at == offset, bit=9000 * page % 18_000) as rule:  # type: ignore[misc]
            hit = made.ask(tokens, overlap=overlap)
        assert rule.met == 1
        assert (hit.sources.get("ssd", 0), hit.recomputed) == (page * PAGE, (5 - page) * PAGE)
        same(hit, plain, exactly=False)
        assert made.cache.lookup(tokens).tokens == 40, "what was recomputed is stored again"


def test_a_bad_page_in_the_cpu_tier_is_recomputed(bench: Callable[..., Bench]) -> None:
    made = bench(ssd=None)
    tokens = prompt(45)
    plain = made.ask(tokens, cached=False)
    made.ask(tokens)
    for page in range(5):
        cpu = made.cache.manager.cpu
        assert cpu is not None
        entry = cpu.index.get(made.cache.pages(tokens)[page].key)
        assert entry is not None
        cpu.extents.memory(entry.slot)[100] ^= 64
        hit = made.ask(tokens)
        assert hit.recomputed == (5 - page) * PAGE
        same(hit, plain, exactly=False)


def test_a_bad_page_of_one_request_leaves_the_batch_alone(bench: Callable[..., Bench]) -> None:
    made = bench(blocks=128)
    prompts = [prompt(45, seed) for seed in range(4)]
    plain = [made.ask(tokens, cached=False) for tokens in prompts]
    for tokens in prompts:
        made.ask(tokens)
        made.drop("cpu", tokens, *range(5))
    bad = made.offset(prompts[2], 1)
    made.poison()
    engine = made.engine()
    with PLAN.rule(Op.READ, Fault.FLIP, lambda at: at == bad, bit=77):
        requests = [engine.submit(tokens, NEW) for tokens in prompts]
        engine.run()
    engine.close()
    assert [request.recomputed for request in requests] == [0, 0, 32, 0]
    for request, expected in zip(requests, plain, strict=True):
        same(request, expected, exactly=False)


@pytest.mark.parametrize("seed", range(3))
def test_random_delays_and_faults_never_show(bench: Callable[..., Bench], seed: int) -> None:
    made = bench("gqa" if seed % 2 else "mla", blocks=96, cpu=6)
    prompts = [prompt(33 + 8 * n, seed=n) for n in range(3)]
    plain = [made.ask(tokens, cached=False) for tokens in prompts]
    draw = random.Random(seed)
    PLAN.seed = seed
    with (
        PLAN.rule(Op.READ, Fault.DELAY, rate=0.5, seconds=0.004),
        PLAN.rule(Op.READ, Fault.FLIP, rate=0.1),
        PLAN.rule(Op.WRITE, Fault.DELAY, rate=0.5, seconds=0.004),
        PLAN.rule(Op.READ, Fault.EIO, rate=0.1),
    ):
        for _ in range(6):
            engine = made.engine(overlap=draw.random() < 0.7, share=draw.random() < 0.3, max_batch=3)
            chosen = [draw.randrange(3) for _ in range(4)]
            requests = [engine.submit(prompts[n], NEW) for n in chosen]
            engine.run()
            engine.close()
            made.pool.forget()
            for number, request in zip(chosen, requests, strict=True):
                same(request, plain[number], exactly=False)
    PLAN.seed = 0


class Late:
    """A load that is not ready in time, and gives its blocks back when it is told to."""

    def __init__(self, load: Any, *, waits: bool) -> None:
        self.load, self.waits, self.tokens, self.release_event = load, waits, load.tokens, Fence()
        self.cancelled = False

    def done(self) -> bool:
        return True

    def wait(self, layer: int) -> None:
        if self.waits:
            raise DeadlineError("a layer is late")

    def settle(self, recompute: Any) -> Any:
        raise DeadlineError("the verdict is late")

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_load_that_is_late_keeps_its_blocks_and_the_request_begins_anew(
    bench: Callable[..., Bench], overlap: bool, waits: bool
) -> None:
    made = bench()
    tokens = prompt(45)
    plain = made.ask(tokens, cached=False)
    made.ask(tokens)
    begin, late = made.cache.load, []

    def load(hit: Any, slots: Any) -> Any:
        late.append((Late(begin(hit, slots), waits=waits), list(slots)))
        return late[-1][0]

    made.cache.load = load  # type: ignore[method-assign, assignment]
    engine = made.engine(overlap=overlap)
    request = engine.submit(tokens, NEW)
    engine.run()
    same(request, plain, exactly=False)
    ((handle, slots),) = late
    assert handle.cancelled
    assert request.recomputed == 40
    made.cache.drain(WAIT)
    engine.step()
    assert made.pool.available == made.pool.blocks - -(-(45 + NEW) // BLOCK), "the blocks of the late load"
    assert not set(slots) & set(made.pool.take(made.pool.available) or ())
    handle.load.result()
    handle.release_event.signal()
    engine.close()
    made.pool.release([b for b in range(made.pool.blocks) if made.pool._holders[b]])


def test_a_read_that_hangs_delays_no_other_request_for_good(bench: Callable[..., Bench]) -> None:
    made = bench(deadline=0.4)
    tokens, other = prompt(45), prompt(37, seed=1)
    plain, plain_other = made.ask(tokens, cached=False), made.ask(other, cached=False)
    made.ask(tokens)
    made.drop("cpu", tokens, *range(5))
    with PLAN.rule(Op.READ, Fault.HANG):
        engine = made.engine()
        requests = [engine.submit(tokens, NEW), engine.submit(other, NEW)]
        engine.run()
        engine.close()
    same(requests[0], plain, exactly=False)
    same(requests[1], plain_other, exactly=False)
    assert requests[0].recomputed == 40


@pytest.mark.parametrize("gone", range(5))
def test_a_hit_is_a_snapshot(bench: Callable[..., Bench], gone: int) -> None:
    made = bench()
    tokens = prompt(45)
    plain = made.ask(tokens, cached=False)
    made.ask(tokens)
    found = made.cache.lookup

    def lookup(*args: Any, **options: Any) -> Any:
        hit = found(*args, **options)
        for tier in ("cpu", "ssd"):
            made.drop(tier, tokens, gone)
        return hit

    made.cache.lookup = lookup  # type: ignore[method-assign]
    hit = made.ask(tokens)
    assert sum(hit.sources.values()) == gone * PAGE
    assert hit.recomputed == 0
    same(hit, plain, exactly=False)


# -- requests that come, go and wait -----------------------------------------------------------------------------------


def test_requests_join_and_leave_a_batch(bench: Callable[..., Bench]) -> None:
    made = bench(blocks=128)
    document = prompt(32)
    prompts = [document + prompt(5 + 9 * n, seed=n + 1) for n in range(6)]
    plain = [made.ask(tokens, cached=False) for tokens in prompts]
    for share in (False, True):
        engine = made.engine(max_batch=3, share=share)
        requests, sizes = [], set()
        for number, tokens in enumerate(prompts):
            requests.append(engine.submit(tokens, NEW))
            for _ in range(number % 3):
                engine.step()
                sizes.add(len(engine.running))
        engine.run()
        engine.close()
        assert sizes >= {2, 3}
        for request, expected in zip(requests, plain, strict=True):
            same(request, expected, exactly=False)
        assert requests[-1].sources.get("pool", 0) == (32 if share else 0)
        made.pool.forget()


def test_prompts_and_single_tokens_share_a_step(bench: Callable[..., Bench]) -> None:
    made = bench()
    steps: list[tuple[str, int]] = []
    engine = made.engine()
    engine.observe = lambda name, number, seconds: steps.append((name, number))
    first = engine.submit(prompt(17), NEW)
    while not first.generated:
        engine.step()
    engine.submit(prompt(33, seed=1), NEW)
    engine.run()
    engine.close()
    assert [number for name, number in steps if name == "step"] == [16, 1, 17, 17, 2, 2, 2, 1, 1, 1]
    steps.clear()
    made.cache.drain(WAIT)
    engine.submit(prompt(17), NEW)
    engine.run()
    engine.close()
    assert [number for name, number in steps if name == "wait"] == [0, 1, 2]


def test_chunks_end_where_they_end_without_a_hit(bench: Callable[..., Bench]) -> None:
    made = bench()
    tokens, steps = prompt(65), []
    made.ask(tokens[:41])
    engine = made.engine()
    engine.observe = lambda name, number, seconds: steps.append(number) if name == "step" else None
    engine.submit(tokens, 1)
    engine.run()
    engine.close()
    assert steps == [8, 16, 1]  # from token 40 to 48, 64, 65


def test_a_stop_token_ends_a_request(bench: Callable[..., Bench]) -> None:
    made = bench()
    expected = made.ask(prompt(20)).generated
    engine = made.engine()
    stop = expected[2]
    request = engine.submit(prompt(20), NEW, stop=frozenset([stop]))
    engine.run()
    engine.close()
    assert request.generated == expected[: expected.index(stop) + 1]


def test_a_full_pool_makes_requests_wait(bench: Callable[..., Bench]) -> None:
    made = bench(blocks=14)  # one request of 45 + 6 tokens needs 13
    prompts = [prompt(45, seed) for seed in range(3)]
    plain = [made.ask(tokens, cached=False) for tokens in prompts]
    for share in (False, True):
        engine = made.engine(share=share)
        requests = [engine.submit(tokens, NEW) for tokens in prompts[:1] + prompts]
        engine.step()
        assert [request.state for request in requests] == [State.RUNNING] + [State.WAITING] * 3
        engine.run()
        engine.close()
        for request, expected in zip(requests, plain[:1] + plain, strict=True):
            same(request, expected, exactly=False)
    with pytest.raises(PoolFullError, match="need 15 blocks, the pool has 14"):
        made.engine().submit(prompt(53), NEW)
    with pytest.raises(TokensError):
        made.engine().submit([], NEW)
    made.pool.forget()
    others = made.pool.take(3)
    assert others is not None
    engine = made.engine()
    engine.submit(prompts[0], NEW)
    with pytest.raises(PoolFullError, match="11 blocks are free"):
        engine.run()
    engine.close()
    made.pool.release(others)


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("share", [True, False])
def test_a_request_may_be_cancelled_at_any_step(bench: Callable[..., Bench], steps: int, share: bool) -> None:
    made = bench()
    tokens, other = prompt(65), prompt(37, seed=1)
    plain, plain_other = made.ask(tokens, cached=False), made.ask(other, cached=False)
    made.ask(tokens[:33])
    made.drop("cpu", tokens, *range(4))
    engine = made.engine(share=share)
    cancelled, kept = engine.submit(tokens, NEW), engine.submit(other, NEW)
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.002):
        for _ in range(steps):
            engine.step()
        engine.cancel(cancelled)
        engine.cancel(cancelled)
        again = engine.submit(tokens, NEW)
        engine.run()
    engine.close()
    assert cancelled.state is State.CANCELLED
    assert cancelled.generated == plain.generated[: len(cancelled.generated)]
    same(kept, plain_other, exactly=False)
    same(again, plain, exactly=False)
    made.pool.forget()


def test_a_cancelled_load_keeps_its_blocks_until_it_lets_go(bench: Callable[..., Bench]) -> None:
    made = bench(blocks=14)
    tokens = prompt(45)
    plain = made.ask(tokens, cached=False)
    made.ask(tokens)
    made.drop("cpu", tokens, *range(5))
    engine = made.engine(overlap=False)
    with PLAN.rule(Op.READ, Fault.HANG):
        request = engine.submit(tokens, NEW)
        engine._admit()
        assert request.load is not None
        fence = request.load.release_event
        engine.cancel(request)
        again = engine.submit(tokens, NEW)
        engine._parked.reclaim()
        engine._admit()
        assert not fence.done()
        assert made.pool.available == 1
        assert again.state is State.WAITING
    engine.run()
    engine.close()
    assert fence.done()
    same(again, plain, exactly=False)


def test_blocks_wait_for_the_stores_that_read_them(bench: Callable[..., Bench]) -> None:
    made = bench(blocks=14)
    store, fences = made.cache.store, []

    def slow(*args: Any, **options: Any) -> Any:
        handle = store(*args, **options)
        handle.result(WAIT)
        handle.release_event = Fence()
        fences.append(handle.release_event)
        return handle

    made.cache.store = slow  # type: ignore[method-assign]
    engine = made.engine()
    first, second = (engine.submit(prompt(45, seed), NEW) for seed in (0, 1))
    while first.state is not State.DONE:
        engine.step()
    for held in (True, False):
        engine._parked.reclaim()
        engine._admit()
        assert (second.state is State.WAITING) is held
        for fence in fences:
            fence.signal()
    engine.cancel(second)
    engine.close()


def test_nobody_has_a_block_that_somebody_else_has() -> None:
    pool = KVPool(SHAPES["gqa"], 12, BLOCK, torch.device("cpu"), torch.float32)
    draw = random.Random(5)
    held: list[list[int]] = []
    holds: dict[int, bytes] = {}  # what a block was last given the bytes of
    for turn in range(3000):
        key = bytes([draw.randrange(6)])
        choice = draw.random()
        if choice < 0.3:
            before, blocks = pool.available, pool.take(count := 2 * draw.randrange(1, 4))
            assert (blocks is None) == (count > before)
            if blocks is not None:
                assert not set(blocks) & {block for others in held for block in others}
                assert pool.available == before - count
                held.append(blocks)
                holds.update(dict.fromkeys(blocks, b"private %d" % turn))
        elif choice < 0.5 and held:
            blocks = draw.choice(held)[:2]
            if all(holds[block].startswith(b"private") for block in blocks):
                pool.publish(key, blocks)
                if pool._pages[key] == tuple(blocks):
                    holds.update(dict.fromkeys(blocks, key))
        elif choice < 0.7:
            if found := pool.find([key]):
                assert {holds[block] for block in found} == {key}
                held.append(found)
        elif choice < 0.99:
            if held:
                pool.release(held.pop(draw.randrange(len(held))))
        else:
            pool.forget()
            holds.update({block: b"private" for block, key in holds.items() if len(key) == 1})
        free = pool.blocks - len({block for blocks in held for block in blocks})
        assert pool.available == free
    for blocks in held:
        pool.release(blocks)
    assert sorted(pool.take(12) or ()) == list(range(12))


# -- checkpoints -------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def write_checkpoint(folder: Path, kind: str, **options: Any) -> Any:
    """A random model of transformers' own, saved to `folder`; the model."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # biases and norms are zeros and ones otherwise, and nobody would miss them
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=options.pop("shard", "20KB"))
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("Llama", {"rope_parameters": LLAMA3_ROPE}, id="llama3"),
        pytest.param(
            "Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, id="llama-biases"
        ),
        pytest.param("Qwen2", {"tie_word_embeddings": True}, id="qwen2"),
        pytest.param("Qwen3", {"head_dim": 16}, id="qwen3"),
    ],
)
def test_a_checkpoint_gives_the_logits_of_transformers(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    theirs = write_checkpoint(tmp_path / "m", kind, **options)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1, "in shards"
    ours = load_checkpoint(tmp_path / "m", torch.device("cpu"))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    tokens = prompt(70)
    request, engine = one_by_one(ours, tokens)
    with torch.no_grad():
        logits = theirs(torch.tensor([request.tokens])).logits[0, len(tokens) - 1 : -1]
    torch.testing.assert_close(torch.stack(request.logits), logits, atol=2e-4, rtol=2e-4)
    assert request.generated == logits.argmax(-1).tolist()
    assert engine.pool.available == engine.pool.blocks


def one_by_one(model: Transformer, tokens: list[int]) -> tuple[Request, InferenceEngine]:
    pool = KVPool(model.shape, 32, BLOCK, torch.device("cpu"), torch.float32)
    engine = InferenceEngine(model, pool, None, EngineOptions(CHUNK, keep_logits=True))
    request = engine.submit(tokens, NEW)
    engine.run()
    engine.close()
    return request, engine


def test_rope_is_read_as_older_versions_wrote_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "Llama", rope_parameters=LLAMA3_ROPE)
    config = json.loads((tmp_path / "config.json").read_text())
    now = shape_of_config(config, "m")
    rope = config.pop("rope_parameters")
    older = {**config, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    assert shape_of_config(older, "m") == now
    assert now.rope_scaling == RopeScaling(4.0, 1.0, 4.0, 32)


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    cpu, folder = torch.device("cpu"), tmp_path / "m"
    write_checkpoint(folder, "Qwen3", head_dim=16)
    config = (folder / "config.json").read_text()

    def refused(match: str, **changes: Any) -> None:
        (folder / "config.json").write_text(json.dumps({**json.loads(config), **changes}))
        with pytest.raises(CheckpointError, match=match):
            load_checkpoint(folder, cpu)

    with pytest.raises(CheckpointError, match="there is no folder"):
        load_checkpoint(tmp_path / "nothing", cpu)
    refused(r"is a MixtralForCausalLM\n.*LlamaForCausalLM, Qwen2", architectures=["MixtralForCausalLM"])
    refused("sliding windows", use_sliding_window=True)
    refused("sliding windows", layer_types=["full_attention", "sliding_attention", "full_attention"])
    refused("rope type 'yarn'", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})
    refused("activation 'gelu'", hidden_act="gelu")
    refused("quantized", quantization_config={"bits": 4})
    refused("lacks 11 tensors, 'layers.3", num_hidden_layers=4)
    refused("a tensor 'layers.2", num_hidden_layers=2)
    refused(r"down_proj.weight is \(32, 48\), config.json makes it \(32, 50\)", intermediate_size=50)
    whole = json.loads(config)
    del whole["hidden_size"]
    (folder / "config.json").write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match="no 'hidden_size'"):
        load_checkpoint(folder, cpu)
    (folder / "config.json").write_text(config)
    shard = min(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(folder, cpu)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        load_checkpoint(folder, cpu)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_checkpoint(folder, cpu)


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("engine", ROOT / "examples" / "engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "engine", module)
    spec.loader.exec_module(module)
    return module


SHORT = [
    "--requests",
    "3",
    "--prefix",
    "128",
    "--suffix",
    "9",
    "--new-tokens",
    "3",
    "--chunk-tokens",
    "64",
    "--device",
    "cpu",
]


@pytest.mark.parametrize("preset", ["tiny", "mla"])
def test_the_command_serves_from_every_place(command: Any, capsys: Any, tmp_path: Path, preset: str) -> None:
    arguments = [
        *SHORT,
        "--preset",
        preset,
        "--documents",
        "1",
        "--concurrency",
        "1",
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert command.main(arguments) == 0
    assert "same tokens as without the cache: yes" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["same_tokens"] == "yes"
    assert {(row["phase"], row["source"]): (row["requests"], row["tokens_reused"]) for row in report["rows"]} == {
        ("no cache", "cold"): (3, 0),
        ("first time", "cold"): (1, 0),
        ("first time", "pool"): (2, 256),
        ("again", "pool"): (3, 384),
        ("pool emptied", "cpu"): (3, 384),
        ("restarted", "ssd"): (1, 128),
        ("restarted", "cpu"): (2, 256),
    }
    assert all(row["ttft_seconds"] > 0 for row in report["rows"])


def test_the_command_takes_a_configuration_and_a_checkpoint(
    command: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = str(ROOT / "configs" / "cpu_only.yaml")
    for _ in range(2):  # what the first run left on the SSD is nothing to the second
        assert command.main([*SHORT, "--config", config, "--json", "-"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert ("first time", "ssd") not in {(row["phase"], row["source"]) for row in rows}
    assert list((tmp_path / ".cache" / "gdscache" / "cpu_only").iterdir())
    write_checkpoint(tmp_path / "m", "Llama")
    assert command.main([*SHORT, "--model", str(tmp_path / "m")]) == 0
    capsys.readouterr()
    for arguments, said in (
        (["--preset", "mla", "--config", config], "kv_lora_rank is None, not 128"),
        (["--preset", "tiny", "--dtype", "bfloat16", "--config", config], "it has to say layers: 4, dtype: bfloat16"),
        (["--model", str(tmp_path / "none")], "there is no folder"),
        (["--config", str(tmp_path / "none.yaml")], "none.yaml"),
    ):
        assert command.main([*SHORT, *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert said in error


def test_the_command_compares_before_it_says_yes() -> None:
    plain = Answer("no cache", "cold", 0, 1.0, [1, 2, 3], [0.5, 0.01, 0.5])

    def verdict(*tokens: int, near_tie: float = 0.0) -> str:
        return verdict_of(differences([plain, Answer("again", "cpu", 8, 0.5, list(tokens), [])], near_tie))

    assert verdict(1, 2, 3) == "yes"
    assert verdict(1, 4, 3) == "no"
    assert verdict(1, 4, 5, near_tie=0.05).startswith("yes, but for 1 near ties")
    assert verdict(4, 2, 3, near_tie=0.05) == "no"


def test_what_is_heavy_is_imported_where_it_is_used() -> None:
    light = sys.stdlib_module_names | {"torch", "rich", "gdscache"}
    files = [ROOT / "examples" / "engine.py", *(ROOT / "gdscache" / "commands" / "toy_engine").glob("*.py")]
    assert len(files) > 6
    for path in files:
        for node in ast.parse(path.read_text()).body:
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= light, path


def test_prefills_are_reported_to_the_gate(bench: Callable[..., Bench]) -> None:
    """Each chunk of a prompt that is alone in its step; neither single tokens nor what several requests share."""
    made = bench()
    figures = made.cache.manager.costs.prefill
    made.ask(prompt(45))
    assert figures.observations == 3
    engine = made.engine(max_batch=2)
    for seed in (1, 2):
        engine.submit(prompt(8, seed), NEW)
    engine.run()
    engine.close()
    assert figures.observations == 3
    made.ask(prompt(45, 3), cached=False)
    assert figures.observations == 3


def test_an_engine_that_stores_nothing(bench: Callable[..., Bench]) -> None:
    made = bench()
    tokens = prompt(45)
    assert made.ask(tokens, store=False).sources == made.ask(tokens, store=False, share=True).sources == {}
    made.ask(tokens)
    assert made.ask(tokens, store=False).sources == {"cpu": 40}


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cpu", "ssd", "mixed", "pool"])
def test_hits_in_bfloat16_on_a_gpu(bench: Callable[..., Bench], where: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = bench(GPU_SHAPE, device="cuda")
    tokens = prompt(65)
    plain = made.ask(tokens, cached=False)
    share = where == "pool"
    same(made.ask(tokens, share=share), plain, exactly=True)
    sources = place(made, tokens, where)
    hit = made.ask(tokens, share=share)
    assert hit.sources == sources
    same(hit, plain, exactly=True)
    if where == "ssd":
        made.drop("cpu", tokens, *range(8))
        bad = made.offset(tokens, 3)
        with PLAN.rule(Op.READ, Fault.FLIP, lambda at: at == bad, bit=77):
            hit = made.ask(tokens)
        assert hit.recomputed == 40
        assert all(bool(torch.isfinite(logits).all()) for logits in hit.logits)
        torch.testing.assert_close(hit.logits[0], plain.logits[0], atol=0.1, rtol=0.1)


@pytest.mark.gpu
def test_a_batch_on_a_gpu(bench: Callable[..., Bench]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = bench(GPU_SHAPE, device="cuda", blocks=128)
    prompts = [prompt(65, seed) for seed in range(4)]
    plain = [made.ask(tokens, cached=False) for tokens in prompts]
    for tokens in prompts:
        made.ask(tokens)
    made.poison()
    engine = made.engine(max_batch=3)
    requests = [engine.submit(tokens, NEW) for tokens in prompts]
    engine.run()
    engine.close()
    for request, expected in zip(requests, plain, strict=True):
        assert sum(request.sources.values()) == 64
        torch.testing.assert_close(request.logits[0], expected.logits[0], atol=0.1, rtol=0.1)
