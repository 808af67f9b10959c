"""Places where prompts part, in SGLang's tree of a hybrid model.

SGLang keeps a window or a state where a prompt parts from one in its tree. That place is within a node that was already
offered, so SGLang does not offer it, and later prompts would miss it in our tiers. So the new window or state is
offered here, locked and acknowledged like SGLang's own offers.

Full pages in our tiers behind the last window or state mean that other prompts went on there: SGLang is asked to keep
one at that token, as for such pages in its own tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        """`match_prefix` of a tree, with branching points in our pages. Without the extra buffer, SGLang keeps states
        at the ends of chunks and requests alone."""
        states = tree.components.get(ComponentType.MAMBA) if tree.enable_mamba_extra_buffer else None
        grids = {} if states is None else {"mamba_branching_seqlen": states.mamba_checkpoint_grid}
        grids |= {"swa_branching_seqlen": self._size} if ComponentType.SWA in tree.components else {}

        def matched(params: Any) -> Any:
            self.whole = None
            result = match(params)
            found = self._agreed(lambda: self.whole or 0) if grids and self.whole is not None else 0
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
        lacking = self._lacking(self._kept(tree, node))
        transfers = [self._transfer(tree, node, name, keys) for name, keys in lacking.items()]
        if transfers:
            lock = tree.inc_lock_ref(node).to_dec_params()
            if self._linker.offload(transfers):
                tree.linker.pending_offloads.append(_PendingOffload(node, lock, []))
            else:
                tree.dec_lock_ref(node, lock)

    def _kept(self, tree: Any, node: Any) -> dict[PoolName, Sequence[str]]:
        """The keys of the state and of the window at the node's end, as far as the tree has them."""
        keys, found = tree.tree_core.get_hash_values(node), dict[PoolName, Sequence[str]]()
        if _value(tree, node, ComponentType.MAMBA) is not None:
            found[PoolName.MAMBA] = keys[-1:]
        if _value(tree, node, ComponentType.SWA) is not None:
            path = keys if len(keys) >= self._pages else [*tree.get_prefix_hash_values(node), *keys]
            found[PoolName.SWA] = path[-self._pages :]
        return found

    def _lacking(self, ends: Mapping[PoolName, Sequence[str]]) -> dict[PoolName, Sequence[str]]:
        """Those of `ends` of which our tiers lack a page that is not on its way. All are one agreement."""
        asked = {name: [key for key in keys if not self._under_way((name.value, key))] for name, keys in ends.items()}

        def lacking() -> int:  # a bit for each of `ends`
            return sum((not self._have(name.value, keys)) << n for n, (name, keys) in enumerate(asked.items()))

        found = self._agreed(lacking) if any(asked.values()) else 0
        return {name: keys for n, (name, keys) in enumerate(ends.items()) if found >> n & 1}

    def _transfer(self, tree: Any, node: Any, name: PoolName, keys: Sequence[str]) -> PoolTransfer:
        """Dropped pages of a window have slot 0."""
        if name == PoolName.MAMBA:
            slots = _value(tree, node, ComponentType.MAMBA)
        else:
            path = tree.path_device_indices(node)[-len(keys) * self._size :]
            slots = tree.token_to_kv_pool_allocator.translate_swa_indices_for_transfer(path)
        return PoolTransfer(name, keys=[*keys], device_indices=slots)


def _value(tree: Any, node: Any, kind: ComponentType) -> Any:
    return tree.tree_core.get_component_device_value(node, kind) if kind in tree.components else None
