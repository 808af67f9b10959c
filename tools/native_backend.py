"""Setuptools' build backend, which also requires a compiler if the machine has none (see native_build.py)."""

from __future__ import annotations

from typing import Any

from native_build import requires
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *requires()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *requires()]
