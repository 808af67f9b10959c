"""Several processes and one directory: ownership, forks, namespaces, and bytes that come back after a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine
from gdscache.errors import DirectoryInUseError, ExtentSizeError
from tests.support.helpers import EXTRA, MHA, MLA, WAIT, layout_of, make_config, prompt, run, until
from tests.support.process_parts import (
    fork_and_close,
    fork_and_die,
    fork_that_closes,
    fork_that_exits,
    keep_open,
    read_after_restart,
    serve,
    through_every_tier,
    try_open,
)
from tests.support.processes import Child

PAGE_TOKENS = 4


def _open_when_free(config: dict[str, Any]) -> CacheEngine:
    """Open a directory whose owner is ending: the kernel takes a moment to drop a killed process's lock."""
    end = time.monotonic() + WAIT
    while True:
        try:
            return CacheEngine.from_config(config)
        except DirectoryInUseError:
            assert time.monotonic() < end, "the lock of a dead owner stays"
            time.sleep(0.005)


# -- ownership ---------------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_by_the_pid_of_the_first_and_served_after_its_death(slab: Path) -> None:
    config = make_config(slab)
    with Child(keep_open, config) as owner:
        assert owner.receive() == "open"
        with pytest.raises(DirectoryInUseError) as refusal:
            CacheEngine.from_config(config)
        assert f"process {owner.pid} " in refusal.value.message
        assert str(slab) in refusal.value.message
        assert refusal.value.hint
        with Child(try_open, config) as third:
            error = third.receive()
            assert isinstance(error, DirectoryInUseError)
            assert f"process {owner.pid} " in str(error)
            third.end()
        owner.kill()
        engine = CacheEngine.from_config(config)
        engine.close()


def _files(slab: Path) -> dict[str, bytes]:
    """What lies in a directory, but for the page that its owner rewrites every second."""
    return {path.name: path.read_bytes() for path in slab.iterdir() if path.name != "status"}


def test_a_refused_process_changes_nothing(slab: Path) -> None:
    config, tokens = make_config(slab), prompt(1, 5)
    with CacheEngine.from_config(config) as engine:
        run(engine, tokens)
        before = _files(slab)
        with Child(try_open, config) as other:
            assert isinstance(other.receive(), DirectoryInUseError)
            other.end()
        assert _files(slab) == before
        assert run(engine, tokens) == 4 * PAGE_TOKENS


def test_a_directory_is_free_as_soon_as_its_owner_closed(slab: Path) -> None:
    config = make_config(slab)
    with Child(keep_open, config) as owner:
        owner.receive()
        owner.send("close")
        assert owner.receive() == "closed"
        CacheEngine.from_config(config).close()
        owner.send("end")
        owner.end()


# -- forks -------------------------------------------------------------------------------------------------------------


def test_a_forked_process_does_not_keep_the_directory(slab: Path, tmp_path: Path) -> None:
    config, tokens, release = make_config(slab), prompt(1, 5), tmp_path / "release"
    with Child(fork_and_close, config, tokens, release) as owner:
        forked = owner.receive()
        assert Path(f"/proc/{forked}").exists()
        with CacheEngine.from_config(config) as engine:
            assert run(engine, tokens) == 4 * PAGE_TOKENS
        release.touch()
        owner.end()


@pytest.mark.parametrize("target", [fork_that_closes, fork_that_exits])
def test_what_a_forked_process_does_at_its_end_does_not_disturb_the_owner(slab: Path, target: Any) -> None:
    config, first, second = make_config(slab), prompt(1, 5), prompt(2, 5)
    with Child(target, config, first, second) as owner:
        assert owner.receive() == 0, "the forked process failed"
        with pytest.raises(DirectoryInUseError, match=f"process {owner.pid} "):
            CacheEngine.from_config(config)
        owner.send("go on")
        assert owner.receive() == (4 * PAGE_TOKENS, 0)
        owner.send("end")
        owner.end()
    with CacheEngine.from_config(config) as engine:
        assert engine.check().problems == ()
        assert engine.stats()["tiers"]["ssd"]["lost_at_recovery"] == {}
        assert run(engine, first) == run(engine, second) == 4 * PAGE_TOKENS


def test_a_forked_process_that_outlives_a_killed_owner_is_said_to_hold_the_lock(slab: Path, tmp_path: Path) -> None:
    config, release = make_config(slab), tmp_path / "release"
    with Child(fork_and_die, config, release) as owner:
        forked = owner.receive()
        owner.process.kill()
        owner.process.join(WAIT)
        with pytest.raises(DirectoryInUseError) as refusal:
            CacheEngine.from_config(config)
        assert f"process {owner.pid} has ended" in refusal.value.hint
        assert "forked" in refusal.value.hint
        release.touch()
        until(lambda: not Path(f"/proc/{forked}").exists(), "the forked process ends")
        _open_when_free(config).close()


# -- other configurations on the same directory ------------------------------------------------------------------------

SAME_EXTENT: dict[str, dict[str, Any]] = {  # one field each; the extent size stays 8,192
    "name": {"name": "other"},
    "weights": {"weights": "v2"},
    "dtype": {"dtype": "float16"},
    "heads and widths swapped": {"kv_heads": 32, "head_dim": 4},
    "v_head_dim": {"v_head_dim": 40},
    "page_tokens": {"page_tokens": 5},
    "layers": {"layers": 4},
    "first_layer": {"first_layer": 3},
    "salt": {"salt": "tenant"},
}


@pytest.mark.parametrize(
    "change", [c if c in ("name", "salt") else pytest.param(c, marks=pytest.mark.suite) for c in SAME_EXTENT]
)
def test_models_of_equal_extents_share_a_directory_and_no_page(slab: Path, change: str) -> None:
    mine, theirs = make_config(slab, ssd=16), make_config(slab, ssd=16, model=MHA | SAME_EXTENT[change])
    assert layout_of(mine["model"]).extent_bytes == layout_of(theirs["model"]).extent_bytes
    tokens = prompt(1, 5, extra=8)
    step = theirs["model"]["page_tokens"]
    with Child(serve, mine, [(tokens, "")]) as first:
        assert first.receive() == [0]
        first.end()
    with Child(serve, theirs, [(tokens, ""), (tokens, "")]) as second:
        assert second.receive() == [0, (len(tokens) - 1) // step * step]
        assert set(second.receive()) <= {"absent"}
        second.end()
    with Child(serve, mine, [(tokens, "")]) as third:
        assert third.receive() == [(len(tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS]
        assert set(third.receive()) <= {"absent"}
        third.end()


def test_salts_share_no_page(slab: Path) -> None:
    config, tokens = make_config(slab, ssd=32), prompt(1, 4, extra=1)
    with Child(serve, config, [(tokens, ""), (tokens, "a"), (tokens, "b")]) as first:
        assert first.receive() == [0, 0, 0]
        first.end()
    with Child(serve, config, [(tokens, "a"), (tokens, "c"), (tokens, "")]) as second:
        assert second.receive() == [16, 0, 16]
        second.end()


def test_a_directory_of_another_extent_size_is_refused_and_left_alone(slab: Path) -> None:
    mine, theirs = make_config(slab), make_config(slab, model=MHA | {"page_tokens": 8})
    tokens = prompt(1, 5)
    with Child(serve, mine, [(tokens, "")]) as first:
        first.receive()
        first.end()
    before = (slab / "slab-0.bin").read_bytes()
    with pytest.raises(ExtentSizeError, match=r"8,192 .*12,288") as refusal:
        CacheEngine.from_config(theirs)
    assert str(slab) in refusal.value.hint
    assert (slab / "slab-0.bin").read_bytes() == before
    with Child(serve, mine, [(tokens, "")]) as again:
        assert again.receive() == [4 * PAGE_TOKENS]
        again.end()


# -- bytes after a restart ---------------------------------------------------------------------------------------------

FLOAT8 = "float8_e4m3fn"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", FLOAT8, "float8_e5m2"])
@pytest.mark.parametrize("model", [MHA, MLA, EXTRA], ids=["mha", "mla", "extra planes"])
def test_bytes_come_back_bit_for_bit_in_another_process(slab: Path, model: dict[str, Any], dtype: str) -> None:
    """Through GPU, CPU and SSD in one process, then from the SSD in the next. The bytes are any, NaNs included."""
    config, tokens = make_config(slab, model=model | {"dtype": dtype}, gpu=10, cpu=8), prompt(3, 6, extra=1)
    with Child(through_every_tier, config, tokens) as first:
        assert first.receive() == [["gpu"], ["cpu"], ["ssd"]]
        first.end()
    with Child(read_after_restart, config, tokens) as second:
        assert second.receive() == (len(tokens) - 1, ["ssd"])
        second.end()
