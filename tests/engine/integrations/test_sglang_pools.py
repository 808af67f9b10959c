"""Host pools of hybrid models below one storage, over real engines: lengths, windows, states."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache import PageHashes
from gdscache.config import Config
from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import CacheGroupsUnsupportedError, CacheLayoutUnsupportedError, EngineClosedError, StorageError
from gdscache.gate.fit import ENOUGH
from gdscache.integrations.sglang.host import PoolPages
from gdscache.integrations.sglang.planes import PoolPlanes, pools_planes
from gdscache.integrations.sglang.served import SeveralPools
from gdscache.store.handle import StoreHandle
from tests.support.helpers import WAIT, raising
from tests.support.hybrid import HybridHost
from tests.support.sglang_fields import kind_of

PAGE, PAGES, SLOTS = 4, 40, 12
KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(20)]


def tokens_pool(heads: int, layout: str = "page_first_direct") -> Any:
    buffer = torch.zeros((2, PAGES, 2, PAGE, heads, 16), dtype=torch.bfloat16)
    return kind_of(
        "MHATokenToKVPoolHost",
        layout=layout,
        kv_buffer=buffer,
        page_size=PAGE,
        size=PAGE * PAGES,
        dtype=torch.bfloat16,
        dcp_size=1,
    )


def states_pool(layout: str = "page_first_direct", *, conv_only: bool = False) -> Any:
    return kind_of(
        "MambaPoolHost",
        layout=layout,
        page_size=1,
        temporal_buffer=torch.zeros((SLOTS, 2, 1, 0 if conv_only else 8, 16)),
        conv_buffer=[torch.zeros((SLOTS, 2, 1, 24), dtype=torch.bfloat16)],
        slot_state_buffers=[torch.zeros((SLOTS, 5), dtype=torch.int32)],
    )


@contextlib.contextmanager
def opened(path: Path, pools: dict[str, Any]) -> Iterator[PoolPages]:
    planes = pools_planes(pools, 8)
    sections: dict[str, Any] = {
        "model": {"name": "tiny", **planes.model()},
        "ssd": {"path": str(path), "capacity": "16MiB", "transport": "posix", "gds": "off", "threads": 2},
        "host_buffer": "4MiB",
        "store": {"window_every": 64},
    }
    pages = PoolPages.over(HybridEngine(Config.from_dict(sections), planes.tensors))
    try:
        yield pages
    finally:
        pages.close()


def at(*pages: int) -> list[int]:
    return [page * PAGE for page in pages]


def test_lengths_are_those_at_which_all_pools_have_what_is_needed(tmp_path: Path) -> None:
    with opened(tmp_path, {"kv": tokens_pool(2), "swa": tokens_pool(4), "mamba": states_pool()}) as pages:
        assert pages.pools["kv"].set(KEYS[:10], at(*range(10))) == [True] * 10
        assert pages.pools["swa"].set(KEYS[2:6], at(0, 1, 2, 3), KEYS[:2]) == [True] * 4
        assert pages.pools["mamba"].set([KEYS[3]], [5], KEYS[:3]) == [True]
        assert pages.pools["mamba"].set([KEYS[8]], [6], KEYS[:8]) == [True]
        assert pages.pools["kv"].exists(KEYS) == 10
        assert pages.lengths(KEYS[:12], {}) == ({"kv": 10}, [*range(1, 11)])
        assert pages.lengths(KEYS[:12], {"swa": 2}) == ({"kv": 10, "swa": 6}, [4, 5, 6])
        assert pages.lengths(KEYS[:12], {"mamba": 1}) == ({"kv": 10, "mamba": 9}, [4, 9])
        assert pages.lengths(KEYS[:12], {"swa": 2, "mamba": 1}) == ({"kv": 10, "swa": 6, "mamba": 9}, [4])
        assert pages.lengths(KEYS[:12], {"swa": None}) == ({"kv": 10, "swa": 0}, []), "all pages are needed"
        assert pages.lengths(KEYS[2:12], {"swa": None}, KEYS[:2]) == ({"kv": 8, "swa": 4}, [1, 2, 3, 4])
        assert pages.lengths(KEYS[2:12], {"swa": 9}, KEYS[:2]) == ({"kv": 8, "swa": 4}, [1, 2, 3, 4]), "none before"
        assert pages.lengths(KEYS[:12], {"indexer": None}) == ({"kv": 10, "indexer": 0}, []), "not kept"


def test_bytes_come_back_to_each_pool_after_a_restart(tmp_path: Path) -> None:
    pools = {"kv": tokens_pool(2), "swa": tokens_pool(4), "mamba": states_pool()}
    for number, pool in enumerate(pools.values()):
        for buffer in pool_buffers(pool):
            buffer.copy_(torch.randint(0, 100, buffer.shape, generator=torch.Generator().manual_seed(number)))
    wanted = {name: [buffer.clone() for buffer in pool_buffers(pool)] for name, pool in pools.items()}
    with opened(tmp_path, pools) as pages:
        pages.pools["kv"].set(KEYS[:4], at(0, 1, 2, 3))
        pages.pools["swa"].set(KEYS[2:4], at(7, 8), KEYS[:2])
        pages.pools["mamba"].set([KEYS[3]], [5], KEYS[:3])
    with opened(tmp_path, pools) as again:
        assert again.lengths(KEYS[:6], {"swa": 2, "mamba": 1})[1] == [4]
        assert again.pools["kv"].get(KEYS[:5], at(10, 11, 12, 13, 14)) == [True] * 4 + [False]
        assert again.pools["swa"].get(KEYS[2:4], at(20, 21), KEYS[:2]) == [True] * 2
        assert again.pools["mamba"].get([KEYS[3]], [9], KEYS[:3]) == [True]
        assert again.pools["mamba"].get([KEYS[2]], [9], KEYS[:2]) == [False]
    for place, first in ((10, 0), (11, 1), (12, 2), (13, 3)):
        assert torch.equal(pools["kv"].kv_buffer[:, place], wanted["kv"][0][:, first])
    assert torch.equal(pools["kv"].kv_buffer[:, 14], wanted["kv"][0][:, 14])
    assert torch.equal(pools["swa"].kv_buffer[:, 20:22], wanted["swa"][0][:, 7:9])
    for now, before in zip(pool_buffers(pools["mamba"]), wanted["mamba"], strict=True):
        assert torch.equal(now[9], before[5])


def pool_buffers(pool: Any) -> list[torch.Tensor]:
    if hasattr(pool, "kv_buffer"):
        return [pool.kv_buffer]
    return [pool.temporal_buffer, *pool.conv_buffer, *pool.slot_state_buffers]


def test_new_weights_are_new_in_every_pool(tmp_path: Path) -> None:
    with opened(tmp_path, {"kv": tokens_pool(2), "mamba": states_pool(conv_only=True)}) as pages:
        pages.pools["kv"].set(KEYS[:2], at(0, 1))
        pages.pools["mamba"].set([KEYS[1]], [0], KEYS[:1])
        pages.weights_changed()
        assert pages.lengths(KEYS[:2], {"mamba": 1}) == ({"kv": 0, "mamba": 0}, [])
        assert pages.pools["mamba"].set([KEYS[1]], [0], KEYS[:1]) == [False]
        pages.flushed()
        assert pages.pools["mamba"].set([KEYS[1]], [0], KEYS[:1]) == [True]
        pages.pools["kv"].set(KEYS[:2], at(0, 1))
        assert pages.lengths(KEYS[:2], {"mamba": 1})[1] == [2]
        pages.clear()
        assert pages.lengths(KEYS[:2], {"mamba": 1}) == ({"kv": 0, "mamba": 0}, [])


def test_what_is_not_kept_is_refused_by_its_name() -> None:
    for name in ("indexer", "draft", "c4"):
        with pytest.raises(CacheGroupsUnsupportedError, match=name) as raised:
            pools_planes({"kv": tokens_pool(2), name: tokens_pool(2)}, None)
        assert "--hicache-storage-backend" in raised.value.hint
    with pytest.raises(CacheGroupsUnsupportedError, match="SimpleNamespace"):
        pools_planes({"kv": tokens_pool(2), "mamba": SimpleNamespace()}, None)
    for pools in (
        {"kv": tokens_pool(2), "mamba": states_pool("layer_first")},
        {"kv": tokens_pool(2), "swa": tokens_pool(2, "layer_first")},
    ):
        with pytest.raises(CacheLayoutUnsupportedError, match="layer_first") as layout:
            pools_planes(pools, None)
        assert "--hicache-mem-layout" in layout.value.hint


def test_one_pool_is_as_it_was() -> None:
    planes = pools_planes({"kv": tokens_pool(2)}, 8)
    assert not planes.groups
    assert "groups" not in planes.model()


def test_a_store_that_one_pool_refuses_reads_nothing_behind_the_error(
    open_hybrid: Callable[..., HybridHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linker gives blocks back to SGLang where a store was refused."""
    begun, planes = StoreHandle(1), PoolPlanes([], {}, [])
    pools = SeveralPools(open_hybrid("apart").engine, 60.0, planes, ranked=False)
    refused = raising(EngineClosedError("the engine was closed meanwhile", "open a new one"))
    for engine, store in zip(pools.engines, (lambda *_: begun, refused), strict=True):
        monkeypatch.setattr(engine, "store_pages", store)
    threading.Timer(0.1, begun.read, [None]).start()
    with pytest.raises(EngineClosedError):
        pools.store(PageHashes([bytes([page]) * 32 for page in range(2)]), {"full": [1, 2], "window": [3, 4]})
    assert begun.release_event.done()


@pytest.mark.parametrize(("before", "wanted"), [(4, 2), (0, 0)])
def test_pages_from_the_middle_of_a_request_are_judged_behind_those_before_them(
    open_hybrid: Callable[..., HybridHost], before: int, wanted: int
) -> None:
    engine = open_hybrid("apart", load={"gate": "enforcing"}, cpu=None).engine
    pools = SeveralPools(engine, 60.0, PoolPlanes([], {}, []), ranked=False)
    digests = [bytes([page]) * 32 for page in range(6)]
    blocks = {"full": range(1, 7), "window": range(1, 7)}
    assert not any(handle.result(WAIT).dropped for handle in pools.store(PageHashes(digests), blocks))
    engine.drain(WAIT)
    for part in engine.engines:
        for _ in range(ENOUGH):
            part.observe_load("ssd", part.layout.bytes_in("ssd"), 0.5)
    for _ in range(ENOUGH):
        for tokens, cached in ((4, 0), (8, 0), (4, 16), (8, 16)):
            engine.observe_prefill(tokens, cached, 1e-3 * tokens + 0.015 * tokens * (cached + tokens / 2))
    fetch = pools.fetch(PageHashes(digests[4:], parent=digests[3], before=before), 2)
    assert (fetch.wanted, fetch.cached) == (wanted, 2)


def test_an_error_of_one_pool_leaves_no_page_of_the_others() -> None:
    cleared: list[str] = []
    others = {name: SimpleNamespace(clear=lambda: cleared.append("")) for name in ("swa", "mamba")}
    pools: Any = {"kv": SimpleNamespace(clear=raising(StorageError("the disk is broken"))), **others}
    with pytest.raises(StorageError):
        PoolPages(pools).clear()
    assert len(cleared) == 2
