#!/usr/bin/env bash
# Dynamo 1.6.1: its router's `RadixTree` takes a removed block for the end of everything behind it. An event
# `BlockRemoved` names one hash; the tree drops this worker's blocks that follow it as well. When the block is stored
# again (it was broken, or one of two copies, or the first to be evicted), those behind it are still in the worker's
# cache, and no event says so a second time: the router counts the prefix up to the block alone from then on. What the
# worker says of the blocks behind is an error meanwhile: their removal, since the tree has them no longer, and a block
# that follows one of them, which is left out. Of another worker's copies nothing is lost. Who publishes events for
# Dynamo removes from the end of a prefix, or stores what follows again behind a block that came back.
#
# Seen with ai-dynamo-runtime 1.6.1, two workers that store four blocks each. One removes the second block, and stores
# it again: 1 and then 2 blocks found, in place of 4; its removal of the fourth and a fifth behind it raise. The other
# worker has 4. With the third and fourth stored again it has 4. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "pydantic==2.14.4" "uvloop==0.23.0"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "ai-dynamo-runtime==1.6.1"
cd "$folder"
DYN_LOG=error "$folder/env/bin/python" - <<'PY'
import importlib.metadata
import itertools
import json
import sys

from dynamo.llm import RadixTree

print("ai-dynamo-runtime", importlib.metadata.version("ai-dynamo-runtime"))
numbers = itertools.count(1)
tree = RadixTree()
seen = {}


def stored(first, last):
    """The event that says that blocks first to last, each the follower of the one before, are there."""
    blocks = [{"block_hash": 100 + number, "tokens_hash": number} for number in range(first, last + 1)]
    return {"stored": {"parent_hash": 99 + first if first > 1 else None, "blocks": blocks}}


def removed(number):
    return {"removed": {"block_hashes": [100 + number]}}


def tell(what, worker, event):
    try:
        tree.apply_event(worker, json.dumps({"event_id": next(numbers), "data": event}).encode())
    except RuntimeError as error:
        seen[what] = str(error)
    else:
        scores = {worker: score for (worker, _), score in tree.find_matches([1, 2, 3, 4]).scores.items()}
        seen[what] = scores.get(1), scores.get(2)
    print(f"{what:40} {seen[what]}")


tell("worker 2 stores four blocks", 2, stored(1, 4))
tell("worker 1 stores four blocks", 1, stored(1, 4))
tell("worker 1 removes the second", 1, removed(2))
tell("worker 1 stores the second again", 1, stored(2, 2))
tell("worker 1 removes the fourth", 1, removed(4))
tell("worker 1 stores a fifth", 1, stored(5, 5))
tell("worker 1 stores the last two again", 1, stored(3, 4))
sys.exit(list(seen.values()) != [
    (None, 4), (4, 4), (1, 4), (2, 4), "Failed to apply event: Failed to find block",
    "Failed to apply event: Failed to find parent block", (4, 4),
])
PY
