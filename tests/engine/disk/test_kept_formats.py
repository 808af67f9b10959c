"""Directories of formats 5 and 6, as the code of the end of 2026-11 left them: every later version opens them, and
finds all pages.

Each archive holds the directory `a` of 3 pages of prompt 1, 3 of prompt 2 with the salt "tenant", and one of prompts 3
(of priority 2), 4 and 5 (of priority -1), the last two with times to live beyond the year 2080. A page is its key,
repeated. `killed` was not closed: rows are in the log alone. `striped` lies over `a` and `b`.

Beside these, a packed directory of vLLM's planes is read by docs/format.md alone.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdscache.commands.inspect.reading import inspect
from gdscache.commands.inspect.verification import verify
from gdscache.pages.keys import namespace_digest
from tests.support.helpers import Host, OpenHost, expected, make_config, narrowed, prompt, settle
from tests.support.packed_pages import unpack

FORMATS = Path(__file__).parents[2] / "formats"
KEPT = sorted(FORMATS.glob("*/*.tar.xz"))
PAGES = {(1, ""): 3, (2, "tenant"): 3, (3, ""): 1, (4, ""): 1, (5, ""): 1}


def options(place: Path, name: str) -> dict[str, Any]:
    if name != "striped":
        return {"path": place / "a", "ssd": 12, "cpu": None}
    return {"path": place / "a", "ssd": 520, "cpu": None, "ssd_options": {"stripes": [str(place / "b")]}}


def unpacked(archive: Path, place: Path) -> str:
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    return archive.name.split(".")[0]


def files(path: Path) -> dict[str, bytes]:
    found = {file.name: file for file in path.iterdir() if file.name != "lock"}
    return {name: b"" if name.endswith("-wal") else file.read_bytes() for name, file in found.items()}


def named(archive: Path) -> str:
    return f"{archive.parent.name}-{archive.name.split('.')[0]}"


def test_there_are_some() -> None:
    names = [(archive.parent.name, archive.name.split(".")[0]) for archive in KEPT]
    assert names == [(version, name) for version in ("5", "6") for name in ("closed", "killed", "striped")]


@pytest.mark.parametrize("archive", KEPT, ids=named)
def test_all_pages_are_found_and_more_are_stored(archive: Path, open_host: OpenHost, tmp_path: Path) -> None:
    name = unpacked(archive, tmp_path)
    for again in range(2):
        host = open_host(**options(tmp_path, name))
        host.data = lambda key: np.resize(np.frombuffer(key, np.uint8), host.layout.page_bytes)  # noqa: B023
        ssd = host.engine.manager.ssd
        assert not ssd.lost
        for (seed, salt), pages in PAGES.items():
            assert host.load(prompt(seed, pages), salt=salt).tokens == 4 * pages  # compares the bytes
        kept = {seed: ssd.index.retention(host.engine.pages(prompt(seed, 1))[0].key) for seed in (1, 3, 4, 5)}
        assert {seed: (k.priority, k.expires is not None) for seed, k in kept.items() if k is not None} == {
            1: (0, False), 3: (2, False), 4: (0, True), 5: (-1, True),
        }  # fmt: skip
        more = prompt(10 + again, 1)
        host.keep(more)
        assert host.load(more).tokens == 4
        assert host.engine.check().problems == ()
        settle(host.engine)
        host.engine.close()


@pytest.mark.parametrize("archive", [archive for archive in KEPT if "striped" not in archive.name], ids=named)
def test_it_is_inspected_and_verified(archive: Path, tmp_path: Path) -> None:
    """And left as it is."""
    unpacked(archive, tmp_path)
    before = files(tmp_path / "a")
    said = inspect(tmp_path / "a")
    assert (said["format_version"], said["pages"]) == (int(archive.parent.name), sum(PAGES.values()))
    report = verify(tmp_path / "a")
    assert (report["pages"], report["good_pages"]) == (sum(PAGES.values()), sum(PAGES.values()))
    assert files(tmp_path / "a") == before


def test_packed_planes_of_opaque_bytes(tmp_path: Path) -> None:
    """Runs that take turns have a part each, and the namespace says so."""
    parts, described = (64, 128), ["kv", [96], "int8", "bfloat16", [64, 128]]
    plane = dict(zip(("name", "shape", "dtype", "values", "parts"), described, strict=True))
    model = {"name": "tiny", "layers": 2, "page_tokens": 4, "planes": [plane], "pack": "on"}
    host = Host(make_config(tmp_path, model=model, cpu=None, bounce=32))
    host.data = lambda key: narrowed(expected(host.layout, key))  # type: ignore[method-assign]
    host.keep(prompt(1, 1))
    (page,) = host.engine.pages(prompt(1, 1))
    host.engine.close()
    fields = {
        "name": "tiny",
        "weights": "",
        "planes": [[described]] * 2,
        "page_tokens": 4,
        "first_layer": 0,
        "layers": 2,
    }
    fields |= {"head_group": 0, "head_groups": 1, "salt": "", "request_salt": "", "packed": 1}
    assert page.namespace == namespace_digest(fields)
    extent = np.frombuffer((tmp_path / "slab-0.bin").read_bytes(), np.uint8)
    at, found = 0, []
    for _ in range(2):
        runs = []
        for nbytes in parts:
            values = nbytes * 2 // 2  # two turns
            size = -(-values // 256) * 384 + 128
            runs.append(unpack(extent[at : at + size], values).view(np.uint8).reshape(2, nbytes))
            at += size
        found.append(np.concatenate(runs, axis=1).reshape(-1))
    assert np.array_equal(np.concatenate(found), host.data(page.key))
