"""Whoever watches a class is told before and behind each method that writes weights. SGLang's are the example."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gdscache.errors import ParallelismUnsupportedError, WeightUpdatesUnsupportedError
from gdscache.integrations.sglang.setup import WEIGHT_METHODS
from gdscache.integrations.vllm.setup import refuse_config
from gdscache.integrations.watching import CallWatch, ExecutorWatch
from tests.support.helpers import raising
from tests.support.vllm_setup import setup


def updater() -> type[Any]:
    def write(self: Any, fails: bool = False) -> str:
        self.written.append(1)
        if fails:
            raise RuntimeError("half of them are written")
        return "done"

    return type("WeightUpdater", (), dict.fromkeys(WEIGHT_METHODS, write))


def test_each_way_to_write_weights_is_told_before_and_behind() -> None:
    kind = updater()
    told: list[tuple[str, int]] = []
    target = SimpleNamespace(written=[])

    def tell(name: str, *call: Any) -> None:
        told.append((name, len(target.written)))

    watch = CallWatch(kind, WEIGHT_METHODS, tell, tell)
    for number, name in enumerate(WEIGHT_METHODS):
        assert getattr(kind, name)(target) == "done"
        assert told[-2:] == [(name, number), (name, number + 1)]
    with pytest.raises(RuntimeError, match="half"):
        kind.update_weights_from_disk(target, fails=True)
    assert [count for _, count in told[-2:]] == [len(WEIGHT_METHODS), len(WEIGHT_METHODS) + 1]
    watch.close()
    watch.close()
    before = len(told)
    kind.update_weights_from_disk(target)
    assert len(told) == before


def test_two_listen() -> None:
    kind = updater()
    told: list[str] = []
    first = CallWatch(kind, WEIGHT_METHODS, lambda *call: told.append("a"))
    second = CallWatch(kind, WEIGHT_METHODS, after=lambda *call: told.append("b"))
    kind.update_weights_from_ipc(SimpleNamespace(written=[]))
    assert told == ["a", "b"]
    first.close()
    kind.update_weights_from_ipc(SimpleNamespace(written=[]))
    assert told[2:] == ["b"]
    second.close()


def test_an_error_or_the_end_of_one_watch_leaves_no_other_untold() -> None:
    kind, told, other = updater(), list[str](), list[CallWatch]()

    class Leaving(CallWatch):
        def __getattribute__(self, name: str) -> Any:
            if name == "before":
                self.close()
            return super().__getattribute__(name)

    Leaving(kind, WEIGHT_METHODS)
    other.append(CallWatch(kind, WEIGHT_METHODS, after=raising(ValueError("a tier cannot be cleared"))))
    other.append(CallWatch(kind, WEIGHT_METHODS, lambda *call: told.append("a"), lambda *call: told.append("b")))
    with pytest.raises(ValueError, match="cleared"):
        kind.update_weights_from_ipc(SimpleNamespace(written=[]))
    assert told == ["a", "b"]
    for watch in other:
        watch.close()


def test_an_updater_that_cannot_be_watched_is_refused() -> None:
    kind = updater()
    del kind.update_weights_from_tensor
    with pytest.raises(WeightUpdatesUnsupportedError, match="update_weights_from_tensor"):
        CallWatch(kind, WEIGHT_METHODS)
    assert not hasattr(kind.update_weights_from_disk, "__wrapped__")


def test_who_comes_later_knows_what_has_happened() -> None:
    kind = updater()
    first = CallWatch(kind, WEIGHT_METHODS)
    assert (first.last(), first.complete) == (0, True)
    first.close()
    kind.end_weight_update(SimpleNamespace(written=[]))  # while nobody watches
    later = CallWatch(kind, WEIGHT_METHODS, from_start=False)
    assert later.complete, "the first one was there from the start"
    assert later.last() == later.last("end_weight_update") > 0
    assert later.last("begin_weight_update") == 0
    before = later.last()
    kind.begin_weight_update(SimpleNamespace(written=[]))
    assert later.last() == later.last("begin_weight_update") > before


def test_who_is_the_first_and_comes_late_knows_that_it_knows_too_little() -> None:
    kind = updater()
    for from_start in (False, True):
        watch = CallWatch(kind, WEIGHT_METHODS, from_start=from_start)
        assert (watch.last(), watch.complete) == (0, False)
        watch.close()


def test_a_call_that_a_listener_refuses_is_not_made() -> None:
    """As a setup of vLLM's that cannot be served: before vLLM is told which executor starts its workers."""

    class Executor:
        @staticmethod
        def get_class(config: Any) -> str:
            return "class"

    def refuse(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        refuse_config(*args)

    for _ in range(2):
        CallWatch(Executor, ["get_class"], before=refuse)
    assert Executor.get_class(setup()[0]) == Executor().get_class(setup()[0]) == "class"
    with pytest.raises(ParallelismUnsupportedError, match="pipeline_parallel_size is 2"):
        Executor.get_class(setup(parallel_config__pipeline_parallel_size=2)[0])


def test_methods_of_workers_in_other_processes_are_called_by_their_names() -> None:
    """As vLLM's executor has it. An object that is not ours is nobody's business."""
    done: list[str] = []

    class Executor:
        def collective_rpc(self, method: Any, timeout: float | None = None) -> None:
            done.append(str(method))

        def shutdown(self) -> None:
            done.append("shutdown")

    mine, other = Executor(), Executor()
    told: list[tuple[str, int]] = []
    watch = ExecutorWatch(
        Executor,
        ["reload_weights"],
        lambda executor: executor is mine,
        lambda name: told.append((name, len(done))),
        lambda executor: told.append(("ends", len(done))),
    )
    for executor in (other, mine):
        executor.collective_rpc("execute_model")
        executor.collective_rpc(print)
        executor.collective_rpc("reload_weights")
        executor.collective_rpc(method="reload_weights")
        executor.shutdown()
    assert told == [
        ("reload_weights", 7), ("reload_weights", 8), ("reload_weights", 8), ("reload_weights", 9), ("ends", 9),
    ]  # fmt: skip
    watch.close()
    mine.collective_rpc("reload_weights")
    assert len(told) == 5
    with pytest.raises(WeightUpdatesUnsupportedError, match="collective_rpc"):
        ExecutorWatch(SimpleNamespace, ["reload_weights"], bool, bool, bool)
