"""The commands on a configuration with groups of layers, and on the directory that its engine leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gdscache.commands.cli import app
from gdscache.commands.doctor import Asked, examine, group_rows
from gdscache.config import Config
from tests.support.doctor_facts import PLAIN
from tests.support.helpers import flip_file, make_config, prompt
from tests.support.hybrid import MODELS, HybridHost, hybrid_config

RUNNER = CliRunner(env={"COLUMNS": "160"})
PROMPT = prompt(1, 12)


@pytest.fixture(params=["off", "on"])
def left(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """What an engine of three groups in two pools has left, with pages of two salts. Of packed pages each pool has a
    directory for those that do not fit."""
    tiers = {"cpu": 2500, "ssd": 2500, "bounce": 64} if request.param == "on" else {}
    host = HybridHost(hybrid_config(tmp_path / "cache", MODELS["mixed"] | {"pack": request.param}, every=8, **tiers))
    with host.engine:
        for salt in ("", "tenant"):
            host.store(PROMPT[:24], salt=salt)
            assert host.load(PROMPT[:24], salt=salt).tokens == 24
    return tmp_path / "cache"


def run(*arguments: str, code: int = 0) -> str:
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_inspect_goes_through_the_directories_below_and_names_the_groups(left: Path) -> None:
    reports = json.loads(run("inspect", str(left), "--json"))
    paths = [str(Path(report["path"]).relative_to(left)) for report in reports]
    packed = len(paths) == 4
    assert paths == (
        ["groups-0", "groups-0/plain", "groups-1-2", "groups-1-2/plain"] if packed else ["groups-0", "groups-1-2"]
    )
    assert all(report["pages"] for report in reports)
    reports = reports[::2] if packed else reports
    groups = [{one["fields"]["group"]["name"] for one in report["namespaces"]} for report in reports]
    assert groups == [{"chunk"}, {"full", "window"}]
    assert all(one["made_of"]["group.keeps"] in ("all", "window", "chunk") for r in reports for one in r["namespaces"])
    shown = run("inspect", str(left))
    for words in ("chunk: chunks of 16", "full: all tokens", "window: the last 10", "tenant", "groups-1-2"):
        assert words in shown
    alone = json.loads(run("inspect", str(left / "groups-0"), "--json"))
    assert (alone[0] if packed else alone)["pages"] == reports[0]["pages"]


def test_verify_goes_through_them_and_says_where_a_byte_is_wrong(left: Path) -> None:
    reports = json.loads(run("verify", str(left), "--json"))
    assert [(report["good_pages"] > 0, report["bad_pages"]) for report in reports] == [(True, 0)] * len(reports)
    flip_file(Path(reports[-1]["path"]) / "slab-0.bin", 10)
    reports = json.loads(run("verify", str(left), "--json", code=1))
    assert [report["bad_pages"] for report in reports] == [0] * (len(reports) - 1) + [1]
    assert "checksum" in run("verify", str(left), code=1)


def test_a_directory_with_neither_is_refused_as_ever(tmp_path: Path) -> None:
    (tmp_path / "groups-0").mkdir()  # and nothing in it
    result = RUNNER.invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code != 0
    assert "has no SSD tier" in str(result.exception)


def written(tmp_path: Path, config: dict[str, Any]) -> str:
    path = tmp_path / "hybrid.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(config))))
    return str(path)


@pytest.mark.parametrize("pack", ["off", "on"])
def test_config_check_says_what_each_group_gets(tmp_path: Path, pack: str) -> None:
    config = hybrid_config(tmp_path / "cache", MODELS["mixed"] | {"pack": pack}, bounce=8)
    file = written(tmp_path, config)
    found = {group["name"]: group for group in json.loads(run("config", "check", file, "--json"))["groups"]}
    assert [found[name]["pool"] for name in ("chunk", "full", "window")] == ["chunk", *["full, window"] * 2]
    assert sum(found[name]["share"] for name in ("chunk", "full")) == pytest.approx(1)
    assert all(found[name]["pages"]["ssd"] >= (48 if pack == "off" else 44) for name in found)
    assert found["window"]["ssd_path"] == str(tmp_path / "cache" / "groups-1-2")
    host = HybridHost(config)
    with host.engine:
        for name, group in found.items():
            engine = host.of(name)[0]
            assert group["extent_bytes"] == engine.layout.extent_bytes
            assert bytes.fromhex(group["namespace"]) in engine.namespaces()
            assert {name: pages for name, pages in group["pages"].items() if name != "gpu"} == {
                name: tier.index.slots for name, tier in engine.manager.tiers.items()
            }
    shown = run("config", "check", file)
    for words in ("window: the last 10", "chunk: chunks of 16", "full: all tokens", "with full, window"):
        assert words in shown


def test_config_check_refuses_a_share_without_a_page(tmp_path: Path) -> None:
    config = hybrid_config(tmp_path / "cache", MODELS["apart"], every=0)
    config["cpu"]["capacity"] = 100_000
    result = RUNNER.invoke(app, ["config", "check", written(tmp_path, config)])
    assert result.exit_code != 0
    assert "cpu.capacity is" in str(result.exception)
    assert "raise cpu.capacity to" in str(getattr(result.exception, "hint", ""))


def test_the_doctor_says_what_each_pool_gets(tmp_path: Path) -> None:
    asked = Asked(Config.from_dict(hybrid_config(tmp_path / "cache", MODELS["mixed"])))
    rows = list(group_rows(PLAIN, asked))
    assert [(row.name, row.verdict) for row in rows] == [("chunk", "ok"), ("full, window", "ok")]
    assert "window: the last 10" in rows[1].value
    small = hybrid_config(tmp_path / "cache", MODELS["apart"], every=0) | {"cpu": {"capacity": 100_000}}
    [row] = group_rows(PLAIN, Asked(Config.from_dict(small)))
    assert (row.verdict, "cpu.capacity is" in row.value, "raise cpu.capacity" in row.next_step) == ("fail", True, True)
    plain = Asked(Config.from_dict(make_config(tmp_path / "cache")))
    assert list(group_rows(PLAIN, plain)) == []
    titles = [*examine(PLAIN, plain).sections]
    assert "Groups of layers" not in titles
    assert "Groups of layers" in examine(PLAIN, asked).sections
