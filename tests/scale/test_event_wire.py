"""KV events on the wire: what a subscriber reads, what it asks for again, and what vLLM's own classes make of it."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.scale.pool_parts import HERE, PYTHON, needs_mooncake

pytestmark = pytest.mark.scale
VLLM = os.environ.get("GDSCACHE_VLLM_PYTHON", "")

ROUND = """
import sys, time
from examples.shared_pool.subscriber import ZmqSubscriber
from examples.shared_pool.view import CacheView
from gdscache.events.socket import ZmqPublisher
from gdscache.events.base import *
out, again = "ipc://%s/out" % sys.argv[1], "ipc://%s/again" % sys.argv[1]
publisher = ZmqPublisher(out, again, "kv", 6)
subscriber = ZmqSubscriber(out, again, "kv")
def batch(n):
    key = bytes([n]) * 32
    stored = BlockStored([key, bytes(32)], None, [], 16, None, "CPU", None, "LOCAL", "cpu")
    return KVEventBatch(n, 1.5 * n, [stored, BlockRemoved([bytes(32)], "STORAGE", "REMOTE", "mooncake")])
publisher.publish(batch(0))  # nobody is there yet
deadline = time.monotonic() + 20
heard, n = [], 0
while not heard:
    n += 1
    publisher.publish(batch(n))
    heard = list(subscriber.receive(0.1))
    assert time.monotonic() < deadline
assert heard == [batch(h.seq) for h in heard], heard
view = CacheView()
view.reset(0)
assert [view.apply(h) for h in heard] == [False] * len(heard) and view.lacking == 0
import threading
stop = threading.Event()
server = threading.Thread(target=lambda: [publisher.serve() or time.sleep(0.01) for _ in iter(stop.is_set, True)])
server.start()
kept = list(subscriber.replay(max(0, n - 2), 5.0))
stop.set(); server.join()
assert kept == [batch(k) for k in range(max(0, n - 2), n + 1)], kept
publisher.close(); subscriber.close()
print("ok")
"""

LARGE = """
import sys, zmq
from gdscache.events.socket import END, KEPT, ZmqPublisher
from gdscache.events.base import *
out, again = "ipc://%s/out" % sys.argv[1], "ipc://%s/again" % sys.argv[1]
publisher = ZmqPublisher(out, again, "kv")
for n in range(KEPT):
    publisher.publish(KVEventBatch(n, 0.0, [BlockRemoved([bytes(32)] * 100, "CPU", "LOCAL", "cpu")]))
reader = zmq.Context().socket(zmq.DEALER)
reader.connect(again)
reader.send_multipart((b"", bytes(8)))
assert publisher._again.poll(20_000)
publisher.serve()  # the reader takes nothing meanwhile
seqs = []
while reader.poll(20_000) and (seq := reader.recv_multipart()[2]) != END:
    seqs.append(int.from_bytes(seq, "big"))
assert seqs == [*range(KEPT)], len(seqs)
publisher.close(); reader.close(0)
print("ok")
"""

PACK = """
from gdscache.events.base import *
from gdscache.events.socket import packed
stored = BlockStored([b"a" * 32, b"b" * 32], b"c" * 32, [], 16, None, "STORAGE", None, "REMOTE", "mooncake")
removed = BlockRemoved([b"a" * 32], "CPU", "LOCAL", "cpu")
print(packed(KVEventBatch(3, 1.5, [stored, removed, AllBlocksCleared()])).hex())
"""

UNPACK = """
import sys
import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
batch = msgspec.msgpack.Decoder(type=KVEventBatch).decode(bytes.fromhex(sys.argv[1]))
stored, removed, cleared = batch.events
assert isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved) and isinstance(cleared, AllBlocksCleared)
assert stored.block_hashes == [b"a" * 32, b"b" * 32] and stored.parent_block_hash == b"c" * 32
assert (stored.medium, stored.locality, stored.ownership) == ("STORAGE", "REMOTE", "mooncake")
assert (removed.block_hashes, removed.medium, removed.ownership, batch.ts) == ([b"a" * 32], "CPU", "cpu", 1.5)
print("ok")
"""


def run(python: str, code: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", code, *arguments], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_what_is_published_is_read_and_what_was_missed_is_had_again(tmp_path: object) -> None:
    needs_mooncake()
    assert run(PYTHON, ROUND, str(tmp_path)) == "ok"


def test_a_replay_is_whole_when_its_reader_is_slow(tmp_path: object) -> None:
    needs_mooncake()
    assert run(PYTHON, LARGE, str(tmp_path)) == "ok"


def test_vllms_own_classes_read_it() -> None:
    needs_mooncake()
    if not VLLM:
        pytest.skip("no environment with vLLM: GDSCACHE_VLLM_PYTHON, make engines")
    assert run(VLLM, UNPACK, run(PYTHON, PACK)).endswith("ok")
