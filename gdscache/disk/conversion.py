"""Catalogues of the previous format: reading them, and converting them to this one.

One transaction does everything but the expiries, and touches no row: tables get columns and new names. After it,
expiries are lifetimes from the epoch on. Steps of bounded size then count them from the time of an open instead, so
that a clock that is set back cannot extend them (docs/format.md). After a kill the next open does the remaining steps.
"""

from __future__ import annotations

import sqlite3

from gdscache.disk.catalog_file import FORMAT_VERSION, OLD_VERSION, SCHEMA

STEP_ROWS = 1 << 14  # retentions of one step's transaction: some 20 ms

# The tables get exactly the text of `SCHEMA`: SQLite defines ALTER TABLE so.
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

# An old catalogue as one of this version: temporary views hide the tables of the same names.
VIEWS = (
    "CREATE TEMP VIEW pages AS SELECT slot AS place, key, parent, namespace, length, recency, 0 AS packed "
    "FROM main.pages",
    "CREATE TEMP VIEW checksums AS SELECT slot AS place, sums FROM main.checksums",
    "CREATE TEMP VIEW retention AS SELECT slot AS place, priority, expires AS lifetime, 0 AS written "
    "FROM main.retention",
)

# A lifetime that does not begin at a time of this clock: it begins at the epoch, or later than now.
UNCOUNTED = "lifetime IS NOT NULL AND (written = 0 OR written > :now)"
COUNT_LIFETIMES = (
    "UPDATE retention SET lifetime = CASE WHEN written > :now THEN lifetime ELSE max(lifetime - :now, 0) END, "
    f"written = :now WHERE place BETWEEN :first AND :last AND {UNCOUNTED}"
)


def convert(writer: sqlite3.Connection) -> None:
    """Convert a catalogue of the previous version, in the caller's transaction. Takes some milliseconds and a few KiB
    of log, for any number of pages."""
    for statement in CONVERT:
        writer.execute(statement)


def present(connection: sqlite3.Connection, version: int) -> None:
    """Let this version's statements read a checked catalogue of `version`, without changing it."""
    if version == OLD_VERSION:
        for statement in VIEWS:
            connection.execute(statement)


def count_lifetimes(writer: sqlite3.Connection, first: int, last: int, now: int) -> None:
    """Count the lifetimes of the places `first` to `last` from `now` on (milliseconds since the epoch), if they do not
    begin at a time of this clock: those of the previous format keep their end, those from the future their length."""
    writer.execute(COUNT_LIFETIMES, {"now": now, "first": first, "last": last})
