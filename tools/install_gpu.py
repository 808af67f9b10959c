"""Install the GPU libraries that fit this machine, into the environment that runs this file. `make` calls it.

The requirements are those of the extras `cuda12` and `cuda13` in pyproject.toml. kvikio and NIXL are installed without
their declared dependencies, most of which (1.3 GB of CUDA libraries for kvikio, every CUDA version for NIXL) are never
imported; the few that kvikio does import follow.

cuda-core and NVRTC, for the tests that compile every kernel on any machine, go into a directory of their own for each
CUDA version: cuda-bindings for two versions cannot live in one environment.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints.txt"  # the newest versions that were tested
# Brought by torch, or never imported; cuda-toolkit is a name for a set of such packages.
PROVIDED = ("cupy", "numpy", "torch", "cuda-toolkit")
CUFILE = {12: "nvidia-cufile-cu12", 13: "nvidia-cufile"}  # loaded by kvikio
NVRTC = {12: "nvidia-cuda-nvrtc-cu12>=12.8", 13: "nvidia-cuda-nvrtc>=13,<14"}  # 12.8 is the first that knows sm_100


def driver_cuda_major() -> int | None:
    """The newest CUDA major version that the driver runs, or None without a driver or a GPU.

    From libcuda itself, which every CUDA program needs; `nvidia-smi` is often missing (containers).
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    return None if cuda.cuDriverGetVersion(ctypes.byref(version)) else version.value // 1000


def torch_cuda_major() -> int | None:
    """The CUDA major version that the installed torch was built for; None for a CPU build."""
    command = [sys.executable, "-c", "import torch; print(torch.version.cuda or '')"]
    version = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return int(version.split(".")[0]) if version else None


def extra_requirements(major: int) -> list[str]:
    """The requirements of the extra for that CUDA version; empty if there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"].get(f"cuda{major}", []))


def distribution(requirement: str) -> str:
    """The name in a requirement: `nixl-cu13` of `nixl-cu13>=1.5`."""
    return re.split(r"[^A-Za-z0-9_-]", requirement.strip(), maxsplit=1)[0]


def is_installed(name: str) -> bool:
    importlib.invalidate_caches()
    return next(iter(importlib.metadata.distributions(name=name)), None) is not None


def declared_by(name: str) -> list[str]:
    """The requirements of an installed distribution, without `PROVIDED` ones and its own extras."""
    importlib.invalidate_caches()
    declared = importlib.metadata.requires(name) or []
    plain = [text.partition(";")[0].strip() for text in declared if "extra ==" not in text]
    return [text for text in plain if not distribution(text).startswith(PROVIDED)]


def pip_install(*arguments: str) -> None:
    """One run of pip in this environment under the constraints, shown first. Raises `CalledProcessError`."""
    print("  pip install", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *arguments], check=True)


def install_kvikio(requirement: str, cufile: str) -> None:
    """kvikio, its C++ library in the same version, and the small packages that this library loads."""
    pip_install("--no-deps", requirement)
    library = [text for text in declared_by(distribution(requirement)) if text.startswith("libkvikio")]
    pip_install("--no-deps", *library)
    loaded = [text for text in declared_by(distribution(library[0])) if distribution(text) != cufile]
    if not is_installed(cufile):  # torch's CUDA builds bring one, in a version that they pin
        loaded.append(cufile)
    pip_install("--no-deps", "packaging", *loaded)


def install_nixl(requirement: str) -> None:
    """NIXL for one CUDA version, and `nixl`, which finds it, in the same version."""
    pip_install("--no-deps", requirement)
    importlib.invalidate_caches()
    pip_install("--no-deps", f"nixl=={importlib.metadata.version(distribution(requirement))}")


def nvrtc_directory(major: int) -> Path:
    """The target of `install_nvrtc` for that CUDA version: a directory for PYTHONPATH."""
    return Path(sys.prefix) / f"nvrtc{major}"


def install_nvrtc(major: int) -> None:
    """Install cuda-core as in the extra, NVRTC, and its finder into `nvrtc_directory`, unless they are there."""
    core = [text for text in extra_requirements(major) if text.startswith(("cuda-core", "cuda-bindings"))]
    wanted = [*core, "cuda-pathfinder>=1.4.2,<2", NVRTC[major]]
    directory = nvrtc_directory(major)
    # Written last: if it is missing or differs, the directory is useless. Wheels are for one Python version.
    complete = directory / "complete.txt"
    content = "\n".join(["python {}.{}".format(*sys.version_info), *wanted, ""])
    if complete.is_file() and complete.read_text(encoding="utf-8") == content:
        print(f"NVRTC for CUDA {major}: {directory}")
        return
    if directory.exists():
        shutil.rmtree(directory)
    pip_install("--no-deps", "--no-compile", "--target", str(directory), *wanted)
    complete.write_text(content, encoding="utf-8")


def install(major: int, requirements: list[str]) -> None:
    # Requirements with dependencies first: otherwise pip would complain about those left out by the others.
    for requirement in sorted(requirements, key=lambda text: text.startswith(("kvikio", "nixl"))):
        if requirement.startswith("kvikio"):
            install_kvikio(requirement, CUFILE[major])
        elif requirement.startswith("nixl"):
            install_nixl(requirement)
        else:
            pip_install(requirement)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install the GPU libraries that fit this machine.")
    parser.add_argument("--gpu", choices=("auto", "on", "off"), default="auto", help="off: never; on: fail without one")
    parser.add_argument(
        "--only-kvikio",
        type=int,
        metavar="MAJOR",
        help="kvikio for that CUDA version, GPU or not: its tests use a stand-in",
    )
    parser.add_argument(
        "--only-nixl",
        type=int,
        metavar="MAJOR",
        help="NIXL for that CUDA version, GPU or not: its POSIX plugin needs none",
    )
    parser.add_argument(
        "--only-nvrtc",
        type=int,
        choices=sorted(NVRTC),
        help="cuda-core and NVRTC for that CUDA version, GPU or not, in a directory of their own; for tests",
    )
    options = parser.parse_args(arguments)
    if options.only_kvikio is not None:
        return install_only(options.only_kvikio, "kvikio")
    if options.only_nixl is not None:
        return install_only(options.only_nixl, "nixl")
    if options.only_nvrtc is not None:
        return attempt(lambda: install_nvrtc(options.only_nvrtc))
    wanted = options.gpu
    driver = None if wanted == "off" else driver_cuda_major()
    if driver is None:
        if wanted == "on":
            print("error: GPU=on, but no NVIDIA driver answers or it shows no GPU", file=sys.stderr)
            return 1
        print("GPU libraries: none (" + ("GPU=off)" if wanted == "off" else "no GPU here)"))
        return 0
    built = torch_cuda_major()
    # Two CUDA major versions in one process do not mix: torch's decides, unless the driver cannot run it.
    major = min(driver, built or driver)
    if built is None:
        print("warning: a GPU is here, but the installed torch is a CPU build and will not use it")
    elif built > driver:
        print(f"warning: torch is built for CUDA {built}, the driver runs CUDA {driver}: update the driver,", end=" ")
        print(f"or install a torch built for CUDA {driver}")
    requirements = extra_requirements(major)
    if not requirements:
        print(f"error: no GPU libraries for CUDA {major}; GPU=off goes on without them", file=sys.stderr)
        return 1
    print(f"GPU libraries for CUDA {major} (the driver runs {driver}):", flush=True)
    return attempt(lambda: install(major, requirements), "; GPU=off goes on without a GPU")


def install_only(major: int, name: str) -> int:
    """Install one library of an extra on any machine. Returns an exit status."""
    requirements = [text for text in extra_requirements(major) if text.startswith(name)]
    return attempt(lambda: install(major, requirements))


def attempt(action: Callable[[], None], advice: str = "") -> int:
    """Install. Returns an exit status, with the cause on stderr."""
    try:
        action()
    except subprocess.CalledProcessError as error:
        print(f"error: pip ended with status {error.returncode}{advice}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
