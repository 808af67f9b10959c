"""The identity of a model's weights: samples of the files' bytes, of every tensor if the format lists them.

Equal weights share pages, and other weights do not, independent of the files' places and times. Times tell neither:
reproducible images give two versions one time, and a download gives one version two.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gdscache.errors import WeightsNotFoundError

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".index.json")
SAMPLE = 4096  # bytes read of each tensor, and of each stretch of a file without a table of tensors
STRETCH = 1 << 20  # bytes; at least one sample lies in each
WHOLE = 256 << 10  # bytes: smaller files are read whole; read at both ends of a file without a table
_EMBEDDING = re.compile(r"embed|wte|wpe")  # a tensor whose single rows are trained, of new tokens say: read whole
_THREADS = 32  # a network disk answers late, and answers many requests at once
_HEADER_LIMIT = 100_000_000  # bytes: the format's own limit of a header
_CLOCK_S = 0.05  # the system's precision of a process's start, and of a file's change
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # of git, and of LFS
_log = logging.getLogger("gdscache")
FRESH = "weights:"  # what a name begins with that nothing else has
_HINT = "name the directory that has the files of weights, or set model.weights to a text that names them"


def fresh_salt() -> str:
    """A salt for pages of weights without a name, which an inference engine has got at run time."""
    return f"{FRESH}{secrets.token_hex(16)}"


def weights_identity(model: str | os.PathLike[str]) -> str:
    """A text that names the weights in a directory (or the one file), for `model.weights`.

    It is a digest of the names and sizes of all weight files below the directory (`SUFFIXES`), and of samples of their
    bytes. Of a safetensors file: the header, the embeddings, and `SAMPLE` bytes of every other tensor, at a place drawn
    from its name. Of other files: the first and last `WHOLE` bytes, and `SAMPLE` bytes of each `STRETCH`, at a place
    drawn from its number. Files of up to `WHOLE` bytes are read whole. So versions are told apart unless all their
    differences lie between the samples. Times, links, the path, the directory's name and the order of files do not
    count: a copy is the same model. Hidden files and directories are left out.

    Raises `WeightsNotFoundError`, also if a file cannot be read or becomes shorter meanwhile.
    """
    root = Path(model)
    try:
        files = [root] if root.is_file() else sorted(_files(root))
        with ThreadPoolExecutor(_THREADS, "gdscache-weights") as readers:
            found = sorted(
                _described(file, file.name if file == root else file.relative_to(root).as_posix(), readers)
                for file in files
            )
    except OSError as error:
        raise WeightsNotFoundError(
            f"{error.filename or root}: {error.strerror or error}: the weights cannot be named", _HINT
        ) from None
    if not found:
        what = "is no directory" if not root.is_dir() else f"has no file that ends in {', '.join(SUFFIXES)}"
        raise WeightsNotFoundError(f"{root} {what}", _HINT)
    text = json.dumps(found, separators=(",", ":"))
    return f"files-3:{hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}"


def weights_read(model: str | os.PathLike[str], commit: str | None = None) -> str:
    """The identity of the weights that this process has read: `weights_identity`, taken after the reading.

    If a file has changed since the process started, the version read is unknown. Then the name is this process's alone,
    and a WARNING says so. Files of the hub's cache may be younger: their names are digests, and the process itself
    downloads them. A snapshot there is another version than was read, if the process read its configuration at another
    `commit`: a branch has moved on meanwhile. Raises `WeightsNotFoundError`.
    """
    found = weights_identity(model)  # refuses files that cannot be read
    root, started = Path(model), _started()
    changed = [file for file in ([root] if root.is_file() else _files(root)) if _changed(file, started)]
    if commit and root.parent.name == "snapshots" and root.name != commit:
        changed.append(root)
    if not changed:
        return found
    _log.warning(
        "%s changed while this process ran: which weights it has is not known. Nothing that it stores is found after a "
        "restart, and it finds nothing of before. Start it again, or set model.weights to a text that names them",
        ", ".join(map(str, changed[:3])),
    )
    return fresh_salt()


def weights_served(
    engine: str, load_format: str, elsewhere: Mapping[str, object], source: Callable[[], tuple[Path, str | None]]
) -> str:
    """The identity of an inference engine's weights: `weights_read` of `source()`, its directory and `commit_of` it.

    Engines draw dummy weights from a fixed seed, so the model's configuration identifies them. `elsewhere`: settings by
    which weights come from elsewhere. Raises `WeightsNotFoundError`, also for those.
    """
    if load_format == "dummy":
        return "dummy"
    if elsewhere:
        raise WeightsNotFoundError(
            f"{', '.join(f'{name} is {value!r}' for name, value in elsewhere.items())}: {engine} has weights that are "
            "not those of the model's files",
            "set model.weights in the configuration to a text that names them",
        )
    return weights_read(*source())


def commit_of(model: Any) -> str | None:
    """The hub's commit at which an inference engine read a model's configuration; None for other sources. `model`: its
    `ModelConfig`."""
    found: str | None = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    return found


def _changed(file: Path, since: float) -> bool:
    blob = Path(os.path.realpath(file))
    if blob.parent.name == "blobs" and _HASH.fullmatch(blob.name):
        return False
    return blob.stat().st_ctime > since + _CLOCK_S


def _started() -> float:
    """The start of this process, in seconds since the epoch, by today's clock; as exact as `_CLOCK_S`."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def model_directory(name: str, revision: str | None = None, cache: str | Path | None = None) -> Path:
    """A model's directory: `name` itself if it is a path, else its snapshot in a Hugging Face hub cache.

    `name`: a path, or `organisation/model`. `revision`: a branch, a tag or a commit; None: `main`. `cache`: the cache's
    directory; None: the hub's own (`HF_HUB_CACHE`, `HF_HOME`). Raises `WeightsNotFoundError`.
    """
    if (path := Path(os.path.expanduser(name))).exists():
        return path
    from huggingface_hub import constants, snapshot_download  # each engine brings it

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (OSError, ValueError):  # no such reference, or no such name
        raise WeightsNotFoundError(
            f"{name!r} is not a path, and its revision {revision or 'main'!r} is not in "
            f"{cache or constants.HF_HUB_CACHE}",
            "download the model, or name its directory; or set model.weights to a text that names the weights",
        ) from None


def _files(root: Path) -> Iterator[Path]:
    """Files of weights below a directory, through links too, each directory once."""
    seen: set[str] = set()
    for directory, below, names in os.walk(root, followlinks=True, onerror=_refuse):
        real = os.path.realpath(directory)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = [name for name in sorted(below) if not name.startswith(".")]
        yield from (Path(directory, n) for n in names if n.lower().endswith(SUFFIXES) and not n.startswith("."))


def _refuse(error: OSError) -> None:
    raise error


def _described(file: Path, name: str, readers: ThreadPoolExecutor) -> tuple[str, int, str]:
    """A file's name, its size, and a digest of the samples of its bytes."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        size = status.st_size
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # else each sample would read ahead

        def read(place: tuple[int, int]) -> bytes:
            data = os.pread(descriptor, place[1], place[0])
            if len(data) != place[1]:
                raise OSError(errno.EIO, f"{len(data)} of {place[1]} bytes at {place[0]}", str(file))
            return hashlib.blake2b(data, digest_size=32).digest()  # here: the readers hash beside each other

        digest = hashlib.blake2b(digest_size=32)
        for piece in readers.map(read, _places(descriptor, file, size)):
            digest.update(piece)
        return name, size, digest.hexdigest()
    finally:
        os.close(descriptor)


def _places(descriptor: int, file: Path, size: int) -> Iterable[tuple[int, int]]:
    """The places of a file's samples and their sizes, in an order that follows from the file."""
    if size <= WHOLE:
        return [(0, size)]
    if file.name.lower().endswith(".safetensors") and (places := _of_tensors(descriptor, size)) is not None:
        return places
    inside = [_sample(str(number), *of) for number, of in enumerate(_stretches(WHOLE, size - 2 * WHOLE))]
    return [(0, WHOLE), *inside, (size - WHOLE, WHOLE)]


def _of_tensors(descriptor: int, size: int) -> list[tuple[int, int]] | None:
    """Header and tensors of a safetensors file; None if it is not one.

    The format: https://github.com/huggingface/safetensors#format.
    """
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    first = 8 + length
    if length > min(_HEADER_LIMIT, size - 8):
        return None
    try:
        tensors = json.loads(os.pread(descriptor, length, 8))
        spans = {name: tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__"}
        if not all(0 <= begin <= end <= size - first for begin, end in spans.values()):
            return None
        samples = [_of_tensor(name, first + begin, end - begin) for name, (begin, end) in sorted(spans.items())]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return [(0, first), *itertools.chain(*samples)]


def _of_tensor(name: str, at: int, nbytes: int) -> list[tuple[int, int]]:
    return _stretches(at, nbytes) if _EMBEDDING.search(name) else [_sample(name, at, nbytes)]


def _stretches(at: int, nbytes: int) -> list[tuple[int, int]]:
    return [(first, min(STRETCH, at + nbytes - first)) for first in range(at, at + nbytes, STRETCH)]


def _sample(name: str, at: int, nbytes: int) -> tuple[int, int]:
    """The place of one sample among the `nbytes` bytes from `at` on."""
    room = nbytes - SAMPLE
    if room <= 0:
        return at, nbytes
    drawn = int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    return at + drawn % (room + 1), SAMPLE
