"""A shared pool on one machine: a master, an owner of memory, two engines that share prefixes, and a router.

    python examples/shared_pool/run.py

Needs `gdscache[mooncake,events]` (without CUDA: mooncake-transfer-engine-non-cuda, and libibverbs1). Its processes
listen on every interface without a password; docs/scale_out.md says how to fence them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    from subscriber import ZmqSubscriber
    from view import CacheView
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: in a checkout, pip install '.[mooncake,events]'") from None

from gdscache.pages.keys import PageNames, as_tokens

HERE = Path(__file__).parent
POOL_BYTES = 256 << 20


class Engine:
    """An engine's process, and the router's view of its pages by tier, from its events."""

    def __init__(self, name: str, directory: Path, master: str, ends: contextlib.ExitStack) -> None:
        self.name = name
        publish, replay = free_port(), free_port()
        text = (HERE / "engine.yaml").read_text()
        for word, value in (("MASTER", master), ("PUBLISH", str(publish)), ("REPLAY", str(replay))):
            text = text.replace(word, value)
        config = directory / f"{name}.yaml"
        config.write_text(text)
        self.process = begin(ends, directory / f"{name}.log", sys.executable, str(HERE / "engine.py"), str(config))
        told = self.answer()
        self.namespace, self.names = bytes.fromhex(told["namespace"]), PageNames(told["page_tokens"])
        self.events = ZmqSubscriber(f"tcp://127.0.0.1:{publish}", f"tcp://127.0.0.1:{replay}")
        ends.callback(self.events.close)
        self.view = CacheView()
        self.view.reset(following=0)

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} has ended: see its log"
        found: dict[str, Any] = json.loads(line)
        return found

    def hear(self) -> None:
        """Bring the view up to date. Missed batches (a late subscriber misses the first) are asked for."""
        heard = list(self.events.receive(0.2))
        for batch in heard:
            if not self.view.apply(batch) and self.view.lacking is not None:
                for again in self.events.replay(self.view.lacking, 1.0):
                    self.view.apply(again)

    def has(self, prompt: list[int]) -> int:
        """The number of a prompt's first pages that this engine has itself; pages of the pool are every engine's."""
        keys = [page.key for page in self.names.of(self.namespace, as_tokens(prompt))]
        return self.view.prefix(keys, ("gpu", "cpu", "ssd"))


def begin(ends: contextlib.ExitStack, log: Path, *command: str) -> subprocess.Popen[str]:
    """Start a process that ends with this one; its log goes to a file."""
    environment = {**os.environ, "GLOG_minloglevel": "2"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    out = ends.enter_context(log.open("w"))
    process = subprocess.Popen(command, stderr=out, text=True, env=environment, **pipes)  # type: ignore[call-overload]
    ends.callback(process.wait)
    ends.callback(process.kill)
    return process  # type: ignore[no-any-return]


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


def start_pool(ends: contextlib.ExitStack, directory: Path) -> str:
    """Start a master and an owner of memory. Returns the master's address."""
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("mooncake is not installed: in a checkout, pip install '.[mooncake]'")
    port = free_port()
    binary = str(Path(next(iter(found.submodule_search_locations))) / "mooncake_master")
    options = [f"-rpc_port={port}", "-rpc_address=127.0.0.1", "-metrics_host=127.0.0.1", f"-metrics_port={free_port()}"]
    master = begin(ends, directory / "master.log", binary, *options)
    for _ in range(100):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        assert master.poll() is None, "the master has ended: see its log"
        time.sleep(0.1)
    address = f"127.0.0.1:{port}"
    owner = begin(ends, directory / "owner.log", sys.executable, str(HERE / "owner.py"), address, str(POOL_BYTES))
    assert owner.stdout is not None
    print(owner.stdout.readline().strip())
    return address


def main() -> None:
    rng = random.Random(1)
    prompts = {name: [rng.randrange(50_000) for _ in range(256)] for name in "AB"}  # 16 pages each
    with contextlib.ExitStack() as ends:
        directory = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        master = start_pool(ends, directory)
        engines = [Engine(name, directory, master, ends) for name in ("one", "two")]
        one, two = engines
        for engine, name in ((one, "A"), (two, "A"), (one, "B")):
            told = engine.ask(prompts[name])
            source = ", ".join(f"{n} from {tier}" for tier, n in told["from"].items()) or "nothing cached"
            print(f"prompt {name} to engine {engine.name}: {told['computed']} pages computed, {source}")
            assert told["right"], "bytes differ from the computed ones"
        for name, prompt in prompts.items():
            for engine in engines:
                engine.hear()
            has = {engine.name: engine.has(prompt) for engine in engines}
            best = max(engines, key=lambda engine: engine.has(prompt))
            print(f"router: of prompt {name}, pages by engine {has}: it goes to engine {best.name}")
        for engine in engines:
            assert engine.process.stdin is not None
            engine.process.stdin.close()
            engine.process.wait(30)


if __name__ == "__main__":
    main()
