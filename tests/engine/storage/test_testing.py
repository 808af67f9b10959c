"""The suite for transports finds broken ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

pytestmark = pytest.mark.suite


# Each class breaks one promise; the test named is the one that finds it.
BROKEN = """
import os, threading, time

class Believes(Posix):  # test_where_the_file_ends_a_read_is_short
    def read(self, file, offset, memory):
        super().read(file, offset, memory)
        return memory.nbytes

class Raises(Posix):  # test_where_the_file_ends_a_read_is_short
    def read(self, file, offset, memory):
        moved = super().read(file, offset, memory)
        if moved < memory.nbytes:
            raise OSError(5, "short")
        return moved

class Misplaces(Posix):  # test_shuffled_extents_come_back_equal
    def read(self, file, offset, memory):
        return super().read(file, offset - offset % 65536, memory)

class Seeks(Posix):  # test_many_threads_call_at_once
    def read(self, file, offset, memory):
        os.lseek(file, offset, os.SEEK_SET)
        time.sleep(0.0001)
        return os.readv(file, [memory])

class Confuses(Posix):  # test_two_files_and_two_transports
    def read(self, file, offset, memory):
        return super().read(self.files[0], offset, memory)

class Remembers(Posix):  # test_memory_is_not_kept
    def write(self, file, offset, memory):
        self.last = memory[:1]
        return super().write(file, offset, memory)

class Swallows(Posix):  # test_a_file_that_is_not_open_is_an_error
    def read(self, file, offset, memory):
        try:
            return super().read(file, offset, memory)
        except OSError:
            return 0

class Promises(Posix):  # test_a_write_without_room_is_not_called_done
    def write(self, file, offset, memory):
        try:
            super().write(file, offset, memory)
        except OSError:
            pass
        return memory.nbytes

class Forgets(Posix):  # test_open_and_flush_of_what_is_not_there
    def flush(self, file):
        if file in self.files:
            super().flush(file)

class LeavesFiles(Posix):  # test_no_descriptor_and_no_thread_is_left
    def close(self):
        self.files.clear()

class LeavesThreads(Posix):  # test_no_descriptor_and_no_thread_is_left
    def close(self):
        if self.files:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        super().close()

class Secretive(Posix):  # test_describe_is_plain_data
    def describe(self):
        return {"name": self.name, "lock": threading.Lock()}
"""


def example() -> str:
    """The transport of the documentation."""
    page = (ROOT / "docs" / "embedding.md").read_text()
    [block] = [b for b in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "class MyTransport" in b]
    return block


def run_suite(directory: Path, code: str, wanted: dict[str, str]) -> dict[str, str]:
    """Run the suite over classes of the module `code`, of each the test named or, for "", all; what failed of each."""
    lines = [code, "from gdscache.testing.transport_suite import TransportSuite"]
    for name in wanted:
        lines += [f"class Test{name}(TransportSuite):", "    def make_transport(self, threads):"]
        lines += [f"        return {name}(threads)"]
    (directory / "test_suite.py").write_text("\n".join(lines))
    (directory / "pytest.ini").write_text("[pytest]\nfilterwarnings = ignore\n")
    # As in CI, and with -v, pytest explains a failed comparison at full length; a case that hangs is ended alone.
    command = [sys.executable, "-m", "pytest", "-v", "-rA", "--tb=no", "-p", "no:cacheprovider", "--timeout=60"]
    command += [f"--basetemp={directory / 'inner'}", f"--rootdir={directory}"]
    command += [f"test_suite.py::Test{name}" + (f"::{test}" if test else "") for name, test in wanted.items()]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "CI": "1", "PYTHONPATH": paths}
    try:
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"the suite did not end: {expired.stdout!r}")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    verdicts = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::Test(\w+)::(\w+)", done.stdout, re.MULTILINE)
    assert {name for _, name, _ in verdicts} == set(wanted), done.stdout + done.stderr
    return {name: test for verdict, name, test in verdicts if verdict != "PASSED"}


def test_the_suite_finds_broken_transports(tmp_path: Path) -> None:
    broken = dict(re.findall(r"^class (\w+)\(Posix\):  # (\w+)$", BROKEN, re.MULTILINE))
    assert len(broken) == BROKEN.count("(Posix)")
    assert run_suite(tmp_path, f"{example()}\nPosix = MyTransport\n{BROKEN}", broken) == broken


def test_the_transport_of_the_documentation_passes(tmp_path: Path) -> None:
    assert run_suite(tmp_path, example(), {"MyTransport": ""}) == {}


def test_without_pytest_only_the_suite_is_missing() -> None:
    code = """
import sys
sys.modules["pytest"] = None
import gdscache.storage
from gdscache.errors import MissingPackageError
try:
    import gdscache.testing.transport_suite
except MissingPackageError as error:
    print(error.hint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("install gdscache[test]\n", "")
