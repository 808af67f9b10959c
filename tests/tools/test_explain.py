"""`gdscache explain`: what it says of pages is what became of them, and it leaves the directory as it was."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gdscache import PageHashes
from gdscache.commands.explain import Asked, explain, explain_tables, read_ids
from gdscache.commands.inspect import reading
from gdscache.config import Config
from gdscache.disk import kept
from gdscache.errors import IOFailedError, TokensError
from gdscache.pages.keys import Page, as_tokens
from tests.support.helpers import Host, flip_file, make_config, prompt, quiet
from tests.support.hybrid import MODELS, HybridHost, hybrid_config

Gdscache = Callable[..., tuple[int, str, str]]
SALTS = ("", "red")


def asked(tokens: Sequence[int]) -> Asked:
    return Asked(as_tokens(tokens))


def opened(path: Path, **options: Any) -> Host:
    return Host(make_config(path, cpu=None, **options))


def states(report: dict[str, Any], namespace: bytes, pages: int) -> list[str]:
    for one in report["namespaces"]:
        if one["digest"] == namespace.hex():
            told = [run["state"] for run in one["runs"] for _ in range(run["first"], run["stop"])]
            assert one["pages"] == len(told)
            assert one["states"] == {state: told.count(state) for state in set(told)}
            return told
    return ["absent"] * pages


def rot(host: Host, page: Page) -> None:
    ssd = host.engine.manager.ssd
    flip_file(ssd.path / "slab-0.bin", ssd.index.slot(page.key) * host.layout.extent_bytes + 100)


class Explained(RuleBasedStateMachine):
    """Pages are stored, evicted, found bad and wiped; the model is what the index had, step by step."""

    SLOTS = 10
    names = st.tuples(st.integers(1, 5), st.sampled_from(SALTS))

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="explained-"))
        self.host = opened(self.folder / "c", ssd=self.SLOTS)
        self.evicted: set[bytes] = set()
        self.bad: set[bytes] = set()

    @property
    def stored(self) -> set[bytes]:
        return {entry.key for entry in self.host.engine.manager.ssd.index}

    @rule(name=names, pages=st.integers(1, 5))
    def store(self, name: tuple[int, str], pages: int) -> None:
        before = self.stored
        keys = {page.key for page in self.host.engine.pages(prompt(name[0], pages), name[1])}
        self.host.keep(prompt(name[0], pages), salt=name[1])
        self.evicted |= before - self.stored
        self.bad -= keys

    @rule(name=names, number=st.integers(0, 4))
    def find_bad(self, name: tuple[int, str], number: int) -> None:
        pages = self.host.engine.pages(prompt(name[0], 5), name[1])
        here = [page for page in pages[: number + 1] if page.key in self.stored]
        if len(here) == number + 1:
            rot(self.host, pages[number])
            assert self.host.load(prompt(name[0], number + 1), salt=name[1]).tokens == 4 * number
            quiet(self.host.engine)
            self.bad.add(pages[number].key)

    @rule(salt=st.sampled_from(SALTS))
    def wipe(self, salt: str) -> None:
        self.host.engine.invalidate(self.host.engine.namespace(salt))

    def truth(self, page: Page) -> str:
        if page.key in self.stored:
            return "stored"
        if page.key in self.bad:
            return "bad"
        return "evicted" if page.key in self.evicted else "absent"

    def holds(self, report: dict[str, Any], seed: int, *, beside: bool) -> None:
        for salt in SALTS:
            pages = self.host.engine.pages(prompt(seed, 5), salt)
            told, true = states(report, self.host.engine.namespace(salt), 5), [self.truth(page) for page in pages]
            if beside:  # what is not stored is known by the history, which is written later
                told, true = ([state == "stored" for state in some] for some in (told, true))  # type: ignore[misc]
            assert told == true, (seed, salt)

    @rule(seed=st.integers(1, 6))
    def ask_beside_the_engine(self, seed: int) -> None:
        quiet(self.host.engine)
        self.holds(explain(self.folder / "c", asked(prompt(seed, 5))), seed, beside=True)

    @rule()
    def ask_and_go_on(self) -> None:
        reports = {}
        self.host.engine.close()
        for seed in range(1, 7):
            reports[seed] = explain(self.folder / "c", asked(prompt(seed, 5)))
        self.host = opened(self.folder / "c", ssd=self.SLOTS)
        for seed, report in reports.items():
            self.holds(report, seed, beside=False)

    @precondition(lambda self: hasattr(self, "host"))
    @invariant()
    def the_engine_says_the_same(self) -> None:
        for salt in SALTS:
            hit = self.host.engine.lookup(prompt(1, 5), salt=salt)
            told = [reason.cause for reason in hit.reasons() for _ in range(reason.first, reason.stop, 4)]
            names = {"stored": ("cached", "behind")}
            for cause, page in zip(told, self.host.engine.pages(prompt(1, 5), salt), strict=True):
                truth = self.truth(page)
                assert cause in names.get(truth, (truth,))

    def teardown(self) -> None:
        if hasattr(self, "host"):
            self.host.engine.close()
            shutil.rmtree(self.folder)


TestExplained = Explained.TestCase
TestExplained.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)


def test_runs_say_where_pages_are_and_since_what_use(tmp_path: Path) -> None:
    path = tmp_path / "c"
    host = opened(path)
    host.keep(prompt(1, 4), priority=2)
    host.keep(prompt(2, 2), salt="red", ttl=1e6)
    host.engine.close()
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    report = explain(path, asked(prompt(1, 6)))
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()} == before
    (found,) = report["namespaces"]
    stored, absent = found["runs"]
    assert (stored["first"], stored["stop"], stored["tokens"], stored["state"]) == (0, 4, [0, 16], "stored")
    assert (stored["place"], stored["slots"], stored["priority"]) == (str(path), [0, 3], 2)
    assert stored["expires"] is None
    assert (absent["first"], absent["stop"], absent["tokens"], absent["state"]) == (4, 6, [16, 24], "absent")
    assert (found["hit"], found["found"], found["pages"]) == (4, 4, 6)
    assert report["other_namespaces"] == 1
    (red,) = explain(path, asked(prompt(2, 2)))["namespaces"]
    assert red["fields"]["request_salt"] == "red"
    assert red["runs"][0]["expires"] > time.time()
    assert json.loads(json.dumps(report)) == report


def test_digests_are_keys_of_pages_or_the_caller_s_hashes(tmp_path: Path) -> None:
    hashes = [hashlib.sha256(bytes([n])).digest() for n in range(3)]
    host = opened(tmp_path / "c")
    named = PageHashes(hashes)
    host.keep(named)
    keys = tuple(page.key for page in host.engine.pages(named))
    host.engine.close()
    by_key, by_hash = (explain(tmp_path / "c", Asked(digests=some)) for some in (keys, tuple(hashes)))
    assert by_key["namespaces"][0]["runs"] == by_hash["namespaces"][0]["runs"]
    assert by_key["namespaces"][0]["hit"] == 3
    (other,) = explain(tmp_path / "c", Asked(digests=(keys[1], bytes(32))))["namespaces"]
    assert [run["state"] for run in other["runs"]] == ["stored", "absent"]


@pytest.mark.parametrize("pack", ["off", "on"])
@pytest.mark.parametrize("model", ["together", "apart"])
def test_pages_of_groups_are_named(tmp_path: Path, model: str, pack: str) -> None:
    tiers = {"cpu": 200, "ssd": 200, "bounce": 64} if pack == "on" else {}
    config = hybrid_config(tmp_path / "c", MODELS[model] | {"pack": pack}, **tiers)
    host = HybridHost(config)
    tokens = prompt(1, 6)
    host.store(tokens)
    host.engine.drain(20)
    host.engine.close()
    auto = Config.from_dict({**config, "model": MODELS[model]})  # finds out, as an engine does
    reports = [explain(one, asked(tokens), auto) for one in reading.directories_of(tmp_path / "c")]
    told = [(one["fields"]["group"]["name"], one) for report in reports for one in report["namespaces"]]
    full = [run for name, one in told if name == "full" for run in one["runs"] if run["state"] == "stored"]
    assert sum(run["stop"] - run["first"] for run in full) == 6
    found = dict(told)
    if pack == "off":
        assert found["full"]["hit"] == 6
        assert [run["state"] for run in found["window"]["runs"]][-1] == "stored"
    alone = [explain(one, asked(tokens)) for one in reading.directories_of(tmp_path / "c")]
    if model == "apart":
        assert not any(report["namespaces"] for report in alone), "a pool's names follow from the whole model"
        told = [" ".join(" ".join(explain_tables(report)[0].lines()).split()) for report in alone]
        assert all("left out 1 namespaces" in one and "--config" in one and "nothing" not in one for one in told), told
    else:
        assert [report["namespaces"] for report in alone] == [report["namespaces"] for report in reports]


def test_beside_an_engine_that_stores_all_the_time(tmp_path: Path) -> None:
    """Each copy is whole, or is not used: a process of its own asks while commits go on."""
    path = tmp_path / "c"
    host = opened(path, ssd=4000)
    host.keep(prompt(1, 5))
    command = [sys.executable, "-m", "gdscache", "explain", str(path), json.dumps(prompt(1, 6)), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        seed = 10
        while asking.poll() is None:
            host.keep(prompt(seed, 3))
            seed += 1
        report = json.loads(asking.stdout.read())
        assert not asking.stderr.read()
    assert report["owner"]["state"] == "in use"
    assert report["namespaces"][0]["hit"] == 5
    assert report["namespaces"][0]["pages"] == 6
    host.keep(prompt(3, 3))  # the engine goes on
    assert host.load(prompt(3, 3)).tokens == 12
    host.engine.close()


def test_a_copy_is_left_out_where_the_log_began_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    host = opened(path)
    host.keep(prompt(1, 2))
    copied, headers = reading.catalog_file.open_copy, [0]

    def torn(where: Path, progress: Any) -> Any:
        headers[0] += 1
        with (path / "catalog.sqlite-wal").open("r+b") as log:  # what a log that begins anew does first
            log.seek(16)
            salt = log.read(4)
            log.seek(16)
            log.write(bytes([salt[0] ^ 1]) + salt[1:])
        return copied(where, progress)

    shutil.copytree(path, tmp_path / "copy")
    host.engine.close()
    path = tmp_path / "copy"
    monkeypatch.setattr(reading.catalog_file, "open_copy", torn)
    monkeypatch.setattr("gdscache.commands.inspect.reading.PAUSE", 0)
    with pytest.raises(IOFailedError):
        explain(path, asked(prompt(1, 2)))
    assert headers[0] > 10


@pytest.mark.parametrize(
    ("given", "tokens", "digests"),
    [
        ("[1, 2, 3]", [1, 2, 3], 0),
        ("1 2\n3", [1, 2, 3], 0),
        ("1,2, 3", [1, 2, 3], 0),
        ("\ufeff[1, 2]", [1, 2], 0),  # as shells of Windows write a file
        ("7", [7], 0),
        ("a" * 64, None, 1),
        (f"0x{'A' * 64} {'b' * 64}", None, 2),
        (json.dumps(["c" * 64]), None, 1),
    ],
)
def test_ids_are_read(given: str, tokens: list[int] | None, digests: int, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(given)
    for source in (given, str(tmp_path / "ids")):
        found = read_ids(source)
        assert (None if found.tokens is None else found.tokens.tolist()) == tokens
        assert len(found.digests) == digests


def test_bytes_that_are_no_text_and_a_closed_standard_input_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin, error in ((io.TextIOWrapper(io.BytesIO(b"1 \xff"), "utf-8"), IOFailedError), (None, TokensError)):
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(error):
            read_ids("-")


@pytest.mark.parametrize("given", ["1 2 9999999999", "1 2 99999999999"])
def test_numbers_that_are_no_token_ids_are_not_taken_for_a_file(given: str) -> None:
    with pytest.raises(TokensError, match="token ids"):
        read_ids(given)


@pytest.mark.parametrize("given", ["", "[]", "x", "1 x", "-1", "[1.5]", "[true]", '{"a": 1}', "a" * 63, "[" * 9999])
def test_what_is_no_id_is_refused(given: str) -> None:
    with pytest.raises((TokensError, IOFailedError)):
        read_ids(given)


def test_a_key_is_told_of_in_its_namespace_alone(tmp_path: Path) -> None:
    """The history has keys alone, so a page that was evicted is of an unknown namespace where several are there."""
    host = opened(tmp_path / "c", ssd=6)
    (red, *_), (blue, *_) = (host.engine.pages(prompt(seed, 3), salt) for seed, salt in ((1, "red"), (2, "blue")))
    for seed, salt in ((1, "red"), (2, "blue"), (3, ""), (1, "red")):  # red is evicted and stored again, blue evicted
        host.keep(prompt(seed, 3), salt=salt)
    host.engine.close()
    stored, evicted, both = (
        [(one["digest"], one["states"]) for one in explain(tmp_path / "c", Asked(digests=some))["namespaces"]]
        for some in ((red.key,), (blue.key,), (red.key, blue.key))
    )
    assert stored == [(red.namespace.hex(), {"stored": 1})]
    assert evicted == [("", {"evicted": 1})]
    assert both == [(red.namespace.hex(), {"stored": 1, "evicted": 1})]


def test_the_command_says_it_in_a_table(tmp_path: Path, gdscache: Gdscache) -> None:
    path = tmp_path / "c"
    host = opened(path, ssd=6)
    host.keep(prompt(1, 3))
    pages = host.engine.pages(prompt(1, 3))
    rot(host, pages[1])
    host.load(prompt(1, 3))
    quiet(host.engine)
    for seed in range(2, 5):
        host.keep(prompt(seed, 3))
    host.engine.close()
    status, out, err = gdscache("explain", path, " ".join(page.key.hex() for page in pages))
    assert (status, err) == (0, "")
    assert "bad" in out
    assert "checksum, found 20" in out
    assert "probably evicted" in out
    assert f"slot 1 of {path}" in out.replace("\n", " ")
    status, out, _ = gdscache("explain", path, json.dumps(prompt(77, 3)))
    assert status == 0
    assert "nothing, in 1 namespaces" in out
    status, out, _ = gdscache("explain", path, "7")
    assert f"a page has {host.layout.page_tokens} tokens" in out
    assert "nothing" not in out
    status, _, err = gdscache("explain", tmp_path / "no", "1 2 3")
    assert status == 2
    assert "does not exist" in err


def test_the_history_is_kept_over_restarts_and_refused_where_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "c"
    host = opened(path, ssd=4)
    for seed in range(1, 4):
        host.keep(prompt(seed, 3))
    host.engine.close()
    assert (path / "history").stat().st_mode & 0o777 == 0o600
    assert not (path / "history.new").exists()
    host = opened(path, ssd=4)
    assert host.engine.lookup(prompt(1, 3)).missing().cause == "evicted"
    host.engine.close()
    whole = (path / "history").read_bytes()
    assert kept.pack(kept.read_history(path)) == whole
    changed = b"x" + whole[1:], whole.replace(b'"period": ', b'"period":0')
    for data in (whole[:-1], whole + b"x", b"", whole[:20], *changed):
        (path / "history").write_bytes(data)
        assert kept.read_history(path) is None
        explain(path, asked(prompt(1, 3)))
    (path / "history").unlink()
    (path / "history").symlink_to(tmp_path / "other")
    assert kept.read_history(path) is None
    host = opened(path, ssd=4)
    assert host.engine.lookup(prompt(1, 3)).missing().cause == "absent"
    host.engine.close()
