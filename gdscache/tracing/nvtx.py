"""NVTX ranges, for Nsight Systems and Nsight Compute, when one of them runs the process."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from typing import Any

from gdscache.tracing.base import OFF, Span, Timeline, title

_log = logging.getLogger("gdscache")

# Nsight Systems and Nsight Compute set these for the process that they run.
_PROFILERS = ("NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")
_TOOL = "NVTX_INJECTION64_PATH"  # any tool's library that gets NVTX calls, by the NVTX headers


class _Range(Span):
    __slots__ = ("_name", "_nvtx")

    def __init__(self, nvtx: Any, name: str) -> None:
        self._nvtx = nvtx
        self._name = name

    def __enter__(self) -> _Range:
        self._nvtx.range_push(self._name)
        return self

    def __exit__(self, *error: object) -> None:
        self._nvtx.range_pop()


class NvtxTimeline(Timeline):
    """Passes everything on as ranges of the default domain; the profiler itself sees the streams' work.

    `nvtx`: torch.cuda.nvtx, or a module with its functions. Raises `RuntimeError` if torch was built without NVTX.
    """

    __slots__ = ("_next", "_nvtx")

    def __init__(self, nvtx: Any = None) -> None:
        if nvtx is None:
            from torch.cuda import nvtx
        nvtx.mark("gdscache")  # raises without NVTX
        self._nvtx: Any = nvtx
        self._next = itertools.count(1)

    def number(self) -> int:
        return next(self._next)

    def span(self, kind: str, /, **about: Any) -> Span:
        return _Range(self._nvtx, _text(kind, about))

    def instant(self, kind: str, /, **about: Any) -> None:
        self._nvtx.mark(_text(kind, about))


def _text(kind: str, about: Mapping[str, Any]) -> str:
    """`gdscache: scatter 0-3 (load 7, 12 pages, 1048576 bytes)`."""
    plain = [f"{about[key]} {key}" for key in ("pages", "bytes") if key in about]
    if "load" in about:
        plain.insert(0, f"load {about['load']}")
    return f"gdscache: {title(kind, about)}" + (f" ({', '.join(plain)})" if plain else "")


def timeline_from_environment() -> Timeline:
    """An `NvtxTimeline` if a profiler runs this process, else one that keeps nothing.

    A process counts as profiled if its environment names Nsight Systems, Nsight Compute, or a library that gets NVTX
    calls. libcupti does not count: some images name it for every process, and the first range would load it, which
    takes CUPTI's only place from torch's own profiler.
    """
    tool = os.path.basename(os.environ.get(_TOOL, ""))
    if not any(name in os.environ for name in _PROFILERS) and (not tool or tool.startswith("libcupti")):
        return OFF
    try:
        return NvtxTimeline()
    except RuntimeError as error:
        _log.info("a profiler is attached and torch has no NVTX: %s", error)
        return OFF
