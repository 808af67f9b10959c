"""The parts of a configuration that pools of groups have: their layers, their bytes, their names."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.config import Config, ModelConfig
from gdscache.config.pools import plain_parts, pool_parts
from gdscache.errors import CapacityError, GeometryError
from gdscache.groups.base import Group
from gdscache.groups.pools import EVERY, interval, pools_of, shares
from gdscache.pages.keys import namespace_digest

KV: dict[str, Any] = {"name": "tiny", "kv_heads": 4, "head_dim": 32, "page_tokens": 16}


def parts_of(groups: list[dict[str, Any]], layers: int, **sections: Any) -> Any:
    return pool_parts(Config.from_dict({"model": KV | {"layers": layers, "groups": groups}, "cpu": {}} | sections))


def test_a_model_without_groups_has_no_parts_and_one_pool_has_the_configuration() -> None:
    assert pool_parts(Config.from_dict({"model": KV | {"layers": 2}})) == []
    [part] = parts_of([{"name": "a", "layers": [0, 1]}, {"name": "w", "layers": [1], "window": 40}], 2)
    assert (part.names, part.share) == ("a, w", 1.0)
    assert part.config.cpu.capacity == 4 << 30
    assert part.config.model.layers == 2


def test_pages_have_the_bytes_of_the_tokens_that_a_pool_s_groups_have() -> None:
    groups = [
        {"name": "a", "layers": [0], "page_tokens": 32},
        {"name": "b", "layers": [1]},
        {"name": "c", "layers": [1], "window": 40, "page_tokens": 64},
        {"name": "s", "layers": [2], "state": True, "page_tokens": 512},
    ]
    assert [part.config.model.page_tokens for part in parts_of(groups, 3)] == [32, 16, 1]
    [alone] = parts_of([{"name": "a", "layers": [0], "page_tokens": 32}], 1)
    assert alone.config.model.page_tokens == 32


def test_a_state_is_one_row_and_not_one_for_each_token() -> None:
    """Qwen3-Next's: as a row a token its page would have 4.8 GB, which is no extent at all."""
    planes = [
        {"name": "k", "shape": [2, 256], "layers": [*range(12)]},
        {"name": "conv", "shape": [8192, 4], "layers": [*range(12, 48)]},
        {"name": "recurrent", "shape": [32, 128, 128], "dtype": "float32", "layers": [*range(12, 48)]},
    ]
    groups = [{"name": "full", "layers": [*range(12)]}, {"name": "state", "state": True, "layers": [*range(12, 48)]}]
    model = {"name": "next", "layers": 48, "page_tokens": 64, "planes": planes, "groups": groups}
    sizes = {"gpu": {"staging": "512MiB"}, "host_buffer": "512MiB"}
    config = Config.from_dict({"model": model, "cpu": {}, **sizes})
    assert [layout.page_tokens for layout in config.model.pool_layouts] == [64, 1]
    extents = [12 * 64 * 2 * 256 * 2, 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)]
    assert [layout.extent_bytes for layout in config.model.pool_layouts] == extents
    assert [part.config.model.layout().extent_bytes for part in pool_parts(config)] == extents
    alone = Config.from_dict({"model": model | {"groups": [groups[1] | {"layers": [*range(48)]}]}})
    assert [layout.page_tokens for layout in alone.model.pool_layouts] == [1]


def test_layouts_are_found_once_for_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[object]()
    layers = ModelConfig._layers
    monkeypatch.setattr(ModelConfig, "_layers", lambda model: found.append(model) or layers(model))
    sections: dict[str, Any] = {"cpu": {}, "ssd": {"path": "/x"}, "store": {}, "gpu": {}}
    config = Config.from_dict({"model": KV | {"layers": 2}, **sections})
    assert (len(found), len(config.model.pool_layouts)) == (1, 1)


def test_the_groups_whose_pages_can_be_packed_are() -> None:
    """Windows like others; not states, of any type, nor quantised pages, which lie under the names of unpacked ones."""
    planes = [
        {"name": "kv", "shape": [4, 32], "layers": [0, 1]},
        {"name": "state", "shape": [700], "layers": [2]},
        {"name": "small", "shape": [4, 32], "dtype": "float8_e4m3fn", "layers": [3]},
    ]
    groups = [
        {"name": "full", "layers": [0]},
        {"name": "window", "layers": [1], "window": 40},
        {"name": "state", "layers": [2], "state": True},
        {"name": "small", "layers": [3]},
    ]
    model = {"name": "tiny", "dtype": "bfloat16", "page_tokens": 16, "layers": 4, "planes": planes, "groups": groups}
    parts = {
        pack: pool_parts(Config.from_dict({"model": model | {"pack": pack}, "cpu": {}}))
        for pack in ("off", "auto", "on")
    }
    copied = Config.from_dict({"model": model}).model.model_copy(update={"pack": "on"})
    assert [layout.packed for layout in copied.pool_layouts] == [True, True, False, False]
    assert [part.config.model.pack for part in parts["on"]] == ["on", "on", "off", "off"]
    assert [part.config.model.layout().packed for part in parts["on"]] == [True, True, False, False]
    assert [part.config.model.pack for part in parts["auto"]] == ["auto"] * 4
    for pack in ("auto", "on"):
        same = [
            namespace_digest(one.config.model.namespace_fields())
            == namespace_digest(off.config.model.namespace_fields())
            for one, off in zip(parts[pack], parts["off"], strict=True)
        ]
        assert same == ([True] * 4 if pack == "auto" else [False, False, True, True])


def test_planes_hold_what_a_prompt_leaves_however_small_a_state_is() -> None:
    planes = [{"name": "k", "shape": [64], "layers": [0]}, {"name": "conv", "shape": [48, 3], "layers": [1]}]
    groups = [{"name": "full", "layers": [0]}, {"name": "state", "state": True, "layers": [1]}]
    model = {"name": "lfm", "layers": 2, "page_tokens": 16, "planes": planes, "groups": groups}
    _, state = pool_parts(Config.from_dict({"model": model, "gpu": {"capacity": "1MiB"}, "cpu": {}}))
    assert state.config.gpu.capacity == 4096, "an extent, and more than the 4 states of 288 bytes"


def test_planes_go_with_their_layers_and_layers_count_from_0() -> None:
    planes = [
        {"name": "k", "shape": [64], "layers": [0, 2, 3]},
        {"name": "v", "shape": [32]},
        {"name": "index", "shape": [8], "layers": [1]},
    ]
    model = {"name": "tiny", "layers": 4, "planes": planes, "page_tokens": 16}
    groups = [{"name": "full", "layers": [3, 1]}, {"name": "window", "layers": [0, 2], "window": 5}]
    full, window = pool_parts(Config.from_dict({"model": model | {"groups": groups}}))
    whole = Config.from_dict({"model": model}).model.layout().layers
    for part, layers in ((full, (1, 3)), (window, (0, 2))):
        assert part.pool.layers == layers
        assert part.config.model.layout().layers == tuple(whole[layer] for layer in layers)
    assert [group.layers for group in full.config.model.layer_groups()] == [(1, 0)]


def test_parts_have_directories_and_events_of_their_own() -> None:
    groups = [{"name": "a", "layers": [1]}, {"name": "b", "layers": [0]}, {"name": "c", "layers": [1], "chunk": 64}]
    ssd = {"path": "/cache", "stripes": ["/more"]}
    first, second = parts_of(groups, 2, ssd=ssd, events={}, status={"path": "/page"})
    assert [str(part.config.ssd.path) for part in (first, second)] == ["/cache/groups-0-2", "/cache/groups-1"]
    assert [str(path) for path in second.config.ssd.stripes] == ["/more/groups-1"]
    assert [str(part.config.status.path) for part in (first, second)] == ["/page/groups-0-2", "/page/groups-1"]


def test_further_tiers_are_shared_too_and_keep_their_options() -> None:
    """Also options that are no plain data: none is changed, or refused."""
    options = {"limit": math.inf, "salt": b"\xff", "client": object()}
    tiers = [{"tier": "a.b:C", "capacity": "1GiB", "options": options}]
    groups = [{"name": "a", "layers": [1]}, {"name": "b", "layers": [0], "window": 64}]
    parts = parts_of(groups, 2, tiers=tiers)
    assert all(part.config.tiers[0].options == options for part in parts)
    assert sum(part.config.tiers[0].capacity for part in parts) <= 1 << 30
    with pytest.raises(CapacityError, match=r"tiers\[0\]\.capacity is 40KiB, whose shares"):
        parts_of(groups, 2, tiers=[tiers[0] | {"capacity": "40KiB"}])
    model = KV | {"layers": 2, "pack": "on"}
    packed, _ = plain_parts(Config.from_dict({"model": model, "cpu": {}, "tiers": tiers}))
    assert (packed.tiers[0].options, packed.tiers[0].capacity) == (options, 1 << 30)


@given(
    st.lists(st.sampled_from(["all", "window", "chunk", "state"]), min_size=2, max_size=5),
    st.lists(st.integers(1, 1 << 22), min_size=5, max_size=5),
    st.sampled_from([0, 64, 4096, 1 << 20]),
    st.integers(1, 1 << 16),
    st.integers(1, 1 << 17),
)
def test_shares_are_of_one_whole_and_none_gets_nothing(
    keeps: list[Any], sizes: list[int], every: int, span: int, prompt: int
) -> None:
    groups = [Group(f"g{n}", (n,), 16, kept, span) for n, kept in enumerate(keeps)]
    pools = pools_of(groups)
    found = shares(groups, pools, sizes[: len(pools)], every, prompt)
    assert sum(found) == pytest.approx(1.0)
    assert all(share > 0 for share in found)
    same = shares(groups, pools, [4096] * len(pools), every, prompt)
    for kept, share in zip(keeps, same, strict=True):  # who keeps all tokens gets no less than anybody
        assert kept != "all" or share == max(same)


@pytest.mark.parametrize(("page", "state", "every"), [(64 << 10, 1 << 20, 8192), (64 << 10, 100 << 20, 409_600)])
def test_large_states_are_kept_seldom_and_have_room_for_one_a_prompt(page: int, state: int, every: int) -> None:
    """Between ends of prompts they take a sixteenth of the pages' bytes at most; small ones lack no room."""
    groups = [Group("full", (0,), 16), Group("state", (1,), 16, "state")]
    pools = pools_of(groups)
    assert interval(groups, pools, [page, state]) == every
    assert interval(groups[1:], pools_of(groups[1:]), [state]) == EVERY
    for prompt in (1024, 8192, 65_536):
        _, share = shares(groups, pools, [page, state], every, prompt)
        left = (1 + prompt // every) * state / (prompt // 16 * page)
        assert share == pytest.approx(left / (1 + left))
    assert shares(groups, pools, [page, 64], every, 8192)[1] == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize(("pages", "plain"), [(10, 1), (100, 6), (1000, 8), (25_600, 100)])
def test_pages_that_cannot_be_packed_have_a_small_part(pages: int, plain: int) -> None:
    model = {"name": "m", "layers": 2, "kv_heads": 8, "head_dim": 128, "page_tokens": 64, "pack": "on"}
    page = 2 * 2 * 8 * 128 * 64 * 2  # bytes
    packed, rest = plain_parts(Config.from_dict({"model": model, "cpu": {"capacity": pages * page}}))
    assert packed.cpu is not None
    assert rest.cpu is not None
    assert rest.cpu.capacity // page == plain
    assert packed.cpu.capacity + rest.cpu.capacity == pages * page
    with pytest.raises(CapacityError, match="cannot be packed"):
        plain_parts(Config.from_dict({"model": model, "cpu": {"capacity": page}}))


def test_the_queue_holds_a_page_that_cannot_be_packed() -> None:
    """Else such a page would never be stored, for want of room."""
    model = {"name": "m", "layers": 2, "kv_heads": 8, "head_dim": 128, "page_tokens": 64, "pack": "on"}
    page = 2 * 2 * 8 * 128 * 64 * 2  # bytes
    given = {"model": model, "cpu": {"capacity": 64 * page}}
    plain_parts(Config.from_dict(given | {"store": {"queue": page}}))
    with pytest.raises(CapacityError, match=r"store\.queue is 508KiB, and a page that cannot be packed has 512KiB"):
        plain_parts(Config.from_dict(given | {"store": {"queue": page - 4096}}))


def test_gpu_capacity_is_of_pages_as_the_planes_have_them() -> None:
    model = {"name": "m", "layers": 2, "kv_heads": 8, "head_dim": 128, "page_tokens": 64, "pack": "on"}
    page = 2 * 2 * 8 * 128 * 64 * 2  # bytes
    given = {"model": model, "cpu": {"capacity": 64 * page}}
    Config.from_dict(given | {"gpu": {"capacity": page}})
    with pytest.raises(CapacityError, match=r"gpu\.capacity is 508KiB, and one page needs 512KiB"):
        Config.from_dict(given | {"gpu": {"capacity": page - 4096}})


NAMES = st.fixed_dictionaries(
    {
        "first": st.sampled_from([[0], [1]]),
        "window": st.sampled_from([8, 40]),
        "page_tokens": st.sampled_from([16, 32]),
        "salt": st.sampled_from(["", "x"]),
        "layers": st.sampled_from([3, 4]),
    }
)


def namespaces(drawn: dict[str, Any]) -> list[bytes]:
    rest = sorted({*range(drawn["layers"])} - {*drawn["first"]})
    groups = [
        {"name": "full", "layers": drawn["first"]},
        {"name": "window", "layers": rest, "window": drawn["window"], "page_tokens": drawn["page_tokens"]},
    ]
    model = KV | {"layers": drawn["layers"], "groups": groups, "salt": drawn["salt"]}
    return [
        namespace_digest(part.config.model.namespace_fields(group=group))
        for part in pool_parts(Config.from_dict({"model": model}))
        for group in part.config.model.layer_groups()
    ]


@given(NAMES, NAMES)
def test_names_are_equal_where_all_of_the_model_s_groups_are(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Also of the group that is the same in both: its layers read what the others compute."""
    first, second = namespaces(one), namespaces(other)
    assert len({*first}) == len(first) == 2
    assert (first == second) if one == other else not {*first} & {*second}


def test_every_size_that_is_too_small_is_named_at_once_with_what_would_do() -> None:
    groups = [{"name": "full", "layers": [0]}, {"name": "window", "layers": [1], "window": 8}]
    sizes: dict[str, Any] = {
        "cpu": {"capacity": 300_000},
        "host_buffer": 300_000,
        "gpu": {"staging": 300_000},
        "ssd": {"path": "/cache", "capacity": 300_000, "endurance": 400_000},
        "store": {"queue": 300_000, "window_every": 0},
    }
    with pytest.raises(CapacityError) as caught:
        parts_of(groups, 2, **sizes)
    keys = ("cpu.capacity", "host_buffer", "gpu.staging", "ssd.capacity", "ssd.endurance", "store.queue")
    hint = str(caught.value.hint)
    for key in keys:
        assert f"{key} is " in str(caught.value)
        assert f"{key} to " in hint
    for key in keys:
        section, _, name = key.partition(".")
        least = hint.partition(f"{key} to ")[2].split(",")[0].split(" ")[0]
        sizes[section] = {**sizes[section], name: least} if name else least
    assert len(parts_of(groups, 2, **sizes)) == 2


def test_a_share_that_is_too_small_is_no_figure_of_the_file() -> None:
    groups = [{"name": "full", "layers": [0]}, {"name": "window", "layers": [1], "window": 8}]
    for part in parts_of(groups, 2):
        said = rf"groups {part.names}, which have .* % of each size: cpu\."
        with pytest.raises(CapacityError, match=said), part.shares():
            raise CapacityError("cpu.capacity is 1", "raise it")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"name": "a", "layers": [0]}], "layer 1 is in no group"),
        ([{"name": "a", "layers": [0, 1]}, {"name": "a", "layers": [0]}], "names 'a' twice"),
        ([{"name": "a", "layers": [0, 1], "window": 3, "chunk": 4}], "several of window, chunk and state"),
        ([{"name": "a", "layers": [0, 2]}], "layers [0, 2] of a model of 2"),
    ],
)
def test_groups_that_are_none_say_why_and_what_to_give(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(GeometryError) as caught:
        parts_of(groups, 2)
    assert message in str(caught.value)
    assert "give each group a name" in str(caught.value)
