"""The part of a configuration for each pool of a hybrid model's groups: its layers, and its share of every size.

Groups in the same planes are one pool, served by one engine. The sizes of a file are for all pools together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from gdscache.config import SIZES, Config
from gdscache.config.file import dotted
from gdscache.errors import CapacityError, InvalidValueError
from gdscache.groups.base import Group
from gdscache.groups.pools import Pool, interval, plane_pages, pools_of, rows_of, shares
from gdscache.limits import SMALL_BATCH_BYTES
from gdscache.pages.layout import PageLayout
from gdscache.sizes import format_size

POOL_PREFIX = "groups-"  # of a pool's directory below `ssd.path` and `status.path`; the numbers of its groups follow
PLAIN_DIRECTORY = "plain"  # below `ssd.path`: of pages that do not fit into packed extents
PLAIN_PARTS = 256  # such pages have one part of each size of `_PLAIN`, of small sizes more: see `plain_parts`
_PLAIN = (("cpu", "capacity"), ("ssd", "capacity"), ("ssd", "endurance"), ("host_buffer",))

# Sizes that pools share beside those of `tiers`, and the number of pages that a pool's share must hold.
_SHARED = {key: pages for key, (pages, _) in SIZES.items() if key != ("gpu", "capacity")}


@dataclasses.dataclass(frozen=True)
class PoolPart:
    """One pool. `config`: of an engine for its layers alone. `share`: of every size of `whole`, more than 0 and at most
    1."""

    pool: Pool
    groups: tuple[Group, ...]
    share: float
    config: Config
    whole: Config

    @property
    def names(self) -> str:
        return ", ".join(group.name for group in self.groups)

    @contextlib.contextmanager
    def shares(self) -> Iterator[None]:
        """A `CapacityError` inside is of a size's share, and says so."""
        try:
            yield
        except CapacityError as error:
            where = f"groups {self.names}, which have {100 * self.share:.1f} % of each size"
            raise CapacityError(f"{where}: {error.message}", error.hint) from None


def pool_parts(config: Config) -> list[PoolPart]:
    """The parts of a configuration, in the order of the pools; none if the model has no groups. None has `metrics`:
    their common owner serves these.

    A single pool has the configuration itself. Several have directories of their own below `ssd.path`, `ssd.stripes`
    and `status.path`. Raises `CapacityError` if the share of a size holds no page, and `InvalidValueError` if several
    engines would bind `events.endpoint`.
    """
    groups = config.model.layer_groups()
    pools = pools_of(groups)
    if not pools:
        return []
    layouts, alone = config.model.pool_layouts, len(pools) == 1
    models = [_model(config, groups, pool, layout, alone=alone) for pool, layout in zip(pools, layouts, strict=True)]
    if alone:
        whole = Config.from_dict({**config.dump(), "model": models[0], "metrics": None})
        return [PoolPart(pools[0], groups, 1.0, whole, config)]
    if config.events is not None and config.events.endpoint is not None:
        raise InvalidValueError(
            f"events.endpoint is {config.events.endpoint}, and groups with planes of their own are several engines",
            "leave events.endpoint out, and publish the events of on_events()",
        )
    extents, every = [layout.extent_bytes for layout in layouts], window_every(config)
    each = shares(groups, pools, extents, every, config.store.prompt_tokens)
    own = [tuple(groups[g] for g in pool.groups) for pool in pools]
    _check(config, own, each, extents)
    page_bytes = [layout.plane_bytes for layout in layouts]
    pages = plane_pages(groups, pools, page_bytes, config.gpu.capacity, every)
    if not all(pages):
        raise CapacityError(
            f"gpu.capacity is {config.gpu.capacity:,} bytes, and a page of each group has {sum(page_bytes):,}",
            "raise gpu.capacity",
        )
    found: list[PoolPart] = []
    for pool, some, model, share, count, size, extent in zip(
        pools, own, models, each, pages, page_bytes, extents, strict=True
    ):
        part = Config.from_dict(_part(config, pool, model, share, max(count * size, extent)))
        found.append(PoolPart(pool, some, share, part, config))
    return found


def plain_parts(config: Config, shards: int = 1, replicas: int = 1) -> tuple[Config, Config]:
    """The part of a configuration for packed pages, and that for pages that do not fit into packed extents, which has
    the rest: of each size a 256th, or eight pages if these are at most a sixteenth; a sixteenth of `host_buffer`, since
    late I/O takes its slots. `shards`: of a page, each with an extent. `replicas`: ranks with equal bytes, each with
    slots of `host_buffer` of its own. Raises `CapacityError` if a size has no room for both, or `store.queue` has none
    for a plain page, and `InvalidValueError` where no tier takes plain pages."""
    if config.tiers and config.cpu is None and config.ssd is None:
        raise InvalidValueError(
            f"model.pack is on, and pages that cannot be packed have no tier: {config.tiers[0].tier} gets none",
            "add a section cpu or ssd, or set model.pack to off",
        )
    extent = config.model.layout().packed_as(packed=False).extent_bytes * shards
    if config.store.queue < extent // shards:
        raise CapacityError(
            f"store.queue is {format_size(config.store.queue)}, and a page that cannot be packed has "
            f"{format_size(extent // shards)}",
            "raise store.queue, or set model.pack to off",
        )
    packed, plain = config.dump(), config.dump()
    for path, size in shared_sizes(config):
        if path not in _PLAIN:
            continue
        buffer = path == ("host_buffer",)
        few = size // 16 if buffer else min(size // 16, 8 * extent)
        least = _SHARED[path] * extent * (replicas if buffer else 1)
        share = max(size // PLAIN_PARTS, few, least)
        if size - share < least:
            raise CapacityError(
                f"{dotted(path)} is {format_size(size)}, of which {format_size(share)} are for pages that cannot be "
                f"packed: {format_size(size - share)} are left, and {format_size(least)} are needed",
                f"raise {dotted(path)}, or set model.pack to off",
            )
        set_size(packed, path, size - share)
        set_size(plain, path, share)
    plain |= {"model": {**plain["model"], "pack": "off"}, "tiers": [], "metrics": None, "events": None, "status": None}
    put_below(plain, config, PLAIN_DIRECTORY)
    return Config.from_dict(packed), Config.from_dict(plain)


def window_every(config: Config) -> int:
    """Tokens of a prompt between two stored windows or states; 0: only where prompts end or part."""
    groups = config.model.layer_groups()
    if config.store.window_every is not None or not groups:
        return config.store.window_every or 0
    return interval(groups, pools_of(groups), [layout.extent_bytes for layout in config.model.pool_layouts])


def shared_sizes(config: Config) -> Iterator[tuple[tuple[int | str, ...], int]]:
    """The given sizes that several engines share, by their keys."""
    data = config.dump()
    for path in (*_SHARED, *(("tiers", number, "capacity") for number in range(len(config.tiers)))):
        value: Any = data
        for key in path:
            value = None if value is None else value[key]
        if isinstance(value, int):
            yield path, value


def put_below(data: dict[str, Any], config: Config, name: str) -> None:
    """Name the directories `name` below those of `config`'s SSD in a part of it as plain data."""
    if config.ssd is not None:
        data["ssd"]["path"] = config.ssd.path / name
        data["ssd"]["stripes"] = [path / name for path in config.ssd.stripes]


def set_size(data: Any, path: Sequence[int | str], value: int) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def _check(config: Config, own: Sequence[Sequence[Group]], each: Sequence[float], extents: Sequence[int]) -> None:
    small, hints = [], []
    for path, size in shared_sizes(config):
        pages, key = _SHARED.get(path, 1), dotted(path)
        least = max(math.ceil(pages * extent / share) for share, extent in zip(each, extents, strict=True))
        short = [
            f"{', '.join(group.name for group in some)} {100 * share:.1f} % "
            f"({int(size * share):,} bytes of {pages * extent:,})"
            for some, share, extent in zip(own, each, extents, strict=True)
            if size * share < pages * extent
        ]
        if short:
            held = "one page" if pages == 1 else f"{pages} pages"
            small.append(f"{key} is {format_size(size)}, whose shares are to hold {held}: {'; '.join(short)}")
            hints.append(f"{key} to {format_size(-(-least // (1 << 20)) << 20)}")
    if small:
        raise CapacityError(
            ". ".join(small), f"raise {', '.join(hints)} or more, or lower the page_tokens of these groups"
        )


def _part(config: Config, pool: Pool, model: dict[str, Any], share: float, planes: int) -> dict[str, Any]:
    """The configuration of a pool as plain data. `planes`: bytes of its part of `gpu.capacity`."""
    data = {**config.dump(), "model": model, "metrics": None}
    data["gpu"]["capacity"] = planes
    for path, size in shared_sizes(config):
        set_size(data, path, int(size * share))
    below = POOL_PREFIX + "-".join(map(str, pool.groups))
    if config.status is not None:
        data["status"]["path"] = config.status.path / below
    put_below(data, config, below)
    return data


def _model(config: Config, groups: Sequence[Group], pool: Pool, layout: PageLayout, *, alone: bool) -> dict[str, Any]:
    """The section `model` of a pool. If it is not `alone`, its layers count from 0, and its salt contains the
    model's."""
    section: dict[str, Any] = config.model.model_dump(mode="json")
    if section["pack"] == "on" and not layout.packed:
        section["pack"] = "off"
    page_tokens = rows_of(groups, pool, section["page_tokens"])
    if alone:
        return {**section, "page_tokens": page_tokens}
    at = {layer: place for place, layer in enumerate(pool.layers)}
    planes = []
    for plane in section["planes"]:
        own = None if plane["layers"] is None else [at[layer] for layer in plane["layers"] if layer in at]
        if own is None or own:
            planes.append({**plane, "layers": own})
    told = {
        "salt": section["salt"],
        "model_layers": section["layers"],
        "model_groups": [group.describe() for group in groups],
    }
    return {
        **section,
        "layers": len(pool.layers),
        "planes": planes,
        "groups": [
            {**section["groups"][g], "layers": list(pool.local(groups[g])), "page_tokens": groups[g].page_tokens}
            for g in pool.groups
        ],
        "salt": json.dumps(told),
        "page_tokens": page_tokens,
    }


SEGMENTS = 3  # least number of pages in half of the staging ring for copies and kernels to overlap
_BOUNCED_BYTES = 32 << 20  # for half of the bounce reserve, so that reads are large enough


def concerns(
    config: Config, gpu_pages: int, *, on_gpu: bool, whole: Config | None = None, pool: PoolPart | None = None
) -> list[str]:
    """Settings that are allowed but probably unintended, one sentence each, with the figures and the setting to change.

    `gpu_pages`: pages that the planes hold, attached or owned. `on_gpu`: they lie on a GPU, not in host memory.
    `whole`: the configuration that `config` has a part of: its sizes are advised. `pool`: the engine's, if a model has
    several. The sentences about all of them are those of the first.
    """
    whole = (whole or config) if pool is None else pool.whole
    found = [*_pools(config, gpu_pages, whole), *_buffers(config, on_gpu, whole)]
    if pool is not None and pool.share < 1:
        found = [f"groups {pool.names}: {sentence}" for sentence in found]
    return found if pool is not None and 0 not in pool.pool.groups else [*found, *without_sizes(whole)]


def _advised(whole: Config, config: Config, key: str, size: int) -> str:
    """The value of a key of `whole` with which `config`, a part of it, has `size` bytes."""
    given, own = (dict(shared_sizes(one))[tuple(key.split("."))] for one in (whole, config))
    unit = 10 if given == own else 20
    return format_size(-(-size * given // (own << unit)) << unit)


def _pools(config: Config, gpu_pages: int, whole: Config) -> Iterator[str]:
    extent = config.model.layout().extent_bytes
    states = [group.keeps == "state" for group in config.model.layer_groups()]
    # A state's planes have as many blocks as those of other layers, and few of them hold a state.
    pools = [] if states and all(states) else [("the GPU's planes", gpu_pages, "gpu.capacity")]
    if config.cpu is not None:
        pools.append(("the CPU pool", config.cpu.capacity // extent, "cpu.capacity"))
    if config.ssd is not None:
        pools.append(("the SSD", config.ssd.capacity // extent, "ssd.capacity"))
    for (above, more, _), (below, fewer, setting) in itertools.pairwise(pools):
        if fewer < more:
            yield (
                f"{below} holds {_pages(fewer)} and {above} {more:,}: most pages evicted from {above} "
                f"have left {below} as well. Raise {setting} above {_advised(whole, config, setting, more * extent)}"
            )


def _buffers(config: Config, on_gpu: bool, whole: Config) -> Iterator[str]:
    layout = config.model.layout()
    extent, below = layout.extent_bytes, config.cpu is not None or config.ssd is not None
    fit = config.gpu.staging // 2 // extent
    if below and on_gpu and fit < SEGMENTS:
        size = _advised(whole, config, "gpu.staging", 2 * SEGMENTS * extent)
        yield (
            f"half of gpu.staging holds {_pages(fit)} of {format_size(extent)}: copies and kernels overlap only if it "
            f"holds {SEGMENTS}. Raise gpu.staging to {size}, or lower model.page_tokens"
        )
    bounced = config.host_buffer // 2 // extent
    if config.ssd is not None and bounced < 2:
        yield (
            f"half of host_buffer holds {_pages(bounced)}: pages pass through it one at a time. "
            f"Raise host_buffer to {_advised(whole, config, 'host_buffer', 2 * max(4 * extent, _BOUNCED_BYTES))}"
        )
    if below and config.store.queue < (least := min(SMALL_BATCH_BYTES, 16 * extent)):
        yield (
            f"store.queue holds {_pages(config.store.queue // extent)}: long "
            f"prompts are stored in part. Raise it above {_advised(whole, config, 'store.queue', least)}"
        )


def without_sizes(config: Config) -> Iterator[str]:
    """The `concerns` that no page's size has a part in."""
    ssd = config.ssd
    if ssd is not None and ssd.endurance is not None and ssd.endurance < ssd.capacity // 100:
        yield (
            f"ssd.endurance is {format_size(ssd.endurance)} a day: filling ssd.capacity once takes "
            f"{ssd.capacity // ssd.endurance:,} days. Raise it, or lower ssd.capacity"
        )
    if ssd is None and not config.tiers:
        for key in ("write_policy", "admission"):
            value = getattr(config.store, key)
            if value != type(config.store).model_fields[key].default:
                yield f"store.{key} is {value}, but there is no SSD tier: it has no effect. Add ssd"
    if (events := config.events) is not None and events.endpoint is None and (events.replay or events.topic):
        key = "replay" if events.replay else "topic"
        yield f"events.{key} is given, but no endpoint: it has no effect. Add events.endpoint"
    if ssd is not None and config.status is not None:
        yield f"status.path has no effect: the status page is in {ssd.path}. Take status out"


def _pages(n: int) -> str:
    return f"{n:,} page" if n == 1 else f"{n:,} pages"
