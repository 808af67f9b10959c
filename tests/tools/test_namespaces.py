"""What namespaces are made of: said of a directory that rests and of one in use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine
from gdscache.commands.inspect.reading import inspect
from gdscache.commands.inspect.tables import made_of
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
    status, out, err = gdscache("inspect", path)
    assert (status, err) == (0, "")
    at = next(n for n, line in enumerate(out.splitlines()) if line.startswith("made of"))
    head, *body = out.splitlines()[at:]
    assert head.split() == ["made", "of", after[:16], before[:16]]
    assert [line.split() for line in body if line.endswith("differs")] == [
        ["salt.length", "5", "4", "differs"],
        ["salt.new", "true", "(no", "such", "line)", "differs"],
    ]
    assert body[2].split() == ["first_layer", "0", "0"]


def test_two_of_many_are_compared_by_their_first_digits(tmp_path: Path, gdscache: Gdscache) -> None:
    path = tmp_path / "c"
    one, _, other = (stored(path, length=length) for length in (5, 6, 7))
    status, out, err = gdscache("inspect", path, "--compare", one[:12], other[:12].upper())
    assert (status, err) == (0, "")
    head, differs, *_ = out.splitlines()
    assert head.split() == ["made", "of", one[:16], other[:16]]
    assert differs.split() == ["salt.length", "5", "7", "differs"]
    assert len([line for line in out.splitlines() if line.endswith("differs")]) == 1
    status, out, _ = gdscache("inspect", path, "--compare", one[:12], other[:12], "--json")
    assert (status, [found["digest"] for found in json.loads(out)["namespaces"]]) == (0, [one, other])
    for digits, count in (("xyz", 0), ("", 3)):
        status, out, err = gdscache("inspect", path, "--compare", one, digits)
        assert (status, out) == (2, "")
        assert f"begins {count} of 3 namespaces" in err
        assert one[:16] in err, "the hint names those that are there"


def test_an_engine_that_runs_shows_what_it_has_stored(tmp_path: Path) -> None:
    path = tmp_path / "c"
    before = stored(path)
    with opened(path, length=5) as engine:
        run(engine, prompt(2, 3), "tenant")
        settle(engine)
        until(lambda: len(inspect(path)["namespaces"]) == 2, "a request's namespace is described")
        new, old = inspect(path)["namespaces"]
        assert (new["made_of"]["request_salt"], new["made_of"]["salt.length"], old["digest"]) == ("tenant", "5", before)
        assert [(found["pages"], found["bytes"]) for found in (new, old)] == [(3, old["bytes"])] * 2
