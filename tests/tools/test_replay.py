"""`gdscache replay`: traces read exactly, figures of tiny traces by hand, the optimum against brute force."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.commands.replay.trace import Request, TraceError, Workload, expand, read_trace
from gdscache.errors import InvalidValueError
from gdscache.policies import POLICIES
from gdscache.policies.base import LRU
from tests.support.bounds import Counts, infinite, optimum, plain_lru
from tests.support.one_tier import simulate
from tests.support.traces import conversation, line, needs_conversation, request, workload, workloads, write

# -- the trace ----------------------------------------------------------------------------------------------------


def test_a_trace_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 27, "input_length": 513, "output_length": 4, "hash_ids": [8, 9], "other": 1}\n\n'
        '{"timestamp": 27.5, "input_length": 0, "output_length": 0, "hash_ids": []}'
    )
    assert read_trace([path]) == [Request(27, 513, 4, (8, 9)), Request(27.5, 0, 0, ())]


@pytest.mark.parametrize("name", ["trace.gz", "trace.jsonl"])
def test_gzip_is_known_by_its_bytes_and_holds_the_same_requests(tmp_path: Path, name: str) -> None:
    lines = [line([1, 2], timestamp=3), line([1], timestamp=4)]
    packed = write(tmp_path / "packed.gz", *lines).rename(tmp_path / name)
    assert packed.read_bytes()[:2] == b"\x1f\x8b"
    assert read_trace([packed]) == read_trace([write(tmp_path / "plain.jsonl", *lines)])


def test_several_files_are_one_trace_in_the_order_of_time(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", line([1, 2], timestamp=5), line([1], timestamp=7))
    second = write(tmp_path / "b.gz", line([1, 3], timestamp=1), line([1, 2, 4], timestamp=5))
    assert [r.blocks for r in read_trace([first, second])] == [(1, 3), (1, 2), (1, 2, 4), (1,)]
    assert [r.blocks for r in read_trace([second, first])] == [(1, 3), (1, 2, 4), (1, 2), (1,)]


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_request(tmp_path: Path) -> None:
    """Editors and shells of Windows write one."""
    plain = write(tmp_path / "a.jsonl", line([1, 2]), line([1]))
    (marked := tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert read_trace([marked]) == read_trace([plain])


GOOD = json.dumps(line([1, 2]))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "not a JSON object"),
        ("\udcff\udcfe", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"timestamp": 1}', "no input_length"),
        (GOOD.replace("timestamp", "time"), "no timestamp"),
        (GOOD.replace('"timestamp": 0', '"timestamp": NaN'), "timestamp is nan"),
        (GOOD.replace('"timestamp": 0', '"timestamp": -1'), "timestamp is -1"),
        (GOOD.replace("1024", "1024.0"), "input_length is 1024.0"),
        (GOOD.replace('"output_length": 1', '"output_length": -1'), "output_length is -1"),
        (GOOD.replace("[1, 2]", '{"1": 2}'), "hash_ids is"),
        (GOOD.replace("[1, 2]", "[1, -2]"), "hash_ids.1 is -2"),
        (GOOD.replace("1024", "1025"), "2 hash_ids for 1025 tokens"),
        (GOOD.replace("[1, 2]", "[2, 1]"), "block 2 follows nothing here and block 1 before"),
        (GOOD.replace("[1, 2]", "[1, 1]"), "block 1 follows block 1 here and nothing before"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, said: str) -> None:
    assert bad != GOOD
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{GOOD}\n\n{bad}\n".encode(errors="surrogateescape"))
    with pytest.raises(TraceError) as caught:
        read_trace([path])
    assert caught.value.message.startswith(f"{path}:3: ")
    assert said in caught.value.message
    assert len(caught.value.message) < len(str(path)) + 200


def test_two_traces_with_ids_of_their_own_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", line([1, 2]))
    other = write(tmp_path / "b.jsonl", line([2, 1]))
    with pytest.raises(TraceError, match=r"b\.jsonl:1: block 2 follows nothing here and block 1 before"):
        read_trace([one, other])


def test_torn_or_damaged_gzip_is_an_error_and_not_a_shorter_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.gz", *[line([1], timestamp=i) for i in range(50)])
    data = path.read_bytes()
    middle = len(data) // 2
    damaged = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
    for found, said in ((data[:-1], "after line"), (data[:-9], "after line"), (damaged, "cannot be read: ")):
        path.write_bytes(found)
        with pytest.raises(TraceError, match=said):
            read_trace([path])


def test_files_that_are_not_there_or_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot be read: No such file"):
        read_trace([tmp_path / "none.jsonl"])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace([tmp_path])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="no block in 0 requests"):
        read_trace([tmp_path / "empty.jsonl"])


def test_blocks_become_pages_with_chained_keys() -> None:
    work = expand([request([7, 8], tokens=700), request([7, 9])], 128)
    assert [p.pages for p in work.prompts] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7, 8]]
    assert len({page.key for page in work.names}) == 9
    parents = [work.namespace, *(work.names[i].key for i in (0, 1, 2, 3, 3, 5, 6, 7))]
    assert [page.parent for page in work.names] == parents
    assert {page.namespace for page in work.names} == {work.namespace}
    assert (work.references, work.tokens) == (13, 1724)


def test_partial_pages_are_left_out_as_an_engine_does() -> None:
    requests = [request([7, 8], tokens=700), request([1], tokens=100)]
    assert [len(p.pages) for p in expand(requests, 128).prompts] == [5, 0]
    assert [len(p.pages) for p in expand(requests).prompts] == [1, 0]


def test_a_block_seen_in_part_and_then_whole_is_one_prefix() -> None:
    work = expand([request([7], tokens=200), request([7, 8])], 128)
    assert [p.pages for p in work.prompts] == [[0], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert work.names[1].parent == work.names[0].key
    assert work.names[4].parent == work.names[3].key


def test_keys_do_not_depend_on_what_came_before() -> None:
    one, other = workload([1, 2], [3]), workload([3], [1], [1, 2])
    assert {page.key for page in one.names} == {page.key for page in other.names}


@pytest.mark.parametrize("page_tokens", [0, -1, 3, 1024])
def test_pages_that_do_not_divide_a_block_are_refused(page_tokens: int) -> None:
    with pytest.raises(InvalidValueError, match="do not divide"):
        expand([request([1])], page_tokens)


def lru(work: Workload, capacity: int) -> Counts:
    return simulate(work, capacity, POLICIES["lru"]())


def test_lru_takes_tails_first() -> None:
    work = workload([1, 2, 3], [4], [1, 2, 3], [5], [4])
    # 4 takes 3's place; 3 takes 4's, since 1 and 2 are its prefix; 5 takes that of 3, and 4 that of 2
    assert lru(work, 3) == Counts(2, 5, 2, 7, 4)


def test_a_prefix_is_touched_tail_first_and_stored_head_first() -> None:
    calls: list[tuple[str, bytes]] = []

    class Recorded(LRU):
        def touch_all(self, keys: Sequence[bytes]) -> None:
            calls.extend(("touch", key) for key in keys)
            super().touch_all(keys)

        def insert_all(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
            calls.extend(("insert", key) for key, _ in pages)
            super().insert_all(pages)

    work = workload([1, 2], [1, 2, 3, 4], [9])  # the last evicts, which looks at the order
    simulate(work, 4, Recorded())
    order = [("insert", 0), ("insert", 1), ("touch", 1), ("touch", 0), ("insert", 2), ("insert", 3)]
    assert calls == [(call, work.names[page].key) for call, page in order]


def test_plain_lru_is_blind_to_prefixes() -> None:
    work = workload([1, 2, 3], [1, 2, 3], [3 + 1])
    assert plain_lru(work, 2) == Counts(0, 4, 3, 7, 5)
    assert plain_lru(work, 3) == Counts(3, 4, 0, 4, 1)


def test_the_optimum_stores_only_what_is_needed() -> None:
    work = workload([1, 2], [3], [4], [1, 2], [3])
    assert optimum(work, 1) == Counts(1, 4, 2, 1, 0)
    assert optimum(work, 2) == Counts(2, 4, 1, 2, 0)
    assert optimum(work, 3) == Counts(3, 4, 0, 3, 0)


def brute_force(work: Workload, capacity: int) -> int:
    """The most consecutive hits over every choice of what to keep after every request."""
    best = {frozenset[int](): 0}
    for pages, _ in work.prompts:
        following: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            hits += next((i for i, page in enumerate(pages) if page not in kept), len(pages))
            pool = kept.union(pages)
            for size in range(min(capacity, len(pool)) + 1):
                for choice in map(frozenset, itertools.combinations(pool, size)):
                    following[choice] = max(following.get(choice, 0), hits)
        best = following
    return max(best.values())


@settings(max_examples=7 * settings.default.max_examples, deadline=None)
@given(workloads(requests=6), st.integers(1, 4))
def test_the_optimum_is_what_brute_force_finds(work: Workload, capacity: int) -> None:
    assert optimum(work, capacity).hits == brute_force(work, capacity)


@settings(max_examples=7 * settings.default.max_examples, deadline=None)
@given(workloads(requests=14, depth=4, page_tokens=256), st.integers(1, 20), st.sampled_from(sorted(POLICIES)))
def test_counts_add_up_and_nothing_beats_the_optimum(work: Workload, capacity: int, name: str) -> None:
    best, forever = optimum(work, capacity), infinite(work)
    counts = simulate(work, capacity, POLICIES[name]())
    for found in (counts, best, plain_lru(work, capacity), forever):
        assert found.hits + found.cold + found.absent == work.references
        assert found.hits <= best.hits <= forever.hits or found is forever
    for found in (counts, plain_lru(work, capacity)):
        assert 0 <= found.written - found.evictions <= capacity
    assert counts.written <= counts.cold + counts.absent
    assert forever == Counts(hits=forever.hits, cold=len(work.names), written=len(work.names))
    if capacity >= len(work.names):
        assert counts == forever


@pytest.mark.suite
@needs_conversation
def test_the_figures_of_the_conversation_trace() -> None:
    # Published figures count the partial block at a prompt's end.
    work = expand([r._replace(input_tokens=512 * len(r.blocks)) for r in conversation()])
    assert (len(work.prompts), work.references, len(work.names)) == (12_031, 288_500, 182_790)
    assert infinite(work).hits / work.references == pytest.approx(0.3664, abs=5e-5)
    sizes = [len(work.names) * part // 100 for part in (1, 5, 10, 25, 50)]
    rates = [plain_lru(work, pages).hits / work.references for pages in sizes]
    assert [round(rate, 4) for rate in rates] == [0.0523, 0.1954, 0.2784, 0.3535, 0.3631]
    rates = [optimum(work, pages).hits / work.references for pages in sizes]
    assert [round(rate, 4) for rate in rates] == [0.2464, 0.3664, 0.3664, 0.3664, 0.3664]
    assert lru(work, sizes[2]).hits / work.references == pytest.approx(0.2787, abs=5e-5)
    hits = [simulate(work, pages, POLICIES["lifetime"]()).hits for pages in sizes]
    base = [plain_lru(work, pages).hits for pages in sizes]
    for found, plain, least in zip(hits, base, [1.69, 1.16, 1.03, 1, 1], strict=True):
        assert found >= least * plain
