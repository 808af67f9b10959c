"""What namespaces are made of: said of a directory that rests and of one in use, and compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine
from gdscache.commands.inspect import compare, inspect
from gdscache.commands.inspect.names import made_of
from gdscache.disk import kept_file
from gdscache.errors import InvalidValueError
from gdscache.pages.keys import namespace_digest
from tests.support.helpers import make_config, prompt, run, settle, until

Gdscache = Callable[..., tuple[int, str, str]]


def opened(path: Path, **facts: object) -> CacheEngine:
    config = make_config(path)
    config["model"] |= {"salt": json.dumps({"dtype": "a", "length": 4, **facts})}
    return CacheEngine.from_config(config)


def stored(path: Path, **facts: object) -> str:
    """Pages of one namespace; its digest."""
    with opened(path, **facts) as engine:
        run(engine, prompt(1, 3))
        settle(engine)
        return engine.namespace().hex()


def lines(namespace: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in namespace["made_of"].items() if name.startswith("salt")}


def test_each_fact_has_a_line(tmp_path: Path) -> None:
    digest = stored(tmp_path / "c")
    (found,) = inspect(tmp_path / "c")["namespaces"]
    assert (found["digest"], found["pages"]) == (digest, 3)
    assert lines(found) == {"salt.dtype": "a", "salt.length": "4"}
    assert found["made_of"]["name"] == "tiny"
    assert found["made_of"]["planes"] == "3 x (k [4, 32] bfloat16, v [4, 32] bfloat16)"


@pytest.mark.parametrize("salt", ["", "plain", "[1]", "[" * 100_000, "{"], ids=lambda salt: salt[:9])
def test_a_salt_that_is_no_json_is_one_line(salt: str) -> None:
    assert made_of({"salt": salt, "planes": 7}) == {"planes": "7", "salt": salt}


def test_why_nothing_hits_after_a_change(tmp_path: Path, gdscache: Gdscache) -> None:
    path = tmp_path / "c"
    before, after = stored(path), stored(path, length=5, new=True)
    report = compare(inspect(path), before[:12], after[:12].upper())
    assert (report["a"], report["b"]) == (before, after)
    assert [line for line in report["lines"] if line["differs"]] == [
        {"line": "salt.length", "a": "4", "b": "5", "differs": True},
        {"line": "salt.new", "a": None, "b": "true", "differs": True},
    ]
    assert report["lines"][2] == {"line": "first_layer", "a": "0", "b": "0", "differs": False}
    status, out, err = gdscache("inspect", path, "--compare", before[:12], after[:12])
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines() if line.startswith("differs")] == [
        ["differs", "salt.length", "4", "5"],
        ["differs", "salt.new", "(no", "such", "line)", "true"],
    ]
    assert f"2 of {len(report['lines'])} lines differ" in out
    status, out, _ = gdscache("inspect", path, "--compare", before[:12], after[:12], "--json")
    assert (status, json.loads(out)) == (0, report)


def test_digits_that_name_none_or_several(tmp_path: Path, gdscache: Gdscache) -> None:
    path = tmp_path / "c"
    digest = stored(path)
    stored(path, length=5)
    for digits, count in (("xyz", 0), ("", 2)):
        with pytest.raises(InvalidValueError, match=f"begins {count} of the 2 namespaces"):
            compare(inspect(path), digest, digits)
    status, out, err = gdscache("inspect", path, "--compare", digest, "xyz")
    assert (status, out) == (2, "")
    assert digest[:16] in err, "the hint names those that are there"


def test_an_engine_that_runs_says_what_it_looks_for_before_it_has_stored(tmp_path: Path) -> None:
    path = tmp_path / "c"
    before = stored(path)
    with opened(path, length=5) as engine:
        report = inspect(path)
        assert [found["digest"] for found in report["namespaces"]] == [engine.namespace().hex(), before]
        assert [(found["pages"], found["bytes"]) for found in report["namespaces"]] == [(None, None)] * 2
        changed = [
            line["line"] for line in compare(report, before, engine.namespace().hex())["lines"] if line["differs"]
        ]
        assert changed == ["salt.length"]
        run(engine, prompt(2, 3), "tenant")
        settle(engine)
        until(lambda: len(inspect(path)["namespaces"]) == 3, "a request's namespace is described")
        assert inspect(path)["namespaces"][0]["made_of"]["request_salt"] == "tenant"
    assert oct((path / "namespaces.json").stat().st_mode & 0o777) == "0o600"


def test_it_keeps_the_last_ones(tmp_path: Path) -> None:
    """Nothing grows without bound, and a digest always fits what it names."""
    for number in range(40):
        names = kept_file.NamespacesFile(tmp_path, {"name": number})
        names.save({})
        names.save({})
    found = kept_file.read_namespaces(tmp_path)
    assert [fields["name"] for fields in found.values()] == list(range(8, 40))
    assert all(namespace_digest(fields) == digest for digest, fields in found.items())


def test_what_is_described_again_is_among_the_last(tmp_path: Path) -> None:
    for number in (*range(32), 0):
        kept_file.NamespacesFile(tmp_path, {"name": number}).save({})
    names = kept_file.NamespacesFile(tmp_path, {"name": 1})
    names.save({namespace_digest(fields): fields for fields in ({"name": 2}, {"name": 40})})
    kept = [fields["name"] for fields in kept_file.read_namespaces(tmp_path).values()]
    assert kept == [*range(4, 32), 0, 1, 2, 40]


BAD = ["", "{", "[]", "7", '{"version": 2, "namespaces": []}', '{"version": 1, "namespaces": 3}', "[" * 100_000]


def test_a_file_that_is_none_is_read_as_empty_and_written_anew(tmp_path: Path) -> None:
    for text in (*BAD, " " * (1 << 21)):
        (tmp_path / "namespaces.json").write_text(text)
        assert kept_file.read_namespaces(tmp_path) == {}, text[:20]
    with opened(tmp_path) as engine:
        assert list(kept_file.read_namespaces(tmp_path)) == [engine.namespace()]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path, other = tmp_path / "c", tmp_path / "other"
    digest = stored(path)
    other.write_bytes((path / "namespaces.json").read_bytes())
    (path / "namespaces.json").unlink()
    (path / "namespaces.json").symlink_to(other)
    assert kept_file.read_namespaces(path) == {}
    (path / "namespaces.json.new").symlink_to(other)  # nor is one that somebody left there
    before = other.read_bytes()
    assert stored(path) == digest
    assert other.read_bytes() == before
    assert not os.path.islink(path / "namespaces.json")
    assert not os.path.lexists(path / "namespaces.json.new")
