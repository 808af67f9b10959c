"""HiCache's host pools of hybrid models below one storage: a pool of windows or states beside that of all tokens.

SGLang names each pool, and asks for the lengths at which all pools have their part of a prefix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import CacheGroupsUnsupportedError
from gdscache.integrations.sglang.host import BorrowedPages, HostPages
from gdscache.integrations.sglang.planes import (
    KV,
    STATES,
    WINDOWS,
    PoolPlanes,
    group_of,
    host_planes,
    named,
    refuse_layout,
    rows_of,
)
from gdscache.runtime.threads import in_turn

_STATES = "MambaPoolHost"


def refuse_pool(name: str) -> None:
    """Raise for a host pool that is not kept, by SGLang's name."""
    if name not in (KV, WINDOWS, STATES):
        raise CacheGroupsUnsupportedError(
            f"the model has a host pool {name!r}; {KV}, {WINDOWS} and {STATES} are supported",
            "use a model whose layers keep all tokens, a sliding window, or a state, or leave "
            "--hicache-storage-backend out",
        )


def pools_planes(pools: Mapping[str, Any], window: int | None) -> PoolPlanes:
    """The planes of host pools, by SGLang's names: a layer each. `window`: tokens that a token attends to.

    Raises `CacheLayoutUnsupportedError`, and `CacheGroupsUnsupportedError` for pools that are not kept.
    """
    for name in pools:
        refuse_pool(name)
    if {*pools} == {KV}:
        return host_planes(pools[KV])
    page = int(pools[KV].page_size)
    names = sorted(pools)
    each = {name: _state_planes(pool) if name == STATES else host_planes(pool) for name, pool in pools.items()}
    groups = [group_of(name, [at], page, window or page) for at, name in enumerate(names)]
    return PoolPlanes(
        [each[name].tensors[0] for name in names],
        {"pools": {name: each[name].described for name in names}},
        [each[name].rows[0] for name in names],
        groups,
    )


def _state_planes(pool: Any) -> PoolPlanes:
    """A pool of states: each slot has the states of all layers side by side."""
    kind = type(pool).__name__
    if kind != _STATES:
        raise CacheGroupsUnsupportedError(
            f"the model's states are in a {kind}; {_STATES} is supported", "leave --hicache-storage-backend out"
        )
    refuse_layout(pool.layout)
    parts = {"state": pool.temporal_buffer} | {f"conv{n}": part for n, part in enumerate(pool.conv_buffer)}
    parts |= {f"beside{n}": part for n, part in enumerate(pool.slot_state_buffers)}
    parts = {name: part for name, part in parts.items() if part.numel()}
    described: dict[str, object] = {name: [str(part.dtype), list(part.shape[1:])] for name, part in parts.items()}
    tensors = tuple(rows_of(part, 1) for part in parts.values())
    return PoolPlanes([tensors], {"pool": kind, "layout": pool.layout, **described}, [named(tensors, names=[*parts])])


class PoolPages:
    """Pages of all pools that are kept, by SGLang's names. Thread-safe."""

    def __init__(
        self, pools: Mapping[str, HostPages | BorrowedPages], engine: CacheEngine | HybridEngine | None = None
    ) -> None:
        """`engine`: of this rank's own directory."""
        self.pools, self.engine = pools, engine

    @classmethod
    def over(cls, engine: CacheEngine | HybridEngine) -> PoolPages:
        if isinstance(engine, CacheEngine):
            return cls({KV: HostPages(engine)}, engine)
        each = zip(engine.names, engine.engines, strict=True)
        return cls({name: HostPages(one) for names, one in each for name in names}, engine)

    def lengths(
        self, keys: Sequence[str], trailing: Mapping[str, int | None], before: Sequence[str] = ()
    ) -> tuple[dict[str, int], list[int]]:
        """Each pool's number of first pages, and the lengths in pages at which all pools have their part.

        `trailing`: for each other pool, the number of a length's last pages that it needs (None: all); its answer is
        the longest length at which it has them. Pools that are not kept have no page.
        """
        whole = self.pools[KV].exists(keys, before)
        reach, found = {KV: whole}, [*range(1, whole + 1)]
        for name, pages in trailing.items():
            pool = self.pools.get(name)
            there = pool.present(keys[:whole], before) if isinstance(pool, HostPages) else bytes(whole)
            good = [n for n in range(1, whole + 1) if 0 not in there[max(0, n - (pages or n)) : n]]
            reach[name] = good[-1] if good else 0
            kept = set(good)
            found = [n for n in found if n in kept]
        return reach, found

    def clear(self) -> None:
        in_turn(*(pool.clear for pool in self.pools.values()))

    def weights_changed(self, *, ends: bool = False) -> None:
        for pool in self.pools.values():
            pool.weights_changed(ends=ends)

    def flushed(self) -> None:
        for pool in self.pools.values():
            pool.flushed()

    def close(self) -> None:
        """Finish accepted stores, and close all engines. Repeated calls are fine."""
        with contextlib.ExitStack() as ends:
            for one in (self.engine, *self.pools.values()):
                if one is not None:
                    ends.callback(one.close)
