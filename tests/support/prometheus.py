"""Prometheus' server and promtool, from Debian's package `prometheus`, for the tests that need them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "configs" / "alerts.yaml"
DASHBOARD = ROOT / "configs" / "grafana.json"


def installed(name: str) -> str:
    """The path of a program of the package; a test that needs it is skipped without."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: apt-get install prometheus")
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """The legend and the expression of each query of the dashboard, with everything chosen that can be."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m")
            yield target["legendFormat"], re.sub(r"\$\w+", ".*", expression)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as some:
        return int(some.getsockname()[1])


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read(), "utf-8")


class Prometheus:
    """A server that scrapes one address four times a second."""

    def __init__(self, port: int) -> None:
        self._port = port

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now."""
        return list(self._get("query", query=expression)["result"])

    def value(self, expression: str) -> float | None:
        """That of the first of them."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def names(self) -> set[str]:
        return set(self._get("label/__name__/values"))

    def firing(self) -> set[str]:
        return {one["labels"]["alertname"] for one in self._get("alerts")["alerts"] if one["state"] == "firing"}

    def _get(self, what: str, **asked: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{what}?{urllib.parse.urlencode(asked)}"
        return json.loads(fetched(url))["data"]


@contextlib.contextmanager
def scraping(folder: Path, target: int) -> Iterator[Prometheus]:
    """A server that scrapes a port of this machine, with the shipped alerts, none of which waits (`for`) that long."""
    program, port = installed("prometheus"), free_port()
    hurried = yaml.safe_load(ALERTS.read_text())
    for rule in hurried["groups"][0]["rules"]:
        rule.pop("for", None)
    (folder / "alerts.yaml").write_text(yaml.safe_dump(hurried))
    config = {
        "global": {"scrape_interval": "250ms", "evaluation_interval": "250ms"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "gdscache", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("w") as log:
        child = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            server = Prometheus(port)
            _until_up(server, child, folder)
            yield server
        finally:
            child.terminate()
            child.wait(20)


def _until_up(server: Prometheus, child: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for the second scrape that worked: only then do counters have a past."""
    end = time.monotonic() + 30
    while time.monotonic() < end and child.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if (server.value("count_over_time(up[1m])") or 0) >= 2 and server.value("up") == 1:
                return
        time.sleep(0.1)
    raise AssertionError(f"Prometheus scrapes nothing: {(folder / 'prometheus.log').read_text()[-2000:]}")
