"""The alerts that gdscache ships: each fires for its fault, under each engine's names; none for an engine at rest. And
the dashboard: its queries run in tests/engine/test_metrics_scraped.py."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gdscache.metrics import FAMILIES
from tests.support.prometheus import ALERTS, DASHBOARD, dashboard_queries, installed, rules

PREFIXES = ("", "vllm:", "sglang:")
# By alert: the series of its fault, and its values, a minute each (Prometheus' notation).
FAULTS = {
    "GdscacheBadPages": ('gdscache_miss_pages_total{cause="checksum"}', "0x60 1x60"),
    "GdscacheReadErrors": ('gdscache_miss_pages_total{cause="io_error"}', "0x60 3x60"),
    "GdscacheTierSwitchedOff": ('gdscache_tier_switched_off{tier="ssd"}', "0x60 1x60"),
    "GdscacheQuarantine": ('gdscache_quarantined_slots{pool="cpu"}', "0x60 2x60"),
    "GdscacheDiskFull": ('gdscache_dropped_pages_total{cause="disk_full"}', "0x60 5x60"),
    "GdscacheWritesFail": ('gdscache_dropped_pages_total{cause="io_error"}', "0x60 5x60"),
    "GdscacheWritesRefused": ('gdscache_refused_pages_total{cause="queue_full"}', "0x20 0+10x100"),
    "GdscacheEnduranceUsedUp": ('gdscache_refused_pages_total{cause="endurance"}', "0x20 0+10x100"),
    "GdscacheRankDead": ('gdscache_rank_running{rank="1"}', "1x60 0x60"),
    "GdscacheHitRateCollapsed": ('gdscache_hit_tokens_total{tier="cpu"}', "0+900x400 360000+10x120"),
}
MINUTES = {  # at which each fires, and before which it does not
    "GdscacheWritesRefused": (100, 40), "GdscacheEnduranceUsedUp": (100, 20), "GdscacheHitRateCollapsed": (450, 400),
}  # fmt: skip
USUAL = (67, 59)


def at_rest(prefix: str) -> list[dict[str, str]]:
    """Every series that an alert asks for, of an engine that serves and has no trouble."""
    quiet = {
        "gdscache_tier_switched_off": ("tier", ["ssd"]), "gdscache_rank_running": ("rank", ["0", "1"]),
        "gdscache_quarantined_slots": ("pool", ["cpu", "bounce_loads"]),
        "gdscache_miss_pages_total": ("cause", ["absent", "checksum", "short_read", "io_error", "deadline"]),
        "gdscache_dropped_pages_total": ("cause", ["disk_full", "io_error", "deadline", "cleared"]),
        "gdscache_refused_pages_total": ("cause", ["queue_full", "endurance", "tinylfu"]),
        "gdscache_hit_tokens_total": ("tier", ["cpu", "ssd"]),
    }  # fmt: skip
    found = [{"series": f'{prefix}gdscache_lookup_tokens_total{{instance="a"}}', "values": "0+1000x520"}]
    for name, (label, values) in quiet.items():
        for value in values:
            # Nobody is troubled by pages that are not there, nor by what an admission is for.
            grows = "0+450x520" if value in ("absent", "cleared", "tinylfu") or "hit" in name else "0x520"
            grows = "1x520" if "running" in name else grows
            found.append({"series": f'{prefix}{name}{{instance="a", {label}="{value}"}}', "values": grows})
    return found


def asked(rule: dict[str, Any], prefix: str) -> dict[str, Any]:
    """What promtool is to check of one alert: at rest, before its fault, and after it."""
    name, (series, values) = rule["alert"], FAULTS[rule["alert"]]
    fires, rests = MINUTES.get(name, USUAL)
    metric, _, labels = series.rstrip("}").partition("{")
    faulty = [one for one in at_rest(prefix) if not _is(one["series"], prefix + metric, labels)]
    faulty.append({"series": f'{prefix}{metric}{{instance="a", {labels}}}', "values": values})
    label, _, value = labels.partition("=")
    own = {label: value.strip('"')} if "sum by" not in rule["expr"] else {}
    alert = {"exp_labels": {**rule["labels"], "instance": "a", **own}, "exp_annotations": rule["annotations"]}
    return {
        "interval": "1m",
        "input_series": faulty,
        "alert_rule_test": [
            {"eval_time": f"{rests}m", "alertname": name, "exp_alerts": []},
            {"eval_time": f"{fires}m", "alertname": name, "exp_alerts": [alert]},
        ],
    }


def _is(series: str, metric: str, labels: str) -> bool:
    return series.startswith(metric + "{") and labels in series


def test_the_dashboard_fits_one_screen_and_asks_for_metrics_and_labels_that_exist() -> None:
    board = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, f"{panel['title']} lies over another panel"
        assert all(x < 24 and y < 24 for x, y in cells)
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert panel["description"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) == 12
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "job", "instance"}
    known = {family.sample: family for family in FAMILIES}
    known |= {f"{family.name}{end}": family for family in FAMILIES if family.bounds for end in ("_bucket", "_sum")}
    for legend, expression in dashboard_queries():
        asked = re.findall(
            r'{__name__=~"\(vllm:\|sglang:\)\?(\w+)", job=~"\.\*", instance=~"\.\*"(?:, (\w+)[!=][^}]*)?}', expression
        )
        assert len(asked) == expression.count("__name__") > 0, legend
        labels = {label for name, _ in asked for label in (*known[name].labels, "le")}
        by = {label for part in re.findall(r"by \(([^)]*)\)", expression) for label in part.split(", ")}
        assert by <= labels
        assert {label for _, label in asked if label} <= labels
        assert {*re.findall(r"{{(\w+)}}", legend)} == by - {"le"}, legend


def promtool(tests: list[dict[str, Any]], folder: Path) -> None:
    (folder / "alerts_test.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run(
        [installed("promtool"), "test", "rules", str(folder / "alerts_test.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_fault_a_runbook_and_metrics_that_exist() -> None:
    known = {family.sample for family in FAMILIES}
    assert {rule["alert"] for rule in rules()} == FAULTS.keys()
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "runbook"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        named = re.findall(r'"\(vllm:\|sglang:\)\?(\w+)"', rule["expr"])
        assert named
        assert set(named) <= known


@pytest.mark.parametrize("prefix", [PREFIXES[0], *(pytest.param(one, marks=pytest.mark.suite) for one in PREFIXES[1:])])
def test_every_alert_fires_for_its_fault_and_not_before_it(tmp_path: Path, prefix: str) -> None:
    promtool([asked(rule, prefix) for rule in rules()], tmp_path)


def test_an_engine_at_rest_and_one_that_has_just_begun_raise_none(tmp_path: Path) -> None:
    quiet = [{"eval_time": f"{at}m", "alertname": rule["alert"], "exp_alerts": []}
             for rule in rules() for at in (1, 45, 500)]  # fmt: skip
    both = [one for prefix in PREFIXES for one in at_rest(prefix)]
    for one in both:
        prefix = one["series"].partition("gdscache")[0]
        one["series"] = one["series"].replace('instance="a"', f'instance="{prefix}a"')
    promtool([{"interval": "1m", "input_series": both, "alert_rule_test": quiet}], tmp_path)


def test_a_series_that_is_born_with_its_fault_would_raise_none(tmp_path: Path) -> None:
    """Why every series is there from the start."""
    born = [{"series": 'gdscache_miss_pages_total{cause="checksum"}', "values": "_x60 1x60"}]
    silent = [{"eval_time": "100m", "alertname": "GdscacheBadPages", "exp_alerts": []}]
    promtool([{"interval": "1m", "input_series": born, "alert_rule_test": silent}], tmp_path)
