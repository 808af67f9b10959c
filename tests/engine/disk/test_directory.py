"""Who owns a cache directory, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gdscache import errors
from gdscache.commands.inspect.owner import find_owner
from gdscache.commands.inspect.reading import inspect
from gdscache.commands.inspect.verification import _own, verify
from gdscache.disk import directory
from gdscache.disk.directory import CacheDirectory
from tests.support.disk_parts import PAGES, opened, served, store
from tests.support.helpers import raising, until

PACKAGE = Path(directory.__file__).parent.parent
# The child takes the modules without the package's own imports: it starts in a tenth of a second.
OWN = f"""
import sys, types
package = types.ModuleType("gdscache"); package.__path__ = [{str(PACKAGE)!r}]; sys.modules["gdscache"] = package
from pathlib import Path
from gdscache.disk.directory import CacheDirectory
from gdscache.errors import DirectoryInUseError
"""


def start_owner(path: Path) -> subprocess.Popen[str]:
    """Another process that owns `path` until its input ends."""
    script = OWN + "d = CacheDirectory.open(Path(sys.argv[1])); print('owned', flush=True); sys.stdin.read(); d.close()"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "owned\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.communicate(timeout=10)


def test_it_is_made_private_with_its_parents(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with CacheDirectory.open(tmp_path / "a" / "b") as owned:
            assert stat.S_IMODE(owned.path.stat().st_mode) == 0o700
            assert stat.S_IMODE((owned.path / "lock").stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_a_tight_umask_does_not_lock_us_out(tmp_path: Path) -> None:
    old = os.umask(0o277)
    try:
        CacheDirectory.open(tmp_path / "a").close()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o750)
    CacheDirectory.open(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


def test_the_lock_says_who_owns_it(tmp_path: Path) -> None:
    with CacheDirectory.open(tmp_path) as owned:
        owner = json.loads((owned.path / "lock").read_text())
    assert owner["pid"] == os.getpid()
    assert set(owner) == {"what", "pid", "host", "started", "command"}
    assert owner["what"] == "engine"
    assert len(owner["command"]) <= directory.COMMAND_LIMIT


def test_a_second_engine_of_this_process_is_refused(tmp_path: Path) -> None:
    with CacheDirectory.open(tmp_path):
        with pytest.raises(errors.DirectoryInUseError, match=rf"in use by this process \(pid {os.getpid()} "):
            CacheDirectory.open(tmp_path)
        with pytest.raises(errors.DirectoryInUseError):  # the refusal must not have released the first one
            CacheDirectory.open(tmp_path / "." / ".." / tmp_path.name)


def test_a_second_process_is_refused_and_told_who(tmp_path: Path) -> None:
    child = start_owner(tmp_path)
    try:
        with pytest.raises(errors.DirectoryInUseError) as caught:
            CacheDirectory.open(tmp_path)
        assert f"process {child.pid}" in caught.value.message
        assert os.uname().nodename in caught.value.message
        assert re.search(r"since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", caught.value.message)
        assert sys.executable in caught.value.message
        assert "ssd.path" in caught.value.hint
    finally:
        end(child)
    CacheDirectory.open(tmp_path).close()


def test_a_killed_owner_is_no_obstacle(tmp_path: Path) -> None:
    child = start_owner(tmp_path)
    child.send_signal(signal.SIGKILL)
    end(child)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == child.pid
    with CacheDirectory.open(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


TOLD = b'{"what": "engine", "host": "h", "started": "s", "command": "c", "pid": %s}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"{}",
        b"[1]",
        b"x" * 100_000,
        b"[" * 4000,
        *(TOLD % p for p in (b'"x"', b"Infinity", b"[]")),
    ],
)
def test_stale_content_is_no_obstacle_and_a_refusal_survives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(directory, "NAME_S", 0.05)
    (tmp_path / "lock").write_bytes(content)
    with CacheDirectory.open(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        (tmp_path / "lock").write_bytes(content)
        with pytest.raises(errors.DirectoryInUseError, match="has not said its name"):
            CacheDirectory.open(tmp_path)
        find_owner(tmp_path)


@pytest.mark.parametrize("removed", [False, True])
def test_a_verification_gives_way_to_an_engine(tmp_path: Path, removed: bool) -> None:
    """`removed`: it looks between the making of the engine's file and its lock, and takes it for a killed engine's."""
    verifying = CacheDirectory.open(tmp_path, engine=False)

    def give_way() -> None:
        until(lambda: directory.wanted(tmp_path), "the engine asks for the directory")
        if removed:
            (tmp_path / directory.WANTED_NAME).unlink()
            until(lambda: directory.wanted(tmp_path), "the engine asks again")
        verifying.close()

    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(give_way)
        with CacheDirectory.open(tmp_path):
            over.result(10)
            assert not (tmp_path / directory.WANTED_NAME).exists()
            assert not directory.wanted(tmp_path)


def test_a_verification_that_does_not_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "VERIFICATION_S", 0.1)
    with CacheDirectory.open(tmp_path, engine=False):
        with pytest.raises(errors.DirectoryInUseError) as caught:
            CacheDirectory.open(tmp_path)
        assert "gdscache verify" in caught.value.hint
        assert not (tmp_path / directory.WANTED_NAME).exists()


def test_an_engine_that_waits_keeps_verifications_out(tmp_path: Path) -> None:
    CacheDirectory.open(tmp_path).close()
    with directory._asked_for(tmp_path):
        with directory._asked_for(tmp_path):  # another one waits, too
            assert directory.wanted(tmp_path)
        assert directory.wanted(tmp_path)
        with pytest.raises(errors.DirectoryInUseError, match="an engine waits") as caught:
            _own([tmp_path])
        assert caught.value.hint
    assert not directory.wanted(tmp_path)


def test_who_was_killed_while_it_waited_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / directory.WANTED_NAME).touch()
    assert not directory.wanted(tmp_path)
    assert not (tmp_path / directory.WANTED_NAME).exists()


def test_the_command_line_of_an_owner_is_printable(tmp_path: Path) -> None:
    with CacheDirectory.open(tmp_path):
        owner = json.loads((tmp_path / "lock").read_text()) | {"command": "evil \x1b]0;title\x07\r"}
        (tmp_path / "lock").write_text(json.dumps(owner))
        with pytest.raises(errors.DirectoryInUseError) as caught:
            CacheDirectory.open(tmp_path)
    assert str(caught.value).replace("\n", "").isprintable()
    assert "evil" in caught.value.message


def test_close_twice_and_reopen(tmp_path: Path) -> None:
    owned = CacheDirectory.open(tmp_path)
    assert not owned.closed
    owned.close()
    with CacheDirectory.open(tmp_path):
        owned.close()  # must not release the new owner
        with pytest.raises(errors.DirectoryInUseError):
            CacheDirectory.open(tmp_path)
    assert owned.closed


def test_a_started_program_does_not_inherit_the_lock(tmp_path: Path) -> None:
    owned = CacheDirectory.open(tmp_path)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        assert str(tmp_path / "lock") not in [os.path.realpath(p) for p in Path(f"/proc/{child.pid}/fd").iterdir()]
        owned.close()
        CacheDirectory.open(tmp_path).close()
    finally:
        child.kill()
        child.wait()


FORKING = (
    OWN
    + """
import os
d = CacheDirectory.open(Path(sys.argv[1]))
pid = os.fork()
if pid == 0:
    d.close()                       # the child's copy only
    os._exit(0)
os.waitpid(pid, 0)
try:
    CacheDirectory.open(Path(sys.argv[1]))
except DirectoryInUseError:
    print("still owned")
ready, go = os.pipe()
pid = os.fork()
if pid == 0:                        # a child that lives on with its copy open
    os.close(go); os.read(ready, 1); os._exit(0)
d.close()
CacheDirectory.open(Path(sys.argv[1])).close()
print("given back")
os.close(go); os.waitpid(pid, 0)
"""
)


def test_a_forked_child_neither_releases_nor_keeps_the_lock(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKING, str(tmp_path)], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == ("still owned\ngiven back\n", "")


def test_an_orphan_that_holds_the_lock_is_pointed_at(tmp_path: Path) -> None:
    script = OWN + (
        "import os\nd = CacheDirectory.open(Path(sys.argv[1]))\n"
        "if os.fork() == 0:\n    os.read(0, 1)\n    os._exit(0)\nos._exit(0)"
    )
    read, write = os.pipe()
    try:
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], stdin=read, check=True, timeout=20)
        with pytest.raises(errors.DirectoryInUseError, match="has ended, but a process it forked"):
            CacheDirectory.open(tmp_path)
    finally:
        os.close(write)
        os.close(read)


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(errors.NotADirectoryPathError, match=re.escape(f"{file} is not a directory")):
        CacheDirectory.open(file / below)
    assert file.read_text() == "mine"


def test_a_dangling_link_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(errors.NotADirectoryPathError):
        CacheDirectory.open(tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()


def test_a_linked_directory_is_the_same_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with CacheDirectory.open(tmp_path / "link"), pytest.raises(errors.DirectoryInUseError):
        CacheDirectory.open(tmp_path / "real")


def test_dots_behind_a_link_lead_where_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "far" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/below")
    path = tmp_path / "link" / ".." / "cache"
    with opened(path) as host:
        store(host, range(2))
    assert not (tmp_path / "cache").exists()
    with opened(tmp_path / "far" / "cache") as host:
        assert served(host, range(2)) == dict.fromkeys(range(2), PAGES)
    for look in (inspect, verify):
        assert look(path)["path"] == str(tmp_path / "far" / "cache")


@pytest.mark.parametrize("make", ["link", "directory", "fifo"])
def test_the_lock_is_never_followed_elsewhere(tmp_path: Path, make: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache = tmp_path / "cache"
    cache.mkdir()
    {"link": lambda p: p.symlink_to(victim), "directory": lambda p: p.mkdir(), "fifo": lambda p: os.mkfifo(p)}[make](
        cache / "lock"
    )
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.NotARegularFileError, match="lock"):
        CacheDirectory.open(cache)
    assert set(os.listdir("/proc/self/fd")) == before
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.EACCES, errors.DirectoryNotWritableError),
        (errno.EROFS, errors.DirectoryNotWritableError),
        (errno.ENOSPC, errors.NoSpaceError),
        (errno.EDQUOT, errors.NoSpaceError),
    ],
)
@pytest.mark.parametrize("call", ["mkdir", "open", "pwrite"])
def test_errors_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], call: str
) -> None:
    path = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(directory.os, call, raising(OSError(number, os.strerror(number))))
        with pytest.raises(error, match=re.escape(os.strerror(number))):
            CacheDirectory.open(path)
    CacheDirectory.open(path).close()  # nothing was left locked


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = directory.fcntl
    refuse = raising(OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(directory, "fcntl", types.SimpleNamespace(**{**vars(real), "flock": refuse}))
    with pytest.raises(errors.DirectoryNotWritableError, match="No locks available"):
        CacheDirectory.open(tmp_path)


def test_another_directory_is_noticed_whose_time_is_that_of_ours(tmp_path: Path) -> None:
    """A look costs one `os.stat` while the time of change stays."""
    path, old = tmp_path / "cache", time.time() - 3600
    for one in (path, tmp_path / "other"):
        one.mkdir()
        os.utime(one, (old, old))
    watch = directory.DirectoryWatch(path)
    assert watch.lost(thorough=False) == watch.lost(thorough=False) == ""
    path.rename(tmp_path / "elsewhere")
    (tmp_path / "other").rename(path)
    assert "is another directory" in watch.lost(thorough=False)
