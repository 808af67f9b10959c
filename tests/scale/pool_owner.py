"""A process that owns memory of the pool, and nothing else: `pool_owner.py MASTER BYTES`. It says when it is in."""

from __future__ import annotations

import sys
import time

from mooncake.store import MooncakeDistributedStore

if __name__ == "__main__":
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
    print(f"owner {code}", flush=True)
    while code == 0:
        time.sleep(60)
