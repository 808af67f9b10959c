"""HiCache's host pools of hybrid models below one storage: a pool of windows or states beside that of all tokens.

SGLang names each pool, and asks for the lengths at which all pools have their part of a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import CacheGroupsUnsupportedError
from gdscache.integrations.sglang.host import HostPages
from gdscache.integrations.sglang.planes import (
    KV,
    STATES,
    WINDOWS,
    PoolPlanes,
    host_planes,
    named,
    refuse_layout,
    rows_of,
)

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
    groups: list[dict[str, object]] = []
    for at, name in enumerate(names):
        about: dict[str, object] = {"name": name, "layers": [at], "page_tokens": page}
        if name == WINDOWS:
            about["window"] = window or page
        elif name == STATES:
            about["state"] = True
        groups.append(about)
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
    """Pages of all pools. Thread-safe. Each pool is `HostPages` over an engine of its own."""

    def __init__(self, engine: HybridEngine) -> None:
        self.engine = engine
        self.pools = {
            name: HostPages(one) for names, one in zip(engine.names, engine.engines, strict=True) for name in names
        }

    def pool(self, name: str) -> HostPages | None:
        """The keeper of a pool, by SGLang's name; None for a pool that is not kept."""
        return self.pools.get(name)

    @property
    def by_groups(self) -> dict[str, CacheEngine]:
        return self.engine.by_groups

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
            there = self.pools[name].present(keys[:whole], before) if name in self.pools else bytes(whole)
            good = [n for n in range(1, whole + 1) if 0 not in there[max(0, n - (pages or n)) : n]]
            reach[name] = good[-1] if good else 0
            kept = set(good)
            found = [n for n in found if n in kept]
        return reach, found

    def exists(self, keys: Sequence[str], before: Sequence[str] = ()) -> int:
        return self.pools[KV].exists(keys, before)

    def get(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str] = ()) -> list[bool]:
        return self.pools[KV].get(keys, slots, before)

    def set(self, keys: Sequence[str], slots: Sequence[int], before: Sequence[str] = ()) -> list[bool]:
        return self.pools[KV].set(keys, slots, before)

    def clear(self) -> None:
        for pool in self.pools.values():
            pool.clear()

    def weights_changed(self, *, ends: bool = False) -> None:
        for pool in self.pools.values():
            pool.weights_changed(ends=ends)

    def flushed(self) -> None:
        for pool in self.pools.values():
            pool.flushed()

    def close(self) -> None:
        """Finish accepted stores, and close all engines. Repeated calls are fine."""
        self.engine.close()
