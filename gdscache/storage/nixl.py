"""NIXL: its POSIX plugin moves host memory with Linux AIO, its GDS_MT plugin moves GPU memory with cuFile.

One transfer holds one call's bytes, because NIXL gives one status a transfer: so a failure costs its own call only, and
a transfer that has ended touches no other's memory. NIXL moves bytes only while it is polled, and its agents are not
thread-safe, so each caller polls its own transfer under a lock. The plugin `GDS` is not used: it reports failed I/O as
done.

NIXL logs to the standard output; importing it here sets its logger to warnings, unless NIXL_LOG_LEVEL is set.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gdscache.errors import IOFailedError, TransportUnavailableError
from gdscache.sizes import about
from gdscache.storage.base import DeviceMemory, Memory, Op, Switch, address_of, failed, memory_of
from gdscache.storage.calls import cufile_hangs, within
from gdscache.storage.files import DirectFiles

if TYPE_CHECKING:
    import torch

OLDEST = (1, 5, 1)  # older versions report short and failed I/O as done
HANG_S = 30.0

_EVERYTHING = 1 << 62
_PAUSE_S, _LONG_PAUSE_S = 50e-6, 1e-3
_T = TypeVar("_T")
_log = logging.getLogger("gdscache.storage")


class NixlTransport(DirectFiles):
    """Files of `DirectFiles`; NIXL moves the bytes, a transfer for each call.

    With `gds` it moves CUDA memory too, inside `register`ed buffers, by `threads` threads of the plugin. A file without
    O_DIRECT is read and written inside NIXL's submit call, so one call at a time. Raises `TransportUnavailableError` if
    NIXL is missing, too old, or refuses the settings.
    """

    name = "nixl"

    def __init__(self, threads: int, direct_io: Switch = "auto", gds: bool = False) -> None:
        super().__init__(threads, direct_io)
        if gds and (cause := cufile_hangs()):
            raise TransportUnavailableError(cause, "set ssd.gds to auto or off")
        self._module, self._version = _import_nixl()
        own = vars(self._module._bindings).values()
        errors = [value for value in own if isinstance(value, type) and issubclass(value, Exception)]
        others = IOFailedError, RuntimeError, ValueError, MemoryError, OSError
        self._nixl_errors: tuple[type[Exception], ...] = (*errors, *others)
        self._call_errors: tuple[type[Exception], ...] = (*self._nixl_errors, ImportError)
        self.memory_kinds = frozenset({"host", "cuda"} if gds else {"host"})
        self._plugins = ["POSIX", "GDS_MT"] if gds else ["POSIX"]
        self._gds = gds
        self._lock = threading.Lock()  # guards the members below, and all objects of NIXL
        self._agent: Any = None
        self._live = 0  # transfers
        self._registered: dict[tuple[object, str], Any] = {}
        self._regions: dict[tuple[int, int], int] = {}
        try:
            self._call("make an agent", self._make_agent)
        except self._call_errors as error:
            self.close()
            raise TransportUnavailableError(
                f"NIXL cannot make an agent with {' and '.join(self._plugins)}: {_said(error)}",
                "set ssd.transport to posix, or ssd.gds to off" if gds else "set ssd.transport to posix",
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
        `IOFailedError` (EINVAL) for memory that overlaps a registered buffer."""
        if isinstance(memory, memoryview):
            return
        place = memory_of(memory)
        try:
            self._call("register memory", lambda: self._register_region(place))
        except IOFailedError:
            raise
        except self._nixl_errors as error:
            raise TransportUnavailableError(
                f"NIXL cannot register {about(place.nbytes)} of GPU memory: {_said(error)}",
                "make the staging ring smaller (BAR1 limits it), or set ssd.gds to off",
            ) from error

    def deregister(self, memory: memoryview | torch.Tensor) -> None:
        if not isinstance(memory, memoryview):
            place = memory_of(memory)
            self._call("deregister memory", lambda: self._deregister_region(place))

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "gds": self._gds, "nixl": self._version}

    def close(self) -> None:
        """Calls under way keep files and memory, and release them at their end."""
        self._closed = True
        if not self._lock.acquire(timeout=HANG_S):
            _log.error("a call of NIXL has not ended for %g s: it keeps its memory and files", HANG_S)
            return
        try:
            self._release_if_over()
        finally:
            self._lock.release()

    def _move(self, op: Op, file: int, offset: int, memory: Memory) -> int:
        """NIXL gives no byte count, so a read is compared with the size of its file."""
        path, moved = self.path(file), memory.nbytes
        error: Exception | None = None
        with self._lock:
            self.check_open()
            try:
                handle = self._handle(op, file, offset, memory)
                self._live += 1
            except IOFailedError:
                raise
            except self._nixl_errors as caught:
                raise failed(op.value, path, offset, RuntimeError(_said(caught))) from caught
            finally:
                self._release_if_over()
        try:
            with self._lock:
                done = self._is_done(self._agent.transfer(handle))
            while not done:
                time.sleep(min(_PAUSE_S * self._live, _LONG_PAUSE_S))
                with self._lock:
                    done = self._is_done(self._agent.check_xfer_state(handle))
        except self._nixl_errors as caught:
            error = caught
        finally:
            with self._lock:
                try:
                    if op is Op.READ:
                        moved = min(max(os.fstat(file).st_size - offset, 0), moved)
                finally:
                    self._end(handle)
        if error is not None and moved == memory.nbytes:
            raise failed(op.value, path, offset, RuntimeError(_said(error))) from error
        return moved

    # --- with the lock

    def _handle(self, op: Op, file: int, offset: int, memory: Memory) -> Any:
        agent, kind, plugin, device = self._agent, "DRAM", "POSIX", 0
        if isinstance(memory, DeviceMemory):
            if not self._holds(memory):
                raise IOFailedError(f"{memory} is not registered", "call register() first", errno.EINVAL)
            kind, plugin, device = "VRAM", "GDS_MT", memory.device
        there = agent.get_xfer_descs([(address_of(memory), memory.nbytes, device)], kind)
        part = agent.get_xfer_descs([(offset, memory.nbytes, file)], "FILE")
        return agent.initialize_xfer(op.name, there, part, agent.name, backends=[plugin])

    @staticmethod
    def _is_done(state: str) -> bool:
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"NIXL answers {state}")
        return state == "DONE"

    def _end(self, handle: Any) -> None:
        """Release an ended transfer only: a release in flight blocks NIXL."""
        try:
            handle.release()
        except self._nixl_errors as refusal:
            _log.warning("NIXL does not release a transfer that ended: %s", _said(refusal))
        self._live -= 1
        self._release_if_over()

    def _release_if_over(self) -> None:
        """After `close`, release everything once no transfer is under way."""
        if self._closed and not self._live:
            self._give_back()

    def _make_agent(self) -> None:
        config = self._module.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = self._module.nixl_agent("gdscache", config)
        depth = str(max(self.threads, 64))
        agent.create_backend("POSIX", {"use_aio": "true", "ios_pool_size": depth, "kernel_queue_size": depth})
        if self._gds:
            pathfinder = importlib.import_module("cuda.pathfinder")
            for library in ("cudart", "cufile"):  # the plugin finds both by name once they are loaded
                pathfinder.load_nvidia_dynamic_lib(library)
            agent.create_backend("GDS_MT", {"thread_count": str(self.threads)})
        self._agent = agent
        # The POSIX plugin takes any host memory, but NIXL looks every address up.
        self._register("host", [(0, _EVERYTHING, 0, "")], "DRAM")

    def _register(self, key: object, entries: list[tuple[int, int, int, str]], kind: str) -> None:
        # One by one: with several plugins NIXL reports a registration as done when the first of them is.
        for plugin in {"DRAM": ["POSIX"], "VRAM": ["GDS_MT"], "FILE": self._plugins}[kind]:
            self._registered[key, plugin] = self._agent.register_memory(entries, kind, backends=[plugin])

    def _register_region(self, new: DeviceMemory) -> None:
        for (index, start), end in self._regions.items():
            if index == new.device and new.address < end and start < new.address + new.nbytes:
                message = f"GPU memory at {new.address:#x} is registered already"
                raise IOFailedError(message, "register a buffer once", errno.EINVAL)
        self._register((new.device, new.address), [(new.address, new.nbytes, new.device, "")], "VRAM")
        self._regions[new.device, new.address] = new.address + new.nbytes

    def _deregister_region(self, old: DeviceMemory) -> None:
        if self._regions.get((old.device, old.address)) != old.address + old.nbytes:
            raise IOFailedError(f"{old} is not registered", "register it first", errno.EINVAL)
        del self._regions[old.device, old.address]
        descriptors = self._registered.pop(((old.device, old.address), "GDS_MT"))
        self._agent.deregister_memory(descriptors, backends=["GDS_MT"])

    def _holds(self, memory: DeviceMemory) -> bool:
        return any(
            index == memory.device and start <= memory.address and memory.address + memory.nbytes <= end
            for (index, start), end in self._regions.items()
        )

    def _give_back(self) -> None:
        """Release all registrations, then close the files: a reused number must not point at another file."""
        for (_, plugin), descriptors in reversed(list(self._registered.items())):
            try:
                self._agent.deregister_memory(descriptors, backends=[plugin])
            except self._nixl_errors as error:
                _log.warning("NIXL does not deregister: %s", _said(error))
        self._registered.clear()
        self._agent = None
        super().close()

    # --- in callers

    def _call(self, what: str, action: Callable[[], _T]) -> _T:
        """Run `action()` in a thread of its own, with the lock: NIXL, or cuFile behind it, may hang for ever."""

        def locked() -> _T:
            with self._lock:
                self.check_open()
                try:
                    return action()
                finally:
                    self._release_if_over()

        hint = "the device or cuFile hangs: set ssd.transport to posix"
        return within("gdscache-nixl-call", locked, f"NIXL did not {what}", hint)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _import_nixl() -> tuple[Any, str]:
    hint = "install gdscache[cuda12] or gdscache[cuda13], or set ssd.transport to posix"
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
