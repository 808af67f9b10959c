"""What an engine does when: reads, copies, kernels, waits and layers, for Perfetto or for a profiler of NVIDIA's.

base.py      Timeline: what the engine tells; by itself it keeps nothing
trace.py     TraceTimeline: kept, and written as trace-event JSON
tracks.py    what a trace's tracks are called, and in which order they come
streams.py   times on CUDA streams, on the host's clock
nvtx.py      NvtxTimeline: passed on as NVTX ranges
summary.py   a trace file read back: how much ran under the model's layers
plot.py      ... and drawn
"""

from gdscache.tracing.base import OFF, Timeline
from gdscache.tracing.nvtx import NvtxTimeline, timeline_from_environment
from gdscache.tracing.trace import TraceTimeline

__all__ = ["OFF", "NvtxTimeline", "Timeline", "TraceTimeline", "timeline_from_environment"]
