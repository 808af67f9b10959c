"""The table of namespaces: reading valid rows, and deleting a bounded number of rows without pages."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Collection, Iterable, Iterator

from gdscache.disk.catalog_file import SCHEMA
from gdscache.limits import KEY_BYTES

PRUNED = 4096  # namespaces without pages that one call deletes: some 0.1 s
DESCRIPTION_BYTES = 4 << 20  # a longer description is left unread
ASKED = 256  # ids a query
NAMED = f"typeof(digest) = 'blob' AND length(digest) = {KEY_BYTES}"


def namespaces_by_id(connection: sqlite3.Connection, ids: Iterable[int]) -> dict[int, bytes]:
    """Id → digest of the namespaces among `ids` that have a digest of the right size."""
    found: dict[int, bytes] = {}
    asked = iter(ids)
    while some := list(itertools.islice(asked, ASKED)):
        places = ", ".join("?" * len(some))
        found.update(connection.execute(f"SELECT id, digest FROM namespaces WHERE id IN ({places}) AND {NAMED}", some))
    return found


def descriptions(connection: sqlite3.Connection) -> Iterator[tuple[int, bytes, bytes | None]]:
    """(id, digest, description) of each namespace that has a digest of the right size; None: unreadable."""
    select = f"SELECT id, digest, typeof(description) = 'text' FROM namespaces WHERE {NAMED}"
    for name, digest, there in connection.execute(select).fetchall():
        yield name, digest, _description(connection, name) if there else None


def tidy(writer: sqlite3.Connection, used: Collection[int]) -> None:
    """Delete invalid rows, and namespaces that are not `used`: all of them, or `PRUNED` if that takes long."""
    broken = writer.execute(f"SELECT 1 FROM namespaces WHERE NOT ({NAMED}) LIMIT 1").fetchall()
    unused = writer.execute("SELECT count(*) FROM namespaces").fetchone()[0] - len(used)
    if broken or unused > max(PRUNED, len(used)):
        _rebuild(writer, used)
    elif unused:
        prune(writer, used)


def prune(writer: sqlite3.Connection, used: Collection[int]) -> None:
    ids = (name for (name,) in writer.execute("SELECT id FROM namespaces"))
    unused = list(itertools.islice((name for name in ids if name not in used), PRUNED))
    writer.executemany("DELETE FROM namespaces WHERE id = ?", [(name,) for name in unused])


def _rebuild(writer: sqlite3.Connection, used: Iterable[int]) -> None:
    """Make the table anew: dropping it costs little, and does not read digests as large as the file."""
    kept = [(name, digest, _text(writer, name)) for name, digest in namespaces_by_id(writer, used).items()]
    writer.execute("DROP TABLE namespaces")
    writer.execute(SCHEMA["namespaces"])
    writer.executemany("INSERT INTO namespaces(id, digest, description) VALUES (?, ?, CAST(? AS TEXT))", kept)


def _text(writer: sqlite3.Connection, name: int) -> bytes:
    (there,) = writer.execute("SELECT typeof(description) = 'text' FROM namespaces WHERE id = ?", (name,)).fetchone()
    return (_description(writer, name) if there else None) or b"{}"


def _description(connection: sqlite3.Connection, name: int) -> bytes | None:
    with connection.blobopen("namespaces", "description", name, readonly=True) as blob:
        return blob.read() if len(blob) <= DESCRIPTION_BYTES else None
