"""The identity of a model's weights, by the files that they lie in. Reads no weights, only what the file system says.

Two loads of equal weights should share pages, and other weights must not. A cache of Hugging Face's hub keeps contents
by their hashes and links names to them, so there the hash counts. Elsewhere it is a file's size and the time of its
last change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from gdscache.errors import WeightsNotFoundError

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".index.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # of git, and of LFS
_HINT = "name the directory that has the files of weights, or set model.weights to a text that names them"


def fresh_salt() -> str:
    """A salt for pages of weights that have no name: those that an inference engine has got while it runs."""
    return f"weights:{secrets.token_hex(16)}"


def weights_identity(model: str | os.PathLike[str]) -> str:
    """A text that names the weights in a directory (or the one file), for `model.weights`.

    It holds the names, sizes and times (ns) of all files of weights below the directory (`SUFFIXES`), and the commit
    where the directory is a snapshot of one. Of a file that is a link into `blobs`, the name of the blob, which is the
    hash of its content, stands for the time. The directory's own path and the order of its files do not count. Hidden
    files and directories are left out. Raises `WeightsNotFoundError`.
    """
    root = Path(model)
    try:
        files = [root] if root.is_file() else sorted(_files(root))
        found = sorted(
            _described(file, file.name if file == root else file.relative_to(root).as_posix()) for file in files
        )
    except OSError as error:
        raise WeightsNotFoundError(
            f"{error.filename or root}: {error.strerror or error}: the weights cannot be named", _HINT
        ) from None
    if not found:
        what = "is no directory" if not root.is_dir() else f"has no file that ends in {', '.join(SUFFIXES)}"
        raise WeightsNotFoundError(f"{root} {what}", _HINT)
    text = json.dumps({"commit": _commit(root), "files": found}, sort_keys=True, separators=(",", ":"))
    return f"files-1:{hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}"


def model_directory(
    name: str,
    revision: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Path:
    """Where a model lies: `name` itself where that is a path, else its snapshot in a cache of Hugging Face's hub.

    `name`: a path, or `organisation/model`. `revision`: a branch, a tag or a commit; None: `main`. `cache`: the cache's
    directory; None: `HF_HUB_CACHE`, `HF_HOME/hub` or `~/.cache/huggingface/hub`. Raises `WeightsNotFoundError`.
    """
    if (path := Path(name).expanduser()).exists():
        return path
    hub = _hub(environment) if cache is None else Path(cache)
    stored = hub / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    snapshot = stored / "snapshots" / wanted
    try:
        if not _COMMIT.fullmatch(wanted):
            snapshot = stored / "snapshots" / (stored / "refs" / wanted).read_text(encoding="utf-8").strip()
        if snapshot.is_dir():
            return snapshot
    except (OSError, ValueError):
        pass  # said below: there is no such reference
    raise WeightsNotFoundError(
        f"{name!r} is not a path, and its revision {wanted!r} is not in {hub}",
        "download the model, or name its directory; or set model.weights to a text that names the weights",
    )


def _hub(environment: Mapping[str, str]) -> Path:
    if given := environment.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


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


def _described(file: Path, name: str) -> tuple[str, int, str]:
    """A file: its name, its size, and the hash of its content or the time of its last change."""
    status = file.stat()
    blob = Path(os.path.realpath(file))
    if file.is_symlink() and blob.parent.name == "blobs" and _HASH.fullmatch(blob.name):
        return name, status.st_size, blob.name
    return name, status.st_size, str(status.st_mtime_ns)


def _commit(root: Path) -> str:
    """The commit that a directory is a snapshot of, in the layout of the hub's cache; "" elsewhere."""
    real = Path(os.path.realpath(root))
    return real.name if real.parent.name == "snapshots" and _COMMIT.fullmatch(real.name) else ""
