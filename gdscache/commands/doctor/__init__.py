"""`gdscache doctor`: this machine's facts, its missing parts, and whether a configuration gets its settings.

Facts are collected first, each a value or a cause. Checks then judge the facts, one section a check. A fact that is
judged alone is collected as a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from gdscache.commands.console import version_of
from gdscache.commands.doctor import gpu
from gdscache.commands.doctor.facts import Asked, Facts, Found, Report, Row, attempt, defaults, tables
from gdscache.commands.doctor.storage import find_ssd, ssd_rows
from gdscache.config.pools import pool_parts
from gdscache.cuda.driver import CopyEngine, Driver
from gdscache.cuda.streams import resolve_device
from gdscache.errors import TierUnavailableError
from gdscache.integrations.settings import TRIED
from gdscache.kernels.jit import find_compiler
from gdscache.mooncake.client import load_package
from gdscache.mooncake.tier import MooncakeTier
from gdscache.sizes import about
from gdscache.tiers.base import DurableTier, tier_class

__all__ = ["CHECKS", "Asked", "Facts", "Report", "Row", "defaults", "examine", "find", "tables"]

Check = Callable[[Facts, Asked], Iterable[Row]]


def group_rows(facts: Facts, asked: Asked) -> Iterator[Row]:
    """A hybrid model's pools: the layer groups of each pool, and its share of every size."""
    parts = attempt(lambda: pool_parts(asked.config))
    if parts.value is None:
        yield Row("shares", parts.cause, "fail", parts.hint)
    for part in parts.value or ():
        kept = ", ".join(group.words for group in part.groups)
        yield Row(part.names, f"{kept}; {100 * part.share:.1f} % of each size", "ok", data=part.share)


def engine_rows() -> Iterator[Row]:
    """A row for each engine with an integration, from distribution metadata: nothing is imported. An untested version
    is no defect."""
    for engine, known in TRIED.items():
        found = {name: version for name in known if (version := version_of(name))}
        if not found:
            yield Row(engine, "not installed")
        for distribution, version in list(found.items())[:1]:
            is_tried = version.partition("+")[0] in known[distribution]
            data = {"distribution": distribution, "version": version, "tried": is_tried}
            value = f"{distribution} {version}, which the integration was {'' if is_tried else 'not '}tried with"
            tried = ", ".join(f"{name} {one}" for name, versions in known.items() for one in versions)
            hint = f"tried were: {tried}. Compare the answers with and without the cache once"
            yield Row(engine, value, "ok" if is_tried else "warn", "" if is_tried else hint, data)


def tier_rows(asked: Asked) -> Iterator[Row]:
    """A row for each tier behind the SSD: whether its class is there, and a shared pool's package. None is opened."""
    for one in asked.config.tiers:
        found = attempt(functools.partial(find_tier, one.tier))
        value = f"{about(one.capacity)}; the class is there, and the tier was not opened"
        if found.value is not None:
            yield Row(one.tier, value)
        else:
            yield Row(one.tier, found.cause, "fail", found.hint or "install the module that tiers[].tier names")


def find_tier(name: str) -> type[DurableTier]:
    """The class of a tier. Raises `TierUnavailableError`, also for any error of its module, and
    `MissingPackageError`."""
    try:
        found = tier_class(name)
    except TierUnavailableError:
        raise
    except Exception as error:  # a user's code, which may raise anything
        module, cause = name.partition(":")[0], " ".join(f"{type(error).__name__}: {error}".split())
        raise TierUnavailableError(f"{module} cannot be imported: {cause}", f"correct {module}") from error
    if issubclass(found, MooncakeTier):
        load_package()
    return found


CHECKS: tuple[tuple[str, Check], ...] = (
    ("GPU", gpu.gpu_rows),
    ("Kernels", gpu.kernel_rows),
    ("GPU <-> CPU", gpu.copy_rows),
    ("SSD", ssd_rows),
    ("Groups of layers", group_rows),
    ("Further tiers", lambda facts, asked: facts.tiers),
    ("Inference engines", lambda facts, asked: facts.engines),
)


def find(asked: Asked, *, recalibrate: bool = False) -> Facts:
    """Collect the facts. Builds kernels, measures the bus unless a calibration is on disk, opens the page copier, and
    writes and reads some MiB in the SSD tier's directories. Removes its files."""
    devices = attempt(gpu.find_devices)
    device: Found[str] = attempt(lambda: str(resolve_device(asked.config.gpu.device)))
    card = gpu.gpu_to_look_at(devices, device)
    compiler = attempt(find_compiler)
    found = compiler.value
    built = attempt(lambda: gpu.build_seconds(card)) if card else None
    calibration = None
    if card and built and built.value is not None:
        calibration = attempt(lambda: gpu.find_calibration(card, recalibrate=recalibrate))
    mover = None if device.value is None else attempt(lambda: gpu.find_mover(asked, torch.device(str(device.value))))
    place, on = asked.ssd_directory, device.value or "cpu"
    return Facts(
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        driver=attempt(gpu.find_driver),
        devices=devices,
        device=device,
        compiler=Found(f"cuda-core {found.version}" if found else None, compiler.cause, compiler.hint),
        nvrtc=attempt(lambda: gpu.nvrtc_version(found)) if found else None,
        built=built,
        mover=mover,
        pinned=attempt(gpu.pin_seconds),
        api=attempt(lambda: CopyEngine(Driver(card)).api) if card else None,
        calibration=calibration,
        ssd=find_ssd(asked, place, on, has_gpu=bool(devices.value)) if place else None,
        tiers=tuple(tier_rows(asked)),
        engines=tuple(engine_rows()),
    )


def examine(facts: Facts, asked: Asked) -> Report:
    sections = {title: tuple(check(facts, asked)) for title, check in CHECKS}
    return Report({title: rows for title, rows in sections.items() if rows})
