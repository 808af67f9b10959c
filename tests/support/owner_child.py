"""A second engine in another process: opens the directories that are named on standard input, and says what came of it.

Each line is a path, or "close"; the answer is a JSON object a line.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from gdscache.errors import GdsCacheError
from tests.support.helpers import Host, make_config, prompt


def main() -> None:
    logging.disable(logging.CRITICAL)
    host = None
    for line in sys.stdin:
        answer: dict[str, object] = {}
        try:
            if line.strip() == "close":
                if host is not None:
                    host.store(prompt(9, 3)).result(20)  # what a second owner does
                    answer["served"] = host.load(prompt(9, 3)).tokens
                    host.engine.close()
                host = None
            else:
                host = Host(make_config(Path(line.strip()), cpu=None))
                answer["refused"] = ""
        except GdsCacheError as error:
            answer["refused"] = type(error).__name__
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
