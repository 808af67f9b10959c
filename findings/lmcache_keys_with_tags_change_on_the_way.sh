#!/usr/bin/env bash
# LMCache 0.5.6: a key with tags is another key behind its own text. A request may carry tags
# (`"lmcache.tag.user": 3` in its JSON), which are part of the name of its pages. `CacheEngineKey.to_string` writes each
# value as text, and `from_string` reads text: a number or a truth value does not come back. `to_dict`, `from_dict` do
# the same. Keys go as text from process to process (peer to peer, prefill to decode). There the key that was read is
# not the one that a request asks for, so its pages are missed, each time and without an error. The order counts, too:
# two requests with the same tags in another order have other keys and other files, though JSON gives its members no
# order. Tags that are text, in one order, are found.
#
# Seen with lmcache 0.5.6 and torch 2.13.0 on a CPU, keys behind `to_string` and `from_string`: equal without tags and
# with "3", not with 3 and true; equal keys of two orders of two tags: no. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6" "msgspec==0.22.0" \
    "prometheus_client==0.26.0" "pyyaml" "psutil==7.2.2" "py-cpuinfo==9.0.0" "requests==2.34.2" "aiohttp==3.14.5" \
    "cachetools==8.0.2" "pyzmq==27.3.0"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "lmcache==0.5.6"
cd "$folder"
LMCACHE_TRACK_USAGE=false LMCACHE_LOG_LEVEL=ERROR "$folder/env/bin/python" - <<'PY'
import importlib.metadata
import json
import sys

import torch
from lmcache.utils import CacheEngineKey

print("lmcache", importlib.metadata.version("lmcache"), "torch", torch.__version__)


def key(request):
    return CacheEngineKey("model", 1, 0, 0x5EED, torch.bfloat16, json.loads(request))


seen = {}
for request in ("{}", '{"lmcache.tag.user": "3"}', '{"lmcache.tag.user": 3}', '{"lmcache.tag.trial": true}'):
    asked = key(request)
    text = asked.to_string()
    seen[request] = CacheEngineKey.from_string(text) == asked, CacheEngineKey.from_dict(asked.to_dict()) == asked
    print(f"{request:28} {text:38} equal behind its text: {seen[request][0]}, behind its dict: {seen[request][1]}")
one, other = key('{"lmcache.tag.a": "1", "lmcache.tag.b": "2"}'), key('{"lmcache.tag.b": "2", "lmcache.tag.a": "1"}')
seen["orders"] = one == other, one.to_string() == other.to_string()
print("the same two tags in two orders:", one.to_string(), other.to_string(), "equal:", one == other)
found, missed = (True, True), (False, False)
sys.exit(list(seen.values()) != [found, found, missed, missed, missed])
PY
