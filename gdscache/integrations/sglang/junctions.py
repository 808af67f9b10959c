"""Places where prompts part, in SGLang's tree of a hybrid model.

SGLang keeps a window or a state where a prompt parts from one in its tree. That place is within a node that was already
offered, so SGLang does not offer it, and later prompts would miss it in our tiers. So the new window or state is
offered here, locked and acknowledged like SGLang's own offers.

Full pages in our tiers behind the last window or state mean that other prompts went on there: SGLang is asked to keep
one at that token, as for such pages in its own tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import _PendingOffload


class Junctions:
    """Called by SGLang's scheduler, which is one thread."""

    def __init__(
        self,
        linker: Any,
        page_tokens: int,
        window: int | None,
        have: Callable[[str, Sequence[str]], bool],
        under_way: Callable[[tuple[str, str]], bool],
        agreed: Callable[[Callable[[], int]], int],
    ) -> None:
        """`linker`: the tree's. `window`: tokens before a token that it attends to. `have(name, keys)`: whether our
        tiers have these pages of a pool. `under_way(end)`: whether an offload reads one of `ends`, on all ranks alike.
        `agreed(find)`: see `Agreement.of`.

        `whole`: pages of the last lookup before which our tiers have all pages of full attention; None: it was taken.
        The leading rank's counts."""
        self._linker, self._size = linker, page_tokens
        self._have, self._under_way, self._agreed = have, under_way, agreed
        self._pages = max(1, -(-(window or 0) // page_tokens))  # of a window
        self.whole: int | None = None

    def ends(self, transfers: Sequence[PoolTransfer]) -> set[tuple[str, str]]:
        """The pages at a node's end that a hit behind it needs: names of pools, and keys."""
        others = (one for one in transfers if one.name != PoolName.KV)
        return {(one.name.value, key) for one in others for key in (one.keys or [])[-self._pages :]}

    def follow(self, tree: Any) -> None:
        """The tree has this linker."""
        tree.match_prefix = self._with_branches(tree, tree.match_prefix)
        tree.insert = self._with_offers(tree, tree.insert)

    def _with_branches(self, tree: Any, match: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`match_prefix` of a tree, with branching points in our pages."""
        states = tree.components.get(ComponentType.MAMBA)
        grids = {} if states is None else {"mamba_branching_seqlen": states.mamba_checkpoint_grid}
        grids |= {"swa_branching_seqlen": self._size} if ComponentType.SWA in tree.components else {}

        def matched(params: Any) -> Any:
            self.whole = None
            result = match(params)
            found = 0 if self.whole is None else self._agreed(lambda: self.whole or 0)
            whole = result.device_prefix_len + found * self._size
            reached = result.device_prefix_len + result.host_hit_length
            ends = {name: whole // grid * grid for name, grid in grids.items()}
            ends = {name: end for name, end in ends.items() if end > max(reached, getattr(result, name) or 0)}
            return result._replace(**ends) if ends else result

        return matched

    def _with_offers(self, tree: Any, insert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`insert` of a tree, followed by an offer of its last node's new window or state."""

        def inserted(params: Any) -> Any:
            result = insert(params)
            if result.last_device_node is not None and not tree.is_root(result.last_device_node):
                self._offer(tree, result.last_device_node)
            return result

        return inserted

    def _offer(self, tree: Any, node: Any) -> None:
        transfers = [one for one in (self._state(tree, node), self._window(tree, node)) if one is not None]
        if transfers:
            lock = tree.inc_lock_ref(node).to_dec_params()
            if self._linker.offload(transfers):
                tree.linker.pending_offloads.append(_PendingOffload(node, lock, []))
            else:
                tree.dec_lock_ref(node, lock)

    def _state(self, tree: Any, node: Any) -> PoolTransfer | None:
        slot = _value(tree, node, ComponentType.MAMBA)
        keys = [] if slot is None else tree.tree_core.get_hash_values(node)[-1:]
        return (
            PoolTransfer(PoolName.MAMBA, keys=keys, device_indices=slot) if self._lack(PoolName.MAMBA, keys) else None
        )

    def _window(self, tree: Any, node: Any) -> PoolTransfer | None:
        """The window before the node's end; dropped pages of it have slot 0."""
        if _value(tree, node, ComponentType.SWA) is None:
            return None
        pages, keys = self._pages, tree.tree_core.get_hash_values(node)
        keys = (keys if len(keys) >= pages else [*tree.get_prefix_hash_values(node), *keys])[-pages:]
        if not self._lack(PoolName.SWA, keys):
            return None
        path = tree.path_device_indices(node)[-len(keys) * self._size :]
        slots = tree.token_to_kv_pool_allocator.translate_swa_indices_for_transfer(path)
        return PoolTransfer(PoolName.SWA, keys=keys, device_indices=slots)

    def _lack(self, name: PoolName, keys: Sequence[str]) -> bool:
        """Whether our tiers lack one of these keys, and it is not on its way."""
        asked = [key for key in keys if not self._under_way((name.value, key))]
        return bool(asked) and bool(self._agreed(lambda: int(not self._have(name.value, asked))))


def _value(tree: Any, node: Any, kind: ComponentType) -> Any:
    return tree.tree_core.get_component_device_value(node, kind) if kind in tree.components else None
