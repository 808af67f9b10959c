"""The engine's metrics at the endpoint of vLLM's server, which is another process than the engine's, or two."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gdscache.metrics import FAMILIES
from tests.engines import vllm_parts as parts
from tests.support.prometheus import fetched, free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
START_S = 150.0
LEARNED = {"gdscache_load_bytes_per_second", "gdscache_load_latency_seconds", "gdscache_prefill_tokens_per_second"}
ABSENT = {  # of this engine: it has no such section
    "gdscache_endurance_bytes", "gdscache_endurance_left_bytes", "gdscache_event_batches",
    "gdscache_event_dropped_pages", "gdscache_event_waiting_pages", "gdscache_copies",
}  # fmt: skip
PAGE = 128 << 10  # bytes: 32 tokens of 4 layers of two heads of 128, K and V
PROMPT = [3 + number * 7 % 400 for number in range(700)]


class Server:
    """A server of vLLM's, as `vllm serve` starts it."""

    def __init__(self, model: Path, port: int) -> None:
        self._model, self._port = model, port

    def ask(self, tokens: list[int]) -> int:
        """Complete a prompt; how many of its tokens were cached."""
        asked = {"model": str(self._model), "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            said: dict[str, Any] = json.loads(answer.read())
        return int((said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def metrics(self) -> dict[str, float]:
        """Our samples, by name and labels but those that are vLLM's."""
        found = {}
        for line in fetched(f"http://127.0.0.1:{self._port}/metrics").splitlines():
            if line.startswith("vllm:gdscache_"):
                series, _, value = line.rpartition(" ")
                series = re.sub(r'((engine|model_name|pid)="[^"]*"|group=""),?', "", series)
                found[series.replace(",}", "}").replace("{}", "")] = float(value)
        return found


@contextlib.contextmanager
def serving(folder: Path, model: Path, servers: int) -> Iterator[Server]:
    """A server with so many processes that answer."""
    port, log = free_port(), folder / f"serve{servers}.log"
    connector = parts.cache(folder / "ssd")
    transfer = {
        "kv_connector": "GdsCacheConnector", "kv_connector_module_path": "gdscache.integrations.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": connector,
    }  # fmt: skip
    command = [
        str(parts.PYTHON), str(Path(__file__).with_name("vllm_serve.py")), "serve", str(model), "--port", str(port),
        "--api-server-count", str(servers), "--skip-tokenizer-init", "--dtype", "bfloat16", "--max-model-len", "2048",
        "--max-num-batched-tokens", "512", "--max-num-seqs", "8", "--block-size", "32", "--enforce-eager",
        "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    settings = {**os.environ, **parts.SETTINGS, "PYTHONPATH": parts.path(), "PYTHONHASHSEED": "0"}
    del settings["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with log.open("w") as out:
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=settings,
            cwd=folder,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + START_S
        while True:
            assert child.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < end, f"vLLM does not start\n{log.read_text()[-6000:]}"
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                fetched(f"http://127.0.0.1:{port}/health")
                break
            time.sleep(0.5)
        yield Server(model, port)
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def names(found: dict[str, float]) -> set[str]:
    """The metrics of which there is a sample."""
    return {re.sub(r"(_total|_bucket|_count|_sum|_created)?(\{.*)?$", "", series) for series in found}


def test_every_metric_is_at_the_endpoint_from_the_start_and_a_bad_page_is_seen(model: Path, tmp_path: Path) -> None:
    """With one process that answers, then with two, whose registries are files that they share."""
    told = {f"vllm:{family.name}" for family in FAMILIES if family.name not in LEARNED | ABSENT}
    counted = {f"vllm:{family.name}" for family in FAMILIES if family.kind != "gauge"} & told
    bad, unread = ('vllm:gdscache_miss_pages_total{cause="checksum"}', 'vllm:gdscache_hit_tokens_total{tier="ssd"}')
    with serving(tmp_path, model, 1) as server:
        before = server.metrics()
        assert counted <= names(before), "a series that is born with its first event"
        assert before[bad] == before[unread] == 0
        server.ask(PROMPT)
        time.sleep(1.5)
        server.ask(PROMPT[:40])
        after = server.metrics()
        assert told <= names(after)
        assert after['vllm:gdscache_stored_pages_total{tier="ssd"}'] == 21
        assert after['vllm:gdscache_moved_bytes_total{source="planes",target="cpu"}'] > 0
        assert after['vllm:gdscache_rank_running{rank="0"}'] == 1
        assert after['vllm:gdscache_tier_pages{tier="cpu"}'] == 21
    with (tmp_path / "ssd" / "slab-0.bin").open("r+b") as slab:  # one byte of one of 21 pages
        slab.seek(10 * PAGE + 5)
        byte = slab.read(1)[0]
        slab.seek(10 * PAGE + 5)
        slab.write(bytes([byte ^ 1]))
    with serving(tmp_path, model, 2) as server:
        before = server.metrics()
        assert counted <= names(before)
        assert before[bad] == before[unread] == 0
        server.ask(PROMPT)
        time.sleep(1.5)
        for _ in range(4):  # each of both answers one
            server.ask(PROMPT[:40])
        after = server.metrics()
        assert told <= names(after)
        assert after[bad] == 1
        assert after[unread] > 0
        assert after["vllm:gdscache_lookup_tokens_total"] >= 672
        assert after['vllm:gdscache_load_duration_seconds_count{size="16MiB",tier="ssd"}'] == 1
        assert after['vllm:gdscache_tier_slots{tier="ssd"}'] == 1024
