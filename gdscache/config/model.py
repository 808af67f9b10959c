"""The `model` section: the bytes of a page, and the facts that make them interchangeable."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, Strict, WithJsonSchema, model_validator

from gdscache.config.file import ConfigSection, rejected
from gdscache.errors import ConfigError, GeometryError
from gdscache.groups.base import Group
from gdscache.groups.pools import pools_of, rows_of
from gdscache.limits import MAX_COUNT, MAX_EXTENT_BYTES, MAX_LAYERS
from gdscache.pages.layout import DTYPE_BYTES, MAX_PAGE_TOKENS, PageLayout, Plane


def _known_dtype(value: str) -> str:
    if value not in DTYPE_BYTES:
        raise ValueError(f"must be one of {', '.join(DTYPE_BYTES)}")
    return value


Dtype = Annotated[str, AfterValidator(_known_dtype), WithJsonSchema({"type": "string", "enum": list(DTYPE_BYTES)})]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Layer = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]


class PlaneConfig(ConfigSection):
    """One kind of per-token row, in a list of planes."""

    missing_key: ClassVar[type[ConfigError]] = GeometryError

    name: str = Field(min_length=1, description="name of the plane; unique within a layer")
    shape: Annotated[tuple[Positive, ...], Strict(False)] = Field(
        min_length=1, description="shape of one token's row, or of one state, in elements"
    )
    dtype: Dtype | None = Field(default=None, description="element type; null means model.dtype")
    values: Dtype | None = Field(
        default=None,
        description="opaque bytes: the type of the values that they are, for `model.pack`; null means dtype",
    )
    parts: Annotated[tuple[Positive, ...], Strict(False)] = Field(
        default=(),
        description="for `model.pack`: bytes of the runs that take turns in a block, each of values of its own kind "
        "(K, V); empty: all are of one kind",
    )
    layers: Annotated[tuple[Layer, ...], Strict(False)] | None = Field(
        default=None,
        description="numbers of the layers that have the plane, counted from 0 in this process; null means all",
    )


class GroupConfig(ConfigSection):
    """Layers of a hybrid model that keep the same tokens: all tokens, without `window`, `chunk` and `state`."""

    missing_key: ClassVar[type[ConfigError]] = GeometryError

    name: str = Field(min_length=1, description="name of the group; unique in the model")
    layers: Annotated[tuple[Layer, ...], Strict(False)] = Field(
        min_length=1, description="numbers of its layers, counted from 0 in this process"
    )
    window: Positive | None = Field(
        default=None, description="sliding window: tokens that a token attends to, itself among them"
    )
    chunk: Positive | None = Field(default=None, description="chunked attention: tokens of a chunk")
    state: bool = Field(
        default=False,
        description="the layers keep a state that stands for all tokens before (Mamba, linear attention): a page is "
        "one state, and each of its planes has one row",
    )
    page_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PAGE_TOKENS,
        description="tokens of a page, or from one state to the next; null means model.page_tokens",
    )


class ModelConfig(ConfigSection):
    """The model whose cache this is, and this process's part of it."""

    missing_key: ClassVar[type[ConfigError]] = GeometryError

    name: str = Field(min_length=1, description="name of the model; part of the namespace")
    weights: str = Field(default="", description="name or version of the weights; part of the namespace")
    dtype: Dtype = Field(default="bfloat16", description=f"element type of the cache: {', '.join(DTYPE_BYTES)}")
    layers: int = Field(ge=1, le=MAX_LAYERS, description=f"layers that this process holds, 1 to {MAX_LAYERS}")
    page_tokens: int = Field(
        default=64,
        ge=1,
        le=MAX_PAGE_TOKENS,
        description=f"tokens of a page, 1 to {MAX_PAGE_TOKENS}; only full pages are stored",
    )
    kv_heads: Positive | None = Field(
        default=None, description="K and V (MHA, GQA, MQA): number of KV heads that this process holds"
    )
    head_dim: Positive | None = Field(default=None, description="K and V: elements in a head of K")
    v_head_dim: Positive | None = Field(
        default=None, description="K and V: elements in a head of V; null means head_dim"
    )
    kv_lora_rank: Positive | None = Field(default=None, description="MLA: elements in the latent part of a row")
    rope_dim: Positive | None = Field(default=None, description="MLA: elements in the rope part of a row")
    planes: Annotated[tuple[PlaneConfig, ...], Strict(False)] = Field(
        default=(), description="any other planes: a list; each has name, shape, dtype and layers"
    )
    first_layer: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="pipeline parallelism: number in the model of this process's first layer",
    )
    groups: Annotated[tuple[GroupConfig, ...], Strict(False)] = Field(
        default=(),
        description="hybrid models: a list of groups of layers that keep different tokens; each has name, layers, "
        "window, chunk or state, and page_tokens. Empty: all layers keep all tokens",
    )
    pack: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="keep bfloat16 pages in 12 bits a value, without loss: `on`, `off`, or `auto`, as the directory of "
        "`ssd.path` has them; a new one is not packed. Of groups, those whose pages can be packed are; "
        "states are not. A 256th of cpu.capacity, "
        "ssd.capacity and ssd.endurance, of small ones up to a 16th, and a 16th of host_buffer are for pages that do "
        "not fit",
    )
    salt: str = Field(
        default="",
        description="text that separates these pages from all others; the adapters for vLLM and SGLang put the other "
        "facts there that tell models apart",
    )

    @model_validator(mode="after")
    def _describes_a_page(self) -> Self:
        wrong = ((self._kind_problems(), self._hint), (self._group_problems(), _GROUPS))
        for problems, hint in wrong:
            if problems:
                raise rejected(GeometryError, {(): ("; ".join(problems), hint)})
        try:
            layouts = self.pool_layouts
            extent = max(layout.extent_bytes for layout in layouts)
        except GeometryError as error:
            raise rejected(GeometryError, {(): (f"model: {error.message}", error.hint or self._hint)}) from None
        if self.pack == "on" and not any(layout.packed for layout in layouts):
            raise rejected(GeometryError, {(): ("model.pack is on, and pages of no group can be packed", _PACK)})
        if extent > MAX_EXTENT_BYTES:
            message = (
                f"model: a page of {self.page_tokens} tokens (model.page_tokens) and {self.layers} layers has "
                f"{extent:,} bytes; the system reads and writes at most {MAX_EXTENT_BYTES:,} at once"
            )
            hint = "lower model.page_tokens, or correct the sizes of the planes"
            raise rejected(GeometryError, {(): (message, hint)})
        return self

    @property
    def kind(self) -> str:
        """The kind of the planes' keys: `mha` (K and V), `mla` (latent and rope), `planes` (a list); "" without any."""
        return next(iter(self._kinds()), "")

    @property
    def _hint(self) -> str:
        return _HINTS[self.kind] if len(self._kinds()) == 1 else _ANY

    def _kinds(self) -> dict[str, list[str]]:
        """The kinds that have keys, each with these keys."""
        given = {kind: [f"model.{key}" for key in keys if self._given(key)] for kind, (keys, _) in _KEYS.items()}
        return {kind: keys for kind, keys in given.items() if keys}

    def _kind_problems(self) -> list[str]:
        kinds = self._kinds()
        if not kinds:
            return ["model says nothing of its planes"]
        if len(kinds) > 1:
            said = " and ".join(f"{', '.join(keys)} ({kind})" for kind, keys in kinds.items())
            return [f"model has planes of {len(kinds)} kinds: {said}"]
        missing = [f"model.{key}" for key in _KEYS[self.kind][1] if not self._given(key)]
        verb = "is" if len(missing) == 1 else "are"
        return [f"{', '.join(missing)} {verb} not given"] if missing else []

    def _group_problems(self) -> list[str]:
        names = [group.name for group in self.groups]
        problems = [f"model.groups names {name!r} twice" for name in dict.fromkeys(names) if names.count(name) > 1]
        for group in self.groups:
            what = f"group {group.name!r}"
            if (group.window is not None) + (group.chunk is not None) + group.state > 1:
                problems.append(f"{what} has several of window, chunk and state")
            if len(set(group.layers)) < len(group.layers) or max(group.layers) >= self.layers:
                problems.append(f"{what} has layers {list(group.layers)} of a model of {self.layers}")
        in_none = set(range(self.layers)) - {layer for group in self.groups for layer in group.layers}
        if self.groups and in_none and not problems:
            problems.append(f"layer {min(in_none)} is in no group ({len(in_none)} of {self.layers} layers are in none)")
        return problems

    def _given(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].get_default())

    def _planes(self) -> list[tuple[Plane, tuple[int, ...] | None]]:
        """Each plane with its layers; None for all."""
        if self.kind == "planes":
            return [
                (Plane(p.name, p.shape, p.dtype or self.dtype, p.values or "", p.parts), p.layers) for p in self.planes
            ]
        rows: dict[str, tuple[int, ...]]
        if self.kind == "mha":
            heads, k_dim = self.kv_heads or 0, self.head_dim or 0
            rows = {"k": (heads, k_dim), "v": (heads, self.v_head_dim or k_dim)}
        else:
            latent, rope = self.kv_lora_rank or 0, self.rope_dim or 0
            rows = {"latent": (latent,), "rope": (rope,)}
        return [(Plane(name, shape, self.dtype), None) for name, shape in rows.items()]

    def layout(self) -> PageLayout:
        """The places of a page's bytes. Planes keep their order in the list."""
        return self._packed(PageLayout(self._layers(), self.page_tokens), self.layer_groups())

    @cached_property
    def pool_layouts(self) -> tuple[PageLayout, ...]:
        """The places of a page's bytes for each pool, in the order of `pools_of`; for all layers without groups."""
        if not (groups := self.layer_groups()):
            return (self.layout(),)
        layers, found = self._layers(), list[PageLayout]()
        for pool in pools_of(groups):
            own = tuple(layers[layer] for layer in pool.layers)
            layout = PageLayout(own, rows_of(groups, pool, self.page_tokens))
            found.append(self._packed(layout, [groups[g] for g in pool.groups]))
        return tuple(found)

    def __copy__(self) -> Self:
        """Of `model_copy`, which may change `pack`: the copy finds its layouts itself."""
        copied = super().__copy__()
        copied.__dict__.pop("pool_layouts", None)
        return copied

    def _packed(self, layout: PageLayout, groups: Sequence[Group]) -> PageLayout:
        """The layout of packed pages with `pack: on`, but for states, and pages of groups that cannot be packed."""
        if self.pack != "on" or any(group.keeps == "state" for group in groups):
            return layout
        try:
            return layout.packed_as(packed=True)
        except GeometryError:
            if not groups:
                raise
            return layout

    def _layers(self) -> tuple[tuple[Plane, ...], ...]:
        layers: list[list[Plane]] = [[] for _ in range(self.layers)]
        for plane, where in self._planes():
            for index in range(self.layers) if where is None else where:
                if index >= self.layers:
                    raise GeometryError(f"plane {plane.name!r} is in layer {index}; the last is {self.layers - 1}")
                layers[index].append(plane)
        if bare := [index for index, planes in enumerate(layers) if not planes]:
            raise GeometryError(f"no plane is in layer {bare[0]} ({len(bare)} of {self.layers} layers have none)")
        return tuple(map(tuple, layers))

    def layer_groups(self) -> tuple[Group, ...]:
        """The groups; none if all layers keep all tokens."""
        return tuple(
            Group(
                group.name,
                group.layers,
                group.page_tokens or self.page_tokens,
                "window" if group.window else "chunk" if group.chunk else "state" if group.state else "all",
                group.window or group.chunk or 0,
            )
            for group in self.groups
        )

    @property
    def kept_groups(self) -> int:
        """Groups whose layers keep tokens, not states; 1 at least."""
        return max(1, sum(group.keeps != "state" for group in self.layer_groups()))

    def namespace_fields(self, salt: str = "", *, shards: int = 1, group: Group | None = None) -> dict[str, object]:
        """All facts that make bytes interchangeable, as plain data for `keys.namespace_digest`.

        `salt`: the request's own (of a tenant or an adapter chosen for one request), beside the config's. The planes
        stand for `dtype` and all sizes: two ways to write the same planes share their pages. `shards`: the number of
        parts of a page. `group`: of the pages, in a hybrid model; all its groups are named too, since layers read the
        other groups' results.
        """
        return {
            "name": self.name,
            "weights": self.weights,
            "planes": self.layout().describe(),
            "page_tokens": self.page_tokens,
            "first_layer": self.first_layer,
            "layers": self.layers,
            "head_group": 0,
            "head_groups": shards,
            "salt": self.salt,
            "request_salt": salt,
            **({"packed": 1} if self.pack == "on" else {}),
            **({"groups": [one.describe() for one in self.layer_groups()]} if self.groups else {}),
            **({} if group is None else {"group": group.describe()}),
        }

    def base_fields(self, salt: str = "") -> dict[str, object]:
        """The facts that the digests of a hybrid model's pages begin with: the same, whichever pools are packed."""
        return self.model_copy(update={"pack": "off"}).namespace_fields(salt)


# For each kind: the allowed keys, and the required ones.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mha": (("kv_heads", "head_dim", "v_head_dim"), ("kv_heads", "head_dim")),
    "mla": (("kv_lora_rank", "rope_dim"), ("kv_lora_rank", "rope_dim")),
    "planes": (("planes",), ("planes",)),
}
_HINTS = {
    "mha": "K and V need kv_heads and head_dim, and may have v_head_dim",
    "mla": "MLA needs kv_lora_rank and rope_dim; for one plane with both, list it in planes",
    "planes": "every layer needs a plane of the list",
}
_GROUPS = "give each group a name, its layers, and one of window, chunk and state, or none; each layer is in a group"
_PACK = "set model.pack to off: only bfloat16 is packed, and states are not"
_ANY = "give kv_heads and head_dim (K and V), or kv_lora_rank and rope_dim (MLA), or a list of planes"
