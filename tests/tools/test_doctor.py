"""`gdscache doctor`: what it makes of a machine, of one without a GPU, and of what a configuration asks for."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache.commands import doctor
from gdscache.commands.doctor import Asked, Facts, Report, Row, defaults, gpu, storage
from gdscache.commands.doctor.facts import Found, attempt
from gdscache.commands.doctor.gpu import calibration_row, device_row, driver_row
from gdscache.config import Config
from gdscache.cuda.numa import Placement
from gdscache.errors import DeviceError, PinnedMemoryError
from gdscache.kernels import choice as paths
from tests.support.doctor_facts import H200, HINT, KEY, MEASURED, PLAIN, WHOLE, answered, changed, lacking
from tests.support.places import ROOT
from tests.support.rates import UP

pytestmark = pytest.mark.suite

CONFIGS = ROOT / "configs"
MODEL = {"name": "m", "layers": 4, "kv_heads": 8, "head_dim": 128, "page_tokens": 16}  # 64 KiB a layer
SECTIONS = ["GPU", "Kernels", "GPU <-> CPU", "SSD", "Inference engines"]

NO_COMPILER = changed(
    WHOLE,
    compiler=lacking("cuda-core is not installed", ""),
    nvrtc=None,
    built=lacking("cannot build pages.cu"),
    calibration=None,
    mover=Found(("copy_engine", "cannot build pages.cu")),
)
NOT_PINNED = changed(WHOLE, pinned=lacking("cudaHostRegister answered 2"))
NO_SUCH_GPU = changed(WHOLE, device=lacking("there are 1 devices"), mover=None)


def asks(**sections: Any) -> Asked:
    return Asked(Config.from_dict({"model": MODEL, "cpu": {}} | sections))


def rows(report: Report) -> dict[str, Row]:
    """Every row by its name; no name is there twice."""
    found = [row for rows in report.sections.values() for row in rows]
    assert len({row.name for row in found}) == len(found)
    return {row.name: row for row in found}


def verdicts(facts: Facts, asked: Asked, verdict: str) -> set[str]:
    return {row.name for row in rows(doctor.examine(facts, asked)).values() if row.verdict == verdict}


def test_a_whole_machine() -> None:
    report = doctor.examine(WHOLE, asks())
    assert not report.failed
    assert [*report.sections] == SECTIONS
    assert {row.verdict for row in rows(report).values()} == {"ok", "info"}
    said = rows(report)
    assert said["torch"].value == "2.11.0, CUDA 13.0"
    assert said["driver"].value == "580.82.07, CUDA 13.0"
    assert said["GPU 0"].value == "NVIDIA H200, compute capability 9.0, 140 GiB, 132 SMs"
    assert said["gpu.kernels"].data["implementation"] == "cuda"


@pytest.mark.parametrize(
    ("place", "verdict", "said"),
    [
        (Placement(1, frozenset({4, 5})), "ok", "NUMA node 1: its pools and threads lie there"),
        (Placement(0, lacks="this process may use no processor of NUMA node 0"), "info", ""),
        (Placement(lacks="the machine does not say which NUMA node it is on"), "info", ""),
    ],
)
def test_where_what_serves_a_gpu_lies(place: Placement, verdict: str, said: str) -> None:
    facts = dataclasses.replace(WHOLE, devices=Found((device_row(0, H200, place),)))
    row = rows(doctor.examine(facts, asks()))["GPU 0"]
    assert row.verdict == verdict
    assert said in row.value
    assert place.lacks in row.next_step
    assert row.data["numa"] == {"node": place.node, "cpus": sorted(place.cpus)}


def test_a_machine_without_a_gpu_lacks_nothing_that_the_defaults_ask_for() -> None:
    for asked in (defaults(), asks(), asks(gpu={"device": "cpu", "kernels": "off"})):
        report = doctor.examine(PLAIN, asked)
        assert not report.failed
        assert verdicts(PLAIN, asked, "warn") == set()
        assert rows(report)["gpu.kernels"].data["implementation"] == "native"
        assert rows(report)["torch"].value == "2.11.0, without CUDA"
        assert not {"GPU", "NVRTC", "kernels", "copy engine", "calibration"} & rows(report).keys()  # nothing was tried
        advised = {name for name, row in rows(report).items() if row.next_step}
        assert advised == {"driver"}  # all else would be advice to someone who has a GPU


def test_a_gpu_that_torch_does_not_see_is_a_warning() -> None:
    driven = changed(PLAIN, driver=Found(driver_row(13000)))
    assert verdicts(driven, defaults(), "warn") == {"torch"}
    hidden = changed(PLAIN, torch_cuda="13.0", driver=Found(driver_row(13000, "", "cuInit answers 100")))
    assert verdicts(hidden, defaults(), "warn") == {"driver", "GPU"}
    assert rows(doctor.examine(hidden, defaults()))["driver"].value == "CUDA 13.0, cuInit answers 100"
    assert not doctor.examine(hidden, defaults()).failed


@pytest.mark.parametrize(
    ("facts", "asked", "fails"),
    [
        (NO_SUCH_GPU, asks(gpu={"device": "cuda:7"}), {"gpu.device"}),
        (NO_SUCH_GPU, asks(gpu={"device": "cuda:7", "kernels": "on"}), {"gpu.device", "gpu.kernels"}),
        (changed(PLAIN, mover=lacking("the planes are in host memory")), asks(gpu={"kernels": "on"}), {"gpu.kernels"}),
        (changed(NO_COMPILER, mover=lacking("cannot build pages.cu")), asks(gpu={"kernels": "on"}), {"gpu.kernels"}),
        (changed(WHOLE, mover=lacking("half of gpu.staging is 131072 bytes")), asks(), {"gpu.kernels"}),
        (changed(WHOLE, mover=lacking("OutOfMemoryError", "")), asks(), {"gpu.kernels"}),
    ],
)
def test_what_would_not_be_as_asked_for_fails(facts: Facts, asked: Asked, fails: set[str]) -> None:
    report = doctor.examine(facts, asked)
    assert {row.name for row in report.failed} == fails
    assert not report.describe()["ok"]
    assert all(row.next_step for row in report.failed)


@pytest.mark.parametrize(
    ("facts", "asked", "warns"),
    [
        (NO_COMPILER, asks(), {"compiler", "kernels", "gpu.kernels"}),
        (NOT_PINNED, asks(), {"page-locking"}),
        (changed(WHOLE, api=Found("single")), asks(), {"copy engine"}),
        (
            changed(WHOLE, calibration=Found(calibration_row(MEASURED, "no home", cached=False, kept=False))),
            asks(),
            {"calibration"},
        ),
        (changed(WHOLE, calibration=lacking("cuMemAlloc")), asks(), {"calibration"}),
        (changed(WHOLE, nvrtc=lacking("no libnvrtc.so.13", "")), asks(), {"NVRTC"}),
    ],
)
def test_what_auto_makes_up_for_is_a_warning(facts: Facts, asked: Asked, warns: set[str]) -> None:
    assert not doctor.examine(facts, asked).failed
    assert verdicts(facts, asked, "warn") == warns


def test_what_is_switched_off_is_no_warning() -> None:
    off = changed(WHOLE, mover=Found(("copy_engine", "gpu.kernels is off")))
    assert verdicts(off, asks(gpu={"kernels": "off"}), "warn") == set()
    assert "since gpu.kernels is off" in rows(doctor.examine(off, asks(gpu={"kernels": "off"})))["gpu.kernels"].value


def test_what_to_install_fits_torch() -> None:
    said = rows(doctor.examine(changed(NO_COMPILER, torch_cuda="12.8"), asks()))
    assert "cuda12" in said["compiler"].next_step
    assert "cuda13" not in said["compiler"].next_step
    assert said["gpu.kernels"].next_step == HINT


def test_the_calibration_says_where_it_is_kept_and_when_it_was_made() -> None:
    said = rows(doctor.examine(WHOLE, defaults()))["calibration"]
    assert said.value == "cached, once measured in 0.50 s: /c/calibration.json"
    assert (said.data["seconds"], said.data["load"]["zero_copy"]) == (0.5, UP.zero_copy)
    facts = changed(WHOLE, calibration=Found(calibration_row(MEASURED, "/c", cached=False, kept=True)))
    assert rows(doctor.examine(facts, defaults()))["calibration"].value == "measured now in 0.50 s: /c"


def raises(error: BaseException) -> Callable[[], None]:
    def find() -> None:
        raise error

    return find


def test_an_expected_error_is_an_answer() -> None:
    assert attempt(lambda: 3) == Found(3)
    assert attempt(raises(PinnedMemoryError("no", "do"))) == Found(None, "no", "do")
    for error in (ImportError("x"), OSError("x"), RuntimeError("\n x\nat line 3"), MemoryError("x")):
        assert attempt(raises(error)) == Found(None, f"{type(error).__name__}: x")
    assert attempt(raises(RuntimeError())) == Found(None, "RuntimeError")


@pytest.mark.parametrize("error", [ZeroDivisionError(), TypeError(), KeyError("x"), KeyboardInterrupt()])
def test_any_other_error_is_not_hidden(error: BaseException) -> None:
    with pytest.raises(type(error)):
        attempt(raises(error))


def test_nvrtc_that_is_not_there() -> None:
    lacks = raises(RuntimeError('Failure finding "libnvrtc.so.13"'))
    missing: Any = SimpleNamespace(nvrtc=lacks)
    assert "libnvrtc.so.13" in attempt(lambda: gpu.nvrtc_version(missing)).cause
    found: Any = SimpleNamespace(nvrtc=lambda: (13, 0))
    assert gpu.nvrtc_version(found) == "13.0"


class FakeCuda:
    """The driver as `find_driver` calls it."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802
        number._obj.value = 12080
        return 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.code

    def cuGetErrorName(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0


def test_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ctypes, "CDLL", raises_for(OSError("libcuda.so.1: cannot open")))
    with pytest.raises(DeviceError, match="no CUDA driver"):
        gpu.find_driver()
    monkeypatch.setattr(gpu, "DRIVER_VERSION", tmp_path / "version")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeCuda(100))
    assert gpu.find_driver() == driver_row(12080, "", "cuInit answers 100 (CUDA_ERROR_NO_DEVICE)")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeCuda(0))
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Fri Jan 10 20:14:31 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (root@x)",
    ):
        (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
        assert gpu.find_driver() == driver_row(12080, "570.86.10")


def raises_for(error: Exception) -> Callable[[str], None]:
    return lambda name: raises(error)()


def test_the_gpu_to_look_at() -> None:
    for device, index in ((WHOLE.device, 0), (Found("cuda:3"), 3), (Found("cpu"), 0), (lacking("cuda:9"), 0)):
        assert gpu.gpu_to_look_at(WHOLE.devices, device) == torch.device("cuda", index)
    assert gpu.gpu_to_look_at(PLAIN.devices, PLAIN.device) is None


def test_a_calibration_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "Driver", lambda device: SimpleNamespace())
    monkeypatch.setattr(gpu, "CopyEngine", lambda driver: SimpleNamespace(api="batch_13"))
    monkeypatch.setattr(paths, "calibration_key", lambda driver, engine: dict(KEY))
    monkeypatch.setattr(paths, "measure", lambda driver, key: MEASURED)
    monkeypatch.setenv("GDSCACHE_CACHE_DIR", str(tmp_path))
    device, file = torch.device("cuda", 0), str(paths.cache_file(KEY))

    def found(*, recalibrate: bool = False) -> Row:
        return gpu.find_calibration(device, recalibrate=recalibrate)

    assert found() == calibration_row(MEASURED, file, cached=False, kept=True)
    assert found() == calibration_row(MEASURED, file, cached=True, kept=True)
    assert found(recalibrate=True) == calibration_row(MEASURED, file, cached=False, kept=True)
    monkeypatch.setenv("GDSCACHE_CACHE_DIR", "/proc")
    assert found() == calibration_row(MEASURED, str(paths.cache_file(KEY)), cached=False, kept=False)


@pytest.fixture
def run(
    gdscache: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run `gdscache doctor` with a cache of its own, and without a child for each transport."""
    monkeypatch.setattr(storage, "try_transport", lambda transport, *asked: answered(transport))
    monkeypatch.setenv("GDSCACHE_CACHE_DIR", str(tmp_path / "calibration"))
    return functools.partial(gdscache, "doctor")


def by_name(out: str) -> dict[str, Any]:
    return {row["name"]: row for section in json.loads(out)["sections"] for row in section["rows"]}


def test_the_defaults_work_everywhere(run) -> None:
    status, out, _ = run("--json")
    said = json.loads(out)
    assert (status, said["ok"]) == (0, True)
    assert [section["title"] for section in said["sections"]] == SECTIONS
    assert set(by_name(out)["torch"]) == {"name", "value", "verdict", "next_step", "data"}
    assert by_name(out)["torch"]["data"] == {"version": torch.__version__, "cuda": torch.version.cuda}
    assert "fail" not in {row["verdict"] for row in by_name(out).values()}


def test_a_host_pool_is_copied_by_numpy_and_the_table_says_what_the_json_says(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, looked, look = CONFIGS / "cpu_only.yaml", list[Facts](), doctor.find

    def look_once(asked: Asked, **options: bool) -> Facts:
        if not looked:
            looked.append(look(asked, **options))
        return looked[0]

    monkeypatch.setattr(doctor, "find", look_once)
    status, as_json, _ = run("--json", "--config", file)
    assert status == 0
    assert by_name(as_json)["gpu.kernels"]["data"]["implementation"] == "native"
    assert by_name(as_json)["gpu.device"]["data"] == "cpu"
    status, out, err = run("--config", file)
    assert (status, err) == (0, "")
    assert out.rstrip().endswith(f"{file}: no check fails")
    lines = [line.split() for line in out.splitlines()]
    for name, row in by_name(as_json).items():
        assert any(line[: 1 + len(name.split())] == [row["verdict"], *name.split()] for line in lines), name


def test_a_tier_behind_the_ssd_that_cannot_be_opened_here_fails(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tier_without_a_host.py").write_text("import os\nos.environ['NO_SUCH_HOST']\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["tests.support.dict_tier:DictTier", "nowhere:Tier", "json:loads", "tier_without_a_host:Tier"]
    file = tmp_path / "c.yaml"
    tiers = ", ".join(f"{{tier: '{name}'}}" for name in names)
    file.write_text(f"model: {{name: m, layers: 4, kv_heads: 8, head_dim: 128}}\ntiers: [{tiers}]\n", encoding="utf-8")
    status, out, _ = run("--config", file, "--json")
    assert status == 1
    rows = [by_name(out)[name] for name in names]
    assert [row["verdict"] for row in rows] == ["info", "fail", "fail", "fail"]
    assert all(row["next_step"] for row in rows[1:])
    assert "KeyError: 'NO_SUCH_HOST'" in rows[3]["value"]


def test_status_1_where_the_config_asks_for_what_is_not_there(run, tmp_path: Path) -> None:
    file, fails = tmp_path / "c.yaml", {"gpu.device", "gpu.kernels"}
    model = "model: {name: m, layers: 4, kv_heads: 8, head_dim: 128}\n"
    file.write_text(f"{model}gpu: {{device: 'cuda:99', kernels: on}}\n", encoding="utf-8")
    status, out, _ = run("--config", file, "--json")
    assert (status, json.loads(out)["ok"]) == (1, False)
    failed = {name: row for name, row in by_name(out).items() if row["verdict"] == "fail"}
    assert set(failed) == fails
    assert all(row["next_step"] for row in failed.values())
    status, out, err = run("--config", file)
    assert status == 1
    assert "Traceback" not in out + err
    for name in fails:
        assert name in " ".join(out.splitlines()[-3:])  # the last sentence, which a long path wraps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which gives what is asked for")
def test_status_1_where_a_gpu_is_asked_for_and_there_is_none(run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run("--json", "--config", CONFIGS / "three_tier_gds.yaml")
    assert status == 1
    failed = {name for name, row in by_name(out).items() if row["verdict"] == "fail"}
    always = {"gpu.device", "gpu.kernels", "ssd.gds"}
    assert always <= failed <= always | {"free space"}  # by the disk of this machine


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_is_calibrated_once(run, tmp_path: Path) -> None:
    status, out, _ = run("--json", "--config", CONFIGS / "llama3_8b.yaml")
    first = by_name(out)
    failed = {name for name, row in first.items() if row["verdict"] == "fail"}
    assert failed <= {"free space"}  # the config asks for 256 GiB of SSD
    assert status == bool(failed)
    assert first["gpu.kernels"]["data"] == {"implementation": "cuda", "cause": ""}
    assert first["kernels"]["data"] > 0
    assert first["page-locking"]["verdict"] == "ok"
    calibration = first["calibration"]["data"]
    assert calibration["seconds"] > 0
    assert (calibration["cached"], calibration["kept"]) == (False, True)
    assert [str(file) for file in (tmp_path / "calibration").glob("*.json")] == [calibration["file"]]
    for path, pieces in (("staged", paths.PIECES), ("copy_engine", paths.ENGINE_PIECES)):
        assert [sorted(map(int, calibration[way][path])) for way in ("load", "store")] == [sorted(pieces)] * 2
    again = by_name(run("--json")[1])["calibration"]["data"]
    assert again == calibration | {"cached": True}
    anew = by_name(run("--json", "--recalibrate")[1])["calibration"]["data"]
    assert not anew["cached"]
    assert anew["seconds"] != calibration["seconds"]
