"""`gdscache bench links`: ranks in processes of their own, which load beside each other."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
import signal
from pathlib import Path

import pytest

from gdscache.commands.bench import links
from gdscache.errors import InvalidValueError
from tests.support.terminal import on_terminal


@pytest.mark.suite
def test_two_ranks_are_measured(tmp_path: Path) -> None:
    file, plot = tmp_path / "links.json", tmp_path / "links.png"
    options = ["--quick", "--ranks", "2", "--report", str(file), "--plot", str(plot)]
    status, shown = on_terminal(["-m", "gdscache", "bench", "links", *options])
    assert status == 0, shown
    report = json.loads(file.read_text())
    assert report["complete"]
    rows = {row["what"]: row for row in report["links"]}
    assert [*rows] == [
        f"{kind} of {name}, 2 ranks" for name in ("heads", "latents") for kind in ("load", "lookup and load")
    ]
    for name in ("heads", "latents"):
        load, whole = rows[f"load of {name}, 2 ranks"], rows[f"lookup and load of {name}, 2 ranks"]
        assert load["figure"]["median"] > whole["figure"]["median"]
        assert load["bytes_of_a_rank"] == load["pages"] * links.layout_of(links.models(2)[name]).page_bytes
        assert load["against_figure"] == whole["against_figure"]
    assert plot.stat().st_size > 0
    assert ("2 ranks without GPUs load at once" in shown) == (not report["machine"]["gpus"])


@pytest.mark.suite
def test_ctrl_c_is_left_to_the_leader() -> None:
    """A terminal sends it to the ranks, too, also while they start."""
    before, settings = signal.getsignal(signal.SIGINT), links.Settings(total=1 << 20)
    with contextlib.closing(links.Links(settings, links.models(1)["latents"], shared=True)):
        (rank,) = multiprocessing.active_children()
        (ignored,) = re.findall(r"^SigIgn:\s+(\w+)", Path(f"/proc/{rank.pid}/status").read_text(), re.MULTILINE)
        assert int(ignored, 16) >> signal.SIGINT - 1 & 1
        assert signal.getsignal(signal.SIGINT) == before


def test_more_ranks_than_links_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.torch.cuda, "device_count", lambda: 2)
    links.Settings("default", ranks=2).check()
    with pytest.raises(InvalidValueError, match="--ranks 3 on 2 GPUs"):
        links.Settings("default", ranks=3).check()
