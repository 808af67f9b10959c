"""An engine in event loops: handles are awaited, and nothing is left of their awaits."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from gdscache.errors import DeadlineError, EngineClosedError, ForkedProcessError
from gdscache.load.handle import LayerwiseLoad
from gdscache.storage.base import Op
from gdscache.store.handle import StoreHandle
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, Host, OpenHost, drop_from, kept_on_ssd, prompt, quiet
from tests.support.hybrid import HybridHost
from tests.support.pages import FAULTY


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    if request.param == "asyncio":
        return asyncio.new_event_loop
    return pytest.importorskip("uvloop", reason="uvloop is not installed").new_event_loop  # type: ignore[no-any-return]


@pytest.fixture
def run(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    def runs(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(asyncio.wait_for(work, WAIT))

    return runs


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def late(open_host: OpenHost) -> Iterator[tuple[Host, list[int]]]:
    """A host and 4 pages that are on the SSD alone, whose reads hang until `PLAN.reset()`."""
    host, tokens = kept_on_ssd(open_host, 4, transport=FAULTY)
    drop_from(host.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.HANG):
        yield host, tokens


def test_a_loop_goes_on_while_handles_of_every_kind_are_awaited_together(open_host: OpenHost, run: Run) -> None:
    host = open_host(transport=FAULTY)
    tokens, turns = prompt(1, 4), 0

    async def clock() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    async def serve() -> None:
        ticking = asyncio.ensure_future(clock())
        handle = host.store(tokens)
        assert (await handle).dropped == {}
        quiet(host.engine)
        drop_from(host.engine, "cpu")
        with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.05):
            load, blocks, keys = host.begin(tokens)
            prefetch, store = host.engine.prefetch(tokens), host.store(prompt(2, 2))
            reports = await asyncio.gather(load, prefetch, store, load)
        assert reports == [load.result(), prefetch.result(), store.result(), load.result()]
        assert (reports[0].tokens, reports[1].tokens, reports[2].dropped) == (16, 16, {})
        assert await load == await load == reports[0]
        host.finish(load, blocks, keys)
        ticking.cancel()

    run(serve())
    assert turns > 2


def test_a_thousand_handles_at_once(late: tuple[Host, list[int]], run: Run) -> None:
    host, tokens = late

    async def serve() -> None:
        asked = [host.engine.prefetch(tokens) for _ in range(1000)]
        asyncio.get_running_loop().call_later(0.01, PLAN.reset)
        reports = await asyncio.gather(*asked)
        assert {report.tokens for report in reports} == {16}

    run(serve())


def test_a_cancelled_await_leaves_its_handle_and_the_other_awaits(late: tuple[Host, list[int]], run: Run) -> None:
    host, tokens = late

    async def serve() -> None:
        load, blocks, keys = host.begin(tokens)
        tasks = [asyncio.ensure_future(load) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(load, 0.001)
        assert len(_waiting(host)) == 1
        assert not load.cancelled
        PLAN.reset()
        assert (await tasks[0]).tokens == (await tasks[2]).tokens == 16
        assert tasks[1].cancelled()
        host.finish(load, blocks, keys)

    run(serve())
    assert not _waiting(host)


def _waiting(host: Host) -> set[asyncio.AbstractEventLoop]:
    """The loops with awaits of an engine's handles."""
    return {waiter.loop for waiter in host.engine.calls._no_end._waiting}


def test_an_await_ends_with_the_patience_that_result_has(open_host: OpenHost, run: Run) -> None:
    host = open_host()
    lost = LayerwiseLoad([], host.layout, 0.01, calls=host.engine.calls)

    async def serve() -> None:
        with pytest.raises(DeadlineError, match="no verdict yet"):
            await lost

    run(serve())
    assert not _waiting(host)


def test_loops_that_end_in_the_middle_of_awaits_leave_nothing(
    late: tuple[Host, list[int]], new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    host, tokens = late
    load, blocks, keys = host.begin(tokens)

    async def forever() -> None:
        await load

    with asyncio.Runner(loop_factory=new_loop) as runner:  # which cancels what is pending
        task = runner.get_loop().create_task(forever())
        runner.run(asyncio.sleep(0.001))
    assert task.cancelled()
    assert not _waiting(host)

    loop = new_loop()  # nobody cancels what is pending in this one
    task = loop.create_task(forever())
    loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    assert _waiting(host) == {loop}

    with asyncio.Runner(loop_factory=new_loop) as runner:
        waiting = asyncio.ensure_future(load, loop=runner.get_loop())
        runner.run(asyncio.sleep(0.001))
        assert _waiting(host) == {loop, runner.get_loop()}
        PLAN.reset()
        assert runner.run(asyncio.wait_for(waiting, WAIT)).tokens == 16
    assert not _waiting(host)
    del task, forever
    gc.collect()
    host.finish(load, blocks, keys)


def test_loops_of_several_threads_await_the_same_handles(late: tuple[Host, list[int]], run: Run) -> None:
    host, tokens = late
    load, blocks, keys = host.begin(tokens)
    found: list[int] = []
    begun = threading.Barrier(5)

    async def serve() -> None:
        waiting = [asyncio.ensure_future(load) for _ in range(10)]
        await asyncio.sleep(0.001)
        begun.wait(WAIT)
        found.extend(report.tokens for report in await asyncio.gather(*waiting))

    threads = [threading.Thread(target=lambda: run(serve())) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(WAIT)
    assert len(_waiting(host)) == 4
    PLAN.reset()
    for thread in threads:
        thread.join(WAIT)
    assert found == [16] * 40
    host.finish(load, blocks, keys)


def test_handles_have_their_ends_when_the_engine_is_closed_meanwhile(late: tuple[Host, list[int]], run: Run) -> None:
    host, tokens = late

    async def serve() -> list[Any]:
        load, _, _ = host.begin(tokens)
        prefetch, store = host.engine.prefetch(tokens), host.store(prompt(3, 2))
        waiting = [asyncio.ensure_future(handle) for handle in (load, prefetch, store)]
        await asyncio.sleep(0.001)
        closing = asyncio.get_running_loop().run_in_executor(None, host.engine.close)
        PLAN.reset()
        reports = await asyncio.gather(*waiting)
        await closing
        assert reports == [load.result(), prefetch.result(), store.result()]
        assert await load == reports[0]
        return reports

    run(serve())


def test_a_handle_that_never_ends_is_an_error_when_the_engine_is_closed(open_host: OpenHost, run: Run) -> None:
    host = open_host()

    async def serve() -> None:
        lost = StoreHandle(1, host.engine.calls)
        waiting = [asyncio.ensure_future(lost) for _ in range(3)]
        await asyncio.sleep(0.001)
        await asyncio.to_thread(host.engine.close)
        for one in waiting:
            with pytest.raises(EngineClosedError):
                await one
        with pytest.raises(EngineClosedError):
            await lost

    run(serve())


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C raises, also where the tests' own process was started to ignore it, as a shell does behind `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_await_alone(
    late: tuple[Host, list[int]], new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    host, tokens = late
    load, blocks, keys = host.begin(tokens)

    async def serve() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await load

    with pytest.raises(KeyboardInterrupt), asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())
    assert not _waiting(host)
    PLAN.reset()
    assert host.finish(load, blocks, keys).tokens == 16


def test_pairs_are_awaited_again_and_again(open_host: OpenHost, run: Run) -> None:
    host, tokens = kept_on_ssd(open_host, 4)

    async def pair() -> None:
        drop_from(host.engine, "cpu")
        load, blocks, keys = host.begin(tokens)
        first, second = await asyncio.gather(load, host.engine.prefetch(tokens))
        assert (first.tokens, second.tokens) == (16, 16)
        host.finish(load, blocks, keys)

    async def serve() -> None:
        for _ in range(60):
            await pair()

    run(serve())


@pytest.mark.parametrize("model", ["apart", "together"])
def test_handles_over_several_pools(open_hybrid: Callable[..., HybridHost], model: str, run: Run) -> None:
    host = open_hybrid(model)
    tokens = prompt(1, 6)

    async def serve() -> None:
        first = host.engine.store(tokens, host.compute(tokens))
        assert (await first).dropped == {name: {} for name in host.pool_of}
        host.rest()
        hit = host.engine.lookup(tokens)
        load, slots = host.begin(hit)
        prefetch = host.engine.prefetch(tokens)
        reports = await asyncio.gather(load, prefetch, first)
        assert reports == [load.result(), prefetch.result(), first.result()]
        assert host.finish(hit, load, slots, tokens).tokens == hit.tokens == 24

    run(serve())


def test_without_a_loop_and_in_a_forked_child(open_host: OpenHost) -> None:
    host = open_host()
    lost = StoreHandle(1, host.engine.calls)
    with pytest.raises(RuntimeError, match="no running event loop"):
        lost.__await__().send(None)
    if not (child := os.fork()):
        try:
            asyncio.run(asyncio.wait_for(lost, WAIT))
        except ForkedProcessError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
