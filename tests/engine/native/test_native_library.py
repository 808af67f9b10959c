"""How the native library is found, refused and built."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gdscache.errors import NativeCallError, NativeMissingError, NativeVersionError
from gdscache.native import library as native
from tests.support.places import ROOT

HEADER = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "csrc" / "host").glob("api*.h")))


def test_a_missing_library_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NativeMissingError, match=r"cannot be loaded.*none\.so") as caught:
        native.Library(tmp_path / "none.so")
    assert "make" in caught.value.hint


def test_a_damaged_library_is_said(tmp_path: Path) -> None:
    (tmp_path / "bad.so").write_bytes(b"no library")
    with pytest.raises(NativeMissingError):
        native.Library(tmp_path / "bad.so")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    with pytest.raises(NativeVersionError, match=f"has the interface {native.ABI - 1}"):
        native.Library(native.PATH)


def test_a_library_without_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(native._FUNCTIONS, "unheard_of", (None, ()))
    with pytest.raises(NativeVersionError, match="gdscache_unheard_of"):
        native.Library(native.PATH)


def test_the_table_has_the_functions_of_the_header() -> None:
    declared = {
        name: 0 if arguments.strip() == "" else arguments.count(",") + 1
        for name, arguments in re.findall(r"GDSCACHE_API [^;(]*?\bgdscache_(\w+)\(([^)]*)\);", HEADER)
    }
    assert {name: len(arguments) for name, (_, arguments) in native._FUNCTIONS.items()} == declared
    assert f"#define GDSCACHE_ABI {native.ABI}\n" in HEADER
    with pytest.raises(AttributeError, match="no function 'unheard_of'"):
        native.library().unheard_of  # noqa: B018


def test_a_refused_call_is_an_error_with_its_number() -> None:
    assert native.checked(7, "x") == 7
    with pytest.raises(NativeCallError, match="x: Cannot allocate memory") as caught:
        native.checked(-12, "x")
    assert caught.value.errno == 12


def test_importing_gdscache_loads_nothing_native() -> None:
    script = (
        "import sys, gdscache; gdscache.CacheEngine; maps = open('/proc/self/maps').read(); "
        "print('libgdscache_host' in maps)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/native_build.py as a module, which knows no compiler yet."""
    pytest.importorskip("setuptools", minversion="77", reason="the build needs it; make test installs it")
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "tools" / "native_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
    assert "good" in done.stdout or "skipped" in done.stdout
