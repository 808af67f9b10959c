"""A call gives the interpreter's lock up nowhere: beside a thread that runs Python, each time may cost it 5 ms."""

from __future__ import annotations

import json

from tests.support.shims import shim, under


def test_no_call_gives_the_lock_up() -> None:
    """Of 64 pages, in the main thread, which signals interrupt, and in another."""
    library = shim("lock_shim")
    told = json.loads(under([library], "lock_child.py", library).splitlines()[-1])
    assert len(told) == 4
    for case, found in told.items():
        assert min(found.pop("os.stat")) > 0, "the shim counts nothing"
        assert len(found) == 5, "kinds of calls"
        # What a call waits for (a lock that a thread of ours has just then) is not its own doing. It is rare, but for
        # loads in parts, whose first pages land while it takes the lock for the next: there one call without it tells.
        place = 2 if case.startswith("at once") else 0
        usual = {call: sorted(times)[len(times) * place // 4] for call, times in found.items()}
        assert not any(usual.values()), (case, found)
