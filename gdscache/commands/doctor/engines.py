"""Which inference engines are installed, and whether our integrations were tried with these versions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from gdscache.commands.doctor.facts import Asked, EngineFacts, Facts, Found
from gdscache.commands.doctor.report import Row
from gdscache.integrations.versions import TRIED


def find_engines() -> dict[str, Found[EngineFacts]]:
    """Each engine that there is an integration for, by the metadata of its distributions; nothing is imported."""
    return {engine: _find(engine) for engine in TRIED}


def _find(engine: str) -> Found[EngineFacts]:
    for distribution, tried in TRIED[engine].items():
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return Found(EngineFacts(distribution, version, version.partition("+")[0] in tried))
    return Found(None, "not installed")


def engine_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    """A row for each engine. A version that was not tried is no defect."""
    for engine, found in facts.engines.items():
        if (there := found.value) is None:
            yield Row(engine, found.cause, "info")
            continue
        name = f"{there.distribution} {there.version}"
        tried = ", ".join(f"{d} {v}" for d, versions in TRIED[engine].items() for v in versions)
        data = {"distribution": there.distribution, "version": there.version, "tried": there.tried}
        if there.tried:
            yield Row(engine, f"{name}, which the integration was tried with", "ok", data=data)
        else:
            hint = f"tried were: {tried}. Compare the answers with and without the cache once"
            yield Row(engine, f"{name}, which the integration was not tried with", "warn", hint, data)
