"""Where the tree is. Child processes of tests have `ROOT` on PYTHONPATH, and import as the tests do."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
