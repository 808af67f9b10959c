"""Stores run beside the next forward: the caller never waits for one, and has its slots back when they were read.

Beside test_attached.py, where slots come back while the writes of pages with a place in the CPU tier hang, and
test_engine.py: here the copy out of the planes hangs, its checksums do, and pages have no place in the CPU tier.
"""

from __future__ import annotations

import time

import pytest
import torch

from gdscache.storage.base import Op
from tests.support import fake_gpu
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, OpenHost, drop_from, prompt, settle, tokens_of, until

FAULTY = "tests.support.faulty:FaultyTransport"


@pytest.fixture(autouse=True)
def _no_faults_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.use(monkeypatch, staging=4 << 20)  # for planes of the host's, too; no kernel waits for room


@pytest.mark.parametrize("cpu", [None, 8])
def test_a_store_returns_while_the_copies_are_stalled(open_host: OpenHost, cpu: int | None) -> None:
    """Stores, lookups and loads of the next request go on; the slots that were handed over stay the engine's."""
    host = open_host(cpu=cpu, ssd=24, bounce=16)
    before, later = prompt(1, 3), [prompt(n, 2) for n in range(2, 5)]
    host.keep(before)
    begun = fake_gpu.calls("cuLaunchKernel")
    with fake_gpu.held():
        stores = []
        for tokens in later:
            blocks = host.compute(tokens)
            stores.append((host.engine.store(tokens, blocks), blocks))
        until(lambda: fake_gpu.calls("cuLaunchKernel") > begun, "a copy is queued")
        assert [tokens_of(host.engine, tokens) for tokens in later] == [0, 0, 0]
        hit = host.engine.lookup(before)
        assert hit.tokens == 12
        for handle, _ in stores:
            assert not handle.done()
            assert not handle.release_event.done()
    for (handle, blocks), tokens in zip(stores, later, strict=True):
        handle.release_event.synchronize(WAIT)
        host.give(blocks)
        assert handle.result(WAIT).dropped == {}
        assert host.load(tokens).tokens == 8
    settle(host.engine)


@pytest.mark.parametrize("cpu", [None, 8])
def test_slots_come_back_right_after_the_gather(open_host: OpenHost, cpu: int | None) -> None:
    """Not after the copies to the host, nor after the write, which hangs. What is stored is what was in the slots."""
    host = open_host(transport=FAULTY, cpu=cpu, bounce=16)
    tokens = prompt(1, 4)
    with PLAN.rule(Op.WRITE, Fault.HANG) as rule:
        with fake_gpu.held(copies_only=True):
            blocks = host.compute(tokens)
            handle = host.engine.store(tokens, blocks)
            handle.release_event.synchronize(WAIT / 4)
            host.give(blocks)  # overwrites them
            assert tokens_of(host.engine, tokens) == 0
        until(lambda: rule.met > 0, "writes hang")
        assert not handle.done()
    assert handle.result(WAIT).dropped == {}
    if cpu is not None:
        assert host.load(tokens).tokens == 16
        drop_from(host.engine, "cpu")
    assert host.load(tokens).tokens == 16, "the bytes that were in the slots when the store was called"
    settle(host.engine)


def test_slots_in_two_places_come_back_after_the_last_gather(open_host: OpenHost) -> None:
    """Some pages of a store find a CPU slot, the others a bounce slot: two gathers, and their writes
    are nobody's wait."""
    host = open_host(transport=FAULTY, cpu=2, bounce=8, ssd=24)
    tokens = prompt(1, 4)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        blocks = host.compute(tokens)
        handle = host.engine.store(tokens, blocks)
        handle.release_event.synchronize(WAIT / 4)
        host.give(blocks)
        assert not handle.done()
    assert handle.result(WAIT).dropped == {}
    drop_from(host.engine, "cpu")
    assert host.load(tokens).tokens == 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("cpu", [None, 8])
def test_a_store_is_ordered_by_events_on_a_gpu(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, cpu: int | None
) -> None:
    """The forward that fills the slots is still running when they are stored, and the next one that overwrites them is
    queued behind `release_event`: the thread waits for neither, and the pages have the first one's rows."""
    monkeypatch.undo()
    host = open_host(device="cuda", cpu=cpu, bounce=16)
    tokens = prompt(1, 4)
    stream = torch.cuda.Stream()
    rows = host.compute(tokens)  # the right bytes, elsewhere
    blocks = host.take(4)
    torch.cuda.synchronize()
    sources = torch.tensor(rows, device="cuda")
    targets = torch.tensor(blocks, device="cuda")
    first = host.planes[0][0].view(torch.uint8)  # a kernel's first launch waits for what runs: not below
    first.index_copy_(0, sources, first.index_select(0, sources)).index_fill_(0, targets, 0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # about half a second
        filled = torch.cuda.Event()
        for tensors in host.planes:
            for tensor in tensors:
                tensor.view(torch.uint8).index_copy_(0, targets, tensor.view(torch.uint8).index_select(0, sources))
        filled.record()
        started = time.monotonic()
        handle = host.engine.store(tokens, blocks)
        took = time.monotonic() - started
        assert not filled.query(), "the store waited for the stream"
        assert took < 0.1
        assert not handle.release_event.done()
        handle.release_event.wait(WAIT)
        for tensors in host.planes:
            for tensor in tensors:
                tensor.view(torch.uint8).index_fill_(0, targets, 0x5A)
    stream.synchronize()
    host.give(rows + blocks)
    assert handle.result(WAIT).dropped == {}
    if cpu is not None:
        assert host.load(tokens).tokens == 16
        drop_from(host.engine, "cpu")
    assert host.load(tokens).tokens == 16
