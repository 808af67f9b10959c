"""Whether an engine packs its pages: as the configuration says, or as its directory has them. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from gdscache.config import Config
from gdscache.config.pools import PLAIN_DIRECTORY, pool_parts
from gdscache.disk.catalog_file import CATALOG_NAME, slab_extent
from gdscache.errors import GeometryError
from gdscache.pages.layout import PageLayout


def as_directory(config: Config) -> Config:
    """The configuration with `model.pack` on or off: for `auto`, as the directory of the SSD tier, or one of a pool's,
    has its extents. Raises as `pool_parts`."""
    model = config.model
    if model.pack != "auto":
        return config
    parts = [part.config for part in pool_parts(config)] or [config]
    same = any(part.ssd is not None and _is_packed(part.model.layout(), part.ssd.path) for part in parts)
    return config.model_copy(update={"model": model.model_copy(update={"pack": "on" if same else "off"})})


def _is_packed(layout: PageLayout, directory: Path) -> bool:
    """Whether a directory has packed extents of these pages. Reads nothing where they cannot be packed. Extents of few
    bytes have one size packed or not; a packed directory has another one below it, for pages that do not fit."""
    try:
        wanted = layout.packed_as(packed=True).extent_bytes
    except GeometryError:
        return False
    if wanted == layout.extent_bytes and not (directory / PLAIN_DIRECTORY / CATALOG_NAME).exists():
        return False
    return slab_extent(directory) == wanted
