"""The setup of SGLang: the integrations' options, and the facts that make two servers' bytes interchangeable."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from gdscache import arguments
from gdscache.config import Config
from gdscache.errors import (
    ConfigError,
    InterfaceUnsupportedError,
    WeightsNotFoundError,
)
from gdscache.integrations.settings import config_named, engine_configuration, switches_of
from gdscache.integrations.sglang.facts import directory_of, facts_of
from gdscache.integrations.sglang.loads import LOOKED_S
from gdscache.integrations.sglang.planes import PoolPlanes
from gdscache.integrations.sglang.ranks import ALONE, RankPlace
from gdscache.integrations.weights import weights_read

# Methods of SGLang's `WeightUpdater` that write weights. Calls between a begin and an end flush SGLang's cache if they
# are asked to; the end does not.
ENDS_UPDATE = "end_weight_update"
WEIGHT_METHODS = (
    "update_weights_from_disk",
    "receive_weights_from_distributed",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    ENDS_UPDATE,
)
RESETS_WEIGHTS = "_reset_tensors"  # of SGLang's `WeightChecker`, which draws weights at random
LINKER_OPTIONS = "linker_extra_config"
STORAGE_OPTIONS = "--hicache-storage-backend-extra-config"
_OWN_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")  # keys that HiCache leaves in it
_ELSEWHERE = ("remote", "remote_instance", "private")  # load formats: the weights come from another server
_OTHER_WEIGHTS = ("weight_cache_mode", "kt_weight_path")  # settings: a daemon's weights, or some of another path
_LONGEST = 3600  # seconds, of an option's time


@dataclasses.dataclass(frozen=True)
class LinkerOptions:
    """`linker_extra_config`.

    `config`: a YAML file, or its sections. `ssd_wait`: seconds that a batch's lookups may wait for pages on their way,
    while no other request runs. `pin_seconds`: the longest time of a request's pins. `untried`: also serve models whose
    pools follow the contract but were run on no GPU.
    """

    config: str | Mapping[str, Any]
    ssd_wait: float = 0.02
    pin_seconds: float = 60.0
    untried: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LinkerOptions:
        """Raises `ConfigError` subclasses that name the key."""
        config = config_named(given, [field.name for field in dataclasses.fields(cls)], LINKER_OPTIONS, "sglang")
        switches = switches_of(given, "untried")
        wait = given.get("ssd_wait", cls.ssd_wait)
        wait = arguments.span(wait, "ssd_wait", _LONGEST, zero=True)  # 0: no wait
        pins = arguments.span(given.get("pin_seconds", cls.pin_seconds), "pin_seconds", 2 * _LONGEST, LOOKED_S + wait)
        return cls(config=config, ssd_wait=wait, pin_seconds=pins, **switches)


def storage_config_of(given: Mapping[str, Any]) -> str | Mapping[str, Any]:
    """The key `config` of HiCache's extra configuration. Raises `ConfigError` subclasses that name the key."""
    config = config_named(given, ["config", *_OWN_OF_SGLANG], STORAGE_OPTIONS, "sglang-hicache")
    if not given.get("interface_v1"):
        raise InterfaceUnsupportedError(
            f"{STORAGE_OPTIONS} has no interface_v1: HiCache would copy each page once more",
            'add "interface_v1": 1 to it',
        )
    return config


def configuration(
    config: str | Mapping[str, Any],
    server: Any,
    model: Any,
    planes: PoolPlanes,
    version: str,
    source: str,
    *,
    cpu: bool,
    place: RankPlace = ALONE,
) -> Config:
    """The engine's configuration, over these planes. `server`: SGLang's settings (`resolved`). `model`: its
    `ModelConfig`. `version`: SGLang's. `cpu`: whether a CPU tier is required, or forbidden. `place`: the engine's rank.
    Raises `ConfigError` subclasses, and `WeightsNotFoundError` if nothing names the weights."""
    planes = dataclasses.replace(planes, described={**planes.described, **place.described()})
    described = model_of(server, model, planes, version)
    found = engine_configuration(config, described, lambda: weights_of(server), source)
    if cpu and found.cpu is None:
        raise ConfigError(
            f"{source} has no section `cpu`: loads begin from pages that were checked in the CPU tier",
            "add cpu.capacity; `gdscache config init sglang` writes one",
        )
    if not cpu and (found.cpu is not None or found.ssd is None):
        raise ConfigError(
            f"{source} has {'a section `cpu`' if found.cpu is not None else 'no section `ssd`'}: HiCache keeps the "
            "pages in host memory, and this is the SSD tier below it",
            "`gdscache config init sglang-hicache` writes one that has ssd and no cpu",
        )
    if found.ssd is not None:
        place.refuse_directory(found.ssd.path)
    return place.part(found)


def model_of(server: Any, model: Any, planes: PoolPlanes, version: str) -> dict[str, object]:
    """The section `model` of the engine's configuration: the sizes of a page, and all facts that decide its bytes,
    except for the weights (`weights_of`)."""
    facts = facts_of(server, model, planes, version, os.environ)
    salt = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return {"name": str(server.model_path), **planes.model(), "salt": salt}


def weights_of(server: Any) -> str:
    """The identity of SGLang's weights, from the files that SGLang has read.

    Dummy weights are drawn from a fixed seed. Raises `WeightsNotFoundError`, also for weights that come from elsewhere.
    """
    load_format = str(getattr(server.load_format, "value", server.load_format))
    if load_format == "dummy":
        return "dummy"
    elsewhere = {"load_format": load_format} if load_format in _ELSEWHERE else {}
    elsewhere |= {
        name: value for name in _OTHER_WEIGHTS if (value := getattr(server, name, None)) not in (None, "", "off")
    }
    if elsewhere:
        raise WeightsNotFoundError(
            f"{', '.join(f'{name} is {value!r}' for name, value in elsewhere.items())}: SGLang has weights that are "
            "not those of the model's files",
            "set model.weights in the configuration to a text that names them",
        )
    return weights_read(directory_of(server))
