"""The identity of weights: other files are other weights, and nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdscache.errors import WeightsNotFoundError
from gdscache.integrations import weights
from gdscache.integrations.sglang import setup as sglang_setup
from gdscache.integrations.vllm import setup as vllm_setup
from gdscache.integrations.weights import STRETCH, WHOLE, model_directory, weights_identity, weights_read

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
    assert weights_identity(model) == "files-3:4d2425c8f5b0d6f514348f488ecde59816f8991568140921af5700f92e829e1c"
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


def _rewrite(model: Path) -> None:
    """Other bytes, of the same number and time."""
    file = model / NAMES[1]
    at = file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    os.utime(file, ns=(at, at))


CHANGES: dict[str, Callable[[Path], object]] = {
    "changed": _append,
    "rewritten, of one size and time": _rewrite,
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
    file.write_bytes(b"other")
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


def test_times_links_commits_and_names_of_blobs_do_not_count(tmp_path: Path) -> None:
    one = cached(tmp_path / "one")
    before = weights_identity(one)
    assert weights_identity(cached(tmp_path / "two", at=77)) == before
    assert weights_identity(cached(tmp_path / "three", OTHER, blobs="d")) == before
    shutil.copytree(one, tmp_path / "plain")
    assert weights_identity(tmp_path / "plain") == before


def test_a_blob_that_was_rewritten_keeps_its_name_and_not_its_identity(tmp_path: Path) -> None:
    one = cached(tmp_path / "one")
    before = weights_identity(one)
    blob = (one / NAMES[0]).resolve()
    blob.write_bytes(b"SAME SIZE")
    os.utime(blob, ns=(5, 5))
    assert weights_identity(one) != before


# -- samples ---------------------------------------------------------------------------------------------------------


def tensors(file: Path, fill: dict[str, bytes]) -> Path:
    """A safetensors file of 1 MiB a tensor, each of one byte value, with the time 1."""
    header = {
        name: {"dtype": "U8", "shape": [1 << 20], "data_offsets": [number << 20, (number + 1) << 20]}
        for number, name in enumerate(fill)
    }
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(value * (1 << 20) for value in fill.values()))
    os.utime(file, ns=(1, 1))
    return file


@pytest.mark.parametrize("other", ["first", "middle", "last"])
def test_one_tensor_of_many_differs(tmp_path: Path, other: str) -> None:
    names = ["first", *(f"layer.{number}" for number in range(20)), "middle", "last"]
    one = tensors(tmp_path / "model.safetensors", dict.fromkeys(names, b"x"))
    before = weights_identity(one)
    assert weights_identity(tensors(one, {**dict.fromkeys(names, b"x"), other: b"y"})) != before
    assert weights_identity(tensors(one, dict.fromkeys(names, b"x"))) == before
    assert weights_identity(tensors(one, dict.fromkeys(["First", *names[1:]], b"x"))) != before, "a tensor's name"


def test_so_much_of_each_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound that the docs give: a header, and 4 KiB a tensor."""
    file = tensors(tmp_path / "model.safetensors", dict.fromkeys(map(str, range(50)), b"x"))
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    reads: list[int] = []
    monkeypatch.setattr(os, "pread", lambda fd, n, at, pread=os.pread: (reads.append(n), pread(fd, n, at))[1])
    weights_identity(file)
    assert sorted(reads) == sorted([8, header - 8, header, *[4096] * 50])


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "transformer.wte.weight", "word_embeddings.weight"])
def test_a_row_of_an_embedding_differs(tmp_path: Path, name: str) -> None:
    """Of new tokens, say, which were trained with all else frozen."""
    file = tensors(tmp_path / "model.safetensors", {"layers.0.weight": b"x", name: b"x"})
    data, found = bytearray(file.read_bytes()), {weights_identity(file)}
    for row in range(1, 256, 51):
        data[-4096 * row] ^= 1
        file.write_bytes(data)
        found.add(weights_identity(file))
    assert len(found) == 6


@pytest.mark.parametrize("name", ["model.bin", "model.gguf", "no header.safetensors"])
def test_a_stretch_of_a_file_without_a_table_differs(tmp_path: Path, name: str) -> None:
    file, size = tmp_path / name, 5 << 20
    places = [0, *range(WHOLE, size - WHOLE, STRETCH), size - 1]
    found = set()
    for changed in (None, *places):
        data = bytearray(b"\xff" * size)
        if changed is not None:
            end = min(size, changed + STRETCH)
            data[changed:end] = b"y" * (end - changed)
        file.write_bytes(data)
        found.add(weights_identity(file))
    assert len(found) == 1 + len(places)


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b'{"a": {}}', b'{"a": {"data_offsets": ["x", "y"]}}', b'{"a": {"data_offsets": [-9, 4]}}',
        b'{"a": {"data_offsets": [0, 99999999]}}', b'{"a": {"data_offsets": [9, 4]}}', b"[" * 100_000,
        b'{"embed": {"data_offsets": [9, 4]}}', b'{"embed": {"data_offsets": [0, 999999999999999999]}}',
    ],
    ids=lambda header: header[:40].decode(),
)  # fmt: skip
def test_a_header_that_is_none_is_sampled_as_any_file(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1 << 20))
    before = weights_identity(file)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert weights_identity(file) != before


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tensors(tmp_path / "model.safetensors", {"a": b"x", "b": b"x"})
    monkeypatch.setattr(os, "pread", lambda fd, n, at, pread=os.pread: pread(fd, n, at)[: n // 2 if n == 4096 else n])
    with pytest.raises(WeightsNotFoundError, match=r"2048 of 4096 bytes at \d+"):
        weights_identity(file)


def test_a_name_of_the_hub_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot = cached(tmp_path / "hf" / "hub")
    for revision in (None, "main", COMMIT):
        assert model_directory("org/name", revision, cache=tmp_path / "hf" / "hub") == snapshot
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


def test_a_pipe_is_no_file_of_weights(model: Path) -> None:
    os.mkfifo(model / "model-00003.bin")
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


# -- read by this process ----------------------------------------------------------------------------------------------


def test_files_that_changed_since_the_process_started_have_a_name_of_its_own(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether they were read before or behind the change nobody knows."""
    monkeypatch.setattr(weights, "_started", lambda: time.time() + 60)
    assert weights_read(model) == weights_identity(model)
    assert not caplog.records
    monkeypatch.setattr(weights, "_started", lambda: time.time() - 60)
    first, second = weights_read(model), weights_read(model)
    assert len({first, second, weights_identity(model)}) == 3
    assert NAMES[0] in caplog.text
    assert "model.weights" in caplog.text


def test_times_that_are_set_back_hide_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path / "model", at=1)
    monkeypatch.setattr(weights, "_started", lambda: time.time() - 60)
    assert weights_read(model) != weights_identity(model)


def test_what_the_process_has_downloaded_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_started", lambda: time.time() - 60)
    snapshot = cached(tmp_path)
    assert weights_read(snapshot) == weights_identity(snapshot)


def test_a_branch_that_moved_on_behind_the_configuration_is_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process has downloaded a newer version, and this one may have read the old or the new weights."""
    monkeypatch.setattr(weights, "_started", time.time)
    config = SimpleNamespace(_commit_hash=COMMIT)
    model = SimpleNamespace(model="org/name", revision=None, hf_config=config, hf_config_path=None)
    vllm = SimpleNamespace(
        load_config=SimpleNamespace(load_format="auto", download_dir=str(tmp_path)), model_config=model
    )
    server = SimpleNamespace(load_format="auto", model_path="org/name", download_dir=str(tmp_path))
    files = weights_identity(cached(tmp_path))

    def named() -> list[str]:
        return [vllm_setup.weights_of(vllm), sglang_setup.weights_of(server, weights.commit_of(model))]

    assert named() == [files] * 2
    assert not caplog.records
    cached(tmp_path, OTHER, blobs="d")
    assert len({*named(), files}) == 3
    assert f"{OTHER} changed while this process ran" in caplog.text
    model.hf_config_path = "org/another"
    assert vllm_setup.weights_of(vllm) == files, "the configuration is of another repository"
    model.hf_config_path, config._commit_hash = None, OTHER
    assert named() == [files] * 2


def test_a_process_knows_when_it_started() -> None:
    code = "import time; from gdscache.integrations import weights; print(weights._started(), time.time())"
    before = time.time()
    said = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert before - 0.05 <= float(said[0]) <= float(said[1])


# -- in an engine ----------------------------------------------------------------------------------------------------


def test_it_imports_nothing_heavy() -> None:
    code = "import sys, gdscache.integrations.weights; assert not {'torch', 'vllm', 'pydantic'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
