"""Every number of the configuration: at its bounds the engine works and closes, beyond them it is refused by its key.

The numbers are found by walking the models, so a new one is tested too, or this file fails for want of its bounds.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import annotated_types
import pytest
from pydantic.fields import FieldInfo

from gdscache import CacheEngine
from gdscache.config import Config
from gdscache.config.file import known_keys
from gdscache.errors import ConfigError, GdsCacheError, GeometryError, InvalidValueError, NoMemoryError
from gdscache.limits import MAX_COUNT, MAX_EXTENT_BYTES, MAX_LAYERS, MAX_SECONDS
from gdscache.sizes import MAX_SIZE

from tests.support.helpers import MHA, WAIT, Host, make_config, prompt, settle  # isort: skip

SOAK = pytest.mark.soak


class Bounds(NamedTuple):
    """Of a number: the least and the greatest that pass the check of its field. `open_*`: the bound itself does not."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False
    whole: bool = True

    @property
    def extremes(self) -> tuple[float, float]:
        """The least and the greatest that may be."""
        return (self.up(self.low) if self.open_low else self.low), (
            self.down(self.high) if self.open_high else self.high
        )

    def up(self, x: float) -> float:
        """The next number above."""
        return x + 1 if self.whole else math.nextafter(x, math.inf)

    def down(self, x: float) -> float:
        """The next number below."""
        return x - 1 if self.whole else math.nextafter(x, -math.inf)


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _number(field: FieldInfo) -> type | None:
    kinds = [part for part in _parts(field.annotation) if part in (int, float)]
    return kinds[0] if kinds else None


def _bounds(field: FieldInfo) -> Bounds:
    """From what pydantic was told of a number; a size has those of `sizes`."""
    told = [*field.metadata, *(m for part in _parts(field.annotation) for m in getattr(part, "__metadata__", ()))]
    flat = [m for item in told for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
    low = next((m for m in flat if isinstance(m, (annotated_types.Ge, annotated_types.Gt))), None)
    high = next((m for m in flat if isinstance(m, (annotated_types.Le, annotated_types.Lt))), None)
    if low is None and high is None and any("parse_size" in repr(m) for m in flat):
        return Bounds(0, MAX_SIZE)
    assert low is not None, "a number without a least value"
    assert high is not None, "a number without a greatest value"
    open_low, open_high = isinstance(low, annotated_types.Gt), isinstance(high, annotated_types.Lt)
    return Bounds(
        low.gt if open_low else low.ge,  # type: ignore[union-attr]
        high.lt if open_high else high.le,  # type: ignore[union-attr]
        open_low,
        open_high,
        _number(field) is int,
    )


FIELDS = {key: field for key, field in known_keys(Config) if _number(field) is not None}
KEYS = sorted(FIELDS)
PLANES = ("model.planes[].shape", "model.planes[].layers")
GROUPS = tuple(key for key in KEYS if key.startswith("model.groups[]."))


def put(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of a configuration with one key changed; `x[].y` is `y` of the first of `x`, a list with this element."""
    config = {**config}
    section, _, name = key.rpartition(".")
    if section == "tiers[]":
        config["tiers"] = [{"tier": "tests.support.dict_tier:DictTier", "capacity": "1MiB", name: value}]
    elif section == "model.groups[]":
        group = {"name": "g", "layers": [0], name: [value] if name == "layers" else value}
        config["model"] = {**config["model"], "groups": [group]}
    elif section.endswith("[]"):
        plane = {"name": "p", "shape": [8], name: [value]}
        config["model"] = {
            **{k: v for k, v in MHA.items() if k in ("name", "layers", "dtype", "page_tokens")},
            "planes": [plane],
        }
    elif section:
        config[section] = {**config.get(section, {}), name: value}
    else:
        config[name] = value
    return config


def wrong_values(key: str) -> list[Any]:
    """What no field takes, and what is just beyond this one's bounds."""
    bounds = _bounds(FIELDS[key])
    low, high = bounds.extremes
    beyond = [bounds.down(low), bounds.up(high), low - 1, high + 1]
    far = [-1, -(1 << 63), 1 << 63, 1 << 64, 10**30, 10**400, 10**5000, -(10**5000)]
    far = [value for value in far if not low <= value <= high]
    return [*beyond, *far, math.nan, math.inf, -math.inf, 1e300, -1e300, True, "nan", "1e10", [], {}]


def base(path: Path | None = None) -> dict[str, Any]:
    config = make_config(path or Path("/nowhere"))
    config["model"] = dict(config["model"])
    return config


# -- beyond the bounds -----------------------------------------------------------------------------------------------


def test_every_number_has_bounds() -> None:
    assert len(KEYS) >= 20
    for key in KEYS:
        low, high = _bounds(FIELDS[key]).extremes
        assert -math.inf < low < high < math.inf, key
    sections = {"", "model", "model.groups[]", "model.planes[]", "gpu", "cpu", "ssd", "tiers[]", "store"}
    assert {key.rpartition(".")[0] for key in KEYS} == sections | {"log", "metrics"}


@pytest.mark.parametrize("key", KEYS)
def test_what_is_beyond_its_bounds_is_refused_by_its_key(key: str) -> None:
    for value in wrong_values(key):
        with pytest.raises(ConfigError) as caught:
            Config.from_dict(put(base(), key, value))
        message = str(caught.value)
        assert key.replace("[]", "[0]") in message, message[:300]
        assert len(message) < 2000, f"{key}: a message of {len(message)} characters"
    # For the sizes it has both bounds, for others the one that the value is beyond.
    bounds = _bounds(FIELDS[key])
    low, high = bounds.extremes
    for value, bound in ((bounds.up(high), bounds.high), (bounds.down(low), bounds.low)):
        with pytest.raises(InvalidValueError) as caught:
            Config.from_dict(put(base(), key, value))
        message = caught.value.message
        assert repr(value) in message, message
        assert f"{bound:g}" in message or str(bound) in message, message


def test_a_page_is_bounded_by_what_one_request_moves() -> None:
    """Each size is right alone; together they are a page that no system call reads."""
    with pytest.raises(GeometryError, match=rf"model\.page_tokens.*{MAX_EXTENT_BYTES:,}"):
        Config.from_dict(put(base(), "model.head_dim", MAX_COUNT))
    fits = {"name": "m", "layers": 1, "page_tokens": 1, "planes": [{"name": "p", "shape": [1]}]}
    fits |= {"dtype": "uint8"}
    for nbytes, refused in ((MAX_EXTENT_BYTES, False), (MAX_EXTENT_BYTES + 1, True)):
        fits["planes"] = [{"name": "p", "shape": [nbytes]}]
        config = {"model": fits, "gpu": {"capacity": "8GiB", "staging": "8GiB"}}
        if refused:
            with pytest.raises(GeometryError, match="reads and writes at most"):
                Config.from_dict(config)
        else:
            assert Config.from_dict(config).model.layout().extent_bytes == MAX_EXTENT_BYTES


def test_times_fit_the_waits_that_they_are_for() -> None:
    """A deadline, and a sum of several, is a wait that the system takes."""
    assert 4 * MAX_SECONDS < threading.TIMEOUT_MAX
    assert MAX_LAYERS - 1 in Bounds(0, MAX_LAYERS, open_high=True).extremes


@pytest.mark.parametrize("device", ["cuda:99999999999999999999", "cuda:128", "cuda:01", "cuda:-1", "cuda:1e3"])
def test_a_device_that_torch_would_take_for_another_one_is_refused(device: str) -> None:
    """torch makes device -128 of cuda:128."""
    with pytest.raises(InvalidValueError, match=r"gpu\.device.*cuda:N"):
        Config.from_dict(put(base(), "gpu.device", device))
    assert Config.from_dict(put(base(), "gpu.device", "cuda:127")).gpu.device == "cuda:127"


# -- at the bounds ---------------------------------------------------------------------------------------------------

# Where a number's least value is below what the rest of the configuration needs, the least that is not: in pages.
PAGE = 8192  # bytes of an extent of the tests' model
LEAST = {
    "gpu.capacity": PAGE, "gpu.staging": 2 * PAGE, "cpu.capacity": PAGE, "ssd.capacity": PAGE,
    "tiers[].capacity": PAGE, "ssd.endurance": 8 * PAGE, "store.queue": PAGE, "host_buffer": 2 * PAGE,
}  # fmt: skip
# What would be that much memory, disk or work; what is refused there is tested by itself.
CAPACITIES = ("gpu.capacity", "gpu.staging", "cpu.capacity", "ssd.capacity", "tiers[].capacity", "host_buffer")
SHAPES = ("model.layers", "model.page_tokens", "model.kv_heads", "model.head_dim", "model.v_head_dim")
OTHERS = ("model.kv_lora_rank", "model.rope_dim", *PLANES, *GROUPS)  # of other kinds of models
THREADS = {"ssd.threads": 64}  # instead of 1,024, which is much for a test machine
TOGETHER = [key for key in KEYS if key not in SHAPES and key not in OTHERS]


def extreme(key: str, *, most: bool) -> Any:
    low, high = _bounds(FIELDS[key]).extremes
    if key in LEAST and not most:
        return LEAST[key]
    return THREADS.get(key, high) if most else low


def works(config: dict[str, Any], seconds: float | None = 0.0) -> None:
    """Open, store, look up, load, prefetch, drain, close: each ends in bounded time, whatever it brings."""
    host = Host(config, blocks=16)
    with host.engine as engine:
        first = prompt(1, 2)
        handle = host.store(first)
        handle.result(WAIT)
        engine.drain(WAIT)
        hit = engine.lookup(first)
        load = engine.load(hit, host.take(len(hit.pages)))
        for limit in (None, WAIT):
            try:
                load.wait(0, limit)
                load.result(limit)
            except GdsCacheError:  # a deadline of no time at all
                assert config["deadline"] < 1
        load.release_event.synchronize(WAIT)
        with engine.prefetch(first) as prefetch:
            prefetch.wait(seconds)
        prefetch.result(WAIT)
        settle(engine)


def merged(path: Path, *, most: bool) -> dict[str, Any]:
    config = base(path)
    for key in TOGETHER:
        if key not in CAPACITIES or not most:
            config = put(config, key, extreme(key, most=most))
    return config


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seconds", [0.0, None, MAX_SECONDS], ids=["at once", "the deadline", "for ever"])
@pytest.mark.parametrize("most", [False, True], ids=["least", "most"])
def test_an_engine_with_all_numbers_at_their_bounds_works_and_closes(
    tmp_path: Path, *, most: bool, seconds: float | None
) -> None:
    config = merged(tmp_path, most=most)
    if not most:
        config["deadline"] = WAIT  # of its own below: with none, what is waited for is not there
    works(config, seconds)


@pytest.mark.suite
@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_the_other_write_policies_close_with_the_longest_deadlines(tmp_path: Path, policy: str) -> None:
    config = merged(tmp_path, most=True)
    config["store"]["write_policy"] = policy
    works(config)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seconds", [5e-324, 1e-9], ids=["least", "a nanosecond"])
def test_deadlines_of_no_time_drop_and_miss_and_nothing_hangs(tmp_path: Path, seconds: float) -> None:
    config = base(tmp_path)
    config["deadline"] = seconds
    works(config)


def bounded(key: str) -> list[tuple[str, bool]]:
    return [(key, False), (key, True)] if key not in CAPACITIES else [(key, False)]


CROSS = [pair for key in TOGETHER for pair in bounded(key)]


@SOAK
@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back", "never"])
@pytest.mark.parametrize(("key", "most"), CROSS)
def test_an_engine_with_one_number_at_its_bound_works_and_closes(
    tmp_path: Path, key: str, policy: str, *, most: bool
) -> None:
    config = base(tmp_path)
    config["store"]["write_policy"] = policy
    config = put(config, key, extreme(key, most=most))
    works(config)


SMALL_SHAPE = {"name": "m", "layers": 1, "page_tokens": 1, "kv_heads": 1, "head_dim": 1, "dtype": "uint8"}


@pytest.mark.suite
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("shape", "pages"),
    [
        ({}, 16), ({"layers": MAX_LAYERS}, 3), ({"page_tokens": 512}, 16), ({"kv_heads": 1 << 16}, 16),
        ({"head_dim": 1 << 20, "v_head_dim": 1}, 4),
    ],
    ids=["least", "layers", "page_tokens", "heads", "a wide row"],
)  # fmt: skip
def test_shapes_at_their_bounds(tmp_path: Path, shape: dict[str, int], pages: int) -> None:
    """What a page may be at most is 2 GiB, which a test does not move: each size alone, as far as a test goes."""
    model = SMALL_SHAPE | shape
    config = make_config(tmp_path, model=model, gpu=pages, cpu=pages, ssd=pages, bounce=4, queue=pages)
    host = Host(config, blocks=4)
    with host.engine as engine:
        tokens = prompt(1, 2, page_tokens=model["page_tokens"])
        host.store(tokens).result(WAIT)
        assert host.load(tokens).tokens == len(tokens)
        settle(engine)


# -- more than the machine has ---------------------------------------------------------------------------------------

HUGE = [1 << 44, 1 << 55, MAX_SIZE]


def refused_open(config: dict[str, Any], error: type[GdsCacheError], *words: str) -> None:
    """Opening raises what names the words, at once and with nothing left behind: it opens then."""
    threads = threading.active_count()
    with pytest.raises(error) as caught:
        CacheEngine.from_config(config)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.hint
    assert threading.active_count() == threads


@pytest.mark.parametrize("nbytes", HUGE)
@pytest.mark.parametrize("key", ["gpu.capacity", "cpu.capacity", "host_buffer"])
def test_more_memory_than_there_is_names_the_key_and_both_figures(tmp_path: Path, key: str, nbytes: int) -> None:
    config = base(tmp_path)
    refused_open(put(config, key, nbytes), NoMemoryError, f"{key} asks for", "available", f"lower {key}")
    CacheEngine.from_config(config).close()


@pytest.mark.parametrize("nbytes", HUGE)
def test_more_disk_than_there_is_names_the_figures(tmp_path: Path, nbytes: int) -> None:
    refused_open(put(base(tmp_path), "ssd.capacity", nbytes), GdsCacheError, "ssd.capacity")
    CacheEngine.from_config(base(tmp_path)).close()


def test_a_limit_of_a_group_of_processes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container it is the cgroup's limit, and its file pages count as free."""
    from gdscache.cuda import host_memory

    for group, files in {
        "v2": {"memory.max": "1048576", "memory.current": "600000", "memory.stat": "inactive_file 100000\nanon 5\n"},
        "top": {"memory.max": "max", "memory.current": "1", "memory.stat": ""},
        "v1": {
            "memory.limit_in_bytes": "2000000",
            "memory.usage_in_bytes": "1500000",
            "memory.stat": "total_active_file 1000\n",
        },
    }.items():
        (tmp_path / group).mkdir()
        for name, text in files.items():
            (tmp_path / group / name).write_text(text)
    assert host_memory.host_bytes([tmp_path / "v2", tmp_path / "top"]) == 1048576 - 600000 + 100000
    assert host_memory.host_bytes([tmp_path / "v1"]) == 501000
    left = functools.partial(host_memory.host_bytes, [tmp_path / "v1"])
    monkeypatch.setattr(host_memory, "host_bytes", left)
    refused_open(put(base(), "cpu.capacity", 4 << 20), NoMemoryError, "cpu.capacity", "501,000 bytes")
    monkeypatch.undo()
    there = host_memory.host_bytes()
    assert there is None or there > 0


def test_a_relative_path_without_a_current_directory_is_refused_and_an_absolute_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    CacheEngine.from_config(make_config(tmp_path / "ssd")).close()
    refused_open(make_config(Path("here")), InvalidValueError, "ssd.path", "no current directory")
