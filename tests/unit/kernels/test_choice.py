"""The choice of a path between host and GPU, and the calibration it is made from: arithmetic, and one small file."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import math
import pwd
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.kernels import choice as paths
from gdscache.kernels.choice import COPY_ENGINE_FROM, Calibration, Choice, Direction, Paths, Rates
from gdscache.runtime import files
from tests.support.rates import DOWN, UP

KEY = {
    "gpu": "NVIDIA H200", "gpu_uuid": "GPU-1", "driver": "13000", "copy_engine": "batch_13", "gdscache": "0.1.0",
    "kernels": "0123456789abcdef",
}  # fmt: skip
MEASURED = Calibration(UP, DOWN, KEY, 0.5)
CHOICES: list[Choice] = ["staged", "zero_copy", "copy_engine"]
BOTH: list[Direction] = ["load", "store"]

by_size = st.dictionaries(st.integers(1, 1 << 25), st.floats(0.001, 1000), min_size=1, max_size=9)
rates = st.builds(Rates, by_size, by_size, st.floats(0.001, 1000))
pieces = st.integers(1, 1 << 30)
runs = pieces | st.integers(COPY_ENGINE_FROM - 2, 4 * COPY_ENGINE_FROM)


def rising(given: dict[int, float]) -> dict[int, float]:
    """The same sizes with rates that never fall."""
    return dict(zip(sorted(given), sorted(given.values()), strict=True))


def staging(by_size: dict[int, float], zero_copy: float = 1.0) -> Rates:
    """Rates where the copy engine alone is never worth it."""
    return Rates(by_size, {COPY_ENGINE_FROM: 0.001}, zero_copy)


def engine(by_size: dict[int, float]) -> Rates:
    """Rates where the copy engine alone is all that is worth it."""
    return Rates({4096: 0.001}, by_size, 0.001)


def automatic(load: Rates = UP, store: Rates = DOWN) -> Paths:
    return Paths("auto", "auto", lambda: Calibration(load, store, KEY, 0.5))


# --- rates -------------------------------------------------------------------------------------------------------


def test_between_sizes_and_outside_of_them() -> None:
    """Between two sizes the rate goes with the logarithm; above the largest it stays, and below the smallest each piece
    takes the smallest one's time."""
    assert UP.staging(8192) == pytest.approx(math.sqrt(3.0 * 12.0))
    assert UP.engine(2 * COPY_ENGINE_FROM) == pytest.approx(math.sqrt(44.0 * 52.0))
    assert UP.staging(1048577) == UP.staging(1 << 40) == 54.0
    assert UP.engine(16 * COPY_ENGINE_FROM + 1) == UP.engine(1 << 40) == 54.5
    assert [size / UP.staging(size) for size in (1, 512, 4095)] == pytest.approx([4096 / 3.0] * 3)
    large, sizes = engine({1 << 20: 50.0}), (COPY_ENGINE_FROM, COPY_ENGINE_FROM + 1, (1 << 20) - 1)
    assert [size / large.engine(size) for size in sizes] == pytest.approx([(1 << 20) / 50.0] * 3)


@given(by_size, runs)
def test_a_rate_lies_between_those_of_its_neighbours_and_is_measured_there(some: dict[int, float], piece: int) -> None:
    sizes = sorted(some)
    assert [staging(some).staging(size) for size in sizes] == pytest.approx([some[size] for size in sizes])
    around = [size for size in sizes if size <= piece][-1:] + [size for size in sizes if size >= piece][:1]
    low, high = (limit(some[size] for size in around) for limit in (min, max))
    if piece < sizes[0]:
        low = 0.0
    assert low * (1 - 1e-9) <= staging(some).staging(piece) <= high * (1 + 1e-9)
    if piece >= COPY_ENGINE_FROM:
        assert low * (1 - 1e-9) <= engine(some).engine(piece) <= high * (1 + 1e-9)


@given(by_size, st.integers(1, COPY_ENGINE_FROM - 1))
def test_for_small_pieces_the_copy_engine_alone_has_no_rate(some: dict[int, float], piece: int) -> None:
    assert engine(some).engine(piece) == 0.0
    assert engine(some).engine(COPY_ENGINE_FROM) > 0.0


# --- the choice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
def test_a_forced_path_is_taken_whatever_was_measured(choice: Choice) -> None:
    forced = Paths(choice, "auto", lambda: MEASURED)
    for size, sums, fused in itertools.product((1, 1 << 30), (False, True), (False, True)):
        assert forced.choose("load", size, size, sums=sums, fused=fused) == choice
    assert forced.choose("store", 1 << 20, 1 << 20, sums=True, fused=True) == "staged"
    backwards = Paths("auto", choice, lambda: MEASURED)
    assert backwards.choose("store", 1, 1, sums=True, fused=True) == choice
    assert backwards.choose("load", 4096, 4096, sums=True, fused=True) == "zero_copy"


def test_nothing_is_measured_where_both_paths_are_forced() -> None:
    def never() -> Calibration:
        raise AssertionError("measured")

    forced = Paths("staged", "zero_copy", never)
    assert forced.calibration is None
    assert forced.describe()["calibration"] is None
    assert [forced.choose(direction, 1, 1, sums=False) for direction in BOTH] == ["staged", "zero_copy"]


@given(pieces, runs, st.booleans(), st.booleans(), st.sampled_from(BOTH))
def test_where_it_cannot_be_measured_all_is_staged(
    span: int, run: int, sums: bool, fused: bool, direction: Direction
) -> None:
    assert Paths("auto", "auto", lambda: None).choose(direction, span, run, sums=sums, fused=fused) == "staged"


def test_each_direction_has_its_own_rates() -> None:
    both = automatic()
    assert both.choose("load", 65536, 512, sums=True) == "zero_copy"
    assert both.choose("store", 65536, 512, sums=True) == "staged"
    swapped = automatic(DOWN, UP)
    for span in (1 << bits for bits in range(9, 26)):
        for direction, other in itertools.permutations(BOTH):
            assert swapped.choose(direction, span, 512, sums=True) == both.choose(other, span, 512, sums=True)
    fast, slow = engine({COPY_ENGINE_FROM: 50.0}), staging({4096: 50.0})
    for some, chosen in (
        (automatic(fast, slow), ["copy_engine", "staged"]),
        (automatic(slow, fast), ["staged", "copy_engine"]),
    ):
        assert [some.choose(direction, 1 << 20, 1 << 20, sums=True) for direction in BOTH] == chosen


def test_the_copy_engine_alone_where_the_planes_have_large_pieces_and_no_kernel_has_to_move_them() -> None:
    both = automatic()
    for direction in BOTH:
        assert both.choose(direction, 1 << 20, 1 << 20, sums=False) == "copy_engine"
        assert both.choose(direction, 1 << 20, 1 << 20, sums=False, fused=True) == "copy_engine"
        assert both.choose(direction, 1 << 20, 1 << 20, sums=True, fused=True) == "staged"
        assert both.choose(direction, 1 << 20, 16384, sums=False) == "staged"
    assert both.choose("store", 1 << 20, 1 << 20, sums=True) == "copy_engine"
    assert both.choose("load", 1 << 20, 1 << 20, sums=True) == "staged"  # it would only be as fast


@given(rates, pieces, runs, st.sampled_from(BOTH))
def test_checksums_of_the_kernel_that_moves_the_bytes_exclude_the_copy_engine_and_nothing_else(
    some: Rates, span: int, run: int, direction: Direction
) -> None:
    both = automatic(some, some)
    fused, free = (both.choose(direction, span, run, sums=True, fused=fused) for fused in (True, False))
    assert fused in ("staged", "zero_copy")
    assert fused == both.choose(direction, span, 1, sums=True)
    assert free in ("copy_engine", fused)
    unwanted, plain = (both.choose(direction, span, run, sums=False, fused=fused) for fused in (True, False))
    assert unwanted == plain


def test_a_kernel_must_win_clearly_where_the_copies_are_large_and_staging_where_they_are_small() -> None:
    for span, zero_copy, path in (
        (65536, 62.4, "staged"),
        (65536, 62.6, "zero_copy"),
        (65535, 47.5, "staged"),
        (65535, 47.7, "zero_copy"),
    ):
        assert automatic(staging({4096: 50.0}, zero_copy)).choose("load", span, 1, sums=True) == path


@pytest.mark.parametrize(
    ("direction", "sums", "last", "pieces", "enough", "too_little"),
    [
        ("load", False, False, 1, 52.6, 52.4),
        ("load", False, False, 2, 48.6, 48.4),
        ("load", False, True, 1, 45.1, 44.9),
        ("load", True, False, 1, 51.1, 50.9),
        ("load", True, True, 1, 51.1, 50.9),
        ("store", False, False, 1, 51.1, 50.9),
        ("store", False, True, 1, 51.1, 50.9),
        ("store", True, True, 1, 51.1, 50.9),
    ],
)
def test_the_copy_engine_may_lose_with_large_pieces_of_loads_and_the_last_layers_and_must_win_elsewhere(
    direction: Direction, sums: bool, last: bool, pieces: int, enough: float, too_little: float
) -> None:
    page, piece = 4 * COPY_ENGINE_FROM, pieces * COPY_ENGINE_FROM
    for staged, zero_copy in ((50.0, 1.0), (1.0, 50.0)):
        fast, slow = (Rates({page: staged}, {piece: rate}, zero_copy) for rate in (enough, too_little))
        assert automatic(fast, fast).choose(direction, page, piece, sums=sums, last=last) == "copy_engine"
        assert automatic(fast, fast).choose(direction, page, piece - 1, sums=sums, last=last) != "copy_engine"
        assert automatic(slow, slow).choose(direction, page, piece, sums=sums, last=last) != "copy_engine"


@given(by_size, st.floats(0.001, 1000))
def test_from_one_size_on_pieces_are_staged(some: dict[int, float], zero_copy: float) -> None:
    both = automatic(staging(rising(some), zero_copy))
    staged = [both.choose("load", 1 << bits, 1, sums=True) == "staged" for bits in range(9, 26)]
    assert staged == sorted(staged)


# --- the file ----------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the calibration is kept; not there yet."""
    found = tmp_path / "some" / "caches"
    monkeypatch.setenv("GDSCACHE_CACHE_DIR", str(found))
    return found


def plant(directory: Path, content: str | bytes) -> None:
    """Leave something where the calibration belongs."""
    directory.mkdir(parents=True, exist_ok=True)
    paths.cache_file(KEY).write_bytes(content if isinstance(content, bytes) else content.encode())


def changed(*where: str, value: object) -> str:
    """The file of `MEASURED` with one value put in the place of another."""
    data = json.loads(json.dumps(dataclasses.asdict(MEASURED)))
    inside = data
    for name in where[:-1]:
        inside = inside[name]
    inside[where[-1]] = value
    return json.dumps(data)


def without(direction: str, part: str) -> dict[str, Any]:
    """What `MEASURED` has of one direction, less a part."""
    rates = dataclasses.asdict(MEASURED)[direction]
    return {name: value for name, value in rates.items() if name != part}


def measured_anew(monkeypatch: pytest.MonkeyPatch, *, fresh: bool = False) -> bool:
    """Whether `calibrated` measures; what it returns is `MEASURED` in any case."""
    runs = []

    def measure(driver: object, key: dict[str, str]) -> Calibration:
        runs.append(key)
        return MEASURED

    monkeypatch.setattr(paths, "calibration_key", lambda driver, engine: dict(KEY))
    monkeypatch.setattr(paths, "measure", measure)
    nothing: Any = SimpleNamespace()
    assert paths.calibrated(nothing, nothing, fresh=fresh) == MEASURED
    return bool(runs)


def test_it_is_measured_once_and_again_when_asked(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_anew(monkeypatch)
    assert not measured_anew(monkeypatch)
    assert measured_anew(monkeypatch, fresh=True)


@pytest.mark.parametrize("part", KEY)
def test_another_machines_calibration_is_not_taken(directory: Path, part: str) -> None:
    paths.write(MEASURED)
    assert paths.read(KEY | {"more": ""}) is None
    assert paths.read({name: KEY[name] for name in KEY if name != "driver"}) is None
    other = KEY | {part: KEY[part] + "1"}
    assert paths.read(other) is None
    (directory / "calibration-GPU-1.json").rename(paths.cache_file(other))
    assert paths.read(other) is None
    paths.write(dataclasses.replace(MEASURED, key=other, seconds=0.75))
    found = paths.read(other)
    assert (found.key, found.seconds) == (other, 0.75)


WHOLE = json.dumps(dataclasses.asdict(MEASURED))
SIZE = str(COPY_ENGINE_FROM)
BROKEN: dict[str, str | bytes] = {
    "empty": "",
    "a list": "[]",
    "null": "null",
    "a text": '"x"',
    "no JSON": "{load: 3}",
    "not UTF-8": b'{"key": "\xff\xfe"}',
    "deep": "[" * 100_000,
    "another program's": '{"version": 1, "entries": []}',
    "nothing but the key": json.dumps({"key": KEY}),
    "load is a list": changed("load", value=[1, 2]),
    "store is null": changed("store", value=None),
    **{f"without {part}": changed("load", value=without("load", part)) for part in ("staged", "copy_engine")},
    "without zero_copy": changed("store", value=without("store", "zero_copy")),
    "no sizes": changed("load", "staged", value={}),
    "sizes are null": changed("store", "staged", value=None),
    "sizes are a list": changed("load", "copy_engine", value=[3.0]),
    **{f"a size of {size}": changed("store", "copy_engine", size, value=3.0) for size in ("0", "-4096", "4KiB", "4.5")},
    **{
        f"{' '.join(where)} is {value!r:.9}": changed(*where, value=value)
        for where in (("seconds",), ("load", "zero_copy"), ("store", "copy_engine", SIZE), ("load", "staged", "4096"))
        for value in (0.0, -1.0, math.nan, math.inf, 10**400, None, "fast", "nan", [])
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_measured_anew(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(directory, BROKEN[name])
    assert paths.read(KEY) is None
    assert measured_anew(monkeypatch)
    assert paths.read(KEY) == MEASURED


def test_a_torn_file_is_no_calibration(directory: Path) -> None:
    for length in range(len(WHOLE)):
        plant(directory, WHOLE[:length])
        assert paths.read(KEY) is None, length


# --- where it cannot be kept -------------------------------------------------------------------------------------


def survives(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is measured every time, with a line in the log and no more."""
    with caplog.at_level(logging.INFO, logger="gdscache"):
        assert measured_anew(monkeypatch)
        assert measured_anew(monkeypatch)
    assert paths.read(KEY) is None
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert all("cannot be kept" in record.message for record in caplog.records)


@pytest.mark.parametrize("spoiled", ["not writable", "a file", "a directory"])
def test_where_it_has_no_place_it_is_measured_each_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spoiled: str
) -> None:
    if spoiled == "not writable":
        monkeypatch.setenv("GDSCACHE_CACHE_DIR", "/proc")  # not even by root
    elif spoiled == "a file":
        directory.parent.mkdir()
        directory.write_text("mine")
    else:
        (paths.cache_file(KEY) / "theirs").mkdir(parents=True)
    survives(monkeypatch, caplog)
    assert spoiled != "a file" or directory.read_text() == "mine"
    assert spoiled != "a directory" or [*paths.cache_file(KEY).iterdir()] == [paths.cache_file(KEY) / "theirs"]


@contextlib.contextmanager
def breaks_off(error: BaseException) -> Iterator[None]:
    """The file's content is written in part, and then that is raised."""

    @contextlib.contextmanager
    def opened(*arguments: Any) -> Iterator[Any]:
        with open(*arguments) as file:

            def part(content: bytes) -> None:
                file.write(content[:100])
                file.flush()
                raise error

            yield SimpleNamespace(write=part)

    with mock.patch.object(files, "open", opened, create=True):
        yield


def test_a_full_disk_leaves_the_old_file_and_nothing_else(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths.write(MEASURED)
    full = OSError(errno.ENOSPC, "No space left on device")
    with breaks_off(full), caplog.at_level(logging.INFO, logger="gdscache"):
        paths.write(dataclasses.replace(MEASURED, seconds=0.75))
    assert "No space left" in caplog.text
    assert [file.name for file in directory.iterdir()] == ["calibration-GPU-1.json"]
    assert paths.read(KEY) == MEASURED


def test_an_interrupt_leaves_nothing_behind(directory: Path) -> None:
    with breaks_off(KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        paths.write(MEASURED)
    assert list(directory.iterdir()) == []


# --- where it is kept --------------------------------------------------------------------------------------------


def test_the_place_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GDSCACHE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    name = "calibration-GPU-1.json"
    assert paths.cache_file(KEY) == tmp_path / ".cache" / "gdscache" / name
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert paths.cache_file(KEY) == Path("/caches/gdscache") / name
    monkeypatch.setenv("GDSCACHE_CACHE_DIR", "~/mine")
    assert paths.cache_file(KEY) == tmp_path / "mine" / name
    monkeypatch.setenv("GDSCACHE_CACHE_DIR", "")
    assert paths.cache_file(KEY) == Path("/caches/gdscache") / name


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("HOME", "GDSCACHE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(FileNotFoundError, match="home"):
        paths.cache_file(KEY)
    survives(monkeypatch, caplog)


@pytest.mark.usefixtures("directory")
def test_a_file_system_without_locks_keeps_nobody_from_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(paths.fcntl, "flock", refuses)
    assert measured_anew(monkeypatch)
    assert not measured_anew(monkeypatch)
