"""The configuration of one engine: a YAML file or a mapping, checked as a whole before anything is opened.

A tier exists if its section exists; `gpu` always does. Importing this needs neither torch nor a GPU library.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    Strict,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
)

from gdscache.config.file import COLLECT, NOWHERE, ConfigSection, dotted, explain, read_places, rejected
from gdscache.config.model import ModelConfig as ModelConfig
from gdscache.config.model import PlaneConfig as PlaneConfig
from gdscache.errors import CapacityError, ConfigError, ConfigFileError, GeometryError, InvalidValueError
from gdscache.limits import MAX_COUNT, MAX_SECONDS
from gdscache.runtime.files import located
from gdscache.sizes import GIB, MIB, SIZE_SCHEMA, Size, format_size, parse_size


def _switch(value: object) -> object:
    """`on` and `off` are booleans to a YAML 1.1 reader, so a mapping may hold booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[
    Literal["auto", "on", "off"], BeforeValidator(_switch), WithJsonSchema({"enum": ["auto", "on", "off", True, False]})
]

GateMode = Annotated[
    Literal["off", "advisory", "enforcing"],
    BeforeValidator(lambda value: "off" if value is False else value),
    WithJsonSchema({"enum": ["off", "advisory", "enforcing", False]}),
]


_NAMED = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})")
_DEVICE = r"auto|cpu|cuda(:([0-9]|[1-9][0-9]|1[01][0-9]|12[0-7]))?"  # torch keeps the index in a signed byte
_CLASS = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
_TRANSPORT = rf"auto|posix|uring|cufile|kvikio|nixl|{_CLASS}"


def _text(pattern: str, allowed: str) -> tuple[AfterValidator, WithJsonSchema]:
    """The check of a text that matches a pattern; `allowed`: the pattern in words."""

    def checked(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must be {allowed}")
        return value

    return AfterValidator(checked), WithJsonSchema({"type": "string", "pattern": f"^({pattern})$"})


def _expand(value: object) -> Path:
    """`~` and, in text, `$VARS` expanded (`$$` is a `$`), made absolute relative to the current directory."""
    text = str(value) if isinstance(value, Path) else _NAMED.sub(_variable, value) if isinstance(value, str) else ""
    if not text or b"\0" in os.fsencode(text):  # no name of a file, or an empty variable
        raise ValueError("must be a path")
    if braces := re.search(r"\{[^}]*\}?", text):
        raise ValueError(f"{braces[0]} is not replaced; $VARS are, such as $RANK")
    try:
        return located(Path(text).expanduser())
    except RuntimeError as error:  # a `~name` without a home directory
        raise ValueError(str(error)) from None
    except OSError as error:
        raise ValueError(f"is relative, and there is no current directory: {error.strerror}; name it from /") from None


def _variable(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if name is None:
        return "$"
    if name not in os.environ:
        raise ValueError(f"the environment variable {name} is not set")
    return os.environ[name]


EvictionOrder = Literal["lru", "lifetime"]
Device = Annotated[str, *_text(_DEVICE, "auto, cpu, cuda or cuda:N, with N from 0 to 127")]
Transport = Annotated[str, *_text(_TRANSPORT, "auto, posix, uring, cufile, kvikio, nixl or package.module:Class")]
ClassPath = Annotated[str, *_text(_CLASS, "package.module:Class")]
Directory = Annotated[
    Path,
    BeforeValidator(_expand),
    PlainSerializer(lambda path: str(path).replace("$", "$$"), str, when_used="json"),
    WithJsonSchema({"type": "string", "minLength": 1}),
]


class GpuConfig(ConfigSection):
    """The paged pool on the GPU, or in host memory without a GPU, and its staging ring."""

    device: Device = Field(
        default="auto", description="auto (cuda if the machine has one, else cpu), cpu, cuda or cuda:N"
    )
    capacity: Size = Field(
        default=1 * GIB, description="size of the page pool on the GPU; unused when an engine attaches its own tensors"
    )
    staging: Size = Field(
        default=256 * MIB, description="size of the staging ring on the GPU; half for loads, half for stores"
    )
    kernels: Switch = Field(
        default="auto",
        description="CUDA kernels that move pages: auto (the copy engine alone where they cannot be built), "
        "on (fail without them), off",
    )


class CpuConfig(ConfigSection):
    """The pinned pool in host memory."""

    capacity: Size = Field(
        default=4 * GIB,
        description="size of the page pool in host memory; allocated when the tier opens, "
        "and page-locked if the pages are for a GPU",
    )


class SsdConfig(ConfigSection):
    """The slab and its catalogue on an SSD."""

    path: Directory = Field(
        description="directory of the tier; ~ and $VARS are replaced, $$ is a $; a relative path starts at the "
        "current directory"
    )
    stripes: Annotated[tuple[Directory, ...], Strict(False)] = Field(
        default=(), description="more directories, on other devices, that the slab is spread over"
    )
    capacity: Size = Field(default=16 * GIB, description="size of the slab on disk; reserved when the tier opens")
    transport: Transport = Field(
        default="auto",
        description="transport that moves the bytes: auto, posix, uring, cufile, kvikio, nixl or package.module:Class",
    )
    route: Literal["auto", "direct", "via_cpu"] = Field(
        default="auto",
        description="way from the SSD to the GPU: direct (into GPU memory), via_cpu (through host memory) or "
        "auto (the faster one)",
    )
    gds: Switch = Field(
        default="auto", description="GPUDirect Storage, from the SSD to the GPU without host memory: auto, on, off"
    )
    threads: int = Field(default=8, ge=1, le=1024, description="number of I/O threads, 1 to 1024")
    durability: Literal["process", "power"] = Field(
        default="process",
        description="failures that committed pages survive: process (a kill) or power (a power cut; stores are slower)",
    )
    endurance: Size | None = Field(
        default=None, description="bytes that may be written in any 24 hours, at least 8 pages; null means no limit"
    )


class TierConfig(ConfigSection):
    """A further tier, of a class of yours."""

    tier: ClassPath = Field(description="package.module:Class, a subclass of gdscache.tiers.base.DurableTier")
    capacity: Size = Field(default=16 * GIB, description="bytes that the tier may hold")
    options: dict[str, Any] | None = Field(default=None, description="further keyword arguments of the class")


class StoreConfig(ConfigSection):
    """How pages are stored."""

    queue: Size = Field(
        default=8 * GIB,
        description="bytes that may be on their way to the CPU tier, and as many to the SSD; a page beyond "
        "the first limit is dropped, a page beyond the second stays in the CPU tier only",
    )
    write_policy: Literal["write_through", "write_through_selective", "write_back", "never"] = Field(
        default="write_through",
        description="when a page is written to the SSD and the tiers behind it: write_through (when it is stored), "
        "write_through_selective (after two hits), write_back (before the CPU tier evicts it) or never",
    )
    admission: Literal["all", "second_offer", "tinylfu"] = Field(
        default="all",
        description="pages that are written there: all, second_offer (offered before, recently) or tinylfu (used "
        "more often than the page they evict)",
    )
    window_every: int | None = Field(
        default=None,
        ge=0,
        le=MAX_COUNT,
        description="hybrid models: tokens of a prompt from one window or state that is stored to the next; 0: only "
        "where prompts end or part; null: 8192, or more where a state takes many bytes, and in vLLM 1024 or a window "
        "while many requests part from others",
    )
    prompt_tokens: int = Field(
        default=8192,
        ge=1,
        le=MAX_COUNT,
        description="hybrid models: tokens of a usual prompt, by whose pages and states groups with planes of their "
        "own share every size",
    )


class LoadConfig(ConfigSection):
    """How pages are loaded."""

    verify: Literal["always", "once"] = Field(
        default="always",
        description="compare checksums at each load (always), or only when the bytes come from the SSD (once)",
    )
    gate: GateMode = Field(
        default="advisory",
        description="a hit that is slower to load than to compute is loaded (off), loaded and reported "
        "(advisory) or left out (enforcing)",
    )


class EventsConfig(ConfigSection):
    """KV events: pages that tiers get and lose, for routers. Callbacks get them without any key."""

    endpoint: str | None = Field(
        default=None,
        description="ZeroMQ endpoint that events are published at, such as tcp://127.0.0.1:5557; null means none",
    )
    replay: str | None = Field(
        default=None, description="ZeroMQ endpoint at which missed batches can be requested; null means none"
    )
    topic: str = Field(default="", description="topic of the messages")


class MetricsConfig(ConfigSection):
    """Prometheus metrics at an address of their own, for processes that serve none."""

    port: int = Field(default=9464, ge=1, le=65535, description="port that they are served at, under /metrics")
    host: str = Field(default="127.0.0.1", min_length=1, description="address of this machine that it is opened on")


class StatusConfig(ConfigSection):
    """The status page of an engine without an SSD, for `gdscache top`; one with an SSD has its page in `ssd.path`."""

    path: Directory = Field(
        description="directory of the page, of this engine alone; ~ and $VARS are replaced as in ssd.path"
    )


class LogConfig(ConfigSection):
    """Lines that an engine writes to Python's `logging` at INFO."""

    summary: float = Field(
        default=600.0,
        ge=0,
        le=MAX_SECONDS,
        description="seconds from one line of summary (hit rate by tier, bytes, refusals) to the next; 0: none",
    )
    requests: float = Field(
        default=60.0,
        ge=0,
        le=MAX_SECONDS,
        description="seconds from one line that says why a request missed pages to the next; 0: none",
    )


class Config(ConfigSection):
    """One engine. `cpu`, `ssd`, `events`, `metrics` and `status` are None if their sections are absent."""

    missing_key: ClassVar[type[ConfigError]] = GeometryError

    model: ModelConfig = Field(description="the model whose cache this is")
    gpu: GpuConfig = Field(default=GpuConfig(), validate_default=True, description="the GPU pool and its staging ring")
    cpu: CpuConfig | None = Field(
        default=None, description="the CPU tier, a pool in host memory; null or absent means no such tier"
    )
    ssd: SsdConfig | None = Field(default=None, description="the SSD tier; null or absent means no such tier")
    tiers: Annotated[tuple[TierConfig, ...], Strict(False)] = Field(
        default=(), description="more tiers behind the SSD, the fastest first"
    )
    host_buffer: Size = Field(
        default=256 * MIB,
        validate_default=True,
        description="size of the bounce reserve in host memory, for pages that cannot stay in the CPU tier; "
        "half for loads, half for stores",
    )
    eviction: EvictionOrder = Field(
        default="lifetime",
        description="order in which a full tier evicts pages: lifetime (learned, its loss bounded by LRU) or lru",
    )
    deadline: float = Field(
        default=30.0,
        gt=0,
        le=MAX_SECONDS,
        description="seconds after which loads and prefetches stop waiting for reads, and a batch of writes is "
        "dropped, also when ranks do not flush it",
    )
    store: StoreConfig = Field(default=StoreConfig(), validate_default=True, description="how pages are stored")
    load: LoadConfig = Field(default=LoadConfig(), description="how pages are loaded")
    events: EventsConfig | None = Field(default=None, description="KV events; null or absent means none are emitted")
    log: LogConfig = Field(default=LogConfig(), description="lines of the log at INFO")
    metrics: MetricsConfig | None = Field(
        default=None, description="Prometheus metrics, served; null or absent means they are not"
    )
    status: StatusConfig | None = Field(
        default=None, description="status page of an engine without an SSD; null or absent means it has none"
    )

    traces: bool = Field(
        default=False, description="a span of OpenTelemetry for each load, in the trace of its caller; true or false"
    )

    @classmethod
    def from_dict(cls, data: Mapping[str, object], source: str = "<dict>") -> Self:
        """Check plain data like a file. `source` names it in messages. Raises a `ConfigError` subclass."""
        if not isinstance(data, Mapping):
            raise ConfigFileError(
                f"{source}: holds {type(data).__name__}, not a mapping", "name its sections; `model` is required"
            )
        return cls._checked(data, source, NOWHERE)

    @classmethod
    def _checked(cls, data: Mapping[str, object], source: str, places: Mapping[tuple[int | str, ...], int]) -> Self:
        try:
            return cls.model_validate(dict(data), context=COLLECT)
        except ValidationError as error:
            raise explain(error, cls, source, places) from None

    def dump(self) -> dict[str, Any]:
        """Plain data, every key included, that `from_dict` reads back as an equal config. Options of tiers are as they
        were given."""
        return {**self.model_dump(mode="json", exclude={"tiers"}), "tiers": [dict(tier) for tier in self.tiers]}

    @field_validator("ssd")
    @classmethod
    def _names_no_directory_twice(cls, ssd: SsdConfig | None) -> SsdConfig | None:
        if ssd is not None and len({ssd.path, *ssd.stripes}) <= len(ssd.stripes):
            raise rejected(
                InvalidValueError, {("stripes",): ("ssd.path and ssd.stripes name a directory twice", _DRIVES)}
            )
        return ssd

    @field_validator("store")
    @classmethod
    def _has_what_policies_need(cls, store: StoreConfig, info: ValidationInfo) -> StoreConfig:
        if store.write_policy in ("write_through_selective", "write_back") and info.data.get("cpu", ...) is None:
            message = f"store.write_policy is {store.write_policy}, which keeps pages in the CPU tier; there is none"
            hint = "add a cpu section, or set it to write_through"
            raise rejected(InvalidValueError, {("write_policy",): (message, hint)})
        return store

    @field_validator("gpu", "cpu", "ssd", "tiers", "host_buffer", "store", mode="wrap")
    @classmethod
    def _holds_pages(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """Every size holds a page of the model, or as many as `SIZES` says, also in a section with other mistakes."""
        try:
            checked, error = handler(value), None
        except ValidationError as caught:
            checked, error = value, caught
        model, name = info.data.get("model"), str(info.field_name)
        has_tier = any(info.data.get(tier, True) for tier in ("cpu", "ssd", "tiers"))
        small: dict[tuple[int | str, ...], tuple[str, str]] = {}
        if model is not None and (has_tier or name not in ("host_buffer", "store")):
            layouts = model.pool_layouts  # each pool holds a page
            extent = sum(layout.extent_bytes for layout in layouts)
            unpacked = sum(max(layout.extent_bytes, layout.plane_bytes) for layout in layouts)  # as in the planes
            for loc, size in _sizes(name, checked):
                pages, what = SIZES.get((name, *loc), (1, "one page"))
                least = pages * (unpacked if (name, *loc) == ("gpu", "capacity") else extent)
                if size < least:
                    message = f"{dotted((name, *loc))} is {_figures(size)}, and {what} needs {_figures(least)}"
                    small[loc] = message, f"raise it to {format_size(least)}, or lower model.page_tokens"
        if error is not None or small:
            raise rejected(CapacityError, small, error)
        return checked


_DRIVES = "name each directory once, on a device of its own"

# Sizes by their keys, beside those of `tiers`: the pages that each holds at least, in a number and in words.
SIZES: dict[tuple[int | str, ...], tuple[int, str]] = {
    ("gpu", "capacity"): (1, "one page"),
    ("gpu", "staging"): (2, "a page in each half"),
    ("cpu", "capacity"): (1, "one page"),
    ("ssd", "capacity"): (1, "one page"),
    ("ssd", "endurance"): (8, "one page in an eighth of it"),
    ("host_buffer",): (2, "a page in each half"),
    ("store", "queue"): (1, "one page"),
}


def _sizes(name: str, value: Any) -> Iterator[tuple[tuple[int | str, ...], int]]:
    """The sizes of a field, each with its place below the field. `value`: a checked value, or plain data."""
    given: list[tuple[tuple[int | str, ...], Any]]
    if name == "tiers":
        tiers = value if isinstance(value, (list, tuple)) else ()
        given = [((number, "capacity"), _get(tier, "capacity")) for number, tier in enumerate(tiers)]
    else:
        given = [(key[1:], _get(value, key[1]) if key[1:] else value) for key in SIZES if key[0] == name]
    for loc, size in given:
        with contextlib.suppress(ValueError):  # reported already, or absent
            yield loc, parse_size(size)


def _get(section: Any, key: int | str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else getattr(section, str(key), None)


def _figures(size: int) -> str:
    return format_size(size) if size and size % 1024 == 0 else f"{size:,} bytes"


# Keys whose values differ between replicas of a server.
_VARIED = {"ssd": ("path", "stripes"), "events": ("endpoint", "replay"), "status": ("path",)}
_LABELS = ("name", "weights", "pack")  # keys that a file may have for a model that the inference engine describes


def load_config(
    path: str | os.PathLike[str],
    model: Mapping[str, object] | None = None,
    *,
    variables: Mapping[str, str] | None = None,
) -> Config:
    """Read and check a YAML file; `~` is expanded. Raises a `ConfigError` subclass that names the file and the key.

    `model`: the inference engine's description of its model, for files without a section `model`, or with some
    keys of it only (`name`, `weights`, `pack`), which take precedence. A file with others is refused (`GeometryError`).
    `variables`: further values by name (`replaced`).
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise ConfigFileError(f"a configuration was given as {type(path).__name__}", "name a YAML file, or a mapping")
    return assembled(*read_places(Path(path)), str(path), model, variables)


def assembled(
    data: Mapping[Any, Any],
    places: Mapping[tuple[int | str, ...], int],
    source: str,
    model: Mapping[str, object] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of a file that was read (`read_places`); otherwise as `load_config`."""
    data = replaced(data, variables or {})
    if model is not None:
        data = {**data, "model": {**model, **labels(data.get("model"), source)}}
    return Config._checked(data, source, places)


def replaced(data: Mapping[Any, Any], variables: Mapping[str, str]) -> dict[Any, Any]:
    """A configuration as plain data. In directories and endpoints, `$NAME` and `${NAME}` are replaced by the values of
    `variables`."""

    def text(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [text(one) if isinstance(one, str) else one for one in value]
        if not isinstance(value, str):
            return value
        return _NAMED.sub(lambda match: variables.get(match[1] or match[2], match[0]), value)

    found = dict(data)
    for section, keys in (_VARIED if variables else {}).items():
        if isinstance(found.get(section), Mapping):
            found[section] = {key: text(value) if key in keys else value for key, value in found[section].items()}
    return found


def described_elsewhere(section: object) -> bool:
    """Whether a section `model` leaves its model to an inference engine: it is missing, or has `_LABELS` alone."""
    return section is None or (isinstance(section, Mapping) and set(section) <= {*_LABELS})


def labels(section: object, source: str) -> Mapping[str, object]:
    """The section `model` of a file for an engine that describes its model itself."""
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise InvalidValueError(f"{source}: `model` is {type(section).__name__}", f"it may have {', '.join(_LABELS)}")
    if others := [str(key) for key in section if key not in _LABELS]:
        raise GeometryError(
            f"{source}: {', '.join(f'`model.{key}`' for key in others)}: the inference engine describes its model",
            f"take it out; model may have {', '.join(_LABELS)} here",
        )
    return section


def config_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a configuration file, for editors. It has keys, types and ranges, but no cross
    checks."""
    schema = Config.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for field in section["properties"].values():
            field.pop("title", None)
            if field.get("anyOf") == SIZE_SCHEMA["anyOf"]:
                field["default"] = format_size(field["default"])
            elif isinstance(field.get("default"), dict):
                field["default"] = {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "gdscache configuration"}
