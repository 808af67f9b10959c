"""Our linker below SGLang's own tree of hybrid models, one case by its name:  sglang_hybrid_cases.py CASE FOLDER"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gdscache.storage.base import Op
from tests.engines import sglang_hybrid_rig as rig
from tests.engines.sglang_case import FAULTY, case, change_weights, run_case
from tests.support.faults import Fault, FaultPlan
from tests.support.faulty import PLAN

KINDS = ("swa", "mamba", "all")


@case
def hybrids_come_back(folder: Path) -> None:
    """From the CPU tier after a flush, from the SSD after a restart; where prompts part, the last end before."""
    for kind, own in _folders(folder):
        found, long = rig.HybridRig(own, kind), rig.prompt(1, 100)
        assert found.serve(long) == (0, 0)
        assert found.serve(long) == (96, 0), "the tree has it"
        found.settle()
        found.flush()
        assert found.serve(long) == (0, 96)
        found.settle()
        found.close()
        # SGLang keeps a page more than the windows at the ends of chunks: at 32, 64 and 96.
        hits = {30: 28, 62: 60, 94: 92, 98: 96} if kind == "swa" else {30: 0, 62: 32, 94: 64, 98: 96}
        for head, hit in hits.items():
            found = rig.HybridRig(own, kind)
            assert found.serve(rig.prompt(head, 110, rig.prompt(1, head))) == (0, hit), (kind, head)
            found.settle()
            found.close()


@case
def prompts_that_end_on_the_edge_of_a_chunk(folder: Path) -> None:
    for kind, own in _folders(folder):
        found = rig.HybridRig(own, kind)
        for tokens in (32, 64, 96):
            first = rig.prompt(tokens, tokens)
            assert found.serve(first) == (0, 0)
            found.settle()
            found.flush()
            assert found.serve(rig.prompt(1, tokens + 6, first)) == (0, tokens), (kind, tokens)
            found.settle()
            found.flush()
            shorter = tokens - (4 if kind == "swa" else 32)  # one token is computed
            assert found.serve(first) == (0, shorter), (kind, tokens)
            found.settle()
            found.flush()
        found.close()


@case
def where_prompts_part(folder: Path) -> None:
    """The second prompt on a common beginning keeps a window, or a state, where it parts: later ones find it."""
    for kind, own in _folders(folder):
        head = rig.prompt(1, 57)
        for restart in (False, True):  # where SGLang's tree has the first one, and where our tiers alone have
            (place := own / f"{restart}").mkdir()
            found = rig.HybridRig(place, kind)
            assert found.serve(rig.prompt(2, 100, head)) == (0, 0)
            found.settle()
            if restart:
                found.flush()
            assert sum(found.serve(rig.prompt(3, 110, head))) in (32, 52), "SGLang keeps a page more than a window"
            found.settle()
            found.flush()
            assert found.serve(rig.prompt(4, 90, head)) == (0, 56), (kind, restart)
            found.settle()
            found.close()


@case
def the_device_has_more_by_then(folder: Path) -> None:
    """A request that is looked up again, with fewer pages missing, loads what is missing by then."""
    for kind, own in _folders(folder):
        found, long = rig.HybridRig(own, kind), rig.prompt(1, 100)
        found.serve(long)
        found.settle()
        found.flush()
        assert found.request(long, "waits").host_hit_length == 96
        assert found.serve(rig.prompt(2, 40, rig.prompt(1, 33))) == (0, 32)
        again = found.request(long, "waits")
        # A loaded state is its request's: the tree has got that behind the 40 tokens alone.
        assert (again.prefix_len, again.host_hit_length) == ((32, 64) if kind == "swa" else (0, 96)), kind
        found.load(again)
        found.finish(again, long)
        found.close()


@case
def a_group_whose_pages_are_gone(folder: Path) -> None:
    """Where one group has lost its pages, all is computed, and stored anew."""
    for kind, own in _folders(folder):
        found, long = rig.HybridRig(own, kind), rig.prompt(1, 100)
        found.serve(long)
        for engine in found.linker.engine.engines:
            found.settle()
            found.flush()
            engine.clear()
            assert found.serve(long) == (0, 0), kind
            found.settle()
            found.flush()
            assert found.serve(long) == (0, 96), kind
        found.close()


@case
def a_group_whose_bytes_flip(folder: Path) -> None:
    """Where the bytes of one group are bad, all is computed."""
    for kind, own in _folders(folder):
        found, long = rig.HybridRig(own, kind), rig.prompt(1, 100)
        found.serve(long)
        found.settle()
        found.close()
        for number in range(len(rig.COMPONENTS[kind])):
            again = rig.HybridRig(own, kind, ssd=FAULTY["ssd"])
            with FaultPlan.rule(PLAN, Fault.FLIP, Op.READ, where=_in(number), rate=1.0, bit=7):
                assert again.serve(long) == (0, 0), (kind, number)
            again.settle()
            again.flush()
            assert again.serve(long) == (0, 96), "computed and stored anew"
            again.close()


def _in(number: int) -> Callable[[str, int], bool]:
    return lambda path, offset: f"groups-{number}" in path


@case
def the_rig_notices(folder: Path) -> None:
    """A window that is not brought, or a state that is zero, is what the cases look at."""
    for (kind, own), name in zip(_folders(folder), ("swa", "mamba", "kv"), strict=True):
        found, long = rig.HybridRig(own, kind), rig.prompt(1, 100)
        found.serve(long)
        found.settle()
        found.flush()
        _spoil(found, name)
        seen = ""
        try:
            found.serve(long)
        except AssertionError as error:
            seen = str(error)
        assert "a wrong" in seen, f"{name} was spoilt, and nobody saw it"
        found.linker.engine.close()


def _spoil(found: rig.HybridRig, name: str) -> None:
    """Blocks of one group are zero behind a load."""
    load_many, engine = found.linker._hybrid.load_many, found.linker.engine
    layers = next(group.layers for group in engine.groups if group.name == name)

    def spoilt(requests: Any, after: Any = None) -> Any:
        load = load_many(requests, after)
        load.results()
        for _, blocks in requests:
            for layer in layers:
                for plane in engine.planes[layer]:
                    plane[torch.tensor(blocks[name])] = 0
        return load

    found.linker._hybrid.load_many = spoilt


@case
def random_traffic_of_windows(folder: Path) -> None:
    _random(folder, "swa")


@case
def random_traffic_of_states(folder: Path) -> None:
    _random(folder, "mamba")


@case
def random_traffic_of_both(folder: Path) -> None:
    _random(folder, "all")


def _random(folder: Path, kind: str) -> None:
    """Prompts with common beginnings, flushes and restarts, in a pool and tiers that are too small: no wrong byte."""
    source = random.Random(5)
    room = {"cpu": {"capacity": "1MiB"}, "ssd": {"capacity": "2MiB"}}
    found, loaded = rig.HybridRig(folder, kind, **room), 0
    for _ in range(150):
        head = rig.prompt(source.randrange(4), source.randrange(4, 150))
        tokens = rig.prompt(source.randrange(3, 9), len(head) + source.randrange(1, 90), head)
        loaded += found.serve(tokens, source.choice([16, 32, 256]))[1]
        if source.random() < 0.1:
            found.settle()
            found.flush()
        if source.random() < 0.04:
            found.close()
            found = rig.HybridRig(folder, kind, **room)
    assert loaded > 500, loaded
    assert found.linker.counts["failed_loads"] == 0
    found.settle()
    assert found.linker.engine.check().ok
    found.close()


@case
def aborted_loads_of_hybrids(folder: Path) -> None:
    """A request that goes while its load is queued leaves nothing behind."""
    for kind, own in _folders(folder):
        found, long = rig.HybridRig(own, kind), rig.prompt(1, 100)
        found.serve(long)
        found.settle()
        found.flush()
        for _ in range(3):
            room = found.room()
            request = found.request(long)
            found.load(request)
            assert found.room() != room
            found.abort(request)
            assert found.room() == room, kind
            assert found.linker.start_layer_wise_loading() == -1
        assert found.serve(long) == (0, 96)
        found.settle()
        found.flush()
        rig.until(lambda found=found: _leases(found) == [], "nothing is held")
        found.close()


def _leases(found: rig.HybridRig) -> list[Any]:
    return [lease for part in found.linker.engine.stats()["pools"].values() for lease in part["leases"]]


@case
def hybrids_of_new_weights_find_nothing(folder: Path) -> None:
    for kind, own in _folders(folder):
        found, long = rig.HybridRig(own, kind), rig.prompt(1, 100)
        found.serve(long)
        found.settle()
        change_weights()
        found.flush()
        assert found.serve(long) == (0, 0), kind
        found.settle()
        found.flush()
        assert found.serve(long) == (0, 96), "those of the new weights are kept"
        found.close()


def _folders(folder: Path) -> list[tuple[str, Path]]:
    found = [(kind, folder / kind) for kind in KINDS]
    for _, own in found:
        own.mkdir()
    return found


if __name__ == "__main__":
    run_case()
