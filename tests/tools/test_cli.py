"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gdscache import CacheEngine, HybridEngine
from gdscache.commands import cli
from gdscache.config import config_schema, load_config
from gdscache.pages.keys import namespace_digest
from gdscache.sizes import about
from tests.support.hybrid import MODELS, hybrid_config
from tests.support.places import ROOT
from tests.support.processes import program

CONFIGS = ROOT / "configs"


def test_schema_is_json_and_nothing_else(gdscache) -> None:
    status, out, err = gdscache("config", "schema")
    assert (status, err) == (0, "")
    assert json.loads(out) == config_schema()


def test_check_as_json(gdscache) -> None:
    file = CONFIGS / "llama3_8b.yaml"
    status, out, err = gdscache("config", "check", file, "--json")
    assert (status, err) == (0, "")
    said = json.loads(out)
    config = load_config(file)
    assert said["file"] == str(file)
    assert said["page_bytes"] == said["extent_bytes"] == 8 << 20
    assert said["token_bytes"] == 128 << 10
    assert said["planes"] == ["k [8, 128] bfloat16", "v [8, 128] bfloat16"]
    assert said["tiers"] == {
        "gpu": {"bytes": 8 << 30, "pages": 1024},
        "cpu": {"bytes": 32 << 30, "pages": 4096},
        "ssd": {"bytes": 256 << 30, "pages": 32768},
    }
    assert said["namespace"] == namespace_digest(config.model.namespace_fields()).hex()
    assert said["ssd_path"] == str(config.ssd.path)


@pytest.mark.parametrize(
    "file", sorted({*CONFIGS.glob("*.yaml")} - {CONFIGS / "alerts.yaml"}), ids=lambda path: path.stem
)
def test_check_shows_the_same_figures_as_a_table(gdscache, file: Path) -> None:
    _, as_json, _ = gdscache("config", "check", file, "--json")
    said = json.loads(as_json)
    status, out, err = gdscache("config", "check", file)
    assert (status, err) == (0, "")
    rows = {line[:14].strip(): line[14:].strip() for line in out.splitlines()[1:]}
    assert rows["namespace"] == said["namespace"]
    assert rows["extent bytes"].startswith(f"{said['extent_bytes']:,} ")
    assert rows["page"].startswith(f"{said['page_tokens']} tokens")
    for name, tier in said["tiers"].items():
        row = rows[f"{name} tier"]
        assert row == "none" if tier is None else f": {tier['pages']:,} pages" in row
    assert (rows.get("ssd path") or None) == said["ssd_path"]


def test_sizes_of_groups_in_several_pools_are_told_with_each_group(gdscache, tmp_path: Path) -> None:
    config = hybrid_config(tmp_path / "c", MODELS["state"])
    (file := tmp_path / "c.yaml").write_text(json.dumps(config), encoding="utf-8")
    _, out, _ = gdscache("config", "check", file)
    said = json.loads(gdscache("config", "check", file, "--json")[1])
    assert f"cpu tier {about(config['cpu']['capacity'])}\n" in re.sub(r" +", " ", out)
    for group in said["groups"]:
        assert f"extents of {group['extent_bytes']:,} bytes" in out
        assert f"cpu {group['pages']['cpu']:,}" in out


@pytest.mark.parametrize("pack", ["on", "off"])
def test_a_check_of_the_file_shows_what_an_engine_says(gdscache, tmp_path: Path, pack: str) -> None:
    model = {"name": "m", "layers": 1, "kv_heads": 8, "head_dim": 64, "page_tokens": 64, "pack": pack}
    small = {"cpu": {"capacity": "4MiB"}, "gpu": {"device": "cpu", "capacity": "16MiB"}, "host_buffer": "2MiB"}
    (file := tmp_path / "c.yaml").write_text(json.dumps({"model": model, "store": {"queue": "256KiB"}, **small}))
    with CacheEngine.from_config(file) as engine:
        expected = engine.stats()["concerns"]
    assert len(expected) == 2
    assert json.loads(gdscache("config", "check", file, "--json")[1])["concerns"] == expected
    _, out, _ = gdscache("config", "check", file)
    assert [line[9:] for line in out.splitlines() if line.startswith("warning: ")] == expected


def test_pages_are_counted_whole_and_an_extent_is_rounded_up(gdscache, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {name: m, layers: 3, kv_lora_rank: 7, rope_dim: 2, page_tokens: 80}\ngpu: {capacity: 24575}\n"
        "tiers: [{tier: 'a.store:OfOurs', capacity: 30000}]\n",
        encoding="utf-8",
    )
    _, out, _ = gdscache("config", "check", file, "--json")
    said = json.loads(out)
    assert (said["page_bytes"], said["extent_bytes"]) == (80 * 3 * (7 + 2) * 2, 8192)
    further = {"a.store:OfOurs": {"bytes": 30000, "pages": 3}}
    assert said["tiers"] == {"gpu": {"bytes": 24575, "pages": 2}, "cpu": None, "ssd": None} | further
    assert said["ssd_path"] is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("model: {name: m}\ncup: {}\n", ["unknown key `cup`", "did you mean `cpu`?"]),
        ("model: {name: m, layers: 1}\n", ["model says nothing of its planes", "hint: give kv_heads and head_dim"]),
        ("model: [\n", ["c.yaml:2:1"]),
        ("[bold]x[/bold]: 1\n", ["c.yaml"]),
        (None, ["No such file"]),
    ],
)
def test_a_refused_file_is_a_message_and_status_2(
    gdscache, tmp_path: Path, content: str | None, says: list[str]
) -> None:
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    for options in ([], ["--json"]):
        status, out, err = gdscache("config", "check", file, *options)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert "Traceback" not in err
        assert "hint: " in err
        for part in [str(file), *says]:
            assert part in err


@pytest.mark.parametrize("arguments", [["nonsense"], ["config", "chek"], ["config", "check"], ["--versoin"]])
def test_wrong_usage_is_status_2(gdscache, arguments: list[str]) -> None:
    status, out, err = gdscache(*arguments)
    assert (status, out) == (2, "")
    assert "Usage" in err


def test_version(gdscache) -> None:
    assert gdscache("--version") == (0, f"gdscache {importlib.metadata.version('gdscache')}\n", "")


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    yield command, path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


@pytest.mark.parametrize(("command", "path"), list(commands(typer.main.get_command(cli.app))), ids=str)
def test_help_shows_flags_without_a_value_and_sentences_in_one_piece(
    gdscache, monkeypatch: pytest.MonkeyPatch, command: Any, path
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    status, out, err = gdscache(*path, "--help")
    assert (status, err) == (0, "")
    assert "--help" in out
    assert "bool" not in out.lower()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    source = inspect.getdoc(command.callback) if command.callback else command.help
    for paragraph in (source or command.help).split("\n\n"):
        assert " ".join(paragraph.split()) in lines
    for option in command.params:
        assert any(option.help in line for line in lines), option.help  # Rich reads [words] as markup
        if not getattr(option, "is_flag", True):  # every other option says what it takes
            assert re.search(rf"{option.opts[0]} +\S*[<A-Z]", out), option.opts


RUN = "import runpy; runpy.run_module('gdscache', run_name='__main__')"
WARNED = """
import logging
from gdscache.commands import cli, main
cli.app = lambda prog_name: logging.getLogger("gdscache.config").warning("ssd.endurance is %s", "9 pages")
main.main()
"""


def test_in_its_own_process(tmp_path: Path) -> None:
    """Completion is offered; a digest is on one line, however narrow; a warning has its logger's name and level."""
    asked = {"_GDSCACHE_COMPLETE": "complete_bash", "COMP_WORDS": "gdscache config c", "COMP_CWORD": "2"}
    assert program("-c", RUN, cwd=tmp_path, **asked).stdout.split() == ["check"]
    done = program("-c", RUN, "config", "check", str(CONFIGS / "cpu_only.yaml"), cwd=tmp_path, COLUMNS="30")
    assert (done.returncode, done.stderr) == (0, "")
    assert namespace_digest(load_config(CONFIGS / "cpu_only.yaml").model.namespace_fields()).hex() in done.stdout
    assert program("-c", WARNED, cwd=tmp_path).stderr == "WARNING gdscache.config: ssd.endurance is 9 pages\n"


def test_a_pipe_is_read_once(gdscache) -> None:
    for text in ("cpu: {capacity: 1GiB}\n", (CONFIGS / "cpu_only.yaml").read_text()):
        reader, writer = os.pipe()
        os.write(writer, text.encode())
        os.close(writer)
        status, out, _ = gdscache("config", "check", f"/dev/fd/{reader}")
        os.close(reader)
        assert (status, out.splitlines()[0]) == (0, f"/dev/fd/{reader}: valid")


def test_a_file_for_an_engine_is_told_all_that_needs_no_model(gdscache, tmp_path: Path) -> None:
    ssd = f"ssd: {{path: {tmp_path}/kv, capacity: 1GiB, endurance: 1MiB}}\n"
    text = f"{ssd}status: {{path: {tmp_path}/page}}\nevents: {{topic: abc}}\n"
    said = []
    for name, model in (("engine", ""), ("own", "model: {name: x, layers: 1, kv_heads: 1, head_dim: 64}\n")):
        (file := tmp_path / f"{name}.yaml").write_text(model + text)
        said.append(json.loads(gdscache("config", "check", file, "--json")[1])["concerns"])
    assert said[0] == said[1]
    assert [sentence.split(" ")[0] for sentence in said[0]] == ["ssd.endurance", "events.topic", "status.path"]


def test_concerns_of_a_hybrid_model_are_those_of_its_engine(gdscache, tmp_path: Path) -> None:
    config = hybrid_config(tmp_path / "kv", MODELS["state"], gpu=64, cpu=24)
    (file := tmp_path / "c.yaml").write_text(json.dumps(config), encoding="utf-8")
    with HybridEngine.from_config(file) as engine:
        expected = [sentence for one in engine.engines for sentence in one.stats()["concerns"]]
    assert expected
    assert json.loads(gdscache("config", "check", file, "--json")[1])["concerns"] == expected
