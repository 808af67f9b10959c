"""KV events that vLLM publishes with the connector: a router finds in them what each of our tiers has."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_parts as parts
from tests.engines.vllm_child import tokens_of
from tests.engines.vllm_script import DRAIN, ask
from tests.support.prometheus import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
BLOCK = 32
DYNAMO = os.environ.get("GDSCACHE_DYNAMO_PYTHON")  # of an environment with ai-dynamo-runtime
EVENTS: tuple[str, dict[str, Any]] = ("events", {})


class Index:
    """Blocks by medium and group, as a router has them: each by the digest of all tokens up to its end."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}

    def hear(self, batches: list[list[dict[str, Any]]]) -> None:
        for event in (event for batch in batches for event in batch):
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            there = self.blocks.setdefault((event["medium"], event.get("group_idx", 0)), {})
            hashes, size = event["block_hashes"], event.get("block_size", 0)
            if event["type"] == "BlockRemoved":
                for one in hashes:
                    there.pop(one, None)
                continue
            if len(event["token_ids"]) != size * len(hashes):  # vLLM's of a window, whose first blocks are none
                assert event["medium"] == "GPU"
                continue
            parents = [event["parent_block_hash"], *hashes]
            for n, (one, parent) in enumerate(zip(hashes, parents, strict=False)):
                there[one] = {"parent": parent, "tokens": event["token_ids"][n * size : (n + 1) * size]}

    def prefix(self, medium: str, tokens: list[int]) -> int:
        """How many of the first tokens it has on a medium: a walk from block to block."""
        there, parent, found = self.blocks.get((medium, 0), {}), None, 0
        following = {(block["parent"], tuple(block["tokens"])): one for one, block in there.items()}
        while (one := following.get((parent, tuple(tokens[found : found + BLOCK])))) is not None:
            parent, found = one, found + BLOCK
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts.made(tmp_path_factory.mktemp("model"), "mha")


def test_what_tiers_have_is_told_in_vllms_own_names(model: Path, tmp_path: Path) -> None:
    first, again = ask(parts.LONG), ask(parts.OTHER)
    connector = parts.cache(tmp_path / "ssd")
    steps = [EVENTS, first, DRAIN, again, EVENTS, ("reset", {"connector": True}), again, EVENTS]
    found = parts.run(tmp_path, model, steps, connector, llm={"kv_events": True}).answers[1:]
    index, tokens = Index(), tokens_of(parts.LONG)
    index.hear(found[4])
    whole = len(tokens) // BLOCK * BLOCK
    assert [index.prefix(medium, tokens) for medium in ("GPU", "CPU", "STORAGE")] == [whole] * 3
    stored = {medium: blocks for (medium, _), blocks in index.blocks.items()}
    assert set(stored["CPU"]) == set(stored["STORAGE"]) <= set(stored["GPU"])
    index.hear(found[7])
    assert [index.prefix(medium, tokens) for medium in ("GPU", "CPU", "STORAGE")] == [0] * 3

    # Pages of an earlier process are told of when a request begins with them.
    connector = parts.cache(tmp_path / "ssd2")
    parts.run(tmp_path, model, [first, DRAIN], connector, llm={"kv_events": True})
    steps = [EVENTS, first, EVENTS]
    found = parts.run(tmp_path, model, steps, connector, llm={"kv_events": True}).answers[1:]
    assert parts.cached(found[1]) == [(len(tokens) - 1) // BLOCK * BLOCK]
    index = Index()
    index.hear(found[2])
    assert index.prefix("STORAGE", tokens) == index.prefix("CPU", tokens) == whole


def test_blocks_of_each_group_are_told_with_its_kind(tmp_path: Path) -> None:
    """A block's hash, tokens and parent are those that vLLM tells of full attention, which keeps all of them: a hash
    names the same tokens in every group."""
    steps = [EVENTS, ask(parts.LONG), DRAIN, ask(parts.OTHER), EVENTS]
    model = parts.made(tmp_path, "windows")
    found = parts.run(tmp_path, model, steps, parts.cache(tmp_path / "ssd"), llm={"kv_events": True}).answers[1:]
    index = Index()
    index.hear([[event for event in batch if event["type"] != "BlockRemoved"] for batch in found[4]])
    about = {
        event.get("group_idx", 0): (event.get("kv_cache_spec_kind"), event.get("kv_cache_spec_sliding_window"))
        for batch in found[4]
        for event in batch
        if event["type"] == "BlockStored" and event["medium"] == "CPU"
    }
    assert set(about) == {group for medium, group in index.blocks if medium == "GPU"}
    assert set(about.values()) == {("full_attention", None), ("sliding_window", 256)}
    [full] = [group for group, (kind, _) in about.items() if kind == "full_attention"]
    for group in about:
        ours = index.blocks["CPU", group]
        assert ours
        assert ours == {one: index.blocks["GPU", full][one] for one in ours}


def test_without_events_nothing_is_gathered(model: Path, tmp_path: Path) -> None:
    steps = [EVENTS, ask(parts.LONG), DRAIN, EVENTS]
    found = parts.run(tmp_path, model, steps, parts.cache(tmp_path / "ssd")).answers[1:]
    assert found[3] == []


def test_dynamos_index_finds_what_each_tier_has(model: Path, tmp_path: Path) -> None:
    """Its standalone indexer reads what vLLM publishes over ZeroMQ, and computes names of blocks itself, by tokens."""
    if DYNAMO is None:
        pytest.skip("GDSCACHE_DYNAMO_PYTHON names no Python that has ai-dynamo-runtime")
    events, port = free_port(), free_port()
    worker = ["--workers", f"1=tcp://127.0.0.1:{events}", "--model-name", "tiny"]
    arguments = ["--block-size", str(BLOCK), "--port", str(port), *worker]
    with (tmp_path / "index").open("w") as log:
        index = subprocess.Popen([DYNAMO, "-m", "dynamo.indexer", *arguments], stdout=log, stderr=subprocess.STDOUT)
    try:
        # Fewer blocks than the prompts have, so that vLLM itself loses the end of the first one.
        llm = {
            "kv_events": True,
            "publisher": {"publisher": "zmq", "endpoint": f"tcp://*:{events}"},
            "num_gpu_blocks_override": 70,
        }
        connector = parts.cache(tmp_path / "ssd")
        steps = [
            ("sleep", {"seconds": 6.0}),  # until the index has connected
            *(ask(parts.LONG), DRAIN, ask(parts.OTHER), DRAIN, ask(parts.EXACT)),
            ("sleep", {"seconds": 2.0}),
        ]
        parts.run(tmp_path, model, steps, connector, llm=llm)
        question = json.dumps({"token_ids": tokens_of(parts.LONG), "model_name": "tiny"}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/query", question, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = json.load(answer)["instances"].get("1", {"gpu": 0, "cpu": 0, "disk": 0})
    finally:
        index.terminate()
        index.wait(30)
    whole = len(tokens_of(parts.LONG)) // BLOCK * BLOCK
    assert found["gpu"] < found["cpu"] == found["disk"] == whole, (found, (tmp_path / "index").read_text())
