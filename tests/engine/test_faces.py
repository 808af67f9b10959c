"""What both faces of the engine promise: the bytes of a prompt come back, from every tier and after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdscache import PageStatus
from tests.support.faces import Face
from tests.support.helpers import EXTRA, MHA, MLA, prompt, settle, until
from tests.support.pages import lose
from tests.support.pairs import pairs

OpenFace = Callable[..., Face[Any]]
LOADED = PageStatus.LOADED
KINDS = {"mha": MHA, "mla": MLA, "extra": EXTRA, "mha-uneven": MHA | {"v_head_dim": 24}}


def below(face: Face[Any]) -> dict[str, int]:
    """Pages by tier, the pool apart."""
    return {name: tier["pages"] for name, tier in face.engine.stats()["tiers"].items() if name != "gpu"}


# -- bit for bit -----------------------------------------------------------------------------------------------------


def there_and_back(open_face: OpenFace, tokens: list[int], **options: Any) -> None:
    """Planes -> CPU -> SSD -> restart -> planes, with every page's bytes compared on each way."""
    pages = len(tokens) // options["model"]["page_tokens"]
    face = open_face(**options)
    face.put(tokens)
    assert face.get(tokens).pages == (LOADED,) * pages
    face.drop("cpu")
    layout, tiers = face.engine.layout, face.tiers(tokens)
    assert {*tiers} <= ({"ssd", "ssd_plain"} if layout.packed else {"ssd"})
    sizes = {"ssd": layout.page_bytes, "ssd_plain": layout.plane_bytes}
    assert face.get(tokens).bytes_by_tier == {name: tiers.count(name) * sizes[name] for name in {*tiers}}
    settle(face.engine)
    face.engine.close()
    face = open_face(**options)
    assert face.tiers(tokens) == tiers
    assert face.get(tokens).pages == (LOADED,) * pages
    assert face.get(tokens).pages == (LOADED,) * pages


@pytest.mark.parametrize("open_face", ["pool", "attached:1", "attached:2", "attached:4"], indirect=True)
@pytest.mark.parametrize(("kind", "dtype"), pairs(KINDS, ["bfloat16", "float16", "float8_e4m3fn"]))
def test_bytes_survive_every_tier_and_a_restart(open_face: OpenFace, device: str, kind: str, dtype: str) -> None:
    there_and_back(open_face, prompt(1, 5, extra=1), device=device, model=KINDS[kind] | {"dtype": dtype})


@pytest.mark.parametrize("open_face", ["pool", "attached:1", "attached:2", "attached:4"], indirect=True)
@pytest.mark.parametrize("kind", ["mha", "mla", "mha-uneven"])
@pytest.mark.parametrize("cpu", [None, 100])
def test_packed_bytes_survive_every_tier_and_a_restart(
    open_face: OpenFace, device: str, kind: str, cpu: int | None
) -> None:
    """Half of the pages fit, and the others have a sixteenth of the tiers."""
    model = KINDS[kind] | {"pack": "on"}
    there_and_back(open_face, prompt(1, 7, extra=1), device=device, model=model, cpu=cpu, ssd=100, bounce=8)


@pytest.mark.parametrize(
    ("open_face", "page_tokens"),
    [
        *(("pool", tokens) for tokens in (1, 3, 16, 512)),
        *(("attached:1", tokens) for tokens in (1, 3, 16)),
        *(("attached:3", 3), ("attached:8", 16), ("attached:16", 16), ("attached:16", 512), ("attached:512", 512)),
    ],
    indirect=["open_face"],
)
@pytest.mark.parametrize("cpu", [None, 6])
def test_pages_of_any_size(open_face: OpenFace, device: str, page_tokens: int, cpu: int | None) -> None:
    heads = {"kv_heads": 1, "head_dim": 8 if page_tokens == 512 else 40, "v_head_dim": 3}
    model = MHA | {"page_tokens": page_tokens, "layers": 2} | heads
    there_and_back(open_face, prompt(1, 5, page_tokens, extra=1), device=device, model=model, cpu=cpu)


@pytest.mark.parametrize(("pages", "extra"), [(4, 0), (4, 1), (4, 3), (1, 0), (1, 1), (0, 3), (0, 0)])
def test_only_full_pages_are_kept(open_face: OpenFace, device: str, pages: int, extra: int) -> None:
    face = open_face(device=device)
    tokens = prompt(1, pages, extra=extra)
    face.put(tokens)
    for _ in range(2):
        assert face.found(tokens) == 4 * pages
        assert face.get(tokens).pages == (LOADED,) * pages
        face.drop("cpu")
    assert below(face) == {"cpu": 0, "ssd": pages}


# -- lookups ---------------------------------------------------------------------------------------------------------


def test_a_hole_ends_the_hit(open_face: OpenFace) -> None:
    face = open_face()
    tokens = prompt(1, 5, extra=1)
    face.put(tokens)
    lose(face.engine, tokens, [2], "cpu", "ssd")
    assert face.found(tokens) == face.get(tokens).tokens == 8
    face.put(tokens)
    assert face.found(tokens) == face.get(tokens).tokens == 20


@pytest.mark.parametrize("cpu", [None, 4])
@pytest.mark.parametrize("ssd", [None, 12])
def test_any_set_of_tiers(open_face: OpenFace, device: str, cpu: int | None, ssd: int | None) -> None:
    face = open_face(device=device, cpu=cpu, ssd=ssd)
    assert list(below(face)) == ["cpu"] * (cpu is not None) + ["ssd"] * (ssd is not None)
    tokens = prompt(1, 6, extra=1)
    found = 24 if ssd else 16 if cpu else 0
    for _ in range(2):
        face.put(tokens)
        assert face.found(tokens) == face.get(tokens).tokens == found


def test_salts_keep_tenants_apart(open_face: OpenFace, device: str) -> None:
    face = open_face(device=device)
    tokens = prompt(1, 3, extra=1)
    face.put(tokens, "a")
    assert face.found(tokens, "b") == face.found(tokens) == 0
    assert face.get(tokens, "b").tokens == face.get(tokens).tokens == 0
    face.put(tokens, "b")
    assert face.get(tokens, "a").tokens == face.get(tokens, "b").tokens == 12
    removed = face.engine.invalidate(face.engine.namespace("a"))
    assert (removed["cpu"], removed["ssd"]) == (3, 3)
    assert face.found(tokens, "a") == face.get(tokens, "a").tokens == 0
    assert face.get(tokens, "b").tokens == 12


def test_a_start_past_the_end_finds_nothing_and_no_lookup_changes_a_tier(open_face: OpenFace) -> None:
    face = open_face()
    face.put(prompt(1, 3))
    counts = ("pages", "free_slots", "evictions")
    before = {n: [tier[c] for c in counts] for n, tier in face.engine.stats()["tiers"].items()}
    for start in (12, 16, 4000):
        hit = face.engine.lookup(prompt(1, 3), start=start)
        assert (hit.start, hit.tokens, hit.tiers, hit.pages) == (start, 0, (), ())
    assert face.found(prompt(1, 3)) == 12
    assert before == {n: [tier[c] for c in counts] for n, tier in face.engine.stats()["tiers"].items()}
    assert face.engine.stats()["leases"] == []


def test_stats_are_plain_data(open_face: OpenFace) -> None:
    face = open_face()
    face.put(prompt(1, 3, extra=1))
    face.drop("cpu")
    face.get(prompt(1, 3, extra=1))
    until(lambda: "ssd" in face.engine.stats()["bytes_per_second"], "the load is learned from")
    stats = json.loads(json.dumps(face.engine.stats()))
    assert stats["loaded"] == {"ssd": 3}
    assert stats["stored"] == {"cpu": 3, "ssd": 3}
    assert stats["bytes_loaded"]["ssd"] == 3 * face.engine.layout.page_bytes
    assert stats["bytes_per_second"]["ssd"] > 0


# -- pressure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cpu", "bounce"), [(3, 4), (None, 2)])
def test_a_prefix_larger_than_the_memory_for_it_loads(
    open_face: OpenFace, device: str, cpu: int | None, bounce: int
) -> None:
    face = open_face(device=device, cpu=cpu, ssd=20, bounce=bounce)
    tokens = prompt(1, 15, extra=1)
    face.put(tokens)
    for _ in range(3):
        face.drop("cpu")
        assert face.get(tokens).bytes_by_tier == {"ssd": 15 * face.engine.layout.page_bytes}


@pytest.mark.parametrize(("cpu", "bounce", "pages"), [(6, 4, 5), (4, 2, 8)])
def test_two_loads_at_once_that_together_exceed_the_cpu_tier(
    open_face: OpenFace, device: str, cpu: int, bounce: int, pages: int
) -> None:
    face = open_face(device=device, cpu=cpu, ssd=20, bounce=bounce)
    prompts = [prompt(1, pages, extra=1), prompt(2, pages, extra=1)]
    for tokens in prompts:
        face.put(tokens)
    for _ in range(5):
        face.drop("cpu")
        first, second = [face.begin(tokens) for tokens in prompts]
        assert [face.end(begun).tokens for begun in (second, first)] == [4 * pages] * 2


def test_pressure_takes_the_cold_tail_first(open_face: OpenFace) -> None:
    face = open_face(cpu=None, ssd=8)
    cold, warm = prompt(1, 4, extra=1), prompt(2, 4, extra=1)
    face.put(warm)
    face.put(cold)
    face.found(warm)
    face.put(prompt(3, 2))
    assert [face.found(tokens) for tokens in (warm, cold, prompt(3, 2))] == [16, 8, 8]


@pytest.mark.parametrize("tier", ["cpu", "ssd"])
def test_a_batch_that_evicts_never_takes_the_head_of_a_prefix_before_its_tail(open_face: OpenFace, tier: str) -> None:
    face = open_face(cpu=8 if tier == "cpu" else None, ssd=8 if tier == "ssd" else None)
    old, new = prompt(1, 8), prompt(2, 3)
    face.put(old)
    face.put(new)
    assert face.found(new) == 12
    assert face.found(old) == 20


def test_capacities_hold_whatever_is_stored(open_face: OpenFace, slab: Path) -> None:
    face = open_face(gpu=6, cpu=4, ssd=8)
    size = sum(f.stat().st_size for f in slab.glob("slab*"))
    for seed in range(12):
        face.put(prompt(seed, 1 + seed % 5, extra=1))
        settle(face.engine)
    assert sum(f.stat().st_size for f in slab.glob("slab*")) == size == 8 * face.engine.layout.extent_bytes
    assert below(face)["ssd"] <= 8
