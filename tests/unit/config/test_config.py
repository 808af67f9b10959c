"""Configuration: what a file means, what is refused and how it is said, and which configs may share pages."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import re
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

import gdscache.config
from gdscache import errors
from gdscache.config import Config, GpuConfig, ModelConfig, config_schema, load_config
from gdscache.config.file import known_keys, read_mapping, section_of
from gdscache.config.pools import put_below
from gdscache.metrics import FAMILIES
from gdscache.pages.keys import namespace_digest
from gdscache.pages.layout import MAX_PAGE_TOKENS, Plane
from gdscache.sizes import MAX_SIZE, SIZE_SCHEMA, about, format_size, parse_size
from tests.support.places import ROOT

SHIPPED = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "alerts")

MHA: dict[str, Any] = {"name": "m", "layers": 4, "kv_heads": 2, "head_dim": 8}
MLA: dict[str, Any] = {"name": "m", "layers": 4, "kv_lora_rank": 16, "rope_dim": 4}
PLANES: dict[str, Any] = {
    "name": "m",
    "layers": 4,
    "planes": [{"name": "a", "shape": [2, 8]}, {"name": "b", "shape": [4], "dtype": "float32", "layers": [0, 2]}],
}


def config(model: dict[str, Any] | None = None, **sections: object) -> Config:
    return Config.from_dict({"model": MHA if model is None else model, **sections}, source="x.yaml")


def refused(cause: type[errors.ConfigError], *parts: str, **data: object) -> str:
    """The text of the refusal of `data`, which must be a `cause` exactly and contain all of `parts`."""
    with pytest.raises(errors.ConfigError) as caught:
        Config.from_dict({"model": MHA} | data, source="x.yaml")
    assert type(caught.value) is cause
    text = str(caught.value)
    for part in ("x.yaml", *parts):
        assert part in text, text
    assert caught.value.hint
    return text


# --- the shipped files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_loads_and_fits_the_schema(path: Path) -> None:
    loaded = load_config(path)
    jsonschema.Draft202012Validator(config_schema()).validate(read_mapping(path))
    # Editors and other tools may read YAML 1.1, where `on` is a boolean.
    by_other_reader = yaml.safe_load(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(config_schema()).validate(by_other_reader)
    assert Config.from_dict(by_other_reader) == loaded
    lines = path.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("# Needs") for line in lines[:6])
    assert max(map(len, lines)) <= 80, "`gdscache config print` fits into a terminal"


def test_shipped_files_mean_what_they_are_for() -> None:
    loaded = {path.stem: load_config(path) for path in SHIPPED}
    assert loaded["ssd_direct"].cpu is None
    assert loaded["ssd_direct"].ssd is not None
    assert loaded["cpu_only"].gpu.device == "cpu"
    gds = loaded["three_tier_gds"]
    assert gds.cpu is not None
    assert (gds.ssd.gds, gds.gpu.kernels) == ("on", "on")
    assert loaded["llama3_8b"].model.layout().token_bytes == 32 * 2 * 8 * 128 * 2
    assert loaded["deepseek_v3_mla"].model.layout().token_bytes == 61 * (512 + 64) * 2


def test_default_yaml_has_every_key_with_its_default_and_a_comment(tmp_path: Path) -> None:
    path = ROOT / "configs" / "default.yaml"
    examples = {"model.kv_heads", "model.head_dim"}  # the model's own sizes, which have no default
    text = path.read_text(encoding="utf-8")
    whole = tmp_path / "whole.yaml"  # with the sections that are there as comments
    whole.write_text(re.sub(r"(?m)^# (?=events:|metrics:|status:|  )", "", text), encoding="utf-8")
    raw = read_mapping(whole)
    assert raw.keys() - read_mapping(path).keys() == {"events", "metrics", "status"}
    seen = []
    for key, field in known_keys(Config):
        if "[]" in key:
            continue
        section, _, name = key.rpartition(".")
        value = (raw[section] if section else raw)[name]
        seen.append(key)
        if isinstance(value, dict):
            assert list(value) == list(section_of(field).model_fields), key  # type: ignore[union-attr]
        elif not field.is_required() and key not in examples:
            default = field.get_default(call_default_factory=True)
            value = parse_size(value) if is_size(field) else tuple(value) if isinstance(value, list) else value
            assert type(value) is type(default) or isinstance(default, float), key
            assert value == default, key
    assert list(raw) == [key for key in seen if "." not in key]
    for line in text.splitlines():
        assert not line or line.startswith("#") or " # " in line, line
        assert len(line) <= 120, line


def is_size(field: Any) -> bool:
    return any(getattr(extra, "json_schema", None) == SIZE_SCHEMA for extra in field.metadata)


def test_the_documentation_and_default_yaml_are_those_of_the_models() -> None:
    """Both are written by tools/config_docs.py; here from the models as they are now."""
    tool = runpy.run_path(str(ROOT / "tools" / "config_docs.py"))
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    again = "run: python tools/config_docs.py"
    assert tool["configuration"](text) == text, again
    assert tool["default_yaml"]() == (ROOT / "configs" / "default.yaml").read_text(encoding="utf-8"), again
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert tool["metrics"](metrics) == metrics, again
    assert metrics.count("| `gdscache_") >= len(FAMILIES)
    for key, field in known_keys(Config):
        if not section_of(field) or key == "model.planes":
            assert f"| `{key}` | " in text, "a key that no table has"
    for path in SHIPPED:
        assert f"`{path.name}`" in text


def test_the_documented_examples_are_valid() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in text.split("```yaml\n")[1:]]
    examples = [block for block in blocks if block.startswith("model:")]
    assert len(examples) == 2
    for block in examples:
        Config.from_dict(yaml.safe_load(block))


# --- meaning -----------------------------------------------------------------------------------------------------


def test_a_tier_exists_when_its_section_does(tmp_path: Path) -> None:
    assert (config().cpu, config().ssd) == (None, None)
    assert config(cpu=None, host_buffer=0, store={"queue": 0}).host_buffer == 0, "sizes that nothing needs"
    full = config(cpu={}, ssd={"path": str(tmp_path)})
    assert full.cpu.capacity == 4 << 30
    assert full.ssd.capacity == 16 << 30
    assert full.gpu == GpuConfig()


def test_planes_of_each_kind() -> None:
    assert config().model.layout().layers[0] == (Plane("k", (2, 8), "bfloat16"), Plane("v", (2, 8), "bfloat16"))
    wide = config(MHA | {"v_head_dim": 5, "dtype": "float16"}).model.layout()
    assert wide.layers[3][1] == Plane("v", (2, 5), "float16")
    assert config(MLA).model.layout().layers[0] == (Plane("latent", (16,), "bfloat16"), Plane("rope", (4,), "bfloat16"))
    a, b = Plane("a", (2, 8), "bfloat16"), Plane("b", (4,), "float32")
    assert config(PLANES).model.layout().layers == ((a, b), (a,), (a, b), (a,))


def test_paths_are_expanded_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DISK", "nvme$0{x}"[:6])
    monkeypatch.chdir(tmp_path)

    monkeypatch.setenv("RANK", "3")

    def path(text: str) -> Path:
        ssd = config(ssd={"path": text}).ssd
        return ssd.path

    assert path("~/kv/$RANK") == tmp_path / "home" / "kv" / "3"
    assert path("/a/$DISK/${DISK}x/r${RANK}$RANK") == Path("/a/nvme$0/nvme$0x/r33")
    assert path("rel/x") == tmp_path / "rel" / "x"
    assert path("/a$$DISK") == Path("/a$DISK")
    (tmp_path / "b$DISK").mkdir()
    monkeypatch.chdir(tmp_path / "b$DISK")
    for written in ("x", Path("x")):  # a dump reads back, also from a directory whose name has a $
        found = config(ssd={"path": written}, status={"path": written})
        assert found.ssd.path == found.status.path == tmp_path / "b$DISK" / "x"
        assert Config.from_dict(found.dump()) == found
        put_below(data := found.dump(), found, "plain")
        assert Config.from_dict(data).ssd.path == found.ssd.path / "plain"
    assert path("/a$b"[:2]) == Path("/a")
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(errors.InvalidValueError, match="must be a path"):
        path("$EMPTY")  # the current directory is not meant
    assert path("/\udcff") == Path(os.fsdecode(b"/\xff"))
    with pytest.raises(errors.InvalidValueError, match="surrogates not allowed"):
        path("/\ud83d\ude00")  # as YAML reads what JSON writes for a character beyond 16 bits


def test_switches_take_yaml_booleans(tmp_path: Path) -> None:
    ssd = config(ssd={"path": "x", "gds": True}).ssd
    assert ssd.gds == "on"
    assert [config(gpu={"kernels": value}).gpu.kernels for value in (True, False)] == ["on", "off"]
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"model": MHA}) + "gpu: {kernels: off}\n", encoding="utf-8")
    assert load_config(file).gpu.kernels == "off"


def test_numbers_and_texts_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {name: 12:30, weights: 2026-01-31}\ncpu: {capacity: 1_048_576}\nssd: {path: /x, threads: 0x10}\n"
    )
    loaded = load_config(file, model=MHA)
    assert (loaded.model.name, loaded.model.weights) == ("12:30", "2026-01-31")
    assert (loaded.cpu and loaded.cpu.capacity, loaded.ssd and loaded.ssd.threads) == (1 << 20, 16)


@pytest.mark.parametrize("loaded", [*map(load_config, SHIPPED), *map(config, (MHA, MLA, PLANES))])
def test_dump_reads_back_equal(loaded: Config) -> None:
    data = loaded.dump()
    assert Config.from_dict(data) == loaded
    assert yaml.safe_load(yaml.safe_dump(data)) == data
    assert {key for key, _ in known_keys(Config) if "." not in key} == set(data)
    assert hash(loaded) == hash(Config.from_dict(data))


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config().deadline = 1
    with pytest.raises(ValueError, match="frozen"):
        config().model.page_tokens = 1


# --- sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0), (4096, 4096), ("4096", 4096), ("17B", 17), ("4KiB", 4096), ("512MiB", 512 << 20), ("64GiB", 64 << 30),
        ("64 GiB", 64 << 30), ("2TiB", 2 << 40), ("1PiB", 1 << 50), ("1.5GiB", 3 << 29), ("10GB", 10**10),
        ("4kB", 4000), ("4KB", 4000), ("0.3KiB", 307), (MAX_SIZE, MAX_SIZE),
    ],
)  # fmt: skip
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size
    assert type(parse_size(text)) is int
    jsonschema.validate(text, SIZE_SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "", "GiB", "64G", "64gib", "64Gb", "-1", "-1GiB", "1e9", "0x10", "1,5GiB", "1.GiB", " 1GiB", "1GiB ",
            "1GiB\n",
        ),
        *("٣GiB", "9999PiB9", "9" * 5000, "9" * 19 + "PiB", "1_000", "nan"),
        *(-1, MAX_SIZE + 1, 1.5, True, None, [1]),
    ],
)  # fmt: skip
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_size(text)
    assert "cpu.capacity" in refused(errors.InvalidValueError, cpu={"capacity": text})


@given(st.integers(0, MAX_SIZE))
def test_a_formatted_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size
    assert parse_size(str(size)) == size


@given(st.integers(0, 9999), st.integers(0, 999), st.sampled_from(["KiB", "MiB", "GiB", "kB", "MB", "GB", "TB"]))
def test_a_decimal_size_is_exact_but_for_the_last_byte(whole: int, thousandths: int, unit: str) -> None:
    size = parse_size(f"{whole}.{thousandths:03}{unit}")
    assert size == (whole * 1000 + thousandths) * parse_size(f"1{unit}") // 1000


A_SIZE = jsonschema.Draft202012Validator(SIZE_SCHEMA)


@given(st.text(max_size=12) | st.from_regex(r"[0-9]{1,4}\.?[0-9]{0,2} ?[KMGTPkib]{0,3}B?", fullmatch=True))
def test_schema_and_parser_agree_on_every_text(text: str) -> None:
    try:
        parse_size(text)
        accepted = True
    except ValueError:
        accepted = False
    # A pattern's `$` also matches before a final newline in Python's `re`, unlike in ECMAScript, whose rules count.
    assert accepted == (A_SIZE.is_valid(text) and not text.endswith("\n"))


@given(st.integers(0, 1 << 62))
@example(1_001 << 30)
def test_a_rounded_size_is_near(size: int) -> None:
    number, _, unit = about(size).replace("bytes", "B").partition(" ")
    assert parse_size(number.replace(",", "") + unit) == pytest.approx(size, rel=0.01)


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "key", "nearest"),
    [
        ({"cup": {}}, "`cup`", "`cpu`"),
        ({"load": {"dead_line": 3}}, "`load.dead_line`", "`deadline`"),
        (
            {"model": PLANES | {"planes": [{"name": "a", "shape": [1], "dtyp": "int8"}]}},
            "`model.planes[0].dtyp`",
            "`model.planes[0].dtype`",
        ),
        ({"gate": "off"}, "`gate`", "`load.gate`"),
        ({"store": {"transport": "posix"}}, "`store.transport`", "`ssd.transport`"),
        ({"zzzzzz": 3}, "`zzzzzz`", "host_buffer"),
    ],
)
def test_an_unknown_key_names_the_file_the_key_and_the_nearest(data: dict[str, Any], key: str, nearest: str) -> None:
    refused(errors.UnknownKeyError, f"unknown key {key}", nearest, **data)


def test_every_key_misspelt_is_recognised() -> None:
    for key, _ in known_keys(Config):
        if "[]" in key:
            continue
        section, _, name = key.rpartition(".")
        wrong = name + "x"
        data: dict[str, Any] = {"model": MHA, "cpu": {}, "ssd": {"path": "x"}, "status": {"path": "x"}}
        inside = data.setdefault(section, {}) if section else data
        if section == "model":
            inside = data["model"] = dict(MHA)
        inside[wrong] = 1
        with pytest.raises(errors.UnknownKeyError) as caught:
            Config.from_dict(data)
        assert f"unknown key `{section + '.' if section else ''}{wrong}`" in caught.value.message
        assert f"`{key}`" in caught.value.hint


@pytest.mark.parametrize("key", [1, None, True, (1, 2)])
def test_a_key_that_is_no_text(key: object) -> None:
    for data in ({"model": MHA, key: 1}, {"model": MHA, "gpu": {key: 1}}):
        with pytest.raises(errors.UnknownKeyError, match=r"unknown key"):
            Config.from_dict(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        ({"eviction": "fifo"}, "eviction", "'fifo'"),
        ({"deadline": "30"}, "deadline", "'30'"),
        ({"events": True}, "events", "True"),
        ({"gpu": None}, "gpu", "None"),
        ({"gpu": {"device": "gpu"}}, "gpu.device", "'gpu'"),
        ({"gpu": {"device": "cuda:0\n"}}, "gpu.device", r"'cuda:0\n'"),
        ({"cpu": []}, "cpu", "[]"),
        ({"ssd": {}}, "ssd.path", "missing"),
        ({"ssd": {"path": ""}}, "ssd.path", "''"),
        ({"ssd": {"path": 3}}, "ssd.path", "3"),
        ({"ssd": {"path": "a\0b"}}, "ssd.path", "a"),
        ({"ssd": {"path": "$GDSCACHE_NOT_SET/x"}}, "ssd.path", "GDSCACHE_NOT_SET"),
        ({"ssd": {"path": "/x/{rank}"}}, "ssd.path", "{rank}"),
        ({"ssd": {"path": "~no-such-user-here/x"}}, "ssd.path", "~no-such-user-here"),
        ({"ssd": {"path": "x", "transport": "posxi"}}, "ssd.transport", "'posxi'"),
        ({"ssd": {"path": "x", "transport": "a.b:"}}, "ssd.transport", "'a.b:'"),
        ({"store": {"write_policy": "yes"}}, "store.write_policy", "'yes'"),
        ({"model": MHA | {"name": ""}}, "model.name", "''"),
        ({"model": MHA | {"salt": 1}}, "model.salt", "1"),
        ({"model": MHA | {"dtype": "bf16"}}, "model.dtype", "'bf16'"),
        ({"model": MHA | {"layers": 4.0}}, "model.layers", "4.0"),
        ({"model": PLANES | {"planes": {"name": "a"}}}, "model.planes", "{'name': 'a'}"),
        ({"model": PLANES | {"planes": [3]}}, "model.planes[0]", "3"),
        ({"model": PLANES | {"planes": [{"name": "", "shape": [1]}]}}, "model.planes[0].name", "''"),
        ({"model": PLANES | {"planes": [{"name": "a", "shape": []}]}}, "model.planes[0].shape", "[]"),
        ({"model": PLANES | {"planes": [{"name": "a", "shape": [2, 0]}]}}, "model.planes[0].shape[1]", "0"),
        ({"model": PLANES | {"planes": [{"name": "a", "shape": [1], "dtype": "x"}]}}, "model.planes[0].dtype", "'x'"),
        ({"model": 3}, "model", "3"),
        ({"tiers": 5}, "tiers", "5"),
        ({"tiers": True}, "tiers", "True"),
        ({"tiers": {"a": 1}}, "tiers", "{'a': 1}"),
    ],
)
def test_an_invalid_value_names_the_key_the_value_and_what_is_allowed(
    data: dict[str, Any], key: str, value: str
) -> None:
    """Numbers beyond their bounds are those of test_config_bounds.py."""
    text = refused(errors.InvalidValueError, f"{key}` is ", value, **data)
    assert "must " in text or "missing" in text or "not set" in text or "$RANK" in text or "home directory" in text


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (None, ["`model` is missing", "gdscache config print cpu_only"]),
        ({}, ["`model.name`", "`model.layers`"]),
        ({"name": "m", "kv_heads": 1, "head_dim": 1}, ["`model.layers` is missing"]),
        ({"name": "m", "layers": 1}, ["model says nothing of its planes", "kv_heads", "kv_lora_rank", "a list"]),
        (MLA | {"kv_heads": 2}, ["2 kinds", "model.kv_heads (mha) and model.kv_lora_rank, model.rope_dim (mla)"]),
        (MLA | {"v_head_dim": 2}, ["model.v_head_dim"]),
        ({"name": "m", "layers": 1, "kv_lora_rank": 2}, ["model.rope_dim is not given"]),
        (MHA | {"rope_dim": 2}, ["2 kinds", "model.rope_dim (mla)"]),
        (MHA | {"planes": PLANES["planes"]}, ["model.planes"]),
        (PLANES | {"head_dim": 8}, ["model.head_dim"]),
        (PLANES | {"planes": [{"name": "a", "shape": [1], "layers": [0, 1, 3]}]}, ["layer 2"]),
        (PLANES | {"planes": [{"name": "a", "shape": [1], "layers": []}]}, ["layer 0", "4 of 4"]),
        (PLANES | {"planes": [{"name": "a", "shape": [1], "layers": [4]}]}, ["'a'", "layer 4", "last is 3"]),
        (PLANES | {"planes": [{"name": "a", "shape": [1]}, {"name": "a", "shape": [2]}]}, ["['a', 'a']"]),
        (PLANES | {"planes": [{"name": "a", "shape": [1], "layers": [0, 0, 1, 2, 3]}]}, ["['a', 'a']"]),
        (PLANES | {"planes": [{"name": "a"}]}, ["`model.planes[0].shape` is missing"]),
    ],
)
def test_a_geometry_that_describes_no_page(model: dict[str, Any] | None, parts: list[str]) -> None:
    with pytest.raises(errors.GeometryError) as caught:
        Config.from_dict({} if model is None else {"model": model}, source="x.yaml")
    assert all(part in str(caught.value) for part in ("x.yaml", *parts))
    assert caught.value.hint


def test_a_directory_is_named_once() -> None:
    refused(errors.InvalidValueError, "directory twice", "each directory once", ssd={"path": "/kv", "stripes": ["/kv"]})


@pytest.mark.parametrize(
    ("key", "needed"),
    [
        ("gpu.capacity", 1), ("cpu.capacity", 1), ("ssd.capacity", 1), ("store.queue", 1), ("gpu.staging", 2),
        ("host_buffer", 2),
    ],
)  # fmt: skip
def test_a_size_below_one_page(key: str, needed: int) -> None:
    extent = config().model.layout().extent_bytes
    base: dict[str, Any] = {"gpu": {}, "cpu": {}, "ssd": {"path": "x"}, "store": {}}

    def with_size(size: int) -> dict[str, Any]:
        data = copy.deepcopy(base)
        section, _, name = key.rpartition(".")
        (data[section] if section else data)[name] = size
        return data

    config(**with_size(needed * extent))
    refused(errors.CapacityError, f"{key} is {needed * extent - 1:,} bytes", **with_size(needed * extent - 1))


def test_all_problems_are_shown_at_once() -> None:
    text = refused(
        errors.UnknownKeyError,
        "4 problems",
        "unknown key `gpu.capcity`",
        "`gpu.kernels` is 'maybe'",
        "`ssd.threads` is 0",
        "`model.layers` is missing",
        gpu={"capcity": 1, "kernels": "maybe"},
        ssd={"path": "x", "threads": 0},
        model={"name": "m"},
    )
    assert text.index("gpu.capcity") < text.index("gpu.kernels") < text.index("model.layers")


def test_sizes_below_a_page_are_shown_with_all_else_and_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text(
        "gpu: {staging: 2}\nssd:\n  path: /x\n  capacity: 1KiB\n  threads: 0\n  endurance: 4KiB\n"
        "tiers:\n- {tier: a:B, capacity: 3}\nhost_buffer: 4\nstore: {write_policy: write_back, queue: 5}\n"
    )
    with pytest.raises(errors.InvalidValueError, match="8 problems") as raised:
        load_config(file, model=MHA)
    for line, told in (
        (1, "gpu.staging is 2 bytes"), (4, "ssd.capacity is 1KiB"), (5, "`ssd.threads` is 0"),
        (6, "ssd.endurance is 4KiB"), (8, "tiers[0].capacity is 3 bytes"), (9, "host_buffer is 4 bytes"),
        (10, "store.queue is 5 bytes"), (10, "store.write_policy is write_back"),
    ):  # fmt: skip
        assert f"  - line {line}: {told}" in str(raised.value)


def test_no_pydantic_error_gets_out_of_direct_construction() -> None:
    with pytest.raises(errors.UnknownKeyError, match="GpuConfig: unknown key `capcity`"):
        GpuConfig(capcity=1)  # type: ignore[call-arg]
    with pytest.raises(errors.InvalidValueError, match="deadline"):
        Config(deadline=-1.0, model=ModelConfig(**MHA))
    with pytest.raises(errors.CapacityError, match=r"gpu\.capacity"):
        Config(model=ModelConfig(**MHA), gpu=GpuConfig(capacity=1))
    assert Config(model=ModelConfig(**MHA)) == config()


@pytest.mark.parametrize("value", [5, True, 1.5, None, "a", b"a", [], [5], [[]], {}, {"a": 1}, {1: 2}, {"a"}, (1,)])
def test_no_value_of_any_key_is_anything_but_taken_or_refused(value: object) -> None:
    planes = [{"name": "a", "shape": [64]}]
    model = {"name": "m", "layers": 1, "planes": planes, "groups": [{"name": "full", "layers": [0]}]}
    whole: Any = {"model": model, "ssd": {"path": "x"}, "status": {"path": "x"}, "tiers": [{"tier": "a:B"}]}
    assert Config.from_dict(whole).tiers
    for key, _ in known_keys(Config):
        data = inside = copy.deepcopy(whole)
        *sections, last = key.split(".")
        for section in sections:
            name = section.removesuffix("[]")
            inside = inside.setdefault(name, [{}] if name != section else {})
            inside = inside[0] if name != section else inside
        inside[last] = value
        with contextlib.suppress(errors.ConfigError):
            Config.from_dict(data)


def test_an_option_of_a_tier_whose_name_is_no_text() -> None:
    with pytest.raises(errors.InvalidValueError, match=r"must be a text") as caught:
        config(tiers=[{"tier": "a:B", "options": {1: 2}}])
    assert caught.value.hint == "put it in quotes"


def test_errors_cross_processes() -> None:
    with pytest.raises(errors.UnknownKeyError) as caught:
        config(cup=1)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is errors.UnknownKeyError
    assert str(copied) == str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("data", [None, 3, "x", [], [("model", MHA)]])
def test_data_that_is_no_mapping(data: Any) -> None:
    with pytest.raises(errors.ConfigFileError, match=r"x\.yaml.*not a mapping"):
        Config.from_dict(data, source="x.yaml")


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds nothing"),
        (b"- 1\n- 2\n", "holds a list"),
        (b"model: [1, 2\n", "c.yaml:2:1"),
        (b"a: 1\n\tb: 2\n", "c.yaml:2:1"),
        (b"load: 1\nload: 2\n", "c.yaml:2:1: the key 'load' is there twice, first in line 1"),
        (b"model:\n  name: a\n  layers: 1\n  name: b\n", "c.yaml:4:3: the key 'name' is there twice, first in line 2"),
        (b"model: {planes: [{name: a, name: b}]}\n", "the key 'name' is there twice"),
        (b"load: 0\n---\nload: 1\n", "c.yaml:2:1"),
        (b"load: !!python/object:os.system x\n", "c.yaml:1:7"),
        (b"? [a]\n: 1\n", "c.yaml:1:3"),
        (b"\xff\xfe\x00\xd8", "is not YAML"),
        (b"[" * 700, "is not YAML"),
        (b"load: !!bool x\n", "c.yaml:1:7: 'x' is not YAML's bool"),
        (b"load: [!!timestamp x]\n", "c.yaml:1:8: 'x' is not YAML's timestamp"),
        (b'load: !!int ""\n', "c.yaml:1:7: '' is not YAML's int"),
        (b"load: " + b"1:" * 200 + b"1.0\n", "is not YAML's float"),
        (b"<<: 1\n", "c.yaml:1"),
        (b"load: *nowhere\n", "c.yaml:1:7"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(errors.ConfigFileError) as caught:
        load_config(file)
    assert says in str(caught.value)
    assert str(file) in caught.value.message
    assert caught.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigFileError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(errors.ConfigFileError, match="Is a directory"):
        load_config(tmp_path)


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model:\n"
        "  name: m\n"
        "  layers: 1\n"
        "  planes:\n"
        "    - &a {name: a, shape: [2]}\n"
        "    - &b {<<: *a, name: b}\n"
        "    - {<<: *b, name: c, shape: [3]}\n",
        encoding="utf-8",
    )
    planes = load_config(file).model.layout().layers[0]
    assert [(plane.name, plane.shape) for plane in planes] == [("a", (2,)), ("b", (2,)), ("c", (3,))]


def test_a_home_directory_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": MHA}), encoding="utf-8")
    assert load_config("~/c.yaml") == config()


# --- namespaces --------------------------------------------------------------------------------------------------


def namespace(model: dict[str, Any], salt: str = "") -> bytes:
    return namespace_digest(config(model).model.namespace_fields(salt))


def plane(index: int, **change: object) -> dict[str, Any]:
    planes = copy.deepcopy(PLANES["planes"])
    planes[index].update(change)
    return {"planes": planes}


KEPT: list[dict[str, Any]] = [{}, {"window": 9}, {"chunk": 9}, {"state": True}, {"page_tokens": 8}]
# Every key of the model, with values that no two of may share a namespace. A key with a new meaning must be added here.
DIFFERENT: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("name", MHA, [{"name": name} for name in ("m", "M", "m ", "mm", "é", "e\u0301", '","weights":"')]),
    ("weights", MHA, [{"weights": weights} for weights in ("", "1", "01", "v1")]),
    ("dtype", MHA, [{"dtype": d} for d in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")]),
    ("layers", MHA, [{"layers": n} for n in (1, 2, 4, 5, 44)]),
    ("page_tokens", MHA, [{"page_tokens": n} for n in range(1, 513)]),
    ("kv_heads", MHA, [{"kv_heads": 2}, {"kv_heads": 1}, {"kv_heads": 4, "head_dim": 4}]),
    ("head_dim", MHA, [{"head_dim": 8}, {"head_dim": 16}]),
    ("v_head_dim", MHA, [{}, {"v_head_dim": 4}, {"v_head_dim": 16}]),
    ("kv_lora_rank", MLA, [{}, {"kv_lora_rank": 17}, {"kv_lora_rank": 4, "rope_dim": 16}]),
    ("rope_dim", MLA, [{}, {"rope_dim": 5}]),
    (
        "planes",
        PLANES,
        [
            {},
            plane(0, name="A"),
            plane(0, shape=[8, 2]),
            plane(0, shape=[16]),
            plane(0, shape=[1, 2, 8]),
            plane(0, dtype="float16"),
            plane(1, dtype="bfloat16", shape=[8]),
            plane(1, layers=[0, 1]),
            plane(1, layers=[1, 3]),
            plane(1, layers=[0, 1, 2, 3]),
            {"planes": list(reversed(PLANES["planes"]))},
            {"planes": PLANES["planes"][:1]},
        ],
    ),
    ("first_layer", MHA, [{"first_layer": n} for n in (0, 1, 4)]),
    (
        "groups",
        MHA | {"layers": 2},
        [
            {},
            *({"groups": [{"name": "a", "layers": [0]}, {"name": "b", "layers": [1], **kept}]} for kept in KEPT),
            {"groups": [{"name": "a", "layers": [1]}, {"name": "b", "layers": [0]}]},
            {"groups": [{"name": "a", "layers": [0, 1]}]},
        ],
    ),
    ("pack", MHA | {"dtype": "bfloat16"}, [{"pack": pack} for pack in ("on", "off")]),
    ("salt", MHA, [{"salt": salt} for salt in ("", "a", "b", " a")]),
]


def test_every_key_of_the_model_is_tested() -> None:
    assert [key for key, _, _ in DIFFERENT] == list(ModelConfig.model_fields)


SCALARS = ("name", "weights", "first_layer", "salt")


def test_configs_whose_bytes_differ_never_share_a_namespace() -> None:
    digests: dict[bytes, object] = {}
    for key, base, changes in DIFFERENT:
        assert len({namespace(base | change) for change in changes}) == len(changes) > 1, key
        for change in changes:
            model = config(base | change).model
            digest = namespace_digest(model.namespace_fields())
            fields = {key: getattr(model, key) for key in SCALARS} | {"layout": model.layout()}
            assert digests.setdefault(digest, fields) == fields
    assert len(digests) > 500


def test_salts_of_config_and_request_and_shards_do_not_mix() -> None:
    salts = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("ab", ""), ("a", "b"), ("", "ab"), ("b", "a")]
    digests = {namespace(MHA | {"salt": ours}, theirs) for ours, theirs in salts}
    digests |= {namespace_digest(config().model.namespace_fields(shards=n)) for n in (2, 4)}
    assert len(digests) == len(salts) + 2


def test_the_same_bytes_share_a_namespace() -> None:
    base = namespace(MHA)
    assert namespace(MHA | {"v_head_dim": 8}) == base
    planes = [
        {"name": "k", "shape": [2, 8]},
        {"name": "v", "shape": [2, 8], "dtype": "bfloat16", "layers": [3, 0, 2, 1]},
    ]
    assert namespace({"name": "m", "layers": 4, "planes": planes}) == base
    elsewhere = config(MHA, deadline=3, cpu={}, load={"verify": "once"}, ssd={"path": "y"}).model.namespace_fields()
    assert namespace_digest(elsewhere) == base


@given(st.randoms(use_true_random=False))
def test_the_order_of_the_text_does_not_matter(shuffle: random.Random) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = [(key, shuffled(inner)) for key, inner in value.items()]
            shuffle.shuffle(items)
            return dict(items)
        return [shuffled(inner) for inner in value] if isinstance(value, list) else value

    data = {"model": PLANES, "cpu": {"capacity": "1GiB"}, "ssd": {"path": "/x/y", "gds": "on"}}
    other = Config.from_dict(yaml.safe_load(yaml.safe_dump(shuffled(data), sort_keys=False)))
    assert other == Config.from_dict(data)
    assert namespace_digest(other.model.namespace_fields()) == namespace(PLANES)


def test_a_namespace_is_the_same_in_every_release() -> None:
    # A changed value makes every stored page unreachable: raise keys.FORMAT on purpose, never by accident.
    assert namespace(MHA).hex() == "542cedb93bc70d6971fb707ccc5067c297672ba20e11bfb2ea62bdb288bfb950"


# --- schema ------------------------------------------------------------------------------------------------------


def test_the_schema_is_one_and_refuses_what_the_models_refuse() -> None:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"model": MHA})
    wrong: list[dict[str, Any]] = [
        {},
        {"model": MHA, "cup": {}},
        {"model": MHA | {"page_tokens": MAX_PAGE_TOKENS + 1}},
        {"model": MHA | {"dtype": "bf16"}},
        {"model": MHA, "cpu": {"capacity": "64G"}},
        {"model": MHA, "gpu": {"kernels": "maybe"}},
        {"model": MHA, "gpu": {"device": "gpu"}},
        {"model": MHA, "ssd": {}},
        {"model": MHA, "ssd": {"path": "x", "transport": "posxi"}},
    ]
    for data in wrong:
        assert not validator.is_valid(data), data
        with pytest.raises(errors.GdsCacheError):
            Config.from_dict(data)


def test_the_schema_describes_every_key_and_its_default() -> None:
    schema = config_schema()

    def section(model: type[BaseModel]) -> dict[str, Any]:
        found: dict[str, Any] = schema if model is Config else schema["$defs"][model.__name__]
        return found

    for model in (
        Config,
        *(c for c in vars(gdscache.config).values() if isinstance(c, type) and issubclass(c, BaseModel)),
    ):
        if model.__name__ == "ConfigSection":
            continue
        properties = section(model)["properties"]
        assert list(properties) == list(model.model_fields)
        for name, field in model.model_fields.items():
            assert properties[name]["description"] == field.description
            if is_size(field):
                assert properties[name]["default"] == format_size(field.default)
                assert parse_size(properties[name]["default"]) == field.default
    filled = {name: p["default"] for name, p in schema["properties"].items() if "default" in p}
    assert Config.from_dict(filled | {"model": MHA}) == config()


# -- where in a file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cpu: {}\n\nssd:\n  path: /x\n  capcity: 1GiB\n", "{file}:5: unknown key `ssd.capcity`"),
        ("cpu:\n  capacity: much\n", "{file}:2: `cpu.capacity` is 'much'"),
        ("# a\ngpu: {}\nssd: {}\n", "{file}:3: `ssd.path` is missing"),
        ("cpu: {}\ntiers:\n- tier: a:B\n- tier: 3\n", "{file}:4: `tiers[1].tier` is 3"),
        ("load: {verify: [&a [1], *a]}\n", "{file}:1: `load.verify`"),
        ("\nfoo: &x\n  b: *x\n", "{file}:2: unknown key `foo`"),
        ("cpu:\n  a: 1\nload:\n  b: 1\n", "  - line 2: unknown key `cpu.a`"),
        ("host_buffer: 1KiB\ncpu: {}\n", "{file}:1: host_buffer is 1KiB"),
        ("metrics: {port: 157:44}\n", "{file}:1: `metrics.port` is '157:44'"),  # 9464 in YAML 1.1
        ("ssd: {path: /x, threads: 010}\n", "{file}:1: `ssd.threads` is '010'"),  # 8 there
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text(text)
    with pytest.raises(errors.ConfigError) as raised:
        load_config(file, model=MHA)
    assert told.format(file=file) in str(raised.value)


def test_aliases_that_double_with_each_line_take_no_time(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    lines = ["a0: &a0 [1, 2]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    file.write_text("\n".join(lines) + "\ncpu: {capcity: 1GiB}\n")
    with pytest.raises(errors.UnknownKeyError, match=r"line 41: unknown key `cpu\.capcity`"):
        load_config(file, model=MHA)
    lines = ["a0: &a0 {k: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 41))]
    file.write_text("\n".join(lines))
    with pytest.raises(errors.ConfigFileError, match="more than 10,000 keys"):
        load_config(file, model=MHA)


@pytest.mark.parametrize("name", ["x" * 100_000, "a\x1b[31mb\x07", "\u202e" * 10])
def test_messages_are_short_and_printable(name: str) -> None:
    with pytest.raises(errors.ConfigError) as raised:
        Config.from_dict({"model": {**MHA, name: 1}})
    told = str(raised.value)
    assert len(told) < 10_000
    assert told.replace("\n", "").isprintable()
    assert len(refused(errors.InvalidValueError, "gpu.device", gpu={"device": name})) < 1000


# -- a file for an inference engine, which describes its model itself --------------------------------------------------


def test_a_file_may_label_the_model_of_an_engine(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("model: {weights: tuesday, name: mine}\n")
    model = load_config(file, model={**MHA, "weights": "of the engine", "salt": "facts"}).model
    assert (model.weights, model.salt, model.name, model.layers) == ("tuesday", "facts", "mine", MHA["layers"])


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("model: {layers: 3}", errors.GeometryError, "model.layers"),
        ("model: {salt: mine}", errors.GeometryError, "model.salt"),
        ("model: {weights: a, dtype: int8, nmae: x}", errors.GeometryError, "`model.dtype`, `model.nmae`"),
        ("model: [1]", errors.InvalidValueError, "`model` is list"),
        ("model: {weights: 3}", errors.InvalidValueError, "model.weights"),
        ("cpu: {capcity: 1GiB}", errors.UnknownKeyError, "did you mean `cpu.capacity`"),
        ("cpu: {CAPACITY: 1GiB}", errors.UnknownKeyError, "did you mean `cpu.capacity`"),
        ("SSD: {path: /kv}", errors.UnknownKeyError, "did you mean `ssd`"),
    ],
)
def test_what_a_file_for_an_engine_may_not_say(
    tmp_path: Path, text: str, error: type[errors.GdsCacheError], told: str
) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text(text)
    with pytest.raises(error) as raised:
        load_config(file, model=MHA)
    assert told in str(raised.value)
    assert str(file) in str(raised.value)
