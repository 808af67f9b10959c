"""The reports of `gdscache inspect`, `inspect --compare` and `gdscache verify` as tables, and a namespace's facts, a
line each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gdscache.commands.console import Table, duration, figure
from gdscache.disk.catalog_file import FORMAT_VERSION
from gdscache.errors import InvalidValueError
from gdscache.groups.base import Group
from gdscache.sizes import about

COMPARE_SCHEMA = "gdscache.compare/2"
NAMESPACES_SHOWN = 40
MADE_SHOWN = 2
FINDINGS_SHOWN = 40
DIGITS = 16
SHOWN = 14  # characters of a name in a row


def made_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """A namespace's lines: name → value. A group of layers, and a salt in JSON, have a line for each of their names."""
    lines: dict[str, str] = {}
    for name, value in fields.items():
        if name == "planes":
            lines[name] = _planes(value)
        elif name == "group" and isinstance(value, dict):
            lines |= {f"group.{fact}": _text(one) for fact, one in value.items()}
        elif name in ("salt", "request_salt") and (facts := facts_of(value)) is not None:
            lines |= {f"{name}.{fact}": _text(one) for fact, one in facts.items()}
        else:
            lines[name] = _text(value)
    return dict(sorted(lines.items()))


def compare(namespaces: Sequence[Mapping[str, Any]], pair: Sequence[str]) -> dict[str, Any]:
    """Of the `namespaces` of `inspect`, the two whose digests begin with these digits.

    Raises `InvalidValueError` if digits name no namespace, several, or one without a description.
    """
    each = {namespace["digest"]: namespace for namespace in namespaces}  # a directory of plain pages has the same
    found = []
    for digits in pair:
        named = [namespace for digest, namespace in each.items() if digest.startswith(digits.lower())]
        if len(named) != 1 or named[0]["made_of"] is None:
            there = ", ".join(digest[:16] for digest, one in [*each.items()][:8] if one["made_of"]) or "none"
            lacks = ", which has no description" if len(named) == 1 else ""
            raise InvalidValueError(
                f"{digits!r} begins {len(named)} of {len(each)} namespaces{lacks}",
                f"give the first digits of one that `gdscache inspect` describes: {there}",
            )
        found += named
    return {"schema": COMPARE_SCHEMA, "namespaces": found}


def facts_of(salt: object) -> dict[str, Any] | None:
    try:
        found = json.loads(salt) if isinstance(salt, str) else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _planes(planes: Any) -> str:
    """The layers' planes; equal successive layers are written once."""
    try:
        layers = [
            ", ".join(" ".join(map(str, (name, list(shape), *types))) for name, shape, *types in layer)
            for layer in planes
        ]
    except (TypeError, ValueError):
        return _text(planes)
    return "; ".join(f"{len(list(run))} x ({what})" for what, run in itertools.groupby(layers))


def kept_by(group: Any) -> str:
    """The tokens that the layers of a namespace's `group` keep (`Group.words`)."""
    try:
        return Group(group["name"], (), 0, group["keeps"], group["span"]).words
    except (KeyError, TypeError, ValueError):
        return _text(group)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


# -- tables ------------------------------------------------------------------------------------------------------------


def inspect_tables(report: Mapping[str, Any]) -> list[Table]:
    table = Table()
    table.add_row("directory", str(report["path"]))
    table.add_row("owner", _owner(report["owner"]))
    version = f"{report['format_version']}, made {report['created'] or 'at unknown time'!s}"
    if report["format_version"] != FORMAT_VERSION:
        version += f"; the next engine makes it {FORMAT_VERSION}, and keeps its pages"
    table.add_row("format version", version)
    shards = f" in each of {report['shards']:,} shards" if report["shards"] > 1 else ""
    table.add_row("extent", f"{_size(report['extent_bytes'])}{shards}")
    table.add_row("capacity", f"{about(report['capacity_bytes'])}: {report['slots']:,} slots")
    table.add_row("pages", f"{report['pages']:,}, {about(report['bytes'])} without padding")
    table.add_row("free slots", f"{report['free_slots']:,}")
    kept = report["retention"]
    if kept["priorities"].keys() - {"0"}:
        counts = ", ".join(f"{n:,} of {priority}" for priority, n in kept["priorities"].items())
        table.add_row("priorities", f"{counts} (the lowest is evicted first)")
    if kept["expiring_pages"]:
        table.add_row(
            "expiring", f"{kept['expiring_pages']:,} pages have a ttl, of which {kept['expired_pages']:,} ended"
        )
    for file in report["files"]:
        table.add_row(file["name"], _size(file["bytes"]))
    for stripe in report["stripes"][1:]:
        table.add_row(stripe["name"], f"{_size(stripe['bytes'])} in {stripe['path']!s}")
    if report["unusable_rows"]:
        causes = ", ".join(f"{count:,} {cause}" for cause, count in report["unusable_rows"].items())
        table.add_row("unusable rows", f"{causes}: the next engine deletes them")
    if report["suspect"]:
        table.add_row("suspect", "the catalogue was found corrupt in use: the next engine looks at it again")
    for file in report["set_aside"]:
        table.add_row("set aside", f"{file['name']!s}, {about(file['bytes'])}: was corrupt; may be deleted")
    if report["owner"]["state"] == "in use":
        table.add_row("not shown", "pages that are not committed yet; and rates and causes, which gdscache top shows")
    return [table, _namespaces(report["namespaces"]), made_of_table(report["namespaces"])]


def verify_tables(report: Mapping[str, Any]) -> list[Table]:
    table = Table()
    table.add_row("directory", str(report["path"]))
    table.add_row("pages", f"{report['pages']:,}")
    for name in ("good", "bad", "unchecked"):
        table.add_row(name, f"{report[f'{name}_pages']:,}")
    rate = figure(report["gb_per_second"], "GB/s")
    table.add_row("read", f"{about(report['bytes'])} in {duration(report['seconds'])}, {rate}")
    found = [*report["bad"], *report["unchecked"]]
    if not found:
        return [table]
    sharded = ["shard"] if report["shards"] > 1 else []
    details = Table("", "slot", "key", "namespace", "cause", "first bad layer", *sharded)
    for page in found[:FINDINGS_SHOWN]:
        where = ["" if page[name] is None else str(page[name]) for name in ("layer", *sharded)]
        details.add_row(f"{page['slot']:,}", page["key"], page["namespace"], page["cause"], *where)
    if len(found) > FINDINGS_SHOWN:
        details.caption = f"and {len(found) - FINDINGS_SHOWN:,} more: --json has all"
    return [table, details]


def _namespaces(namespaces: list[dict[str, Any]]) -> Table:
    grouped = any("group" in (namespace["fields"] or {}) for namespace in namespaces)
    facts = ("name", "weights", "request_salt") if grouped else ("name", "weights", "salt", "request_salt")
    titles = [*(name.replace("_", " ") for name in ("model", *facts[1:])), *(["group"] if grouped else [])]
    table = Table("", "namespace", *titles, "pages", "bytes")
    for namespace in namespaces[:NAMESPACES_SHOWN]:
        fields = namespace["fields"] or {"name": "(unknown)"}
        texts = [str(fields.get(name, "")) for name in facts]
        texts = [text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}\N{HORIZONTAL ELLIPSIS}" for text in texts]
        texts += [kept_by(fields["group"]) if "group" in fields else ""] if grouped else []
        sizes = f"{namespace['pages']:,}", about(namespace["bytes"])
        table.add_row(namespace["digest"][:DIGITS], *texts, *sizes)
    if len(namespaces) > NAMESPACES_SHOWN:
        table.caption = f"and {len(namespaces) - NAMESPACES_SHOWN:,} more: --json has all"
    return table


def made_of_table(namespaces: list[dict[str, Any]]) -> Table:
    """The lines of the first namespaces, those in which they differ first."""
    known = [namespace for namespace in namespaces if namespace["made_of"] is not None]
    some = [namespace["made_of"] for namespace in known[:MADE_SHOWN]]
    table = Table("", "made of", *(namespace["digest"][:DIGITS] for namespace in known[:MADE_SHOWN]), "")
    lines = {name: [str(one.get(name, "(no such line)")) for one in some] for one in some for name in one}
    for name, texts in sorted(lines.items(), key=lambda line: (len(set(line[1])) == 1, line[0])):
        table.add_row(str(name), *texts, "differs" if len(set(texts)) > 1 else "")
    if len(known) > MADE_SHOWN:
        table.caption = f"and {len(known) - MADE_SHOWN:,} namespaces more: --json has all"
    return table


def _owner(owner: Mapping[str, Any]) -> str:
    if owner["state"] == "unknown":
        host = f" (last opened on {owner['host']!s})" if owner["host"] else ""
        return f"unknown: the locks of its host cannot be seen from here{host}"
    if owner["state"] == "free":
        return "free: not open"
    since = f", since {owner['started']!s}: {owner['command']!s}" if owner["started"] else ""
    return f"in use by process {owner['pid']}{since}"


def _size(nbytes: int) -> str:
    exact, text = f"{nbytes:,} bytes", about(nbytes)
    return exact if text.endswith("bytes") else f"{text} ({exact})"
