"""The identity of weights: other files are other weights, and nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gdscache.errors import WeightsNotFoundError
from gdscache.integrations.weights import model_directory, weights_identity
from tests.support.helpers import Host, make_config, prompt, settle

NAMES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
COMMIT, OTHER = "a" * 40, "b" * 40


def make(directory: Path, names: list[str] | None = None, at: int = 1_700_000_000_123_456_789) -> Path:
    directory.mkdir(parents=True)
    for name in NAMES if names is None else names:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode())
        os.utime(file, ns=(at, at))
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make(tmp_path / "model")


def test_it_is_this_text_for_ever(model: Path) -> None:
    assert weights_identity(model) == "files-1:29c1a36d7bfc37e3e7c02735a28f9a309fc3669906fe86049938ef37141f7da8"
    assert weights_identity(str(model)) == weights_identity(model)


def test_the_path_and_the_order_do_not_count(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = weights_identity(model)
    assert weights_identity(make(tmp_path / "elsewhere" / "b", NAMES[::-1])) == before
    (tmp_path / "link").symlink_to(model)
    assert weights_identity(tmp_path / "link") == before
    monkeypatch.chdir(model)
    assert weights_identity(".") == before
    shuffled = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: _Backwards(shuffled(path)))
    assert weights_identity(model) == before


class _Backwards:
    def __init__(self, entries: os.ScandirIterator[str]) -> None:  # type: ignore[name-defined]
        self._entries = iter(list(entries)[::-1])

    def __enter__(self) -> _Backwards:
        return self

    def __exit__(self, *rest: object) -> None: ...

    def __iter__(self) -> _Backwards:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def close(self) -> None: ...


def _append(model: Path) -> None:
    file = model / NAMES[0]
    at = file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes() + b"x")
    os.utime(file, ns=(at, at))


def _retouch(model: Path) -> None:
    file = model / NAMES[1]
    at = file.stat().st_mtime_ns + 1
    os.utime(file, ns=(at, at))


CHANGES: dict[str, Callable[[Path], object]] = {
    "changed": _append,
    "retouched, by a nanosecond": _retouch,
    "added": lambda model: (model / "adapter.bin").write_bytes(b"x"),
    "added below": lambda model: make(model / "original", ["consolidated.00.pth"]),
    "renamed": lambda model: (model / NAMES[0]).rename(model / "model.safetensors"),
    "renamed to a directory": lambda model: _move_down(model),
    "swapped": lambda model: _swap(model / NAMES[0], model / NAMES[2]),
    "removed": lambda model: (model / NAMES[0]).unlink(),
    "another index": lambda model: (model / NAMES[2]).write_text("{}"),
}


def _move_down(model: Path) -> None:
    (model / "x").mkdir()
    (model / NAMES[0]).rename(model / "x" / NAMES[0])


def _swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between), other.rename(one), between.rename(other)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_other_files_are_other_weights(model: Path, change: str) -> None:
    before = weights_identity(model)
    CHANGES[change](model)
    after = weights_identity(model)
    assert after != before
    assert weights_identity(model) == after


def test_what_holds_no_weights_does_not_count(model: Path) -> None:
    before = weights_identity(model)
    (model / "README.md").write_text("new")
    (model / "tokenizer.json").write_text("new")
    make(model / ".cache", ["x.safetensors"])
    (model / ".hidden.bin").write_bytes(b"x")
    assert weights_identity(model) == before


def test_one_file_is_a_model_too(tmp_path: Path) -> None:
    make(tmp_path / "a", ["m.gguf"])
    make(tmp_path / "b", ["m.gguf"])
    file = tmp_path / "a" / "m.gguf"
    assert weights_identity(file) == weights_identity(tmp_path / "b" / "m.gguf")
    os.utime(file, ns=(1, 1))
    assert weights_identity(file) != weights_identity(tmp_path / "b" / "m.gguf")


def test_a_directory_that_leads_to_itself(model: Path) -> None:
    (model / "again").symlink_to(model)
    before = weights_identity(model)
    _append(model)
    assert weights_identity(model) != before


# -- a cache of the hub ----------------------------------------------------------------------------------------------


def cached(hub: Path, commit: str = COMMIT, blobs: str = "c", at: int = 5) -> Path:
    stored = hub / "models--org--name"
    snapshot = stored / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for below in ("refs", "blobs"):
        (stored / below).mkdir(exist_ok=True)
    (stored / "refs" / "main").write_text(commit)
    for number, name in enumerate(NAMES):
        blob = stored / "blobs" / (blobs * 63 + str(number))
        blob.write_bytes(b"same size")
        os.utime(blob, ns=(at, at))
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_the_hash_of_the_content_counts_and_no_time(tmp_path: Path) -> None:
    one, two = cached(tmp_path / "one"), cached(tmp_path / "two", at=77)
    assert weights_identity(one) == weights_identity(two)
    assert weights_identity(cached(tmp_path / "three", blobs="d")) != weights_identity(one)
    shutil.copytree(one, tmp_path / "plain")
    assert weights_identity(tmp_path / "plain") != weights_identity(one)


def test_another_commit_is_another_identity(tmp_path: Path) -> None:
    assert weights_identity(cached(tmp_path / "one")) != weights_identity(cached(tmp_path / "two", OTHER))


def test_links_that_lead_elsewhere_count_by_their_times(tmp_path: Path, model: Path) -> None:
    """A directory of links to files that somebody may change in place."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in NAMES:
        (linked / name).symlink_to(model / name)
    before = weights_identity(linked)
    assert before == weights_identity(model)
    _retouch(model)
    assert weights_identity(linked) != before


def test_a_name_of_the_hub_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot = cached(tmp_path / "hf" / "hub")
    for environment in (
        {"HF_HOME": str(tmp_path / "hf")},
        {"HF_HUB_CACHE": str(tmp_path / "hf" / "hub"), "HF_HOME": "/nowhere"},
    ):
        assert model_directory("org/name", environment=environment) == snapshot
        assert model_directory("org/name", COMMIT, environment=environment) == snapshot
    assert model_directory("org/name", cache=tmp_path / "hf" / "hub", environment={}) == snapshot
    assert model_directory(str(snapshot)) == snapshot
    for name, revision in (("org/other", None), ("org/name", "v2"), ("org/name", OTHER), ("org/name", "../../x")):
        with pytest.raises(WeightsNotFoundError, match="is not a path") as raised:
            model_directory(name, revision, cache=tmp_path / "hf" / "hub")
        assert "model.weights" in raised.value.hint


# -- what is wrong ---------------------------------------------------------------------------------------------------


def test_where_there_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    for name, told in (("empty", "has no file that ends in .safetensors"), ("nowhere", "No such file")):
        with pytest.raises(WeightsNotFoundError, match=told) as raised:
            weights_identity(tmp_path / name)
        assert str(tmp_path / name) in raised.value.message
        assert "model.weights" in raised.value.hint


def test_a_link_that_leads_nowhere(model: Path) -> None:
    (model / "model-00003.safetensors").symlink_to("gone")
    with pytest.raises(WeightsNotFoundError, match="model-00003"):
        weights_identity(model)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every directory")
def test_a_directory_that_may_not_be_read(model: Path) -> None:
    make(model / "sub").chmod(0)
    try:
        with pytest.raises(WeightsNotFoundError, match="Permission denied"):
            weights_identity(model)
    finally:
        (model / "sub").chmod(0o700)


# -- in an engine ----------------------------------------------------------------------------------------------------


def test_other_weights_hit_nothing(model: Path, slab: Path) -> None:
    tokens = prompt(1, 4)

    def found() -> int:
        config = make_config(slab)
        config["model"] = {**config["model"], "weights": weights_identity(model)}
        host = Host(config)
        with host.engine as engine:
            tokens_there = engine.lookup(tokens).tokens
            host.store(tokens)
            settle(engine)
        return tokens_there

    assert [found(), found()] == [0, 16]
    _append(model)
    assert [found(), found()] == [0, 16]
    _retouch(model)
    assert found() == 0


def test_it_imports_nothing_heavy() -> None:
    code = "import sys, gdscache.integrations.weights; assert not {'torch', 'vllm', 'pydantic'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
