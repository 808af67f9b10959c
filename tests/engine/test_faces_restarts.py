"""What both faces promise of directories: what was cleared stays away, what was kept comes back, in order of use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdscache.tiers import ssd
from tests.support.faces import Face
from tests.support.helpers import MHA, prompt, settle

OpenFace = Callable[..., Face[Any]]


def test_clear_reaches_every_tier_and_the_disk(open_face: OpenFace) -> None:
    face = open_face()
    tokens = prompt(1, 4, extra=1)
    face.put(tokens)
    removed = face.engine.clear()
    assert (removed["cpu"], removed["ssd"]) == (4, 4)
    assert set(face.engine.clear().values()) == {0}
    assert face.found(tokens) == face.get(tokens).tokens == 0
    settle(face.engine)
    face.engine.close()
    assert open_face().found(tokens) == 0


def test_invalidate_survives_a_restart(open_face: OpenFace) -> None:
    face = open_face()
    tokens = prompt(1, 3, extra=1)
    face.put(tokens, "a")
    face.put(tokens, "b")
    face.engine.invalidate(face.engine.namespace("a"))
    face.engine.close()
    face = open_face()
    assert face.found(tokens, "a") == 0
    assert face.get(tokens, "b").tokens == 12


def test_recency_survives_a_restart(open_face: OpenFace) -> None:
    face = open_face(cpu=None, ssd=8)
    prompts = [prompt(seed, 2) for seed in range(4)]
    for tokens in prompts:
        face.put(tokens)
    for i in (2, 0, 3, 1):
        assert face.found(prompts[i]) == 8
    face.engine.close()
    for survivors in ([0, 3, 1], [3, 1], [1]):
        face = open_face(cpu=None, ssd=8)
        face.put(prompt(100 + len(survivors), 2))
        with face.engine.manager.lock:  # not by lookup: that would count as a use
            index = face.engine.manager.tiers["ssd"].index
            kept = [i for i in range(4) if all(index.get(p.key) is not None for p in face.engine.pages(prompts[i]))]
        assert sorted(survivors) == kept
        face.engine.close()


def test_of_many_uses_without_a_commit_the_last_survive_a_restart(
    open_face: OpenFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd, "_TOUCHES_KEPT", 4)
    face = open_face(cpu=None, ssd=8)
    prompts = [prompt(seed, 2) for seed in range(4)]
    for tokens in prompts:
        face.put(tokens)
    face.engine.close()
    face = open_face(cpu=None, ssd=8, store={"write_policy": "never"})
    for i in (3, 2, 3, 2, 1, 0, 1):
        assert face.found(prompts[i]) == 8
    for _ in range(100):
        assert face.found(prompt(9, 2)) == 0
    assert len(face.engine.manager.ssd._touches) < 100, "lookups that find nothing gather"  # type: ignore[union-attr]
    face.engine.close()
    face = open_face(cpu=None, ssd=8)
    face.put(prompt(101, 4))
    assert [face.found(tokens) for tokens in prompts] == [8, 8, 0, 0]


def test_a_use_before_a_page_came_says_nothing_after_a_restart(open_face: OpenFace) -> None:
    face = open_face(cpu=None, ssd=4)
    first, second = prompt(1, 2), prompt(2, 2)
    face.put(first)
    with face.engine.manager.lock:
        for tokens in (second, first):
            face.engine.manager.tiers["ssd"].touch([page.key for page in reversed(face.engine.pages(tokens))])
    face.put(second)
    face.engine.close()
    face = open_face(cpu=None, ssd=4)
    face.put(prompt(3, 2))
    assert [face.found(tokens) for tokens in (first, second)] == [0, 8]


def test_the_write_policy_never_keeps_the_ssd_as_it_is(open_face: OpenFace) -> None:
    tokens, other = prompt(1, 3, extra=1), prompt(2, 3, extra=1)
    face = open_face()
    face.put(tokens)
    face.engine.close()
    face = open_face(store={"write_policy": "never"})
    face.put(other)
    assert face.engine.stats()["tiers"]["ssd"]["pages"] == 3
    face.drop("cpu")
    assert face.found(other) == 0
    assert face.get(tokens).tokens == 12
    face.put(tokens)
    assert face.engine.stats()["tiers"]["ssd"]["pages"] == 3


def test_another_model_of_the_same_extent_size_shares_the_directory_but_no_page(open_face: OpenFace) -> None:
    tokens = prompt(1, 3, extra=1)
    face = open_face()
    face.put(tokens)
    face.engine.close()
    face = open_face(model=MHA | {"name": "other"})
    assert face.found(tokens) == face.get(tokens).tokens == 0
    face.put(tokens)
    assert face.engine.stats()["tiers"]["ssd"]["pages"] == 6
    face.engine.close()
    assert open_face().get(tokens).tokens == 12


def test_two_engines_in_one_process_do_not_meet(open_face: OpenFace, tmp_path: Path) -> None:
    one, two = open_face(tmp_path / "one"), open_face(tmp_path / "two")
    tokens = prompt(1, 3, extra=1)
    one.put(tokens)
    assert two.found(tokens) == two.get(tokens).tokens == 0
    two.put(tokens)
    one.engine.clear()
    assert two.get(tokens).tokens == 12
    assert one.get(tokens).tokens == 0
