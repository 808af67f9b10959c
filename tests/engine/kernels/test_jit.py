"""Building kernels: what compiles them, what names a compiled one, where it is kept, and what is said where none is."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gdscache.errors import GdsCacheError, KernelUnavailableError
from gdscache.kernels import jit

NO_HOME = "/proc/nonexistent"  # where not even root can make a directory
DEVICE = torch.device("cuda", 0)

PROBE = b"""#include "value.cuh"
extern "C" __global__ void fill(int* out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = VALUE;
}
"""

Tree = dict[str, bytes]


def write(directory: Path, tree: Tree) -> Path:
    """A directory of sources with these files and no others."""
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    for name, content in tree.items():
        (directory / name).write_bytes(content)
    return directory


# -- what names a compiled kernel ------------------------------------------------------------------------------------

TREE = {"a.cu": b"one two", "b.cuh": b"three", "c.cuh": b""}
EDITS: dict[str, Tree] = {
    "nothing": TREE,
    "a byte changed": TREE | {"b.cuh": b"thrEe"},
    "a byte more": TREE | {"b.cuh": b"three "},
    "a file renamed": {"a.cu": b"one two", "d.cuh": b"three", "c.cuh": b""},
    "an ending changed": {"a.cuh": b"one two", "b.cuh": b"three", "c.cuh": b""},
    "bytes moved to the next file": TREE | {"a.cu": b"one ", "b.cuh": b"twothree"},
    "contents swapped": TREE | {"a.cu": b"three", "b.cuh": b"one two"},
    "two files in one": {"a.cu": b"one twob.cuh\0three", "c.cuh": b""},
    "two files in one, with a length": {"a.cu": b"one twob.cuh\x005\0three", "c.cuh": b""},
    "an empty file less": {"a.cu": b"one two", "b.cuh": b"three"},
    "an empty file more": TREE | {"d.cu": b""},
    "empty": {},
}


def test_every_edit_changes_the_digest(tmp_path: Path) -> None:
    digests = {edit: jit.source_digest(write(tmp_path / "sources", tree)) for edit, tree in EDITS.items()}
    assert len(set(digests.values())) == len(EDITS), digests
    for digest in digests.values():
        assert len(digest) == 16
        int(digest, 16)


def test_what_no_kernel_includes_does_not_change_the_digest(tmp_path: Path) -> None:
    sources = write(tmp_path / "sources", TREE)
    digest = jit.source_digest(sources)
    (sources / "__init__.py").write_text("# another\n", encoding="utf-8")
    (sources / "__pycache__").mkdir()
    os.utime(sources / "a.cu", (1, 1))
    assert jit.source_digest(sources) == digest


def test_the_macros_name_the_sources(tmp_path: Path) -> None:
    sources = write(tmp_path / "sources", TREE)
    defines = jit.defines(sources, WIDTH=16, KIND="char")
    assert defines == {"GDSCACHE_SOURCE": f"0x{jit.source_digest(sources)}ULL", "KIND": "char", "WIDTH": "16"}
    assert list(jit.defines(sources, KIND="char", WIDTH=16).items()) == list(defines.items())
    (sources / "b.cuh").write_bytes(b"Three")
    changed = jit.defines(sources, WIDTH=16, KIND="char")
    assert {name for name in defines if defines[name] != changed[name]} == {"GDSCACHE_SOURCE"}


def test_the_sources_are_those_of_the_package() -> None:
    assert (jit.SOURCES / "pages.cu").is_file()
    assert jit.defines() == {"GDSCACHE_SOURCE": f"0x{jit.source_digest()}ULL"}


# -- where nothing can be built --------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that can be written, no word of the user on where to cache, and a temporary directory of our own."""
    for variable in ("GDSCACHE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write(tmp_path / "sources", {"probe.cu": PROBE, "value.cuh": b"#define VALUE 7\n"})


def refused(sources: Path, source: str = "probe.cu") -> KernelUnavailableError:
    with pytest.raises(KernelUnavailableError) as caught:
        jit.build(source, {"fill": "P"}, DEVICE, sources=sources)
    assert isinstance(caught.value, GdsCacheError)
    assert caught.value.message.startswith(f"cannot build {source}: ")
    assert caught.value.hint
    return caught.value


@pytest.mark.usefixtures("home")
def test_without_a_compiler_the_hint_names_what_to_install(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    error = refused(sources)
    assert error.message == "cannot build probe.cu: cuda-core is not installed"
    assert "gdscache[cuda13]" in error.hint
    assert "gdscache[cuda12]" in error.hint


def install(place: Path, monkeypatch: pytest.MonkeyPatch, part: str, text: str) -> None:
    """A module `cuda.<part>` that is found before all others."""
    there = [name for name in sys.modules if name.split(".")[0] == "cuda"]
    for name in {*there, "cuda", "cuda.core"}:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that what is there afterwards goes again
        del sys.modules[name]
    (place / "cuda").mkdir(parents=True)
    (place / "cuda" / f"{part}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(place)


@pytest.mark.usefixtures("home")
def test_a_compiler_that_cannot_be_imported_is_told_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sources: Path
) -> None:
    install(tmp_path / "lib", monkeypatch, "core", "raise RuntimeError('first\\n\\nsecond')\n")
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"cuda-core": "9.9"}[name])
    assert jit.find_compiler().version == "9.9"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    error = refused(sources)
    assert error.message == "cannot build probe.cu: RuntimeError: first | second"
    assert "install" not in error.hint


def test_what_others_put_into_cuda_is_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path / "lib", monkeypatch, "pathfinder", "")
    with pytest.raises(KernelUnavailableError, match="cuda-core is not installed"):
        jit.find_compiler()


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch, home: Path) -> SimpleNamespace:
    """A cuda-core whose compiler is a counter, or raises `error`; `cubins` are those that were loaded."""
    seen = SimpleNamespace(compiled=[], cubins=[], version=(13, 0), launches=[], error=None)

    def from_cubin(cubin: bytes, name: str) -> SimpleNamespace:
        seen.cubins.append(cubin)
        return SimpleNamespace(get_kernel=lambda kernel: SimpleNamespace(handle=2000 + len(kernel)))

    def compile(self: Any, source: Path, macros: dict[str, str], arch: str) -> tuple[bytes, str]:
        if seen.error is not None:
            raise seen.error
        seen.compiled.append((source.name, macros, arch))
        return f"cubin {len(seen.compiled)}".encode(), ""

    class Driver:
        def __init__(self, device: torch.device) -> None:
            assert device == DEVICE

        def launch(self, *arguments: Any) -> None:
            seen.launches.append(arguments)

    cuda, part = ModuleType("cuda"), ModuleType("cuda.core")
    part.ObjectCode = SimpleNamespace(from_cubin=from_cubin)  # type: ignore[attr-defined]
    for module in (cuda, part):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.2")
    monkeypatch.setattr(jit.CudaCore, "compile", compile)
    monkeypatch.setattr(jit.CudaCore, "nvrtc", lambda self: seen.version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(jit, "Driver", Driver)
    return seen


def kernel(sources: Path, **macros: int) -> int:
    return jit.build("probe.cu", {"fill": "P"}, DEVICE, sources=sources, **macros)["fill"].pointer


def test_a_cubin_is_compiled_once_and_kept(core: SimpleNamespace, sources: Path, home: Path) -> None:
    assert [kernel(sources, WIDTH=4), kernel(sources, WIDTH=4)] == [2004] * 2
    digest = f"0x{jit.source_digest(sources)}ULL"
    assert core.compiled == [("probe.cu", {"GDSCACHE_SOURCE": digest, "WIDTH": "4"}, "sm_90")]
    assert core.cubins == [b"cubin 1"] * 2
    assert len(list((home / ".cache/gdscache/kernels").iterdir())) == 1, "nothing half-written beside it"


def test_whatever_changes_a_cubin_names_another(
    core: SimpleNamespace, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(sources)
    kernel(sources, WIDTH=4)
    (sources / "value.cuh").write_bytes(b"#define VALUE 8\n")
    kernel(sources)
    core.version = (13, 1)
    kernel(sources)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    kernel(sources)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.3")
    kernel(sources)
    assert len(core.compiled) == 6
    assert len(set(core.cubins)) == 6


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 32 + b"cubin 1"])
def test_a_kept_cubin_that_is_damaged_is_compiled_again(
    core: SimpleNamespace, sources: Path, home: Path, damage: bytes
) -> None:
    kernel(sources)
    (file,) = (home / ".cache/gdscache/kernels").iterdir()
    file.write_bytes(damage)
    kernel(sources)
    assert core.cubins == [b"cubin 1", b"cubin 2"]
    kernel(sources)
    assert core.cubins[-1] == b"cubin 2"


def test_a_launch_packs_its_arguments_as_c_does(core: SimpleNamespace, sources: Path) -> None:
    kernel = jit.build("probe.cu", {"fill": "IPq3s"}, DEVICE, sources=sources)["fill"]
    for i in range(3):
        kernel.launch(i, 32, [i, 1 << 63, -5, b"ab"], SimpleNamespace(cuda_stream=7 * i))  # type: ignore[arg-type]
    packed = [struct.pack("<IxxxxQq", i, 1 << 63, -5) + b"ab\0" for i in range(3)]
    assert core.launches == [(2004, i, 32, packed[i], 7 * i) for i in (1, 2)]  # an empty grid is no launch


@pytest.mark.usefixtures("core")
def test_a_source_that_is_not_there_is_told(sources: Path) -> None:
    assert "FileNotFoundError" in refused(sources, "absent.cu").message


def test_a_long_compile_error_is_cut(core: SimpleNamespace, sources: Path) -> None:
    core.error = RuntimeError("\n".join(f"line {i}" for i in range(1000)))
    assert refused(sources).message == "cannot build probe.cu: RuntimeError: line 0 | line 1 | line 2 | line 3"


# -- where compiled kernels are kept ---------------------------------------------------------------------------------

UNUSABLE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "no such home": lambda home, patch: patch.setenv("HOME", NO_HOME),
    "home is a file": lambda home, patch: (home.rmdir(), home.touch()),
    "cache is a file": lambda home, patch: ((home / ".cache").mkdir(), (home / ".cache" / "gdscache").touch()),
    "cache is a dangling link": lambda home, patch: (home / ".cache").symlink_to(NO_HOME),
    # A container that runs under any number: no HOME, no entry in the list of users.
    "user without a home": lambda home, patch: (patch.delenv("HOME"), patch.setattr("pwd.getpwuid", {}.__getitem__)),
}


@pytest.mark.parametrize("spoil", UNUSABLE)
def test_without_a_usable_home_kernels_are_compiled_each_time(
    core: SimpleNamespace, sources: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    UNUSABLE[spoil](home, monkeypatch)
    monkeypatch.chdir(tmp_path)
    kernel(sources)
    kernel(sources)
    assert core.cubins == [b"cubin 1", b"cubin 2"]
    assert not (tmp_path / "~").exists()
    assert kept_in(tmp_path / "tmp") == []
    monkeypatch.setenv("GDSCACHE_CACHE_DIR", str(tmp_path / "given"))
    kernel(sources)
    assert len(kept_in(tmp_path / "given" / "kernels")) == 1


# -- on a GPU --------------------------------------------------------------------------------------------------------


FILL = """
import sys
from pathlib import Path
import torch
from gdscache.kernels import jit

device = torch.device("cuda", 0)
out = torch.zeros(1000, dtype=torch.int32, device=device)
print("ready", flush=True)
sys.stdin.readline()
kernel = jit.build("probe.cu", {"fill": "Pi"}, device, sources=Path(sys.argv[1]))["fill"]
kernel.launch(4, 256, [out.data_ptr(), 1000], torch.cuda.current_stream(device))
torch.cuda.synchronize()
print(*set(out.tolist()))
"""


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        jit.find_compiler()
    except KernelUnavailableError as error:
        pytest.skip(str(error))


def kept_in(place: Path) -> list[Path]:
    """The files below a directory for compiled kernels, whoever has written them."""
    return [path for path in place.rglob("*") if path.is_file()]


def fill(sources: Path, cache: Path, processes: int) -> list[int]:
    """What each of so many processes finds in memory that it filled with VALUE; they build the kernel all at once."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FILL, str(sources)],
            env=os.environ | {"GDSCACHE_CACHE_DIR": str(cache)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    try:
        for process in running:
            process.stdout.readline()
        for process in running:  # all of them are ready
            with contextlib.suppress(BrokenPipeError):  # it has ended; what it said is below
                process.stdin.write("go\n")
                process.stdin.flush()
        said = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            with process:
                process.kill()
    assert [process.returncode for process in running] == [0] * processes, [errors for _, errors in said]
    return [int(out) for out, _ in said]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_processes_that_build_at_once_all_get_the_kernel(tmp_path: Path, sources: Path) -> None:
    cache = tmp_path / "cache"
    assert fill(sources, cache, 4) == [7] * 4
    assert len(kept_in(cache)) == 1, "one kernel, and nothing half-written beside it"
    (compiled,) = kept_in(cache)
    compiled.write_bytes(compiled.read_bytes()[:1000])
    assert fill(sources, cache, 1) == [7], "a kernel that was cut short is compiled again"
