"""How the native library is found, missed and built, and that its stub tells of it."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gdscache import _native
from gdscache.errors import NativeMissingError
from tests.support.places import ROOT, tool


def test_a_library_that_cannot_be_imported_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gdscache.native")
    monkeypatch.setitem(sys.modules, "gdscache._native", None)
    with pytest.raises(NativeMissingError, match="cannot be loaded") as caught:
        importlib.import_module("gdscache.native")
    assert "make" in caught.value.hint


@pytest.mark.parametrize("content", [None, b"no library"], ids=["missing", "damaged"])
def test_a_missing_or_damaged_file_is_said(tmp_path: Path, content: bytes | None) -> None:
    package = tmp_path / "gdscache"
    package.mkdir()
    for name in ("__init__.py", "errors.py", "native.py"):
        shutil.copy(ROOT / "gdscache" / name, package)
    if content is not None:
        (package / Path(_native.__file__).name).write_bytes(content)
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from gdscache.errors import NativeMissingError
try:
    import gdscache.native
except NativeMissingError as error:
    print(error)
"""
    command = [sys.executable, "-I", "-S", "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stderr == ""
    assert "the native library cannot be loaded" in done.stdout
    assert "hint: install the wheel of this machine and Python, or run make" in done.stdout
    assert content is None or str(package) in done.stdout


def test_importing_gdscache_loads_nothing_native() -> None:
    script = """
import gdscache, gdscache.commands.main
gdscache.load_config, gdscache.GdsCacheError
print("_native." in open("/proc/self/maps").read())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "False\n", done.stderr


# --- the stub ----------------------------------------------------------------------------------------------------


def arguments(function: ast.FunctionDef) -> tuple[list[str], list[str], int]:
    """The names of a function's arguments, of those that have to be named, and how many may be left out."""
    of = function.args
    by_name = [argument.arg for argument in of.kwonlyargs]
    optional = len(of.defaults) + sum(default is not None for default in of.kw_defaults)
    return [argument.arg for argument in (*of.posonlyargs, *of.args)], by_name, optional


def declared(body: list[ast.stmt]) -> dict[str, Any]:
    """What a stub has, by name: `value`, or a function's arguments, or what a class has."""
    found: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = declared(node.body)
        elif isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
            found[node.name] = "value" if node.decorator_list else arguments(node)
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            found[node.target.id] = "value"
    return found


def built(names: dict[str, Any]) -> dict[str, Any]:
    """The same of what the module has. nanobind knows of each function how it is called."""
    found: dict[str, Any] = {}
    for name, value in names.items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, type):
            found[name] = built(dict(vars(value)))
        elif hasattr(value, "__nb_signature__"):
            ((signature, *_),) = value.__nb_signature__
            (function,) = ast.parse(re.sub(r"\\\d+", "...", signature) + ": ...").body
            assert isinstance(function, ast.FunctionDef)
            found[name] = arguments(function)
        elif name != "__init__":  # of a class that nobody makes
            found[name] = "value"
    return found


def test_the_stub_has_what_the_module_has() -> None:
    stub = declared(ast.parse((ROOT / "gdscache" / "_native.pyi").read_text(encoding="utf-8")).body)
    made = built({name: value for name, value in vars(_native).items() if name != "hooks"})  # of the tests' build
    assert list(stub) != []
    assert stub.keys() == made.keys()
    for name, told in stub.items():
        assert told == made[name], name


# --- the build ---------------------------------------------------------------------------------------------------


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/native_build.py as a module, which knows no compiler yet."""
    pytest.importorskip("setuptools", minversion="77", reason="the build needs it; make test installs it")
    module = tool("native_build")
    monkeypatch.delenv("CXX", raising=False)
    return module


def test_ziglang_is_required_where_there_is_no_compiler(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.requires() == [build.ZIG]
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install ziglang"):
        build.compiler()


def test_what_is_missing_for_the_bindings_is_one_sentence(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without = build.python()._replace(version="3.11", headers=str(tmp_path))
    with pytest.raises(
        SystemExit, match=r"^error: Python 3\.11 has no headers \(.*Python\.h\): install python3\.11-dev "
    ):
        build.build(tmp_path / "none.so", of=without)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SystemExit, match=r'^error: there is no nanobind: pip install "nanobind>=3\.1,<4", and try again$'
    ):
        build.bindings(build.python())
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_is_asked_what_its_module_is_called(build: ModuleType, tmp_path: Path) -> None:
    old = build.Python("python3.11", "3.11", "", f".cpython-311-{os.uname().machine}-linux-gnu.so", False)
    assert old.file("aarch64") == "_native.cpython-311-aarch64-linux-gnu.so"
    assert old.file("x86_64") == "_native.cpython-311-x86_64-linux-gnu.so"
    assert old._replace(stable=True).file("aarch64") == "_native.abi3.so"
    assert build.LIBRARY == build.python().library() == Path(_native.__file__)
    assert build.python().stable == (sys.version_info >= (3, 12))
    with pytest.raises(SystemExit, match="is no Python that runs"):
        build.python(str(tmp_path / "python3.12"))


def test_a_library_is_old_where_any_source_is_newer(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [tmp_path / "host" / "moves", tmp_path / "host" / "bind"]
    monkeypatch.setattr(build, "SOURCES", tmp_path / "host")
    library = tmp_path / "_native.abi3.so"
    assert not build.is_fresh(library)
    library.touch()
    for folder in folders:
        folder.mkdir(parents=True)
        for name in ("a.cc", "a.h"):
            assert build.is_fresh(library)
            (folder / name).touch()
            os.utime(folder / name, (2e9, 2e9))
            assert not build.is_fresh(library)
            (folder / name).unlink()


def test_a_compiler_that_builds_no_library_is_passed_over_or_named(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "c++"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert build.system_compiler() != ("c++",)
    build.system_compiler.cache_clear()
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(SystemExit, match="builds no C"):
        build.system_compiler()


def test_only_wheels_that_are_built_portable_are_called_so(build: ModuleType) -> None:
    assert build.wheel_machine("linux_x86_64") is None
    assert build.wheel_machine("manylinux_2_28_aarch64") == "aarch64"
    with pytest.raises(SystemExit, match="no wheel for manylinux_2_17_x86_64"):
        build.wheel_machine("manylinux_2_17_x86_64")


@pytest.mark.suite
def test_the_tests_in_cpp() -> None:
    command = [sys.executable, "tools/native_tests.py", "plain"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    if "good" not in done.stdout:
        pytest.skip(done.stdout.strip())
