#!/usr/bin/env bash
# Dynamo 1.6.1: its router's `RadixTree` knows a block by the hash of the worker that stored it first. An event names
# each block by the engine's own hash and by one of its tokens, which the tree goes by. A second worker that stores the
# same tokens under hashes of its own is counted, but these hashes are not kept: each of its removals is an error
# ("Failed to find block") and its blocks are counted for ever, so the router sends requests to a worker that computes
# them anew. What it stores behind them is an error as well and is never found. Where it tells one block an event, as
# SGLang does, only the first one counts. A dump of the tree names its blocks by the first worker's hashes. Engines
# differ in their hashes with vLLM's `xxhash` and no `PYTHONHASHSEED`, which draws a seed a process, where two kinds of
# engines serve one model, and where one has keys of its own. One hash for all workers is safe; `remove_worker` mends.
#
# Seen with ai-dynamo-runtime 1.6.1, three blocks, the worker that comes second. With hashes of its own, told at once: 3
# found, and 3 when it has removed all; a fourth block raises. Told one by one: 1 found. With the hashes of the first
# worker: 3, then 0. The dump has both workers under the hashes of the first. Fails (exit 1) where that is no longer so.
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
FIRST, OWN = (101, 102, 103), (201, 202, 203)
MISSING = "Failed to apply event: Failed to find "


def tell(tree, worker, data):
    """Whether the tree takes the event: "ok", or what it raises."""
    try:
        tree.apply_event(worker, json.dumps({"event_id": next(numbers), "data": data}).encode())
    except RuntimeError as error:
        return str(error)
    return "ok"


def stored(hashes, parent=None, first=1):
    """The event that says that blocks are there, each the follower of the one before; their tokens count from first."""
    blocks = [{"block_hash": number, "tokens_hash": tokens} for tokens, number in enumerate(hashes, first)]
    return {"stored": {"parent_hash": parent, "blocks": blocks}}


def found(tree):
    return {worker: score for (worker, _), score in tree.find_matches([1, 2, 3, 4]).scores.items()}.get(2, 0)


seen = {}
for name, hashes, at_once in (
    ("its own, at once", OWN, True), ("its own, one by one", OWN, False), ("the first one's", FIRST, True),
):
    tree = RadixTree()
    assert tell(tree, 1, stored(FIRST)) == "ok"
    if at_once:
        answers = [tell(tree, 2, stored(hashes))]
    else:
        parents = (None, *hashes)
        answers = [tell(tree, 2, stored([number], parents[at], at + 1)) for at, number in enumerate(hashes)]
    count = found(tree)
    dump = [json.loads(event) for event in tree.dump_tree_as_events()]
    named = {event["worker_id"]: [block["block_hash"] for block in event["event"]["data"]["stored"]["blocks"]]
             for event in dump}
    answers.append(tell(tree, 2, stored([hashes[-1] + 1], hashes[-1], 4)))
    answers += [tell(tree, 2, {"removed": {"block_hashes": [number]}}) for number in (hashes[-1] + 1, *hashes[::-1])]
    seen[name] = count, found(tree), [answer.removeprefix(MISSING) for answer in answers], named[2]
    print(f"{name:20} {count} found, {seen[name][1]} when all are removed; in the dump {named[2]}; {seen[name][2]}")
sys.exit(seen != {
    "its own, at once": (3, 3, ["ok", "parent block", *["block"] * 4], [*FIRST]),
    "its own, one by one": (1, 1, ["ok", *["parent block"] * 3, *["block"] * 4], [*FIRST[:1]]),
    "the first one's": (3, 0, ["ok"] * 6, [*FIRST]),
})
PY
