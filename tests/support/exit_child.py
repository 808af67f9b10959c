"""A process that ends in some way without closing its engine. One that is warm forks for each line that it is given.

A line is JSON: `config`, `kind`, `stored` (numbers of prompts). The answer is the exit status, as waitpid has it; what
the fork writes to stderr goes to the file `stderr`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import warnings
from typing import Any

from tests.support.helpers import WAIT, Host, prompt

PAGES = 4
KEPT: list[Any] = []


def act(config: dict[str, Any], kind: str, stored: list[int]) -> None:
    """Store, and end; what this returns to is the end of the program."""
    host = Host(config)
    for number in stored:
        tokens = prompt(number, PAGES)
        host.engine.store(tokens, host.compute(tokens)).release_event.synchronize(WAIT)
    if kind not in ("local", "dropped", "cycle"):  # those that nobody has any more when this function returns
        KEPT.append(host)
    if kind == "sys.exit":
        sys.exit(3)
    elif kind == "exception":
        raise RuntimeError("the program's own")
    elif kind == "interrupt":
        raise KeyboardInterrupt
    elif kind == "os._exit":
        os._exit(4)
    elif kind == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "dropped":
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            host.engine = None  # type: ignore[assignment]
            host = None  # type: ignore[assignment]
        assert [w.category for w in said] == [ResourceWarning], said
        assert not [t for t in threading.enumerate() if t.name.startswith("gdscache-")]
    elif kind == "cycle":
        host.engine.circle = host.engine  # type: ignore[attr-defined]
        host = None  # type: ignore[assignment]
        gc.collect()
        assert not [t for t in threading.enumerate() if t.name.startswith("gdscache-")]
    elif kind == "daemon":
        threading.Thread(target=lambda: (host, threading.Event().wait()), daemon=True).start()
    elif kind == "closed":
        host.engine.close()


def main() -> None:
    gc.freeze()  # what is there by now is looked at by no fork
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            error = os.open(job["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(error, 2)
            os.dup2(error, 1)
            os.close(0)
            signal.alarm(60)
            act(job["config"], job["kind"], job["stored"])
            return  # to the end of the program, as any
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
