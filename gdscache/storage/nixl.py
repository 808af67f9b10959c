"""NIXL: its POSIX plugin moves host memory with Linux AIO, its GDS_MT plugin moves GPU memory with cuFile.

One transfer holds one piece, because NIXL gives one status a transfer: so a failure costs its own request only, and a
transfer that has ended touches no other's memory. NIXL moves bytes only while it is polled, and its agents are not
thread-safe, so one thread owns the agent and does all of it. The plugin `GDS` is not used: it calls failed I/O done.

NIXL logs to the standard output; importing it here sets its logger to warnings, unless NIXL_LOG_LEVEL is set.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gdscache.errors import (
    DeadlineError,
    EngineClosedError,
    InvalidValueError,
    IOFailedError,
    TransportUnavailableError,
)
from gdscache.storage.base import Op, Submission, Switch, check_memory, failed, refused
from gdscache.storage.files import DirectFiles
from gdscache.storage.workers import MAX_RUN, IOPiece, IORun, Result, RunTransport

if TYPE_CHECKING:
    import torch

OLDEST = (1, 5, 1)  # older versions call short and failed I/O done
PROC_MODULES = "/proc/modules"
IN_FLIGHT_PER_THREAD = 16
MAX_IN_FLIGHT = 1024  # NIXL's largest kernel queue: with more, an error may reach the wrong transfer
CALL_S = 60.0
HANG_S = 30.0

_EVERYTHING = 1 << 62
_PAUSE_S, _LONG_PAUSE_S, _PAUSES = 50e-6, 1e-3, 100
_T = TypeVar("_T")
_log = logging.getLogger("gdscache.storage")


@dataclasses.dataclass(slots=True)
class _Transfer:
    op: Op
    file: int
    submission: Submission
    piece: IOPiece
    handle: Any = None


class NixlTransport(DirectFiles, RunTransport):
    """Files are opened as `DirectFiles` does; NIXL moves the bytes, from one thread that starts and polls transfers.

    At most `threads` times 16 pieces (1,024 in all) and `threads` times 4 MiB are in flight. With `gds` CUDA memory is
    moved too, where a `register`ed buffer holds it whole, by `threads` threads of the plugin. A file without O_DIRECT
    is read and written inside NIXL's submit call, so one piece at a time.

    `close` waits as long as transfers end. When none has ended for `HANG_S` seconds it returns: the thread stays, with
    what hangs, its memory and the files, and gives all of it back if the last transfer ever ends.

    Raises `TransportUnavailableError` when NIXL is missing, too old, or cannot make what is asked for.
    """

    name = "nixl"

    def __init__(self, threads: int, direct_io: Switch = "auto", gds: bool = False) -> None:
        if threads < 1:
            raise InvalidValueError(f"a transport with {threads} threads moves nothing", "set threads to 1 or more")
        if gds and not os.path.exists(PROC_MODULES):
            raise TransportUnavailableError(
                f"cuFile never answers on a kernel without {PROC_MODULES}", "set gds to auto or off"
            )
        self._module, self._version = _import_nixl()
        errors = [value for value in vars(self._module._bindings).values() if _is_error(value)]
        self._nixl_errors: tuple[type[Exception], ...] = (
            *errors,
            IOFailedError,
            RuntimeError,
            ValueError,
            MemoryError,
            OSError,
        )
        self._call_errors: tuple[type[Exception], ...] = (*self._nixl_errors, ImportError)
        self.memory_kinds = frozenset({"host", "cuda"} if gds else {"host"})
        self._plugins = ["POSIX", "GDS_MT"] if gds else ["POSIX"]
        self._depth_threads, self._gds = threads, gds
        self._most = min(threads * IN_FLIGHT_PER_THREAD, MAX_IN_FLIGHT)
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        # The thread's own, as is all that NIXL made.
        self._agent: Any = None
        self._waiting: deque[_Transfer] = deque()
        self._live: list[_Transfer] = []
        self._live_bytes = 0
        self._registered: dict[tuple[object, str], Any] = {}
        self._regions: dict[tuple[int, int], int] = {}
        self._progress = time.monotonic()
        super().__init__(1, direct_io)
        try:
            self._call("make an agent", self._make_agent)
        except self._call_errors as error:
            self.close()
            raise TransportUnavailableError(
                f"NIXL cannot make an agent with {' and '.join(self._plugins)}: {_said(error)}",
                "set transport to posix, or gds to off" if gds else "set transport to posix",
            ) from error

    def open(self, path: Path) -> int:
        file = super().open(path)
        try:
            self._call(f"register {path}", lambda: self._register(file, [(0, _EVERYTHING, file, "")], "FILE"))
        except self._nixl_errors as error:
            raise failed("open", str(path), 0, RuntimeError(_said(error))) from error
        return file

    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Register CUDA memory with cuFile; nothing for the host. Raises `TransportUnavailableError`, and
        `IOFailedError` (EINVAL) for memory that overlaps what is registered."""
        if isinstance(memory, memoryview):
            return
        check_memory(Op.READ, 0, memory, self.memory_kinds)
        place = _place(memory)
        try:
            self._call("register memory", lambda: self._register_region(*place))
        except IOFailedError:
            raise
        except self._nixl_errors as error:
            raise TransportUnavailableError(
                f"NIXL cannot register {place[1]} bytes of GPU memory: {_said(error)}",
                "make the staging ring smaller (BAR1 limits it), or set gds to off",
            ) from error

    def deregister(self, memory: memoryview | torch.Tensor) -> None:
        if not isinstance(memory, memoryview):
            place = _place(memory)
            self._call("deregister memory", lambda: self._deregister_region(*place))

    def describe(self) -> dict[str, object]:
        own = {"threads": self._depth_threads, "in_flight": self._most, "gds": self._gds, "nixl": self._version}
        return {**super().describe(), **own}

    def close(self) -> None:
        with self._work:
            first, self._closing = not self._closing, True
            self._work.notify_all()
        thread, begun = self._threads[0], time.monotonic()
        while thread.is_alive() and time.monotonic() - max(begun, self._progress) < HANG_S:
            thread.join(min(HANG_S / 10, 1.0))
        if thread.is_alive() and first:
            _log.error(
                "%d transfers of NIXL have not ended for %g s: they keep their memory and files, and a thread",
                len(self._live) + len(self._waiting),
                HANG_S,
            )

    # What follows runs in the thread.

    def _serve(self) -> None:
        finished = False
        try:
            pauses = 0
            while self._take(_PAUSE_S if pauses < _PAUSES else _LONG_PAUSE_S):
                ended = self._start() + self._poll()
                pauses = 0 if ended else pauses + 1
                self._report(ended)
            finished = True
        finally:
            if not finished:
                self._abandon()
            if not self._live:
                self._give_back()

    def _take(self, pause: float) -> bool:
        """Wait for something to do, at most `pause` seconds where transfers are in flight, and run the commands that
        others wait for. False when there is nothing left to do for ever."""
        with self._work:
            while not self._commands and not (self._has_room() and (self._waiting or self._reads or self._writes)):
                if self._live:
                    self._work.wait(pause)
                    break
                if self._closing:
                    return False
                self._work.wait()
            commands = list(self._commands)
            self._commands.clear()
        for action, future in commands:
            try:
                future.set_result(action())
            except self._call_errors as error:
                future.set_exception(error)
        return True

    def _has_room(self) -> bool:
        return len(self._live) < self._most and self._live_bytes < self._depth_threads * MAX_RUN

    def _start(self) -> list[tuple[Submission, Result]]:
        """Begin transfers while there is room; those that ended, or could not begin."""
        ended: list[tuple[Submission, Result]] = []
        while self._has_room():
            if not self._waiting and (run := self._next_run()) is not None:
                self._waiting.extend(_Transfer(run.op, run.file, run.submission, piece) for piece in run.pieces)
            if not self._waiting:
                break
            transfer = self._waiting.popleft()
            try:
                done = self._begin(transfer)
            except self._nixl_errors as error:
                ended.append(self._end(transfer, error))
                continue
            if done:
                ended.append(self._end(transfer, None))
            else:
                self._live.append(transfer)
                self._live_bytes += transfer.piece.nbytes
        return ended

    def _next_run(self) -> IORun | None:
        with self._work:
            if not self._reads and not self._writes:
                return None
        return self._next()  # at once: nobody else takes runs

    def _begin(self, transfer: _Transfer) -> bool:
        """Hand the transfer to NIXL; whether it ended at once."""
        piece, agent = transfer.piece, self._agent
        address, nbytes, device = _place(piece.memory)
        host = isinstance(piece.memory, memoryview)
        if not host and not self._holds(address, nbytes, device):
            raise refused(f"{nbytes} bytes of GPU memory at {address:#x} are not registered", "call register() first")
        kind, plugin = ("DRAM", "POSIX") if host else ("VRAM", "GDS_MT")
        memory = agent.get_xfer_descs([(address, nbytes, device)], kind)
        part = agent.get_xfer_descs([(piece.offset, nbytes, transfer.file)], "FILE")
        operation = "READ" if transfer.op is Op.READ else "WRITE"
        transfer.handle = agent.initialize_xfer(operation, memory, part, agent.name, backends=[plugin])
        return self._is_done(agent.transfer(transfer.handle))

    def _poll(self) -> list[tuple[Submission, Result]]:
        """Drive the transfers in flight; those that ended."""
        ended: list[tuple[Submission, Result]] = []
        live: list[_Transfer] = []
        for transfer in self._live:
            error: Exception | None = None
            try:
                done = self._is_done(self._agent.check_xfer_state(transfer.handle))
            except self._nixl_errors as caught:
                done, error = True, caught
            if done:
                self._live_bytes -= transfer.piece.nbytes
                ended.append(self._end(transfer, error))
            else:
                live.append(transfer)
        self._live = live
        return ended

    @staticmethod
    def _is_done(state: str) -> bool:
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"NIXL answers {state}")
        return state == "DONE"

    def _end(self, transfer: _Transfer, error: Exception | None) -> tuple[Submission, Result]:
        """Release what has ended, and only that: a release in flight wedges NIXL. NIXL gives no byte count, so a read
        is held against the size of its file."""
        self._progress = time.monotonic()
        piece = transfer.piece
        if transfer.handle is not None:
            try:
                transfer.handle.release()
            except self._nixl_errors as refusal:
                _log.warning("NIXL does not release a transfer that ended: %s", _said(refusal))
        moved, answer = piece.nbytes, None
        if transfer.op is Op.READ:
            moved = min(max(os.fstat(transfer.file).st_size - piece.offset, 0), piece.nbytes)
        if isinstance(error, IOFailedError):
            moved, answer = 0, error
        elif error is not None and moved == piece.nbytes:
            cause = RuntimeError(_said(error))
            moved, answer = 0, failed(transfer.op.value, self._path(transfer.file), piece.offset, cause)
        return transfer.submission, (piece.index, moved, answer)

    @staticmethod
    def _report(ended: list[tuple[Submission, Result]]) -> None:
        by_batch: dict[int, tuple[Submission, list[Result]]] = {}
        for submission, result in ended:
            by_batch.setdefault(id(submission), (submission, []))[1].append(result)
        for submission, results in by_batch.values():
            submission.finish(results)

    def _make_agent(self) -> None:
        config = self._module.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = self._module.nixl_agent("gdscache", config)
        depth = str(max(self._most, 64))
        agent.create_backend("POSIX", {"use_aio": "true", "ios_pool_size": depth, "kernel_queue_size": depth})
        if self._gds:
            pathfinder = importlib.import_module("cuda.pathfinder")
            for library in ("cudart", "cufile"):  # the plugin finds both by name once they are loaded
                pathfinder.load_nvidia_dynamic_lib(library)
            agent.create_backend("GDS_MT", {"thread_count": str(self._depth_threads)})
        self._agent = agent
        # The POSIX plugin takes any host memory, but NIXL looks every address up.
        self._register("host", [(0, _EVERYTHING, 0, "")], "DRAM")

    def _register(self, key: object, entries: list[tuple[int, int, int, str]], kind: str) -> None:
        # One by one: with several plugins NIXL calls a registration done when one of them has done it.
        for plugin in {"DRAM": ["POSIX"], "VRAM": ["GDS_MT"], "FILE": self._plugins}[kind]:
            self._registered[key, plugin] = self._agent.register_memory(entries, kind, backends=[plugin])

    def _register_region(self, address: int, nbytes: int, device: int) -> None:
        for (index, start), end in self._regions.items():
            if index == device and address < end and start < address + nbytes:
                raise refused(f"GPU memory at {address:#x} is registered already", "register a buffer once")
        self._register((device, address), [(address, nbytes, device, "")], "VRAM")
        self._regions[device, address] = address + nbytes

    def _deregister_region(self, address: int, nbytes: int, device: int) -> None:
        if self._regions.get((device, address)) != address + nbytes:
            raise refused(f"{nbytes} bytes of GPU memory at {address:#x} are not registered", "register them first")
        del self._regions[device, address]
        descriptors = self._registered.pop(((device, address), "GDS_MT"))
        self._agent.deregister_memory(descriptors, backends=["GDS_MT"])

    def _holds(self, address: int, nbytes: int, device: int) -> bool:
        return any(
            index == device and start <= address and address + nbytes <= end
            for (index, start), end in self._regions.items()
        )

    def _give_back(self) -> None:
        """Take all registrations back, then close the files: a number used again must not point at another file."""
        for (_, plugin), descriptors in reversed(list(self._registered.items())):
            try:
                self._agent.deregister_memory(descriptors, backends=[plugin])
            except self._nixl_errors as error:
                _log.warning("NIXL does not deregister: %s", _said(error))
        self._registered.clear()
        self._agent = None
        self.release()

    def _abandon(self) -> None:
        """An unexpected error ends the thread: what NIXL holds is never reported; all that waits has failed."""
        cause = IOFailedError("the thread of the nixl transport stopped on an unexpected error", "see the traceback")
        with self._work:
            self._closing = True
        ended: list[tuple[Submission, Result]] = [(t.submission, (t.piece.index, 0, cause)) for t in self._waiting]
        while (run := self._next_run()) is not None:
            ended += [(run.submission, (piece.index, 0, cause)) for piece in run.pieces]
        self._waiting.clear()
        self._report(ended)

    # What follows runs in callers.

    def _call(self, what: str, action: Callable[[], _T]) -> _T:
        """Run `action` in the thread and answer with what it returns or raises."""
        future: Future[_T] = Future()
        with self._work:
            if self._closing:
                raise EngineClosedError(f"the {self.name} transport was closed", f"{what} before close")
            self._commands.append((action, future))
            self._work.notify()
        try:
            return future.result(CALL_S)
        except TimeoutError:
            raise DeadlineError(
                f"NIXL did not {what} within {CALL_S:g} s", "the device or cuFile hangs: set transport to posix"
            ) from None


def _place(memory: memoryview | torch.Tensor) -> tuple[int, int, int]:
    """(address, bytes, device index)."""
    if isinstance(memory, memoryview):
        return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0]), memory.nbytes, 0
    return memory.data_ptr(), memory.numel(), memory.device.index or 0


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _import_nixl() -> tuple[Any, str]:
    """NIXL, and its version."""
    hint = "install gdscache[cuda12] or gdscache[cuda13], or set transport to posix"
    try:
        module: Any = importlib.import_module("nixl")
        distribution = module.nixl_agent.__module__.partition(".")[0].replace("_", "-")
        version = importlib.metadata.version(distribution)
    except (ImportError, OSError, AttributeError) as error:
        raise TransportUnavailableError(f"nixl cannot be imported: {error}", hint) from error
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise TransportUnavailableError(f"nixl {version} calls failed I/O done", f"install nixl {oldest} or newer")
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return module, version
