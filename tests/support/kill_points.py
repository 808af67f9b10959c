"""A process that kills itself at one chosen point of a store, a clear or an opening."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gdscache.disk import catalog_file, directory, slab
from gdscache.disk.catalog import Catalog
from gdscache.storage import files
from gdscache.storage.base import Memory, part
from gdscache.tiers.ssd import SsdTier
from tests.support.helpers import WAIT, Host, write_page
from tests.support.kill_record import DOCUMENTS, PAGE_TOKENS, content, name
from tests.support.posix_transport import PosixTransport

FIRST, SECOND = 2, 5  # documents of 6 pages that share none


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(WAIT)  # other threads must not run on, nor this one return


class DyingTransport(PosixTransport):
    """POSIX, until a write or a read is told to stop."""

    name = "dying"
    in_write: Callable[[], None] | None = None
    in_read: Callable[[], None] | None = None

    def write(self, file: int, offset: int, memory: Memory) -> int:
        if DyingTransport.in_write is not None:
            super().write(file, offset, part(memory, 0, memory.nbytes // 2))
            DyingTransport.in_write()
        return super().write(file, offset, memory)

    def read(self, file: int, offset: int, memory: Memory) -> int:
        if DyingTransport.in_read is not None:
            DyingTransport.in_read()
        return super().read(file, offset, memory)


def store(host: Host, document: int) -> None:
    """Store all pages of a document and wait until they are on the SSD."""
    tokens = DOCUMENTS[document]
    blocks = host.take(len(tokens) // PAGE_TOKENS)
    for page, block in enumerate(blocks):
        write_page(host.planes, host.layout, [block], content(name("", document, page), host.layout.plane_bytes))
    host.engine.store(tokens, torch.tensor(blocks)).result(WAIT)
    host.give(blocks)


def catalogue(host: Host) -> Catalog:
    return host.engine.manager.ssd._catalog


def _meet(reached: threading.Event, go: threading.Event) -> None:
    reached.set()
    go.wait(WAIT)


def die_at_sqlite_commit(host: Host) -> None:
    writer = catalogue(host)._writer
    writer.set_trace_callback(lambda sql: die() if sql.startswith("COMMIT") else None)


def at_commit(host: Host, inserts: bool, act: Callable[[], None], *, before: bool) -> None:
    """Store the second document, and `act` before or after the catalogue's commit of its rows, or of deletions."""
    whole = catalogue(host).commit

    def commit(insert: Any, delete: Any, *rest: Any) -> None:
        chosen = insert if inserts else delete
        if chosen and before:
            act()
        whole(insert, delete, *rest)
        if chosen and not before:
            act()

    catalogue(host).commit = commit  # type: ignore[method-assign]
    store(host, SECOND)


def half_written(host: Host) -> None:
    DyingTransport.in_write = die
    store(host, SECOND)


def clear_in_transaction(host: Host) -> None:
    die_at_sqlite_commit(host)
    host.engine.clear()


def cleared(host: Host) -> None:
    host.engine.clear()
    die()


def cleared_during_a_load(host: Host) -> None:
    reached, hold = threading.Event(), threading.Event()
    DyingTransport.in_read = lambda: _meet(reached, hold)
    tokens = DOCUMENTS[FIRST]
    host.engine.load(host.engine.lookup(tokens), host.take(len(tokens) // PAGE_TOKENS))
    assert reached.wait(WAIT)
    host.engine.clear()
    die()


def cleared_during_a_write(host: Host) -> None:
    reached, go = threading.Event(), threading.Event()
    DyingTransport.in_write = lambda: _meet(reached, go)
    writing = threading.Thread(target=store, args=(host, SECOND))
    writing.start()
    assert reached.wait(WAIT)
    host.engine.clear()
    go.set()
    writing.join(WAIT)
    host.engine.drain(WAIT)
    die()


def cleared_during_a_commit(host: Host) -> None:
    reached, go = threading.Event(), threading.Event()
    ssd, whole = host.engine.manager.ssd, SsdTier.commit

    def commit(entries: Any, sums: Any) -> list[bool]:
        visible = whole(ssd, entries, sums)
        if entries:
            _meet(reached, go)
        return visible

    ssd.commit = commit  # type: ignore[method-assign]
    threading.Thread(target=store, args=(host, SECOND)).start()
    assert reached.wait(WAIT)
    host.engine.clear()
    die()


def closing(host: Host) -> None:
    host.engine.lookup(DOCUMENTS[FIRST])
    die_at_sqlite_commit(host)
    host.engine.close()


def closed_catalogue(host: Host) -> None:
    catalogue(host).close = die  # type: ignore[method-assign]
    host.engine.close()


STORED: dict[str, Callable[[Host], None]] = {
    "half_written": half_written,
    "written": lambda host: at_commit(host, True, die, before=True),
    "rows_in_transaction": lambda host: at_commit(host, True, lambda: die_at_sqlite_commit(host), before=True),
    "committed": lambda host: at_commit(host, True, die, before=False),
    "deletions_in_transaction": lambda host: at_commit(host, False, lambda: die_at_sqlite_commit(host), before=True),
    "deleted": lambda host: at_commit(host, False, die, before=False),
    "clear_in_transaction": clear_in_transaction,
    "cleared": cleared,
    "cleared_during_a_load": cleared_during_a_load,
    "cleared_during_a_write": cleared_during_a_write,
    "cleared_during_a_commit": cleared_during_a_commit,
    "closing": closing,
    "closed_catalogue": closed_catalogue,
}

OPENING: dict[str, tuple[Any, str]] = {  # where an opening is ended: what death takes the place of
    "the directory is made": (directory, "_lock"),
    "the lock is held": (Catalog, "__init__"),
    "the catalogue has its tables": (Path, "replace"),
    "the catalogue is made": (catalog_file, "open_reader"),
    "the slab has no bytes": (os, "posix_fallocate"),
    "the slab is allocated": (slab, "flush_directory"),
    "the transport is probed": (files, "_probe_sector"),
    "the catalogue is recovered": (Catalog, "recover"),
    "all parts are open": (slab.Slab, "cut"),
}
ONLY_NEW = {"the catalogue has its tables", "the slab is allocated"}  # what happens once in a directory's life


def run(pipe: Connection, config: dict[str, Any], point: str) -> None:
    """Store the first document, then die at a point of `STORED`."""
    host = Host(config)
    store(host, FIRST)
    pipe.send("stored")
    STORED[point](host)


def run_opening(pipe: Connection, config: dict[str, Any], point: str) -> None:
    pipe.send("opening")
    with mock.patch.object(*OPENING[point], side_effect=die):
        Host(config)
