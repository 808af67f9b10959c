"""What is allowed and hardly meant is said when an engine opens, with the figures and the setting to change."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine, HybridEngine
from gdscache.config import Config
from gdscache.config.pools import concerns, plain_parts, pool_parts
from gdscache.sizes import format_size, parse_size
from tests.support.helpers import make_config
from tests.support.hybrid import MODELS, hybrid_config

EXTENT = 8192
ROOMY: dict[str, Any] = {"gpu": 8, "cpu": 16, "ssd": 64, "bounce": 8}


def said(tmp_path: Path, gpu_pages: int = 8, *, on_gpu: bool = False, changes: Any = (), **options: Any) -> list[str]:
    config = make_config(tmp_path, **(ROOMY | options))
    for section, values in dict(changes).items():
        config[section] |= values
    return concerns(Config.from_dict(config), gpu_pages, on_gpu=on_gpu)


def test_nothing_is_said_of_a_roomy_configuration(tmp_path: Path) -> None:
    assert said(tmp_path) == []
    assert said(tmp_path, cpu=None, gpu_pages=64) == []
    assert said(tmp_path, ssd=None) == []
    assert said(tmp_path, on_gpu=True) == []


@pytest.mark.parametrize(
    ("options", "figures", "setting"),
    [
        ({"cpu": 7}, "the CPU pool holds 7 pages and the GPU's planes 8", "cpu.capacity"),
        ({"ssd": 15}, "the SSD holds 15 pages and the CPU pool 16", "ssd.capacity"),
        ({"cpu": None, "ssd": 7}, "the SSD holds 7 pages and the GPU's planes 8", "ssd.capacity"),
        ({"bounce": 2}, "half of host_buffer holds 1 page:", "host_buffer"),
        ({"queue": 3}, "store.queue holds 3 pages", "store.queue"),
        (
            {"changes": {"gpu": {"staging": 4 * EXTENT}}, "on_gpu": True},
            "half of gpu.staging holds 2 pages of 8KiB",
            "",
        ),
        ({"ssd": None, "store": {"write_policy": "write_back"}}, "store.write_policy is write_back", "Add ssd"),
        ({"status": {"path": "/page"}}, "status.path has no effect", "Take status out"),
        ({"ssd": None, "store": {"admission": "tinylfu"}}, "store.admission is tinylfu", "Add ssd"),
        ({"events": {"replay": "tcp://127.0.0.1:5558"}}, "events.replay is given", "Add events.endpoint"),
        ({"events": {"topic": "pages"}}, "events.topic is given", "Add events.endpoint"),
        (
            {"ssd": 6400, "ssd_options": {"endurance": 8 * EXTENT}},
            "ssd.endurance is 64KiB a day: filling ssd.capacity once takes 800 days",
            "ssd.endurance",
        ),
    ],
)
def test_each_has_its_figures_and_the_setting(
    tmp_path: Path, options: dict[str, Any], figures: str, setting: str
) -> None:
    [sentence] = said(tmp_path, **options)
    assert figures in sentence
    assert setting in sentence


def test_an_engine_says_it_once_and_shows_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gdscache.config"):
        engine = CacheEngine.from_config(make_config(tmp_path, gpu=8, cpu=4, ssd=12, bounce=8))
    with engine:
        expected = [r.getMessage() for r in caplog.records if "the CPU pool holds 4 pages" in r.getMessage()]
        assert len(expected) == 1
        assert engine.stats()["concerns"] == expected


def advised(config: dict[str, Any]) -> list[str]:
    """The concerns of all pools, whose planes are on a GPU."""
    whole = Config.from_dict(config)
    found: list[str] = []
    for pool in [*pool_parts(whole)] or (None,):
        one = whole if pool is None else pool.config
        layout = one.model.layout()
        part = plain_parts(one)[0] if layout.packed else one
        pages = one.gpu.capacity // layout.plane_bytes
        found += concerns(part, pages, on_gpu=True, whole=whole, pool=pool)
    return found


@pytest.mark.parametrize("pack", ["off", "on"])
@pytest.mark.parametrize("groups", ["", "apart", "state", "together"])
def test_a_file_with_the_sizes_that_are_advised_gives_no_concern(tmp_path: Path, groups: str, pack: str) -> None:
    """Also where a pool has a share of each size, and packed pages a part of that."""
    sizes = {"gpu": 64, "cpu": 24, "ssd": 22, "bounce": 3 if pack == "off" else 5}
    if groups:
        config = hybrid_config(tmp_path, MODELS[groups] | {"pack": pack}, **sizes)
    else:
        config = make_config(tmp_path, **sizes)
        config["model"] |= {"pack": pack, "dtype": "bfloat16"}
    config["gpu"]["staging"], config["store"]["queue"] = config["host_buffer"], config["host_buffer"]
    heard = set[str]()
    for _ in range(12):
        now = Config.from_dict(config).dump()  # of several pools that advise a size the last one is taken
        for sentence in advised(config):
            assert not groups or groups == "together" or sentence.startswith("groups "), sentence
            key, size = re.findall(r"([a-z_.]+|it) (?:above|to) (\w+)", sentence)[-1]
            key = "store.queue" if key == "it" else key
            heard.add(key)
            section, _, name = key.partition(".")
            assert parse_size(size) > (now[section][name] if name else now[section]), sentence
            config[section] = config[section] | {name: size} if name else size
    assert heard | {"host_buffer"} == {"gpu.staging", "cpu.capacity", "host_buffer", "store.queue", "ssd.capacity"}
    assert advised(config) == []


def test_pools_name_themselves_and_say_once_what_is_of_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = hybrid_config(tmp_path, MODELS["state"], gpu=64, cpu=24, ssd=6400)
    config["ssd"]["endurance"] = config["ssd"]["capacity"] // 200
    with caplog.at_level(logging.WARNING, "gdscache.config"), HybridEngine.from_config(config):
        heard = [r.getMessage() for r in caplog.records if r.name == "gdscache.config"]
    ours = [sentence for sentence in heard if not sentence.startswith("groups ")]
    [sentence] = [one for one in ours if one.startswith("ssd.endurance")]
    assert f"is {format_size(config['ssd']['endurance'])} a day" in sentence
    assert ours == [sentence]
    assert {one.split(":")[0] for one in heard} - {sentence.split(":")[0]}
