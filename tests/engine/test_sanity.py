"""What is allowed and hardly meant is said when an engine opens, with the figures and the setting to change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine
from gdscache.config import Config
from gdscache.config.pools import concerns
from tests.support.helpers import make_config

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
