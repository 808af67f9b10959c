"""The setup of SGLang: the integrations' options, settings that are refused at SGLang's start, and the facts that make
two servers' bytes interchangeable, by name; `fields.toml` lists them with reasons."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gdscache import arguments
from gdscache.config import Config
from gdscache.errors import (
    CacheGroupsUnsupportedError,
    ConfigError,
    InterfaceUnsupportedError,
    RopeByLengthError,
    WeightsNotFoundError,
)
from gdscache.integrations.fields import table_in
from gdscache.integrations.ropes import ropes
from gdscache.integrations.settings import config_named, content_of, contents_of, engine_configuration, switches_of
from gdscache.integrations.sglang.loads import LOOKED_S
from gdscache.integrations.sglang.planes import PoolPlanes
from gdscache.integrations.sglang.ranks import ALONE, RankPlace
from gdscache.integrations.weights import commit_of, model_directory, weights_served

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


# Files whose content counts, by the fields of `ServerArgs` that name them.
FILES = ("quantization_param_path", "decrypted_config_file", "rl_quant_profile", "modelopt_checkpoint_restore_path")
_PREFIXES = ("SGLANG_", "SGL_")


class ServerArgs(SimpleNamespace):
    """SGLang's settings after its own decisions; its class `ServerArgs` has the given ones."""


def resolved(server: Any) -> Any:
    """The settings that SGLang runs with. `server`: its `ServerArgs`."""
    decided = getattr(server, "resolved_dict", None)
    return ServerArgs(**decided()) if callable(decided) else server


table = functools.partial(table_in, "gdscache.integrations.sglang", "fields.toml")


def facts_of(
    server: Any, model: Any, planes: PoolPlanes, version: str, environment: Mapping[str, str]
) -> dict[str, object]:
    """All facts that tell namespaces apart, except for the weights, by name.

    `server`: see `resolved`. `model`: SGLang's `ModelConfig`. `environment`: the process's.
    """
    known, folder = table(), None
    with contextlib.suppress(WeightsNotFoundError):
        folder = directory_of(server)
    return {
        "sglang": version,
        **planes.described,
        "config.json": content_of(folder and folder / "config.json"),
        "code": contents_of(folder, "*.py") if folder else "",  # SGLang's backend for transformers' models runs it
        **{f"content of {name}": content_of(getattr(server, name, None)) for name in FILES},
        **known.facts([server, model], known.variables(environment, _PREFIXES)),
    }


def directory_of(server: Any) -> Path:
    """The model's directory. Raises `WeightsNotFoundError`."""
    revision, cache = getattr(server, "revision", None), getattr(server, "download_dir", None)
    return model_directory(str(server.model_path), revision, cache)


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
    events: bool = False,
) -> Config:
    """The engine's configuration, over these planes. `server`: SGLang's settings (`resolved`). `model`: its
    `ModelConfig`. `version`: SGLang's. `cpu`: whether a CPU tier is required, or forbidden. `place`: the engine's rank.
    `events`: SGLang publishes its own. Raises `ConfigError` subclasses, and `WeightsNotFoundError` if nothing names the
    weights."""
    planes = dataclasses.replace(planes, described={**planes.described, **place.described()})
    described = model_of(server, model, planes, version)
    found = engine_configuration(config, described, lambda: weights_of(server, commit_of(model)), source, events=events)
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


def weights_of(server: Any, commit: str | None = None) -> str:
    """See `weights_served`."""
    load_format = str(getattr(server.load_format, "value", server.load_format))
    elsewhere = {"load_format": load_format} if load_format in _ELSEWHERE else {}
    others = {name: getattr(server, name, None) for name in _OTHER_WEIGHTS}
    elsewhere |= {name: value for name, value in others.items() if value not in (None, "", "off")}
    return weights_served("SGLang", load_format, elsewhere, lambda: (directory_of(server), commit))


_BY_POSITION = ("default", "linear", "llama3", "yarn", "deepseek_yarn", "proportional", "mrope")
_BY_LENGTH = ("longrope", "dynamic")  # up to the length of the model's training they rotate in one way
_NATIVE = "sglang"  # of `ModelImpl`: SGLang's own code of a model


def refuse_setup(server: Any) -> None:
    """Raise the `IntegrationError` subclass of an unsupported setting. `server`: SGLang's `ServerArgs`."""
    table().refuse(ServerArgs=server)


def refuse_components(names: Collection[str], params: Any) -> None:
    """Raise for components of the tree beside full attention, windows and states. `names`: of SGLang's `ComponentType`.
    `params`: its `CacheInitParams`."""
    if "FULL" not in names or not set(names) <= {"FULL", "SWA", "MAMBA"}:
        raise CacheGroupsUnsupportedError(
            f"the model's cache has {', '.join(sorted(names)) or 'nothing'}; FULL, SWA and MAMBA are supported, the "
            "last two beside the first",
            "use a model whose layers keep all tokens, a sliding window, or a state",
        )
    if "SWA" in names and not params.swa_gates_prefix_match:
        raise CacheGroupsUnsupportedError(
            "the model's sliding windows are kept for each request, and are not in SGLang's tree",
            "use another model, or leave the cache out of this server",
        )


def refuse_model(model: Any) -> None:
    """Raise if K and V depend on more than SGLang's page name. `model`: SGLang's `ModelConfig`.

    A page's name covers the tokens up to its end. An image's tokens are 62 bits of a digest of the model's input, or
    any number that a request gives in its `mm_hashes`.
    """
    table().refuse(ModelConfig=model)
    text = model.hf_text_config
    for kind, rope in ropes(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)):
        _refuse_rope(kind, rope, model)


def _refuse_rope(kind: str, rope: Mapping[str, Any], model: Any) -> None:
    """Refuse a rope whose rotation depends on other requests. SGLang's longrope takes the long factors for a whole
    batch when one position is beyond the limit. Its dynamic rope depends on the model alone; transformers' on the
    longest request so far."""
    impl = getattr(model, "_resolved_model_impl", None) or model.model_impl
    native = str(getattr(impl, "value", impl)) == _NATIVE
    if kind in _BY_POSITION or (kind == "dynamic" and native):
        return
    limit = _limit(rope, model.hf_text_config) if kind in _BY_LENGTH else None
    if limit is not None and model.context_len <= limit:
        return
    raise RopeByLengthError(
        f"rope_type is {kind!r}: keys are rotated by the longest length in the batch, and requests have up to "
        f"{model.context_len} tokens",
        "leave the cache out of this server"
        if limit is None
        else f"set --context-length {limit}, which keeps every request to one side"
        + (", or --model-impl sglang" if kind == "dynamic" else ""),
    )


def _limit(rope: Mapping[str, Any], text: Any) -> int | None:
    """The shortest length that may be the limit. transformers writes one into the rope if the model's file has it
    beside the rope, and SGLang takes one or the other by the model's code."""
    name = "original_max_position_embeddings"
    known = [found for found in (rope.get(name), getattr(text, name, None)) if found is not None]
    known = known or [found for found in (getattr(text, "max_position_embeddings", None),) if found is not None]
    return min(map(int, known), default=None)
