"""The log of an engine: each kind of bad page is one line that says which, where and why; storms are one a minute."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gdscache import PageStatus, errors
from gdscache.disk.catalog import Catalog
from gdscache.errors import IOFailedError, NativeCallError
from gdscache.integrations.settings import follow
from gdscache.policies.base import LRU
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import Host, OpenHost, drop_from, kept, kept_on_ssd, prompt, quiet, raising, settle, until
from tests.support.hybrid import MODELS, HybridHost, hybrid_config
from tests.support.pages import FAULTY, offset_of, slot_of
from tests.support.ranks import RanksHost

PAGES = 4
SAID = re.compile(
    r"page ([0-9a-f]{64}) in slot (\d+) of the (\w+) tier \((.*?)\) did not come \((\w+)\): ([^()]*)"
    r"(?: \((\d+) more of this cause within \d+ s\))?"
)


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "gdscache"):
        yield


def bad(caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    """Key, slot, tier, place, cause, words and count of each line on a page that did not come."""
    found = [SAID.fullmatch(record.message) for record in caplog.records if "did not come" in record.message]
    assert all(record.levelname == "WARNING" for record in caplog.records if "did not come" in record.message)
    return [match.groups() for match in found if match is not None or pytest.fail(caplog.text)]


def one(caplog: pytest.LogCaptureFixture) -> tuple[str, ...]:
    until(lambda: bool(bad(caplog)), "the line is there")
    (line,) = bad(caplog)
    return line


def told(host: Host, tokens: list[int], page: int, tier: str, place: str, cause: str) -> tuple[str, ...]:
    """What a line is to say of a page, but for its words and the count."""
    key = host.engine.pages(tokens)[page].key.hex()
    return key, str(slot_of(host.engine, tokens, page, tier)), tier, place, cause


FAULTS = [
    (Fault.EIO, "io_error", "stays"),
    (Fault.SHORT, "short_read", "stays"),
    (Fault.FLIP, "checksum", "dropped"),
    (Fault.HANG, "deadline", "stays"),
]


@pytest.mark.parametrize(("fault", "cause", "words"), FAULTS)
@pytest.mark.parametrize("way", ["through the CPU tier", "past it", "prefetch"])
def test_a_page_of_the_ssd_that_does_not_come_is_one_line(
    open_host: OpenHost, slab: Path, caplog: pytest.LogCaptureFixture, way: str, fault: Fault, cause: str, words: str
) -> None:
    transport = "tests.support.faulty:FaultyUring" if fault is Fault.SHORT else FAULTY
    options = {"transport": transport, "deadline": 0.5 if fault is Fault.HANG else 20.0}
    host, tokens = kept(open_host, PAGES, ssd=24, cpu=None if way == "past it" else 8, **options)
    drop_from(host.engine, *([] if way == "past it" else ["cpu"]))
    expected, place = told(host, tokens, 1, "ssd", str(slab), cause), offset_of(host.engine, tokens, 1)
    with PLAN.rule(Op.READ, fault, lambda offset: offset == place):
        if way == "prefetch":
            host.engine.prefetch(tokens).result(20)
        else:
            load, blocks, keys = host.begin(tokens)
            load.result(20)
            host.finish(load, blocks, keys)
        until(lambda: bool(bad(caplog)), "the line is there")
        quiet(host.engine)
    (line,) = bad(caplog)
    assert (line[:5], line[6]) == (expected, None)
    assert words in line[5]
    settle(host.engine)


def test_checksums_that_cannot_be_read_are_a_line_too(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, tokens = kept(open_host, PAGES, cpu=None)
    first.engine.close()
    host = open_host(cpu=None)
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "checksum_rows", raising(IOFailedError("the catalogue cannot be read", "", 5)))
        for _ in range(3):
            assert host.load(tokens).pages == (PageStatus.IO_ERROR,) * PAGES
    (line,) = bad(caplog)
    assert (line[2], line[4]) == ("ssd", "io_error")
    assert sum("cannot be read" in record.message for record in caplog.records) == 2, "and the catalogue's own, once"


def test_a_page_that_rots_in_memory_is_one_line(open_host: OpenHost, caplog: pytest.LogCaptureFixture) -> None:
    host = open_host(cpu=8, ssd=None)
    tokens = prompt(1, PAGES)
    host.keep(tokens)
    expected = told(host, tokens, 2, "cpu", "host memory", "checksum")
    cpu: Any = host.engine.manager.cpu
    cpu.extents.buffer.view[slot_of(host.engine, tokens, 2, "cpu") * host.layout.extent_bytes + 9] ^= 1
    assert host.load(tokens).tokens == 8
    line = one(caplog)
    assert line[:5] == expected


def test_a_page_that_a_tier_has_not_is_one_line(open_host: OpenHost, caplog: pytest.LogCaptureFixture) -> None:
    tier = {"tier": "tests.support.dict_tier:DictTier", "capacity": 24 * 8192}
    host = open_host(cpu=None, ssd=None, bounce=4, tiers=[tier])
    tokens = prompt(1, PAGES)
    host.keep(tokens)
    found: Any = host.engine.manager.tiers["dict"]
    expected = told(host, tokens, 1, "dict", "the dict tier", "gone")
    found.io.broken[slot_of(host.engine, tokens, 1, "dict")] = errors.PageGoneError("nowhere")
    host.load(tokens)
    line = one(caplog)
    assert line[:5] == expected


def test_two_loads_that_want_a_bad_page_tell_of_it_once(
    open_host: OpenHost, slab: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second waits for the first one's read, and has the same verdict."""
    host, tokens = kept_on_ssd(open_host, PAGES, cpu=8, ssd=24, transport=FAULTY)
    expected, place = told(host, tokens, 1, "ssd", str(slab), "checksum"), offset_of(host.engine, tokens, 1)
    with PLAN.rule(Op.READ, Fault.FLIP, lambda offset: offset == place):
        both = [host.begin(tokens) for _ in range(2)]
        for one in both:
            assert host.finish(*one).tokens == 4
    quiet(host.engine)
    host.engine.close()
    (line,) = bad(caplog)
    assert (line[:5], line[6]) == (expected, None)


def test_a_page_that_is_bad_on_one_rank_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = RanksHost(tmp_path / "cache", [0, 1])
    try:
        tokens = prompt(1, PAGES)
        host.store(tokens)
        drop_from(host.engine, "cpu")
        key, slot = host.engine.pages(tokens)[2].key, slot_of(host.engine, tokens, 2)
        with (tmp_path / "cache" / "slab-0.0.1.bin").open("r+b") as file:
            file.seek(slot * host.layout.extent_bytes + 5)
            file.write(b"\x55\xaa\x55")
        host.load(tokens)
        line = one(caplog)
        assert line[:5] == (key.hex(), str(slot), "ssd", str(tmp_path / "cache"), "checksum")
    finally:
        host.close()


def test_pools_of_groups_name_their_directories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = HybridHost(hybrid_config(tmp_path / "c", MODELS["apart"], cpu=None))
    tokens = prompt(1, 6)
    host.store(tokens)
    host.engine.drain(20)
    for slab in sorted((tmp_path / "c").glob("*/slab-0.bin")):
        slab.write_bytes(bytes(slab.stat().st_size))
    host.load(tokens)
    until(lambda: len(bad(caplog)) == 2, "each pool has told it")
    assert {line[3] for line in bad(caplog)} == {str(tmp_path / "c" / f"groups-{number}") for number in range(2)}
    host.engine.close()


# -- storms ------------------------------------------------------------------------------------------------------------


def clock(host: Host) -> Callable[[float], None]:
    """Time goes on for the log by so many seconds when a test says so."""
    log, now = host.engine.manager.log, [host.engine.manager.log.clock()]
    log.clock = lambda: now[0]

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def test_a_storm_of_bad_pages_is_one_line_a_minute_with_the_count(
    open_host: OpenHost, caplog: pytest.LogCaptureFixture
) -> None:
    host, tokens = kept(open_host, PAGES, cpu=None, transport=FAULTY)
    pass_by = clock(host)
    with PLAN.rule(Op.READ, Fault.EIO):
        for _ in range(20):
            host.load(tokens)
            quiet(host.engine)
            pass_by(6.0)
        host.engine.close()
    lines = bad(caplog)
    assert len(lines) == 3, caplog.text
    assert int(lines[0][6]) + 1 == PAGES
    assert sum(int(line[6] or 0) + 1 for line in lines) == 20 * PAGES, "each page is written, or counted"


def test_a_full_disk_is_one_line_a_minute(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = open_host(cpu=None, ssd=64)
    pass_by = clock(host)
    full = IOFailedError("/mnt/catalog.sqlite cannot be written: database or disk is full", "free space there", 28)
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "commit", raising(full))
        for seed in range(8):
            assert set(host.store(prompt(seed, 2)).result(20).dropped.values()) == {"disk_full"}
            quiet(host.engine)
    said = [record for record in caplog.records if "disk is full" in record.message]
    assert [record.message.partition(": ")[0] for record in said] == ["the ssd tier commits no pages"]
    assert (said[0].levelname, said[0].name) == ("WARNING", "gdscache.store")
    assert "/mnt" in said[0].message
    assert "free space there" in said[0].message
    pass_by(61)
    host.keep(prompt(9, 2))
    until(lambda: "(13 more of this cause" in caplog.text, "what was left unsaid is counted")


def test_pages_for_a_tier_that_has_stopped_are_counted(
    open_host: OpenHost, slab: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = open_host(cpu=None)
    (slab / "lock").unlink()
    assert set(host.store(prompt(1, 2)).result(20).dropped.values()) == {"lock_lost"}
    host.engine.close()
    (line,) = (record.message for record in caplog.records if "takes no pages" in record.message)
    assert "(1 more of this cause" in line


def test_refusals_are_said_once_a_minute(open_host: OpenHost, caplog: pytest.LogCaptureFixture) -> None:
    host = open_host(cpu=16, ssd=64, store={"admission": "second_offer"})
    pass_by = clock(host)
    for minute in range(3):
        for seed in range(3):
            host.keep(prompt(10 * minute + seed, 2))
        pass_by(60.5)
    host.engine.close()
    said = [record.message for record in caplog.records if "refuses pages (second_offer)" in record.message]
    assert 3 <= len(said) <= 4
    assert all("store.admission is second_offer" in message for message in said)


def test_an_order_without_memory_is_a_line_that_no_lock_is_held_for(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A log's handler may be slow, and may call the engine."""
    host, held = open_host(cpu=8, ssd=None, eviction="lru"), list[bool]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            held.append(host.engine.manager.lock._is_owned())  # type: ignore[attr-defined]

    logger, handler = logging.getLogger("gdscache"), Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(LRU, "insert_all", raising(NativeCallError("as ordered", "free memory", errno.ENOMEM)))
            host.keep(prompt(1, 4))
            assert host.engine.manager.tiers["cpu"].index.evict(1) == 1
        host.engine.clear()
        host.keep(prompt(1, 4))
        host.engine.close()
    finally:
        logger.removeHandler(handler)
    (line,) = [record.message for record in caplog.records if "begins anew" in record.message]
    assert line.startswith("no memory for a change of an eviction order")
    assert held == [False]


# -- summaries, and requests that missed ------------------------------------------------------------------------------


def test_a_summary_comes_every_some_seconds_where_something_was_done(
    open_host: OpenHost, slab: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = open_host(cpu=8, ssd=24, log={"summary": 100, "requests": 0})
    pass_by = clock(host)
    tokens = prompt(1, 4)
    host.keep(tokens)
    host.load(tokens)
    drop_from(host.engine, "cpu")
    host.load(tokens)
    quiet(host.engine)
    assert "lookups of" not in caplog.text
    pass_by(101)
    until(lambda: "lookups of" in caplog.text, "a thread of the engine's writes it")
    (line,) = [record for record in caplog.records if "lookups of" in record.message]
    assert (line.name, line.levelname) == ("gdscache.summary", "INFO")
    size = host.layout.page_bytes
    assert line.message.startswith(f"{slab}: in 10")
    for part in (
        "2 lookups of 8 pages, hit 100.0 % (cpu 50.0 %, ssd 50.0 %), missed 0.0 %",
        f"loaded {8 * size // 1024} KiB",
        "refused 0 pages, dropped 0 pages",
    ):
        assert part in line.message
    pass_by(101)
    assert not host.engine.prefetch(prompt(9, 2)).result(10).tokens
    pass_by(101)
    host.keep(prompt(2, 2))
    until(lambda: caplog.text.count("lookups of") == 2, "the next one is of what came since")
    assert "in 20" in caplog.records[-1].message, "idle times have no line"
    assert ": 0 lookups" not in caplog.text


def test_a_request_that_missed_pages_is_told_once_in_a_while(
    open_host: OpenHost, caplog: pytest.LogCaptureFixture
) -> None:
    host = open_host(cpu=8, ssd=None, log={"summary": 0, "requests": 50})
    pass_by = clock(host)
    host.keep(prompt(1, 2))
    for seed in range(5):
        host.engine.lookup([*prompt(1, 2), *prompt(100 + seed, 2)])
        host.keep(prompt(1, 2))
        host.load(prompt(1, 2))
    said = [record.message for record in caplog.records if "missed pages" in record.message]
    assert said == ["tiny: a request that missed pages: tokens 0 to 8 cached on cpu, tokens 8 to 16 absent"]
    pass_by(51)
    host.engine.lookup(prompt(7, 1))
    host.load(prompt(1, 2))
    until(lambda: caplog.text.count("missed pages") == 2, "the next one")
    assert caplog.records[-1].levelname == "INFO"


def test_words_for_that_line_are_a_function(open_host: OpenHost, caplog: pytest.LogCaptureFixture) -> None:
    """A text would break off the thread that writes the line, later."""
    host = open_host(cpu=8, ssd=None, log={"summary": 0, "requests": 50})
    with pytest.raises(errors.InvalidValueError, match="words is 'mine'"):
        host.engine.tell("mine")  # type: ignore[arg-type]
    host.engine.tell(lambda: "mine")
    host.keep(prompt(1, 2))
    until(lambda: "missed pages: mine" in caplog.text, "the line")


def test_both_may_be_off(open_host: OpenHost, caplog: pytest.LogCaptureFixture) -> None:
    host = open_host(cpu=8, ssd=24, log={"summary": 0, "requests": 0})
    pass_by = clock(host)
    host.load(prompt(1, 2))
    host.keep(prompt(1, 2))
    pass_by(1e6)
    host.keep(prompt(2, 2))
    host.load(prompt(1, 2))
    host.engine.close()
    assert "gdscache.summary" not in {record.name for record in caplog.records}


# -- under an inference engine ----------------------------------------------------------------------------------------


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    ours, theirs = logging.getLogger("gdscache"), logging.getLogger("engine_of_a_test")
    before = ours.handlers[:], ours.level, ours.propagate
    ours.handlers, ours.level, ours.propagate = [], logging.NOTSET, True
    yield ours, theirs
    ours.handlers, (ours.level, ours.propagate) = before[0], before[1:]
    theirs.handlers.clear()


def test_lines_go_where_the_engine_s_go(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    ours, theirs = loggers
    follow(theirs)
    assert (ours.handlers, ours.level) == ([], logging.NOTSET), "an engine that has configured nothing changes nothing"
    handler = logging.NullHandler()
    theirs.addHandler(handler)
    theirs.setLevel(logging.DEBUG)
    theirs.propagate = False
    for _ in range(2):
        follow(theirs)
        assert (ours.handlers, ours.level, ours.propagate) == ([handler], logging.DEBUG, False)


def test_what_somebody_has_configured_stays(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    ours, theirs = loggers
    theirs.addHandler(logging.NullHandler())
    ours.setLevel(logging.ERROR)
    follow(theirs)
    assert (ours.handlers, ours.level) == ([], logging.ERROR)
