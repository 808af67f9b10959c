import importlib.util
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import (
    GdsCacheError,
    IOFailedError,
    ShortIOError,
)
from gdscache.storage import IORequest, Op, probe
from gdscache.storage.kvikio import KvikioTransport
from gdscache.storage.native import NativeTransport
from tests.support.places import SUPPORT
from tests.support.transport_parts import FILE_BYTES, SECTOR, has_libcuda, odd_extents, random_bytes, soon


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    path = tmp_path / "slab"
    path.write_bytes(random_bytes(1))
    return path


# kvikio on a machine without a driver, and on a GPU.


@pytest.mark.suite
def test_kvikio_host_path_with_a_stand_in_driver(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed")
    if has_libcuda():
        pytest.skip("a real libcuda.so.1 is here: the suite runs with that")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, SUPPORT / "stand_ins" / "libcuda.c"], check=True, timeout=60
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
        "-k",
        "TestKvikio",
        f"--basetemp={tmp_path / 'inner'}",
        str(Path(__file__).with_name("test_transports.py")),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    assert " passed" in done.stdout


@pytest.fixture
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_kvikio_into_cuda_memory(slab: Path) -> None:
    result = probe.probe_kvikio(slab.parent, 0, 60)
    if not result.ok:
        pytest.skip(f"kvikio does not work here: {result.reason}")
    compat = "off" if result.mode == "gds" else "on"
    with KvikioTransport(8, compat=compat) as transport:
        file = transport.open(slab)
        rng = random.Random(6)
        extents = odd_extents(rng, FILE_BYTES, 300)
        source = torch.randint(0, 256, (FILE_BYTES,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        torch.cuda.synchronize()
        transport.register(target)
        for op, memory in ((Op.WRITE, source), (Op.READ, target)):
            batch = [IORequest(file, at, memory[at : at + n]) for at, n in extents]
            assert not any(transport.submit(op, batch).wait(soon()))
        assert torch.equal(source, target)
        assert slab.read_bytes() == source.cpu().numpy().tobytes()
        bad = [IORequest(file, FILE_BYTES, target[:SECTOR]), IORequest(file, 0, target[SECTOR : 2 * SECTOR])]
        errors = transport.submit(Op.READ, bad).wait(soon())
        assert [type(error) for error in errors] == [ShortIOError, type(None)]
        wrong = IORequest(file, 0, target[:SECTOR].view(torch.int8))
        assert isinstance(transport.submit(Op.READ, [wrong]).wait(soon())[0], IOFailedError)
        transport.deregister(target)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_posix_into_pinned_memory_and_on_to_the_gpu(slab: Path) -> None:
    with HostBuffer(FILE_BYTES, "on") as pinned, NativeTransport(4, uring=False) as transport:
        file = transport.open(slab)
        batch = [
            IORequest(file, at, pinned.view[at : at + n]) for at, n in odd_extents(random.Random(7), FILE_BYTES, 300)
        ]
        assert not any(transport.submit(Op.READ, batch).wait(soon()))
        there = pinned.tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert there.cpu().numpy().tobytes() == slab.read_bytes()
        refused = transport.submit(Op.READ, [IORequest(file, 0, there)]).wait(soon())[0]
        assert isinstance(refused, GdsCacheError)
        assert "cuda" in str(refused)
