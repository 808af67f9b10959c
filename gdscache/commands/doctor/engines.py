"""The installed inference engines, and whether the integrations were tested with their versions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from gdscache.commands.doctor.report import Row
from gdscache.integrations.settings import TRIED


def engine_rows() -> Iterator[Row]:
    """A row for each engine with an integration, from distribution metadata: nothing is imported. An untested version
    is no defect."""
    for engine, known in TRIED.items():
        found = {name: version for name in known if (version := _version(name))}
        if not found:
            yield Row(engine, "not installed")
        for distribution, version in list(found.items())[:1]:
            is_tried = version.partition("+")[0] in known[distribution]
            data = {"distribution": distribution, "version": version, "tried": is_tried}
            value = f"{distribution} {version}, which the integration was {'' if is_tried else 'not '}tried with"
            tried = ", ".join(f"{name} {one}" for name, versions in known.items() for one in versions)
            hint = f"tried were: {tried}. Compare the answers with and without the cache once"
            yield Row(engine, value, "ok" if is_tried else "warn", "" if is_tried else hint, data)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
