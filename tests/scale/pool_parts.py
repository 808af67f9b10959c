"""A real pool on loopback: `mooncake_master`, owners and engines, each a process that a test may kill.

They run in a network namespace of their own where that can be had, since what they open listens everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import make_config, until

HERE = Path(__file__).parent
PYTHON = os.environ.get("GDSCACHE_MOONCAKE_PYTHON", "")
MODEL = {  # 128 KiB a page
    "name": "shared",
    "layers": 4,
    "kv_heads": 8,
    "head_dim": 64,
    "dtype": "bfloat16",
    "page_tokens": 16,
}
EXTENT = 128 << 10
PAGES = 16
ENDS_S = 30.0  # seconds within which nothing may hang: a call to a dead master takes 4.3
LEAVES_S = 25.0  # a dead owner's memory is found out after 10


def needs_mooncake() -> None:
    """Skip where there is no environment with the store in it."""
    if not PYTHON:
        pytest.skip("no environment with Mooncake: GDSCACHE_MOONCAKE_PYTHON, make scale")


@functools.cache
def fence() -> list[str]:
    """What a command is run with, so that it is alone on its loopback; nothing where that cannot be had."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None or shutil.which("ip") is None:
        return []
    keeper = subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "ip link set lo up && echo up && exec sleep 3600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if keeper.stdout.readline() != "up\n":
        keeper.kill()
        keeper.wait()
        return []
    _keepers.append(keeper)
    return ["nsenter", "-t", str(keeper.pid), "-n"]


_keepers: list[subprocess.Popen[str]] = []


def end_fence() -> None:
    fence.cache_clear()
    for keeper in _keepers:
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()
    _keepers.clear()


def _free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


class Process:
    def __init__(self, command: list[str], log: Path, **pipes: Any) -> None:
        self.log = log
        with log.open("ab") as out:
            options: dict[str, Any] = {"stdout": out} | pipes
            environment = {
                **os.environ,
                "PYTHONPATH": str(HERE.parents[1]),
                "GLOG_minloglevel": "2",
                "OMP_NUM_THREADS": "1",
            }
            self.process = subprocess.Popen([*fence(), *command], stderr=out, env=environment, **options)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Engine(Process):
    def __init__(self, log: Path, config: dict[str, Any], blocks: int = 256) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        super().__init__([PYTHON, str(HERE / "pool_child.py")], log, **pipes)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.call("open", config=config, blocks=blocks)

    def _read(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self.process.stdout:
                self._answers.put(line)
        self._answers.put("")

    def begin(self, name: str, **arguments: Any) -> None:
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()

    def end(self, seconds: float = ENDS_S) -> Any:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"no answer within {seconds:g} s; {self._told()}") from None
        assert line, f"the process has ended; {self._told()}"
        return json.loads(line)

    def call(self, name: str, **arguments: Any) -> Any:
        self.begin(name, **arguments)
        return self.end()

    def is_state(self, state: str, seconds: float = ENDS_S) -> None:
        until(lambda: bool(self.call("state")["state"] == state), f"the pool is {state}", seconds)

    def _told(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class RealPool:
    """A master, owners and engines; all end with the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port, self.metrics = _free_port(), _free_port()
        self.master = self.new_master()
        self.processes: list[Process] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def new_master(self, *options: str) -> Process:
        binary = next(Path(PYTHON).parents[1].glob("lib/python*/site-packages/mooncake/mooncake_master"))
        command = [str(binary), "-rpc_address=127.0.0.1", f"-rpc_port={self.port}", "-metrics_host=127.0.0.1"]
        self.master = Process([*command, f"-metrics_port={self.metrics}", *options], self.path / "master.log")
        probe = f"import socket; socket.create_connection(('127.0.0.1', {self.port}), 1).close()"
        until(lambda: subprocess.run([*fence(), PYTHON, "-c", probe], capture_output=True).returncode == 0, "a master")
        return self.master

    def new_owner(self, mib: int = 256) -> Process:
        log = self.path / f"owner{len(self.processes)}.log"
        owner = Process([PYTHON, str(HERE / "pool_owner.py"), self.address, str(mib << 20)], log)
        self.processes.append(owner)
        until(lambda: "owner 0" in log.read_text(errors="replace"), "an owner")
        return owner

    def new_engine(
        self, *, cpu: int = 160, pool: bool = True, large: bool = False, store: str = "write_through", **options: Any
    ) -> Engine:
        """`pool`: with the shared tier. `large`: pages of 1 MiB. `store`: store.write_policy."""
        entry = {
            "tier": "gdscache.mooncake.tier:MooncakeTier",
            "capacity": 512 * (8 if large else 1) * EXTENT,
            "options": {"master": self.address} | options,
        }
        config = make_config(
            model=MODEL | {"layers": 32} if large else MODEL,
            cpu=cpu,
            ssd=None,
            bounce=16,
            queue=256,
            store={"write_policy": store},
            tiers=[entry] if pool else [],
        )
        engine = Engine(self.path / f"engine{len(self.processes)}.log", config)
        self.processes.append(engine)
        return engine

    def close(self) -> None:
        for process in [*self.processes, self.master]:
            process.kill()


@contextlib.contextmanager
def real_pool(path: Path) -> Iterator[RealPool]:
    needs_mooncake()
    pool = RealPool(path)
    try:
        yield pool
    finally:
        pool.close()


def eventually(what: str, condition: Any, seconds: float = LEAVES_S) -> None:
    """Like `until`, for what costs a call to a process."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)
