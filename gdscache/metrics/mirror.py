"""An engine's figures in registries of other processes, and in registries of several processes.

Those registries ask no collector, so real counters, gauges and histograms are changed by differences. The engine's
process takes them from `Differences`, and gives them to a `Mirror`, as plain data.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gdscache.metrics.table import FAMILIES, Labels, Stats
from gdscache.tiers.measures import Measures, TokenCounts

_BY_NAME = {family.name: family for family in FAMILIES}
_BETWEEN = "\t"  # in the name of a series: the metric's name, and the values of its labels


# Changes by series: growth of a counter, value of a gauge, and of a histogram the `Buckets` of its new values.
News = Mapping[str, Any]


class Differences:
    """The changes of an engine's figures since the last call, at first from 0."""

    def __init__(self, every: float, clock: Callable[[], float]) -> None:
        """`every`: seconds between two reads of the figures."""
        self._every, self._clock = every, clock
        self._due = -math.inf
        self._last: dict[str, Mapping[Labels, Any]] = {}

    @property
    def due(self) -> bool:
        return self._clock() >= self._due

    def take(self, stats: Stats) -> News:
        """The changes up to these figures. Series without counts yet are reported once."""
        self._due = self._clock() + self._every
        news: dict[str, Any] = {}
        for family in FAMILIES:
            before, now = self._last.get(family.name, {}), family.read(stats)
            if now == before:  # most of them
                continue
            self._last[family.name] = now
            for labels, value in now.items():
                last = before.get(labels)
                if value != last:
                    grown = family.kind != "gauge" and last is not None
                    name = _BETWEEN.join((family.name, *labels))
                    news[name] = _combined(operator.sub, value, last) if grown else value
        return news


def merged(news: News, later: News) -> News:
    """The changes over both times."""
    both = {
        name: _combined(operator.add, value, later[name])
        for name, value in news.items()
        if name in later and _BY_NAME[name.partition(_BETWEEN)[0]].kind != "gauge"
    }
    return {**news, **later, **both}


class Mirror:
    """The metrics of an engine in a registry for several processes, such as `vllm:gdscache_lookups_total`."""

    def __init__(
        self, prefix: str, counter: Any, gauge: Any, histogram: Any, labels: Sequence[str], **options: Any
    ) -> None:
        """`prefix`: of every name. `counter`, `gauge`, `histogram`: classes like those of Prometheus' client. `labels`:
        of every series, before its own. `options`: further arguments of the classes, such as `registry`."""
        self._registry = options.get("registry")
        self._metrics: dict[str, Any] = {}
        for family in FAMILIES:
            about = {"name": prefix + family.name, "documentation": family.help, **options}
            about["labelnames"] = [*labels, *family.labels]
            if family.kind == "counter":
                self._metrics[family.name] = counter(**about)
            elif family.kind == "gauge":
                self._metrics[family.name] = gauge(**about, multiprocess_mode="mostrecent")
            else:
                self._metrics[family.name] = histogram(**about, buckets=[*family.bounds])

    def born(self, values: Sequence[Any], tiers: Mapping[str, str]) -> None:
        """Make the series of an engine with these tiers, by name (see `Tier.kind`), before it counts anything: a series
        made at its first event would hide that event. `values`: of the labels."""
        stats = unborn(tiers)
        for family in FAMILIES:
            for labels in family.read(stats) if family.kind != "gauge" else ():
                self._series(family.name, values, labels)

    def add(self, values: Sequence[Any], news: News) -> None:
        """Apply changes. `values`: of the labels."""
        for name, value in news.items():
            family, *labels = name.split(_BETWEEN)
            series, kind = self._series(family, values, labels), _BY_NAME[family].kind
            if kind == "counter":
                series.inc(value)
            elif kind == "gauge":
                series.set(value)
            else:
                for count, total in zip(value["counts"], value["sums"], strict=True):
                    for _ in range(count):  # within a bucket the mean is as good as each value
                        series.observe(total / count)

    def close(self) -> None:
        """Remove the metrics from the given registry."""
        if self._registry is not None:
            for metric in self._metrics.values():
                self._registry.unregister(metric)

    def _series(self, family: str, values: Sequence[Any], labels: Sequence[str]) -> Any:
        metric, every = self._metrics[family], [*values, *labels]
        return metric.labels(*every) if every else metric


def unborn(tiers: Mapping[str, str]) -> Stats:
    """The part of `stats()` that counters and histograms read, for an engine with these tiers (kinds by name) that has
    counted nothing."""
    files = [tier for tier, kind in tiers.items() if kind == "files"]
    about: dict[str, Any] = {tier: {"kind": kind} for tier, kind in tiers.items()}
    if files:
        about[files[0]]["quarantine"] = {"switch_offs": 0, "error_switch_offs": 0}
    return {
        "tiers": about,
        "tokens": TokenCounts(tiers).describe(),
        "measured": Measures(tiers).describe(),
        "page_bytes": 0,
        "plain_page_bytes": 0,
        "gate": {},
        "prefetch": {},
        "store_policy": {"admission": {"endurance": None} if files else None},
        "events": None,
        "ranks": None,
        "leases": (),
    }


def _combined(by: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """Of two numbers, or two `Buckets`."""
    if not isinstance(one, Mapping):
        return by(one, other)
    return {name: [*map(by, some, other[name])] for name, some in one.items()}
