"""Catalogues of the format before: how they are read as they are, and how they become ones of this format.

Everything but the ends of retentions is done in one transaction that touches no row: tables get columns and new names,
and their rows keep their keys. What is left after it is whole. Ends that were times of the clock are of lifetimes from
the begin of the epoch on then; steps of bounded size count them from the time of an open instead, which bounds them by
a clock that is set back (docs/format.md). Each step may be the last one: the next open goes on.
"""

from __future__ import annotations

import sqlite3

from gdscache.disk.catalog_file import FORMAT_VERSION, OLD_VERSION, SCHEMA

STEP_ROWS = 1 << 14  # retentions that one transaction counts anew: some 20 ms

# The statements leave the tables with the very text of `SCHEMA`: so SQLite defines ALTER TABLE.
CONVERT = (
    "ALTER TABLE pages RENAME COLUMN slot TO place",
    "ALTER TABLE pages ADD COLUMN packed INTEGER DEFAULT 0",
    "ALTER TABLE checksums RENAME COLUMN slot TO place",
    "ALTER TABLE retention RENAME COLUMN slot TO place",
    "ALTER TABLE retention RENAME COLUMN expires TO lifetime",
    "ALTER TABLE retention ADD COLUMN written INTEGER DEFAULT 0",
    SCHEMA["slabs"],
    "INSERT INTO slabs SELECT 0, extent.value, heads.value FROM meta AS extent, meta AS heads "
    "WHERE extent.name = 'extent_bytes' AND heads.name = 'head_groups'",
    "DELETE FROM meta WHERE name IN ('extent_bytes', 'head_groups')",
    f"UPDATE meta SET value = {FORMAT_VERSION} WHERE name = 'format_version'",
)

# An old catalogue as one of this version: temporary views, which stand before the tables of the same names.
VIEWS = (
    "CREATE TEMP VIEW pages AS SELECT slot AS place, key, parent, namespace, length, recency, 0 AS packed "
    "FROM main.pages",
    "CREATE TEMP VIEW checksums AS SELECT slot AS place, sums FROM main.checksums",
    "CREATE TEMP VIEW retention AS SELECT slot AS place, priority, expires AS lifetime, 0 AS written "
    "FROM main.retention",
)

# A lifetime that does not begin at a time of this clock, or before it: from the epoch on, or later than now.
UNSETTLED = "lifetime IS NOT NULL AND (written = 0 OR written > :now)"
SETTLE = (
    "UPDATE retention SET lifetime = CASE WHEN written > :now THEN lifetime ELSE max(lifetime - :now, 0) END, "
    f"written = :now WHERE place BETWEEN :first AND :last AND {UNSETTLED}"
)


def convert(writer: sqlite3.Connection) -> None:
    """Make a catalogue of the version before one of this version, in the transaction that the caller has begun. Costs
    some milliseconds and a few KiB of log, however many pages there are."""
    for statement in CONVERT:
        writer.execute(statement)


def present(connection: sqlite3.Connection, version: int) -> None:
    """Have the statements of this version read a checked catalogue of `version`, which stays as it is."""
    if version == OLD_VERSION:
        for statement in VIEWS:
            connection.execute(statement)


def settle(writer: sqlite3.Connection, first: int, last: int, now: int) -> None:
    """Count the lifetimes of the places `first` to `last` from `now` on (milliseconds since the epoch), where they
    begin at no time of this clock: those of the format before keep their end, those from the future their length."""
    writer.execute(SETTLE, {"now": now, "first": first, "last": last})
