"""`gdscache explain`: the places and namespaces of a request's pages in a directory, and the causes of missing ones.

Changes nothing there and takes no lock. An engine may use the directory meanwhile.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdscache.commands.console import Progress, Table, reason_of, silent
from gdscache.commands.inspect.owner import find_owner
from gdscache.commands.inspect.reading import Contents, Namespace, existing, read
from gdscache.commands.inspect.tables import facts_of, kept_by, made_of
from gdscache.config import Config
from gdscache.disk import kept
from gdscache.disk.kept import History
from gdscache.errors import IOFailedError, TokensError
from gdscache.limits import KEY_BYTES
from gdscache.pages.keys import as_tokens, find, namespace_digest, page_keys

SCHEMA = "gdscache.explain/1"
RUNS_SHOWN = 40
DIGITS = 16
_UNKNOWN = b""  # in place of a namespace's digest
_DIGEST = re.compile(r"(?:0x)?([0-9a-fA-F]{64})")
_NUMBER = re.compile(r"[0-9]{1,10}")
_MOST_BYTES = 1 << 28  # greatest size of the ids
_FORMS = "a file, - or a text with token ids or digests of 64 hexadecimal digits, as a JSON list or between blanks"


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: token ids, uint32 (tokens,); or digests, 32 bytes each, of successive pages. Digests are page keys or
    an inference engine's names of pages."""

    tokens: Any = None
    digests: tuple[bytes, ...] = ()


def read_ids(given: str) -> Asked:
    """The ids of a command's argument: see `_FORMS`. Raises `TokensError`, `IOFailedError`."""
    if given != "-":
        try:
            return _ids(given)
        except TokensError:
            if given.strip()[:1] in ("[", "{") or not given.strip("0123456789, \t\n"):
                raise
    try:
        if given == "-":
            text = "" if sys.stdin is None else sys.stdin.read(_MOST_BYTES)
        else:
            with Path(given).open(encoding="utf-8") as file:
                text = file.read(_MOST_BYTES)
    except (OSError, ValueError) as error:
        message = f"{given!r} has no ids, and is no file that can be read: {reason_of(error)}"
        raise IOFailedError(message, f"pass {_FORMS}") from None
    return _ids(text)


def _ids(text: str) -> Asked:
    """Raises `TokensError`."""
    text = text.removeprefix("\ufeff")
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        words = re.split(r"[\s,]+", text.strip())
    words = words if isinstance(words, list) else [words]
    digests = [_DIGEST.fullmatch(word) if isinstance(word, str) else None for word in words]
    if words and all(digests):
        return Asked(digests=tuple(bytes.fromhex(match[1]) for match in digests if match is not None))
    numbers = [int(word) if isinstance(word, str) and _NUMBER.fullmatch(word) else word for word in words]
    if not numbers or not all(type(number) is int for number in numbers):
        raise TokensError("the ids are neither token ids nor digests", f"pass {_FORMS}")
    return Asked(as_tokens(numbers))


def explain(directory: Path, asked: Asked, config: Config | None = None, progress: Progress = silent) -> dict[str, Any]:
    """The places of a request's pages in a directory, as plain data.

    `namespaces`: the namespaces with present or past pages of the request, the most pages first. Each has its `runs` of
    pages: `first` and `stop` (exclusive) count pages of the request, `tokens` its tokens. An empty `digest`: past pages
    given by their keys, whose namespace is not known. `config`: gives the page keys of tokens in a hybrid model with
    planes by group. Raises as `inspect` does.
    """
    directory = existing(directory)
    owner = find_owner(directory)
    contents = read(directory, progress)
    history = kept.read_history(directory)
    named = {digest: _named(digest, one.fields, asked, config) for digest, one in contents.names.items()}
    if asked.digests:
        named[_UNKNOWN] = (asked.digests,), None
    tell = _teller(contents, history, [key for ways, _ in named.values() for way in ways for key in way], asked.digests)
    found = []
    for digest, (ways, size) in named.items():
        each = [[tell(key, digest) for key in way] for way in ways]
        told = max(each, key=lambda pages: sum(page["state"] != "absent" for page in pages), default=[])
        fields, states = contents.names.get(digest, Namespace()).fields, Counter(page["state"] for page in told)
        about: dict[str, Any] = {
            "digest": digest.hex(),
            "fields": fields,
            "made_of": None if fields is None else made_of(fields),
            "page_tokens": size,
            "pages": len(told) if ways else None,
            "found": len(told) - states["absent"],
            "hit": next((n for n, page in enumerate(told) if page["state"] != "stored"), len(told)),
            "states": {state: n for state, n in states.items() if n},
            "runs": [*_runs(told, size)],
        }
        found.append(about)
    with_pages = [one for one in found if one["found"]]
    return {
        "schema": SCHEMA,
        "path": str(directory),
        "owner": dataclasses.asdict(owner),
        "asked": {"tokens": None if asked.tokens is None else len(asked.tokens), "digests": len(asked.digests)},
        "history": None if history is None else {"written": history.written, "bad_pages": len(history.bad)},
        "other_namespaces": sum(not one["found"] for one in found if one["digest"]),
        "shorter_than_page": min((one["page_tokens"] for one in found if one["pages"] == 0), default=None),
        "unnamed_namespaces": sum(one["pages"] is None for one in found),
        "namespaces": sorted(with_pages, key=lambda one: (-one["hit"], -one["found"])),
    }


def _teller(
    contents: Contents, history: History | None, keys: Sequence[bytes], given: Sequence[bytes]
) -> Callable[[bytes, bytes], dict[str, Any]]:
    """A function that gives the facts of one of these pages in a namespace, as a run of one page. `given`: page keys
    that were not made for a namespace. The history has keys alone: these of it are of the one namespace that is known,
    or that has all stored ones, else of `_UNKNOWN`."""
    pages, slab, now = contents.pages, contents.slab, time.time()
    rows = find(pages.keys, np.frombuffer(b"".join(keys), f"V{KEY_BYTES}")).tolist()
    at = {key: row for key, row in zip(keys, rows, strict=True) if row >= 0}
    retentions = zip(pages.priorities.tolist(), pages.expires.tolist(), strict=True)
    kept = dict(zip(pages.retained.tolist(), retentions, strict=True))
    loose = frozenset(given)
    homes = {pages.digests[pages.namespaces[at[key]]] for key in loose & at.keys()} or contents.names.keys()
    home = next(iter(homes)) if len(homes) == 1 else _UNKNOWN

    def tell(key: bytes, namespace: bytes) -> dict[str, Any]:
        row = at.get(key, -1)
        if row >= 0 and pages.digests[pages.namespaces[row]] == namespace:
            slot, (priority, expires) = int(pages.slots[row]), kept.get(row, (0, math.inf))
            return {
                "state": "expired" if expires <= now else "stored",
                "place": str(slab.files[slab.locate(slot)[0]].parent),
                "slots": [slot, slot],
                "priority": priority,
                "expires": None if math.isinf(expires) else expires,
            }
        if history is None or row >= 0 or (key in loose and namespace != home):
            return {"state": "absent"}
        bad = history.bad.get(key)
        if bad is not None:
            told = {"state": "bad", "cause": bad.cause, "tier": bad.tier, "place": bad.place, "at": bad.at}
            return {**told, "slots": [bad.slot, bad.slot]}
        return {"state": "evicted" if key in history.evicted else "absent"}

    return tell


def _named(
    digest: bytes, fields: Mapping[str, Any] | None, asked: Asked, config: Config | None
) -> tuple[Sequence[Sequence[bytes]], int | None]:
    """The keys of a request's pages in a namespace, one list for each of the possible namings (none if the known facts
    do not give them), and the tokens of a page."""
    group = (fields or {}).get("group")
    about = group if isinstance(group, dict) else fields
    size = about.get("page_tokens") if about is not None else None
    size = size if type(size) is int and size > 0 else None
    if asked.tokens is None:
        return (asked.digests, [_named_by(digest, one) for one in asked.digests]), size
    if fields is None or size is None:
        return (), None
    if group is None:
        return [page_keys(digest, asked.tokens, size)], size
    base, step = _base(fields, config)
    if step is None or size % step:
        return (), None
    chained = page_keys(base, asked.tokens, step)[size // step - 1 :: size // step]
    return [[_named_by(digest, one) for one in chained]], size


def _base(fields: Mapping[str, Any], config: Config | None) -> tuple[bytes, int | None]:
    """The digest at the start of a hybrid model's digest chains, and the tokens of a page."""
    if config is not None:
        groups = config.model.layer_groups()
        salt = fields.get("request_salt")
        base = namespace_digest(config.model.base_fields(salt if isinstance(salt, str) else ""))
        return base, math.gcd(*(group.page_tokens for group in groups)) if groups else None
    if "model_groups" in (facts_of(fields.get("salt")) or {}):
        return b"", None  # of several pools: the fields have the planes of one
    whole = {name: value for name, value in fields.items() if name not in ("group", "packed")} | {"head_groups": 1}
    try:
        whole["planes"] = [[plane[:3] for plane in layer] for layer in fields["planes"]]  # as unpacked ones are told
        sizes = [int(group["page_tokens"]) for group in fields["groups"]]
    except (KeyError, TypeError, ValueError):
        return b"", None
    return namespace_digest(whole), math.gcd(*sizes) if sizes else None


def _named_by(namespace: bytes, digest: bytes) -> bytes:
    """The key of a page that another digest names."""
    return hashlib.blake2b(digest, digest_size=KEY_BYTES, key=namespace).digest()


def _runs(told: Sequence[dict[str, Any]], page_tokens: int | None) -> Iterator[dict[str, Any]]:
    """Runs of successive pages with equal facts. Stored ones lie in successive slots."""
    for _, some in itertools.groupby(enumerate(told), key=_alike):
        run = list(some)
        (first, page), (last, end) = run[0], run[-1]
        tokens = None if page_tokens is None else [first * page_tokens, (last + 1) * page_tokens]
        slots = {"slots": [page["slots"][0], end["slots"][1]]} if "slots" in page else {}
        yield {"first": first, "stop": last + 1, "tokens": tokens, **page, **slots}


def _alike(numbered: tuple[int, dict[str, Any]]) -> tuple[Any, ...]:
    number, page = numbered
    slot = page["slots"][0] - number if "slots" in page else None
    return slot, *(page.get(name) for name in ("state", "place", "priority", "expires", "cause", "tier", "at"))


# -- tables ------------------------------------------------------------------------------------------------------------


def explain_tables(report: Mapping[str, Any]) -> list[Table]:
    head = Table()
    head.add_row("directory", str(report["path"]))
    asked, owner = report["asked"], report["owner"]
    count = asked["digests"] if asked["tokens"] is None else asked["tokens"]
    head.add_row("asked for", f"{count:,} {'digests' if asked['tokens'] is None else 'tokens'}")
    if owner["state"] == "in use":
        head.add_row("not shown", "pages in the engine's memory alone, and pages not yet committed")
    if report["history"] is None:
        head.add_row("history", "none is kept here yet: absent pages may have been evicted")
    if report["unnamed_namespaces"]:
        why = "their pages of these tokens cannot be named: pass digests, or --config"
        head.add_row("left out", f"{report['unnamed_namespaces']:,} namespaces: {why}")
    if report["shorter_than_page"]:
        head.add_row("too short", f"a page has {report['shorter_than_page']:,} tokens, and only full pages are stored")
    elif not report["namespaces"] and report["other_namespaces"] > report["unnamed_namespaces"]:
        looked = report["other_namespaces"] - report["unnamed_namespaces"]
        head.add_row("found", f"nothing, in {looked:,} namespaces")
    return [head, *map(_table, report["namespaces"])]


def _table(namespace: Mapping[str, Any]) -> Table:
    fields = namespace["fields"] or {}
    group = f", {kept_by(fields['group'])}" if "group" in fields else ""
    salt = f", salt {fields['request_salt']!s}" if fields.get("request_salt") else ""
    name = f"{namespace['digest'][:DIGITS] or '(unknown)'}, model {fields.get('name', '(unknown)')!s}{group}{salt}"
    table = Table(f"namespace {name}", "pages", "tokens", "state", "where", "about")
    for run in namespace["runs"][:RUNS_SHOWN]:
        tokens = "" if run["tokens"] is None else f"{run['tokens'][0]:,} to {run['tokens'][1]:,}"
        pages = f"{run['first']:,} to {run['stop']:,}"
        state = _STATES.get(run["state"], run["state"])
        table.add_row(pages, tokens, state, _where(run), _about(run), color=_COLORS[run["state"]])
    more = len(namespace["runs"]) - RUNS_SHOWN
    prefix = fields.get("group", {}).get("keeps", "all") == "all"  # others are stored where prompts end
    stored = namespace["hit"] if prefix else namespace["states"].get("stored", 0)
    whole = f"{stored:,} of {namespace['pages']:,} pages{' from the first on' if prefix else ''} are stored"
    table.caption = whole if more <= 0 else f"{whole}; and {more:,} runs more: --json has all"
    return table


_COLORS = {"stored": "green", "expired": "yellow", "bad": "red", "evicted": "yellow", "absent": ""}
_STATES = {"evicted": "probably evicted", "absent": "never stored, as far as is known"}


def _where(run: Mapping[str, Any]) -> str:
    if "slots" not in run:
        return ""
    first, last = run["slots"]
    slots = f"slot {first:,}" if first == last else f"slots {first:,} to {last:,}"
    return f"{slots} of {run['place']!s}"


def _about(run: Mapping[str, Any]) -> str:
    told = []
    if run["state"] == "bad":
        told.append(f"{run['cause']!s}, found {_time(run['at'])}")
    if run.get("priority"):
        told.append(f"priority {run['priority']}")
    if run.get("expires") is not None:
        told.append(f"until {_time(run['expires'])}")
    return ", ".join(told)


def _time(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "at an impossible time"
