"""The installed vLLM against the one that the connector was written for: what has changed, and what hits it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_parts as parts

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
HERE = Path(__file__).parent
WRITTEN_FOR: dict[str, Any] = json.loads((HERE / "vllm_contract.json").read_text())


def told(*arguments: str) -> dict[str, Any]:
    """What a file here says as JSON, behind what vLLM prints."""
    said = parts.told(HERE / arguments[0], *arguments[1:])
    found: dict[str, Any] = json.loads(said[said.rindex("\n{") :])
    return found


def test_changes_are_told() -> None:
    before = {"a": "function(self)", "b": "function(self)", "c": "property"}
    now = {"a": "function(self, x)", "c": "property", "d": "function()", "restore_kv_caches": "function(self)"}
    told = ["a: function(self, x), was function(self)", "b is gone", "d is new: function()"]
    assert parts.changes(before, now) == told


def test_the_installed_vllm_is_the_one_that_this_was_written_for() -> None:
    now = told("vllm_contract.py")
    found = parts.broken(WRITTEN_FOR, now)
    assert not found, f"vLLM {now['version']}, written for {WRITTEN_FOR['version']}:\n" + "\n".join(found)


def test_its_fields_are_those_that_the_table_knows() -> None:
    """A field that is not known is held: it costs hits at most. A line for it in fields.toml mends this."""
    found = told("vllm_contract.py", "--names")
    assert (found["unknown"], found["restarted"], found["unseen"]) == ([], [], [])
    assert len(found["lines"]) > 40


def test_hits_are_those_that_vllm_finds() -> None:
    """The lengths at which all groups of a hybrid model have a hit, over random presences of pages. Left out are
    windows of one token, of which vLLM wants a page that no token attends to, and chunks that are no multiple of a
    block, of which it misses one beside full attention alone."""
    assert told("vllm_lengths.py", "1000") == {"models": 12, "found": []}


SCALES = """
import types
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import KVQuantMode
from gdscache.integrations.vllm.planes import write_first_scales

cache = torch.zeros(4, 2, 16, 2 * (64 + 4), dtype=torch.int8)  # blocks, heads, tokens, a key and a value with scales
impl = TritonAttentionImpl.__new__(TritonAttentionImpl)
impl.kv_cache_dtype, impl._kv_quant_mode = "int8_per_token_head", KVQuantMode.INT8_PER_TOKEN_HEAD
write_first_scales([types.SimpleNamespace(impl=impl, kv_cache=cache)])
loaded = torch.randint(-128, 127, cache.shape, dtype=torch.int8)
cache.copy_(loaded)
impl._pth_key_value_caches(cache)  # of each forward pass, before it writes or reads the cache
print("kept" if torch.equal(cache, loaded) else "lost", "by scales of", tuple(impl._k_scale_cache.shape))
"""


def test_its_first_forward_pass_keeps_the_scales_of_loaded_blocks() -> None:
    """By the class that writes ones over them in that pass otherwise; a GPU would run the pass."""
    assert parts.told("-c", SCALES, VLLM_LOGGING_LEVEL="ERROR").endswith("kept by scales of (4, 16, 2)\n")


CALLS = """
import types
from collections import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from gdscache.integrations.vllm.connector import GdsCacheConnector
from gdscache.integrations.vllm.groups import KeptStates

connector = GdsCacheConnector.__new__(GdsCacheConnector)
connector._engine_id, connector._states, connector._closing = "e", KeptStates(), types.SimpleNamespace(close=int)
table = types.SimpleNamespace(stale=False)
table.leave_alone = lambda stale: setattr(table, "stale", stale)
connector._table, connector._session = table, types.SimpleNamespace(weights_changed=int)
connector._events = None
for caching in (True, False):
    pool = BlockPool(8, caching, 2)
    connector.bind_gpu_block_pool(pool)
    scheduler = types.SimpleNamespace(kv_cache_manager=pool, connector=connector, log_stats=False)
    scheduler.aux_output_connector, table.stale = None, False
    scheduler.reset_connector_cache = lambda: Scheduler.reset_connector_cache(scheduler)
    used, told = pool.get_new_blocks(1), []
    connector._weights_written("reload_weights")
    for blocks in ([], used):
        pool.free_blocks(blocks)
        told.append((Scheduler.reset_prefix_cache(scheduler, False, True), table.stale))
    print(told)
connector._counts, connector._separate, connector._rank, connector._session = Counter(), True, 0, None
connector._role, connector._figures, connector._quiet = KVConnectorRole.WORKER, {}, 0
reports = []
for step in range(600):
    with connector._timed("worker_seconds"):
        pass
    reports.append(connector.get_kv_connector_stats())
print([(step, list(one.data)) for step, one in enumerate(reports) if one is not None])
connector._session = object()
ids = [None, types.SimpleNamespace(engine_id="e"), types.SimpleNamespace(engine_id="f")]
executors = [types.SimpleNamespace(vllm_config=types.SimpleNamespace(kv_transfer_config=one)) for one in ids]
print([connector._is_mine(one) for one in executors])
"""


def test_the_connector_answers_vllms_calls() -> None:
    """A reset that failed, since requests hold blocks, leaves KV of the old weights in vLLM's own prefix cache, if it
    has one. A rank tells its time every 256 steps. Workers of an LLM without a connector are not this connector's."""
    assert parts.told("-c", CALLS, VLLM_LOGGING_LEVEL="ERROR").splitlines()[-4:] == [
        "[(False, True), (True, False)]",
        "[(False, False), (True, False)]",
        "[(255, ['worker_seconds']), (511, ['worker_seconds'])]",
        "[False, True, False]",
    ]
