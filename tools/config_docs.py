"""Write the descriptions in gdscache/config into configs/default.yaml and the tables of docs/configuration.md, and
those in gdscache/metrics into the table of docs/metrics.md.

    python tools/config_docs.py

Keys, defaults and meanings are written once, in the code. Tests compare the files with the output.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gdscache.config import Config
from gdscache.metrics import FAMILIES
from gdscache.sizes import SIZE_SCHEMA, format_size

ROOT = Path(__file__).resolve().parent.parent
TABLES = re.compile(r"<!-- keys: (\S+) -->\n.*?<!-- end -->\n", re.DOTALL)
METRICS = re.compile(r"<!-- metrics -->\n.*?<!-- end -->\n", re.DOTALL)
# Keys without a default, or with none that a file could begin with.
EXAMPLES = {
    "model.name": "my-model",
    "model.layers": "16",
    "model.kv_heads": "8",
    "model.head_dim": "64",
    "ssd.path": "~/.cache/gdscache",
    "status.path": "/run/gdscache",
}
COMMENTED = (
    "events",
    "metrics",
    "status",
)  # sections that have an effect by their presence, and are shown commented out
HEAD = """\
# Every key with its default. Copy the file and keep the lines that you change.
# `gdscache config print` prints it.
# The model's name and sizes and the SSD's path have no default: these are
# examples, of a small Llama shape.
# Needs 1 GiB of GPU memory (or host memory, without a GPU), 4 GiB of host
# memory and 16 GiB on an SSD.
"""
COMMENT = 32  # the column at which a comment begins
WIDTH = 78


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a section's field, of an optional section's, or of the items of a list."""
    for part in (field.annotation, *_parts(field.annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _parts(annotation: Any) -> Iterator[Any]:
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


def is_list(field: FieldInfo) -> bool:
    return field.default == ()


def shown(field: FieldInfo) -> str:
    value = field.default
    if any(getattr(extra, "json_schema", None) == SIZE_SCHEMA for extra in field.metadata) and value is not None:
        return format_size(value)
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return {"": '""', (): "[]"}.get(value, str(value))


def rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The rows of a table: the keys of a model, and those of a list's items."""
    for name, field in model.model_fields.items():
        inner = section_of(field)
        if inner is not None and not is_list(field):
            continue
        default = "required" if field.is_required() else f"`{shown(field)}`"
        yield f"| `{prefix}{name}` | {default} | {field.description} |"
        if inner is not None:
            yield from rows(inner, f"{prefix}{name}[].")


def table(name: str) -> str:
    """The table of one section; `top` has the keys outside of all sections."""
    if name == "top":
        lines = [row for row in rows(Config, "") if not row.startswith("| `tiers")]
    else:
        field = Config.model_fields[name]
        section = section_of(field)
        assert section is not None, name
        lines = list(rows(section, f"{name}[]." if is_list(field) else f"{name}."))
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *lines, ""])


def configuration(text: str) -> str:
    """docs/configuration.md with new tables."""
    return TABLES.sub(lambda found: f"<!-- keys: {found[1]} -->\n{table(found[1])}<!-- end -->\n", text)


def metrics(text: str) -> str:
    """docs/metrics.md with a new table."""
    rows = [
        f"| `{one.sample}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.help} |"
        for one in FAMILIES
    ]
    table = "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows, ""])
    return METRICS.sub(lambda found: f"<!-- metrics -->\n{table}<!-- end -->\n", text)


def default_yaml() -> str:
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        section = section_of(field)
        if section is None or is_list(field):
            parts.append("\n".join([*entry("", name, shown(field), str(field.description)), ""]))
            continue
        commented = name in COMMENTED
        width = WIDTH - 2 * commented
        lines = entry("", name, "", str(field.description), width)
        for key, inner in section.model_fields.items():
            value = EXAMPLES.get(f"{name}.{key}") or shown(inner)
            required = "required: " if inner.is_required() else ""
            lines += entry("  ", key, value, required + str(inner.description), width)
        parts.append("\n".join([*(f"# {line}" if commented else line for line in lines), ""]))
    return "\n".join(parts)


def entry(indent: str, key: str, value: str, description: str, width: int = WIDTH) -> list[str]:
    """A key with its comment, which continues below if it is long."""
    begin = f"{indent}{key}: {value}".rstrip()
    first, *more = textwrap.wrap(description, width - max(COMMENT, len(begin) + 1), break_on_hyphens=False)
    if len(begin) >= COMMENT and more:
        first, *more = textwrap.wrap(description, width - len(begin) - 3, break_on_hyphens=False)
    return [f"{begin:<{COMMENT - 1}} # {first}", *(f"{'':<{COMMENT - 1}} # {line}" for line in more)]


def main() -> None:
    for name, written in (("configuration.md", configuration), ("metrics.md", metrics)):
        page = ROOT / "docs" / name
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "configs" / "default.yaml").write_text(default_yaml(), encoding="utf-8")


if __name__ == "__main__":
    main()
