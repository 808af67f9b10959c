"""Timelines of an engine: reads, copies, kernels, waits and layers, for Perfetto, OpenTelemetry or NVIDIA's profilers.

base.py      Timeline: the contract; by itself it keeps nothing
trace.py     TraceTimeline: kept, and written as trace-event JSON, on named tracks
nvtx.py      NvtxTimeline: passed on as NVTX ranges
otel.py      OtelTimeline: loads as spans of OpenTelemetry
"""

from gdscache.tracing.base import OFF, Timeline
from gdscache.tracing.nvtx import NvtxTimeline, timeline_from_environment
from gdscache.tracing.otel import OtelTimeline
from gdscache.tracing.trace import TraceTimeline

__all__ = ["OFF", "NvtxTimeline", "OtelTimeline", "Timeline", "TraceTimeline", "timeline_from_environment"]
