#!/usr/bin/env bash
# Python's sqlite3 with numpy 2.4.6: a number of an array, bound as a parameter, is stored as its bytes in place of a
# number, into an INTEGER column, too. A numpy scalar is no int (but for float64, which is a float), and it is a buffer,
# so it becomes a BLOB. Nothing is raised. A catalogue of pages whose hashes and slots come out of arrays does not find
# them by the same number from elsewhere; `UNIQUE` lets the same slot in twice; each range, order and sum is without
# them or wrong, since a BLOB is above all numbers; int32 and int64 of one number are two values. Only looking with the
# same type finds the row, so a test that stores and looks in one process passes. apsw does the same. A PRIMARY KEY of
# INTEGER and a STRICT table refuse it. diskcache, a cache over sqlite3, pickles such a key: `cache[5]` and
# `cache[numpy.int64(5)]` are two entries, where a dict has one. `int(number)`, `array.tolist()` give numbers.
#
# Seen with numpy 2.4.6, apsw 3.54.1.0, diskcache 5.6.3 and Python 3.11.7 (SQLite 3.40.1): rows of int64, uint64, int32,
# uint8, float32 and bool have the type "blob", and 5 does not find them; those of float64 are numbers. Slots 2, int64(2)
# and int32(2) are all in a UNIQUE column; below 100 is one of them. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "numpy==2.4.6" "apsw==3.54.1.0" "diskcache==5.6.3"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import platform
import sqlite3
import sys

import apsw
import diskcache
import numpy as np

print("Python", platform.python_version(), "SQLite", sqlite3.sqlite_version, "numpy", np.__version__, "apsw",
      apsw.apsw_version(), "diskcache", diskcache.__version__)
NUMBERS = (5, np.int64(5), np.uint64(5), np.int32(5), np.uint8(5), np.float32(5), np.bool_(True), np.float64(5))
seen = {}
for library, connect in (("sqlite3", sqlite3.connect), ("apsw", apsw.Connection)):
    pages = connect(":memory:")
    pages.execute("CREATE TABLE pages (hash INTEGER)")
    for number in NUMBERS:
        pages.execute("DELETE FROM pages")
        pages.execute("INSERT INTO pages VALUES (?)", (number,))
        kind, held = pages.execute("SELECT typeof(hash), hash FROM pages").fetchone()
        ways = [pages.execute("SELECT count(*) FROM pages WHERE hash = ?", (by,)).fetchone()[0] for by in (5, number)]
        seen[library, type(number).__name__] = kind, *ways
        print(f"{library:7} {type(number).__name__:7} {kind:7} {held!r}; found by 5: {ways[0]}, by itself: {ways[1]}")
slots = sqlite3.connect(":memory:")
slots.execute("CREATE TABLE pages (slot INTEGER UNIQUE)")
slots.executemany("INSERT INTO pages VALUES (?)", [(2,), (np.int64(2),), (np.int32(2),)])
counts = tuple(slots.execute(f"SELECT count(*) FROM pages {where}").fetchone()[0] for where in ("", "WHERE slot < 100"))
print("slot 2 three times in a UNIQUE column:", counts[0], "rows, of them below 100:", counts[1])
refused = 0
for table in ("(slot INTEGER PRIMARY KEY)", "(slot INTEGER) STRICT"):
    strict = sqlite3.connect(":memory:")
    strict.execute(f"CREATE TABLE pages {table}")
    try:
        strict.execute("INSERT INTO pages VALUES (?)", (np.int64(2),))
    except sqlite3.IntegrityError as error:
        refused += 1
        print(f"{table}: {error}")
with diskcache.Cache("cache") as cache:
    cache[np.int64(5)] = "of the array"
    there = 5 in cache
    cache[5] = "of the number"
    entries = len(cache), len({np.int64(5): 0, 5: 0})
print("diskcache: 5 is there behind int64(5):", there, "; entries, and those of a dict:", entries)
wanted = {"int": ("integer", 1, 1), "float64": ("integer", 1, 1)}
good = all(got == wanted.get(kind, ("blob", 0, 1)) for (_, kind), got in seen.items())
sys.exit(not good or counts != (3, 1) or refused != 2 or there or entries != (2, 1))
PY
