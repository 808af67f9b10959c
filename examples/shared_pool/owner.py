"""A process that only gives memory to the pool: engines may come and go, and its pages stay.

python owner.py MASTER BYTES
"""

from __future__ import annotations

import sys
import threading

from mooncake.store import MooncakeDistributedStore


def main(master: str, nbytes: int) -> None:
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", nbytes, 0, "tcp", "", master)
    print(f"owner: {nbytes >> 20} MiB, code {code}", flush=True)
    if code == 0:
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
