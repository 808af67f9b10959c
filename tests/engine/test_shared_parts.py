"""Parts that threads share, without an engine: names of pages, the file of a calibration."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from gdscache.kernels import choice as paths
from gdscache.kernels.choice import Calibration
from gdscache.pages.keys import PageNames, as_tokens, namespace_digest, page_keys
from tests.support.doctor_facts import KEY, MEASURED
from tests.support.helpers import together

NAMESPACE = namespace_digest({"name": "m"})


def test_threads_share_what_is_remembered() -> None:
    """Eight threads grow sequences with one beginning in few places: each name is right, whoever wrote it there."""
    names, tokens = PageNames(2, kept=3), [[1, 2, 3, 4, *[thread] * 40] for thread in range(8)]

    def grow(thread: int) -> None:
        for length in range(2, len(tokens[thread]), 2):
            pages = names.of(NAMESPACE, as_tokens(tokens[thread][:length]))
            assert [page.key for page in pages] == page_keys(NAMESPACE, as_tokens(tokens[thread][:length]), 2)

    together(grow, len(tokens))


def test_two_writers_at_once_leave_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "caches"
    monkeypatch.setenv("GDSCACHE_CACHE_DIR", str(directory))
    written = [dataclasses.replace(MEASURED, seconds=0.25), dataclasses.replace(MEASURED, seconds=0.75)]
    paths.write(written[0])
    start, stop = threading.Barrier(3), threading.Event()

    def writes(calibration: Calibration) -> None:
        start.wait()
        while not stop.is_set():
            paths.write(calibration)

    writers = [threading.Thread(target=writes, args=(calibration,)) for calibration in written]
    for writer in writers:
        writer.start()
    start.wait()
    try:
        found = [paths.read(KEY) for _ in range(1000)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert all(calibration in written for calibration in found)  # a torn file would be None
    assert all(calibration in found for calibration in written)
    assert [file.name for file in directory.iterdir()] == ["calibration-GPU-1.json"]
