"""What is shipped, and what sets a machine up: the wheel, the Makefile, the GPU libraries."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.interpreters import python
from tests.support.places import ROOT, tool

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
STABLE = sys.version_info >= (3, 12)
LIBRARY = "_native" + (".abi3.so" if STABLE else str(sysconfig.get_config_var("EXT_SUFFIX")))
HEAVY = ("cupy", "cuda.core", "kvikio", "nixl", "mooncake", "transformers", "matplotlib")


def test_core_dependencies_are_the_promised_ones() -> None:
    names = {re.split(r"[^A-Za-z0-9_-]", text)[0] for text in PROJECT["project"]["dependencies"]}
    assert names == {"torch", "numpy", "pydantic", "pyyaml", "xxhash", "typer", "rich", "prometheus-client"}
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {
        "cuda12", "cuda13", "kernels", "hf", "plot", "mooncake", "events", "otel", "test", "dev",
    }  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy, since setuptools writes beside the sources."""
    for name, version in (("setuptools", "77"), ("nanobind", "3.1")):
        pytest.importorskip(name, minversion=version, reason="the build needs it; make test installs it")
    source = tmp_path_factory.mktemp("source")
    for name in ("gdscache", "configs", "csrc", "tools"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    quick = target.with_name("c++")  # what is compiled here is not run for long
    quick.write_text('#!/bin/sh\nexec c++ "$@" -O0\n', encoding="utf-8")
    quick.chmod(0o755)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(target)]
    environment = os.environ | ({} if "CXX" in os.environ or not shutil.which("c++") else {"CXX": str(quick)})
    subprocess.run([*command, str(source)], check=True, timeout=500, capture_output=True, env=environment)
    (file,) = target.iterdir()
    return zipfile.ZipFile(file)


@pytest.mark.suite
@pytest.mark.timeout(600)  # the library is compiled anew
def test_the_wheel_is_complete_and_says_what_it_fits(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    expected = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "gdscache").rglob("*")
        if file.is_file() and file.suffix in {".py", ".pyi", ".toml", ".typed"}
    }
    for folder in ("configs", "csrc"):
        expected |= {f"gdscache/{file.relative_to(ROOT)}" for file in (ROOT / folder).iterdir() if file.is_file()}
    expected.add(f"gdscache/{LIBRARY}")
    assert "gdscache/_native.pyi" in expected
    shipped = {name for name in names if ".dist-info/" not in name}
    assert shipped == expected
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    about = wheel.read(f"{info}/WHEEL").decode()
    assert "Root-Is-Purelib: false" in about
    tag = "cp312-abi3" if STABLE else "cp311-cp311"
    assert re.findall("Tag: (.*)", about) == [f"{tag}-linux_{os.uname().machine}"]
    assert f"{info}/licenses/LICENSE" in names
    assert "gdscache = gdscache.commands.main:main" in wheel.read(f"{info}/entry_points.txt").decode()


@pytest.mark.suite
@pytest.mark.timeout(600)
def test_the_wheel_works_away_from_the_tree(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    script = """
import sys
sys.path.insert(0, sys.argv[1])
import gdscache.config, gdscache.csrc, gdscache.commands.main, gdscache.native
assert gdscache.native.best_arm() in ("scalar", "avx2", "neon")
assert not hasattr(gdscache._native, "hooks"), "which are for tests"
assert gdscache._native.__file__.startswith(sys.argv[1]), gdscache._native.__file__
assert gdscache.config.__file__.startswith(sys.argv[1]), gdscache.config.__file__
assert gdscache.csrc.__file__.startswith(sys.argv[1] + "/gdscache/csrc/"), gdscache.csrc.__file__
sys.argv[1:] = ["config", "print", "llama3_8b"]
out, sys.stdout = sys.stdout, open("here.yaml", "w")
try:
    gdscache.commands.main.main()
except SystemExit as ended:
    assert ended.code in (0, None)
sys.stdout.close()
sys.stdout = out
print(gdscache.config.load_config("here.yaml").model.layout().extent_bytes)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert (done.stdout.splitlines()[-1], done.stderr) == (str(8 << 20), "")


@pytest.mark.suite
def test_no_module_imports_an_optional_library_when_it_is_imported() -> None:
    # The integrations, and the bench's client of an engine, are the modules that one imports in order to get a library.
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((ROOT / "gdscache").rglob("*.py"))
        if "integrations" not in file.parts and file.name not in ("__main__.py", "ttft_transformers.py")
    ]
    script = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
print(sorted(name for name in {HEAVY!r} if name in sys.modules))
"""
    assert python(script).strip() == "[]"


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("setuptools", minversion="77", reason="it imports the build, which needs it")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("wheels")


def test_wheels_are_built_by_the_pythons_that_can(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, script in (
        ("python3.17", "exit 127"),  # of pyenv, which has not chosen it
        ("python3.18", "echo 3 18 0"),  # without headers
        ("python3.19", "echo 3 19 1"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "versions" / "this"))
    ours = {sys.version_info[:2]: Path(sys.executable)}
    assert wheels.interpreters([]) == ours | {(3, 19): tmp_path / "python3.19"}
    other = tmp_path / "other"
    (tmp_path / "python3.19").rename(other)
    assert wheels.interpreters([]) == ours
    assert wheels.interpreters([str(other)]) == ours | {(3, 19): other}
    with pytest.raises(SystemExit, match=r"python3\.18 is no CPython 3\.11 or later with Python\.h and ensurepip"):
        wheels.interpreters([str(tmp_path / "python3.18")])
    assert [wheels.kind_of(version) for version in ((3, 11), (3, 12), (3, 19))] == [*wheels.KINDS, "cp312-abi3"]


def test_the_build_asks_for_one_nanobind(wheels: ModuleType) -> None:
    wanted = sys.modules["native_build"].NANOBIND
    assert wanted in PROJECT["build-system"]["requires"]
    assert f'"{wanted}"' in (ROOT / "Makefile").read_text(encoding="utf-8")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "-C", str(ROOT), "--no-print-directory", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
@pytest.mark.parametrize(
    "target",
    [
        "demo", "test", "suites", "sanitize", "lint", "soak", "mutants", "scale", "scale-smoke", "resolve", "wheels",
        "bench", "clean", "help",
    ],
)  # fmt: skip
def test_each_target_can_be_planned(target: str, tmp_path: Path) -> None:
    done = make("-n", target, f"VENV={tmp_path / 'new'}")
    assert done.returncode == 0, done.stderr
    if target in ("demo", "test", "suites", "lint", "wheels"):
        plan = done.stdout
        assert plan.index("-m venv") < plan.index("pip install") < plan.index("install_gpu.py")
    assert not (tmp_path / "new").exists()


@needs_make
def test_an_old_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    # A newer Python that claims to be an old one: the check sees sys.version_info only.
    old = tmp_path / "old-python"
    old.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || exit 9\nexec {sys.executable} -c '
        "\"import sys; sys.version_info = (3, 10, 9); sys.version = '3.10.9 (old)'; $2\"\n",
        encoding="utf-8",
    )
    old.chmod(0o755)
    done = make("test", f"PY={old}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "gdscache needs Python 3.11 or newer" in done.stderr
    assert "is 3.10.9" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_runs_lint_the_tests_and_the_suites_and_fails_where_one_of_its_parts_fails(tmp_path: Path) -> None:
    """The real script, with stand-ins for make and for what it runs."""
    fetched = ["engine_pins.py"]
    fetched += [f"install_gpu.py --only-{what}" for what in ("kvikio 13", "nixl 13", "nvrtc 12", "nvrtc 13")]
    fetches = [f"fetches tools/{what}" for what in fetched]
    before = ["makes .venv/.installed-dev", "makes lint", *fetches, "makes demo-model", "makes mooncake-env"]
    script = tmp_path / ".ci" / "run"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    script.parent.mkdir()
    shutil.copy(ROOT / ".ci" / "run", script)
    python = 'echo "fetches $*"; [ "$2" != "$FAILS" ]'
    make = 'echo "makes $*"; [ "$1" != "$FAILS" ]'
    for name, text in ((".venv/bin/python", python), ("make", make), ("promtool", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    end = "makes engines-smoke scale-smoke"
    cases = [("nothing", 0, end), ("suites", 1, end), ("engines-smoke", 1, end), ("--only-nixl", 1, "--only-nixl 13")]
    for fails, status, last in [*cases, ("test", 1, "makes test")]:
        done = subprocess.run(
            [script], env={**os.environ, "PATH": path, "FAILS": fails}, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (status, "")
        assert done.stdout.rstrip().endswith(last)
        if fails == "nothing":
            assert done.stdout.splitlines() == [*before, "makes test", "makes suites WORKERS=4", end]


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/install_gpu.py as a module, whose pip only notes its arguments, on a machine with CUDA 13."""
    module = tool("install_gpu")
    declared = {
        "kvikio-cu13": ["cupy-cuda13x[ctk]>=14", "libkvikio-cu13==26.10.*", "numpy<3.0", "boto3; extra == 'test'"],
        "kvikio-cu12": [
            "cupy-cuda12x[ctk]>=14",
            "libkvikio-cu12==26.10.*",
            'zarr; python_version > "3" and extra == "z"',
        ],
        "libkvikio-cu13": ["cuda-pathfinder", "cuda-toolkit[cufile]==13.*", "rapids-logger==0.3.*"],
        "libkvikio-cu12": [
            "cuda-pathfinder", "cuda-toolkit[cufile]==12.*", "nvidia-cufile-cu12", "rapids-logger==0.3.*",
        ],
    }  # fmt: skip
    metadata = SimpleNamespace(requires=declared.get, version=lambda name: "1.5.1", distributions=lambda name: iter(()))
    monkeypatch.setattr(module.importlib, "metadata", metadata)
    module.calls = []
    monkeypatch.setattr(module, "pip_install", lambda *arguments: module.calls.append(list(arguments)))
    monkeypatch.setattr(module, "driver_cuda_major", lambda: 13)
    monkeypatch.setattr(module, "torch_cuda_major", lambda: 13)
    return module


def extra(major: int, name: str) -> str:
    (found,) = [text for text in PROJECT["project"]["optional-dependencies"][f"cuda{major}"] if text.startswith(name)]
    return str(found)


def test_the_libraries_of_the_extra_are_installed_without_what_is_never_imported(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = ["--no-deps", "packaging", "cuda-pathfinder", "rapids-logger==0.3.*"]
    kvikio = [["--no-deps", extra(13, "kvikio")], ["--no-deps", "libkvikio-cu13==26.10.*"], [*needed, "nvidia-cufile"]]
    kernels = [[extra(13, "cuda-core")], [extra(13, "cuda-bindings")]]
    assert installer.main([]) == 0
    assert installer.calls == [*kernels, *kvikio, ["--no-deps", extra(13, "nixl")], ["--no-deps", "nixl==1.5.1"]]
    with monkeypatch.context() as without_a_gpu:
        without_a_gpu.setattr(installer, "driver_cuda_major", lambda: None)
        installer.calls.clear()
        assert installer.main(["--only-kvikio", "13"]) == 0
        assert installer.calls == kvikio
    monkeypatch.setattr(installer.importlib.metadata, "distributions", lambda name: iter([name]))
    assert installer.main([]) == 0
    assert needed in installer.calls, "a cuFile that is there is kept"


@pytest.mark.parametrize(
    ("driver", "built", "used", "says"),
    [
        (12, 12, 12, ""),
        (13, 12, 12, ""),
        (12, 13, 12, "torch is built for CUDA 13, the driver runs CUDA 12"),
        (13, None, 13, "CPU build"),
        (14, 13, 13, ""),
    ],
)
def test_the_cuda_version_is_that_of_torch_if_the_driver_can(
    installer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    driver: int,
    built: int | None,
    used: int,
    says: str,
) -> None:
    monkeypatch.setattr(installer, "driver_cuda_major", lambda: driver)
    monkeypatch.setattr(installer, "torch_cuda_major", lambda: built)
    assert installer.main([]) == 0
    assert ["--no-deps", extra(used, "kvikio")] in installer.calls
    out = capsys.readouterr().out
    assert says in out
    assert ("warning" in out) == bool(says)


@pytest.mark.parametrize(
    ("gpu", "driver", "status"), [("off", 13, 0), ("auto", None, 0), ("on", None, 1), ("auto", 11, 1)]
)
def test_machines_where_nothing_is_installed(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch, gpu: str, driver: int | None, status: int
) -> None:
    monkeypatch.setattr(installer, "driver_cuda_major", lambda: driver)
    assert installer.main(["--gpu", gpu]) == status
    assert installer.calls == []


def test_a_failing_pip_fails_the_set_up(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: str) -> None:
        raise subprocess.CalledProcessError(7, ["pip"])

    monkeypatch.setattr(installer, "pip_install", fail)
    assert installer.main([]) == 1
    assert "status 7; GPU=off" in capsys.readouterr().err


@pytest.fixture
def prefix(installer: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment whose pip makes the directory of `--target`, with one file in it."""

    def pip_install(*arguments: str) -> None:
        installer.calls.append(list(arguments))
        target = Path(arguments[arguments.index("--target") + 1])
        target.mkdir()
        (target / "installed.py").touch()

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(installer, "driver_cuda_major", lambda: None)
    monkeypatch.setattr(installer, "pip_install", pip_install)
    return tmp_path


@pytest.mark.parametrize(("major", "nvrtc"), [(12, "nvidia-cuda-nvrtc-cu12>=12.8"), (13, "nvidia-cuda-nvrtc>=13,<14")])
def test_nvrtc_goes_into_a_directory_of_its_own(installer: ModuleType, prefix: Path, major: int, nvrtc: str) -> None:
    for other in ("11", "14", "x"):
        with pytest.raises(SystemExit):
            installer.main(["--only-nvrtc", other])
    assert installer.main(["--only-nvrtc", str(major)]) == 0
    directory = prefix / f"nvrtc{major}"
    assert installer.nvrtc_directory(major) == directory
    wanted = [extra(major, "cuda-core"), extra(major, "cuda-bindings"), "cuda-pathfinder>=1.4.2,<2", nvrtc]
    assert installer.calls == [["--no-deps", "--no-compile", "--target", str(directory), *wanted]]
    assert installer.main(["--only-nvrtc", str(major)]) == 0
    assert len(installer.calls) == 1, "it was there"


def test_nvrtc_is_installed_anew_when_it_is_not_what_is_wanted(
    installer: ModuleType, prefix: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, working = prefix / "nvrtc13", installer.pip_install

    def fail(*arguments: str) -> None:
        working(*arguments)
        raise subprocess.CalledProcessError(7, ["pip"])

    with monkeypatch.context() as failing:
        failing.setattr(installer, "pip_install", fail)
        assert installer.main(["--only-nvrtc", "13"]) == 1
    assert capsys.readouterr().err == "error: pip ended with status 7\n"
    installer.calls.clear()
    (directory / "half").touch()  # an installation that was interrupted
    assert installer.main(["--only-nvrtc", "13"]) == 0
    assert sorted(path.name for path in directory.iterdir()) == ["complete.txt", "installed.py"]
    monkeypatch.setitem(installer.NVRTC, 13, "nvidia-cuda-nvrtc>=13.1,<14")
    assert installer.main(["--only-nvrtc", "13"]) == 0
    assert installer.calls[1][-1] == "nvidia-cuda-nvrtc>=13.1,<14"
    with monkeypatch.context() as another_python:
        another_python.setattr(sys, "version_info", (3, 99))
        assert installer.main(["--only-nvrtc", "13"]) == 0
    assert len(installer.calls) == 3
