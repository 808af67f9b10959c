"""A trace file read back: the tracks, what each was busy with, and how much of that ran under the model's layers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gdscache.errors import InvalidValueError
from gdscache.tracing.trace import FORMAT

MOVES = ("read", "scatter", "copies", "kernel", "check", "gather", "write", "commit")  # what can run under the model
MAX_BYTES = 1 << 30
MODEL_STREAM = "model stream"
_HINT = "name a file that --trace, or TraceTimeline.write, wrote"

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSpan:
    """A span of the file: times in microseconds since its begin."""

    kind: str
    name: str
    track: str
    start: float
    end: float
    about: dict[str, Any]

    @property
    def layer(self) -> int | None:
        """The (first) layer that it is about."""
        layer = self.about.get("layer", self.about.get("first_layer"))
        return None if layer is None else int(layer)


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """What a file has. `tracks`: their names, from top to bottom; `spans` by their start; `left_out`: events that are
    not in the file, since the timeline was full."""

    tracks: tuple[str, ...]
    spans: tuple[TraceSpan, ...]
    left_out: int

    @property
    def longest_load(self) -> int | None:
        """The load with the most time between the begin of its first span and the end of its last; None without any."""
        ends: dict[int, Interval] = {}
        for span in self.spans:
            if (load := span.about.get("load")) is not None:
                first, last = ends.get(load, (span.start, span.end))
                ends[load] = min(first, span.start), max(last, span.end)
        return max(ends, key=lambda load: ends[load][1] - ends[load][0], default=None)

    def of_load(self, load: int) -> Trace:
        """From the begin of a load's first span to the end of its last. Raises `InvalidValueError` if it has none."""
        own = [span for span in self.spans if span.about.get("load") == load]
        if not own:
            known = sorted({span.about["load"] for span in self.spans if "load" in span.about})
            raise InvalidValueError(f"no span is of load {load}", f"the file has loads {known[:8]}")
        first, last = min(span.start for span in own), max(span.end for span in own)
        seen = tuple(span for span in self.spans if span.end > first and span.start < last)
        return Trace(tuple(t for t in self.tracks if any(s.track == t for s in seen)), seen, self.left_out)


def _read(path: Path) -> bytes:
    """The file's bytes, as far as they may be JSON and end: a device or a pipe may not."""
    with path.open("rb") as file:
        begin = file.read(1)
        if begin != b"{":
            raise ValueError(f"it begins with {begin!r}")
        content = begin + file.read(MAX_BYTES)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    return content


def read_trace_file(path: Path) -> Trace:
    """Read what `TraceTimeline.write` wrote. Raises `InvalidValueError` for anything else."""
    try:
        data = json.loads(_read(path))
        about = data["otherData"]
        if about["format"] != FORMAT:
            raise InvalidValueError(f"{path} has format {about['format']}, not {FORMAT}", "record it anew")
        events = data["traceEvents"]
        names = {e["tid"]: str(e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        spans = tuple(
            TraceSpan(e["cat"], e["name"], names[e["tid"]], e["ts"], e["ts"] + e["dur"], e["args"])
            for e in events
            if e["ph"] == "X"
        )
        return Trace(tuple(names[tid] for tid in sorted(names)), spans, int(about["events_left_out"]))
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}", _HINT) from None
    except (KeyError, TypeError, AttributeError):
        raise InvalidValueError(f"{path} is no timeline of gdscache: it is JSON of another kind", _HINT) from None
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{path} is no timeline of gdscache: {str(error)[:200]}", _HINT) from None


def computing(trace: Trace) -> list[Interval]:
    """When the model computed: its layers, without its waits. On the GPU where the file has that, else on the host."""
    on_gpu = any(span.kind == "layer" and span.track == MODEL_STREAM for span in trace.spans)
    own = [span for span in trace.spans if (span.track == MODEL_STREAM) == on_gpu]
    layers = union((span.start, span.end) for span in own if span.kind == "layer")
    return without(layers, union((span.start, span.end) for span in own if span.kind == "wait"))


def summary(trace: Trace) -> dict[str, Any]:
    """Milliseconds and bytes by tracks of a name and kind, and the share of it that ran while the model computed.

    `busy_ms` counts overlapping spans once. `under_layers` is None where nothing was computed.
    """
    model = computing(trace)
    rows = []
    keys = dict.fromkeys((_group(span.track), span.kind) for span in trace.spans)
    order = list(dict.fromkeys(map(_group, trace.tracks)))
    for track, kind in sorted(keys, key=lambda key: order.index(key[0])):
        spans = [span for span in trace.spans if span.kind == kind and _group(span.track) == track]
        busy = union((span.start, span.end) for span in spans)
        total = length(busy)
        row = {
            "track": track,
            "kind": kind,
            "spans": len(spans),
            "bytes": sum(span.about.get("bytes", 0) for span in spans),
            "busy_ms": total / 1000,
            "under_layers": None,
        }
        if kind in MOVES and model and total:
            row["under_layers"] = length(both(busy, model)) / total
        rows.append(row)
    everything = union((span.start, span.end) for span in trace.spans)
    span_ms = (everything[-1][1] - everything[0][0]) / 1000 if everything else 0.0
    return {
        "milliseconds": span_ms,
        "computing_ms": length(model) / 1000,
        "events_left_out": trace.left_out,
        "rows": rows,
    }


def _group(track: str) -> str:
    """What a track is one of: without the numbers of thread, engine or lane."""
    return re.sub(r"( \d+)?( #\d+)?( \(\d+\))?$", "", track)


# -- sets of intervals, as sorted lists that do not touch --------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All that is in any of them."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def both(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What is in both sets."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What is in the first set and not in the second."""
    if not other:
        return list(one)
    borders = [(float("-inf"), other[0][0])]
    borders += [(a[1], b[0]) for a, b in itertools.pairwise(other)]
    borders.append((other[-1][1], float("inf")))
    return both(one, borders)


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
