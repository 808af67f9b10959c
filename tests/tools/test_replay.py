"""`gdscache replay`: traces read exactly, figures of tiny traces by hand, the optimum against brute force."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.commands.replay.families import FAMILIES, Ids, Prompt, blocks_of, drawn
from gdscache.commands.replay.options import listed
from gdscache.commands.replay.setup import pages_of
from gdscache.commands.replay.simulate import Counts, infinite, optimum, plain_lru, simulate
from gdscache.commands.replay.trace import Request, TraceError, read_trace, write_trace
from gdscache.commands.replay.workload import Workload, expand
from gdscache.errors import InvalidValueError
from gdscache.policies import POLICIES
from gdscache.policies.base import LRU
from tests.support.traces import line, request, workload, workloads, write

TRACE = os.environ.get("GDSCACHE_CONVERSATION_TRACE")


# -- the trace ----------------------------------------------------------------------------------------------------


def test_a_trace_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 27, "input_length": 513, "output_length": 4, "hash_ids": [8, 9], "other": 1}\n\n'
        '{"timestamp": 27.5, "input_length": 0, "output_length": 0, "hash_ids": []}'
    )
    assert read_trace([path]) == [Request(27, 513, 4, (8, 9)), Request(27.5, 0, 0, ())]


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace.gz"])
def test_gzip_holds_the_same_requests(tmp_path: Path, name: str) -> None:
    lines = [line([1, 2], timestamp=3), line([1], timestamp=4)]
    packed = write(tmp_path / name, *lines)
    assert packed.read_bytes()[:2] == b"\x1f\x8b"
    assert read_trace([packed]) == read_trace([write(tmp_path / "plain.jsonl", *lines)])


def test_gzip_is_known_by_its_bytes(tmp_path: Path) -> None:
    packed = write(tmp_path / "a.gz", line([1]))
    assert len(read_trace([packed.rename(tmp_path / "a.jsonl")])) == 1


def test_several_files_are_one_trace_in_the_order_of_time(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", line([1, 2], timestamp=5), line([1], timestamp=7))
    second = write(tmp_path / "b.gz", line([1, 3], timestamp=1), line([1, 2, 4], timestamp=5))
    assert [r.blocks for r in read_trace([first, second])] == [(1, 3), (1, 2), (1, 2, 4), (1,)]
    assert [r.blocks for r in read_trace([second, first])] == [(1, 3), (1, 2, 4), (1, 2), (1,)]


GOOD = json.dumps(line([1, 2]))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "list instead of an object"),
        ("null", "NoneType instead of an object"),
        ('{"timestamp": 1}', "no input_length"),
        (GOOD.replace("timestamp", "time"), "no timestamp"),
        (GOOD.replace('"timestamp": 0', '"timestamp": NaN'), "timestamp is nan"),
        (GOOD.replace('"timestamp": 0', '"timestamp": "0"'), "timestamp is '0'"),
        (GOOD.replace('"timestamp": 0', '"timestamp": -1'), "timestamp is -1"),
        (GOOD.replace("1024", "1024.0"), "input_length is 1024.0"),
        (GOOD.replace("1024", "true"), "input_length is True"),
        (GOOD.replace('"output_length": 1', '"output_length": -1'), "output_length is -1"),
        (GOOD.replace("[1, 2]", '{"1": 2}'), "hash_ids is"),
        (GOOD.replace("[1, 2]", "[1, -2]"), "hash_ids is"),
        (GOOD.replace("[1, 2]", "[1, 2.0]"), "hash_ids is"),
        (GOOD.replace("1024", "1025"), "2 hash_ids for 1025 tokens"),
        (GOOD.replace("1024", "512"), "2 hash_ids for 512 tokens"),
        (GOOD.replace("[1, 2]", "[2, 1]"), "block 2 follows nothing here and block 1 before"),
        (GOOD.replace("[1, 2]", "[1, 1]"), "block 1 follows block 1 here and nothing before"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, said: str) -> None:
    assert bad != GOOD
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n\n{bad}\n")
    with pytest.raises(TraceError) as caught:
        read_trace([path])
    assert caught.value.message.startswith(f"{path}:3: ")
    assert said in caught.value.message
    assert len(caught.value.message) < len(str(path)) + 200


def test_a_line_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe\xff\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: not JSON"):
        read_trace([path])


def test_two_traces_with_ids_of_their_own_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", line([1, 2]))
    other = write(tmp_path / "b.jsonl", line([2, 1]))
    with pytest.raises(TraceError, match=r"b\.jsonl:1: block 2 follows nothing here and block 1 before"):
        read_trace([one, other])


@pytest.mark.parametrize("cut", [1, 9])
def test_torn_gzip_is_an_error_and_not_a_shorter_trace(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "trace.gz", *[line([1], timestamp=i) for i in range(50)])
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(TraceError, match=r"trace\.gz: cannot be read after line"):
        read_trace([path])


def test_damaged_gzip_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.gz", *[line([1], timestamp=i) for i in range(50)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(TraceError, match="cannot be read after line"):
        read_trace([path])


def test_files_that_are_not_there_or_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace([tmp_path / "none.jsonl"])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace([tmp_path])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="no block in 0 requests"):
        read_trace([tmp_path / "empty.jsonl"])


# -- pages --------------------------------------------------------------------------------------------------------


def test_blocks_become_pages_with_chained_keys() -> None:
    work = expand([request([7, 8], tokens=700), request([7, 9])], 128)
    assert [p.pages for p in work.prompts] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7, 8, 9]]
    assert len({page.key for page in work.names}) == 10
    parents = [work.namespace, *(work.names[i].key for i in (0, 1, 2, 3, 4, 3, 6, 7, 8))]
    assert [page.parent for page in work.names] == parents
    assert {page.namespace for page in work.names} == {work.namespace}
    assert (work.references, work.tokens, work.blocks) == (14, 1724, 4)


def test_partial_pages_are_counted_or_left_out() -> None:
    requests = [request([7, 8], tokens=700), request([1], tokens=100)]
    assert [len(p.pages) for p in expand(requests, 128).prompts] == [6, 1]
    assert [len(p.pages) for p in expand(requests, 128, partial=False).prompts] == [5, 0]
    assert [len(p.pages) for p in expand(requests, 512, partial=False).prompts] == [1, 0]


def test_a_block_seen_in_part_and_then_whole_is_one_prefix() -> None:
    work = expand([request([7], tokens=200), request([7, 8])], 128)
    assert [p.pages for p in work.prompts] == [[0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert work.names[2].parent == work.names[1].key
    assert work.names[4].parent == work.names[3].key


def test_keys_do_not_depend_on_what_came_before() -> None:
    one, other = workload([1, 2], [3]), workload([3], [1], [1, 2])
    assert {page.key for page in one.names} == {page.key for page in other.names}


@pytest.mark.parametrize("page_tokens", [0, -1, 3, 1024])
def test_pages_that_do_not_divide_a_block_are_refused(page_tokens: int) -> None:
    with pytest.raises(InvalidValueError, match="do not divide"):
        expand([request([1])], page_tokens)


# -- figures by hand ----------------------------------------------------------------------------------------------


def lru(work: Workload, capacity: int) -> Counts:
    return simulate(work, capacity, POLICIES["lru"]())


def test_lru_takes_tails_first() -> None:
    work = workload([1, 2, 3], [4], [1, 2, 3], [5], [4])
    # 4 takes 3's place; 3 takes 4's, since 1 and 2 are its prefix; 5 takes that of 3, and 4 that of 2
    assert lru(work, 3) == Counts(2, 5, 2, 2, 1024, 7, 4, 0)


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


def test_what_finds_no_slot_is_cut_from_the_tail() -> None:
    assert lru(workload([1, 2, 3], [1, 2, 3]), 2) == Counts(2, 3, 1, 2, 1024, 2, 0, 2)


def test_plain_lru_is_blind_to_prefixes() -> None:
    work = workload([1, 2, 3], [1, 2, 3], [3 + 1])
    assert plain_lru(work, 2) == Counts(0, 4, 3, 0, 0, 7, 5, 0)
    assert plain_lru(work, 3) == Counts(3, 4, 0, 0, 0, 4, 1, 0)


def test_the_optimum_stores_only_what_is_needed() -> None:
    work = workload([1, 2], [3], [4], [1, 2], [3])
    assert optimum(work, 1) == Counts(1, 4, 2, 1, 512, 1, 0, 0)
    assert optimum(work, 2) == Counts(2, 4, 1, 2, 1024, 2, 0, 0)
    assert optimum(work, 3) == Counts(3, 4, 0, 3, 1536, 3, 0, 0)


def test_an_infinite_tier_misses_only_what_is_new() -> None:
    assert infinite(workload([1, 2], [1, 3], [1, 2])) == Counts(3, 3, 0, 3, 1536, 3, 0, 0)


def test_hits_in_tokens_and_blocks_end_with_the_prompt() -> None:
    work = expand([request([1, 2], tokens=700), request([1, 2], tokens=700)], 128)
    counts = infinite(work)
    assert (counts.hits, counts.hit_tokens, counts.hit_blocks) == (6, 700, 2)
    full = infinite(expand([request([1, 2], tokens=700), request([1, 2], tokens=700)], 128, partial=False))
    assert (full.hits, full.hit_tokens, full.hit_blocks) == (5, 640, 1)
    cut = lru(work, 5)
    assert (cut.hits, cut.hit_tokens, cut.hit_blocks) == (5, 640, 1)


def test_a_capacity_below_a_page_is_refused() -> None:
    for replay in (optimum, plain_lru, lru):
        with pytest.raises(InvalidValueError, match="0 pages"):
            replay(workload([1]), 0)


# -- against slow models ------------------------------------------------------------------------------------------


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


@settings(max_examples=150, deadline=None)
@given(workloads(requests=6), st.integers(1, 4))
def test_the_optimum_is_what_brute_force_finds(work: Workload, capacity: int) -> None:
    assert optimum(work, capacity).hits == brute_force(work, capacity)


def slow_lru(work: Workload, capacity: int) -> tuple[int, int, int]:
    """(hits, written, evictions) of leaf-first LRU, one page at a time on a list, the coldest first."""
    order: list[int] = []
    hits = written = evictions = 0
    parent = {page: above for pages, _ in work.prompts for above, page in zip([-1, *pages], pages, strict=False)}
    for pages, _ in work.prompts:
        found = list(itertools.takewhile(lambda page: page in order, pages))
        hits += len(found)
        for page in reversed(found):
            order.remove(page)
            order.append(page)
        for page in pages[len(found) :]:
            if len(order) == capacity:
                above = {parent[other] for other in order}
                leaves = [other for other in order if other not in pages and other not in above]
                if not leaves:
                    break
                order.remove(leaves[0])
                evictions += 1
            order.append(page)
            written += 1
    return hits, written, evictions


@settings(max_examples=200, deadline=None)
@given(workloads(requests=14, depth=4), st.integers(1, 12))
def test_lru_on_the_real_index_is_the_slow_model(work: Workload, capacity: int) -> None:
    counts = lru(work, capacity)
    assert (counts.hits, counts.written, counts.evictions) == slow_lru(work, capacity)


@settings(max_examples=150, deadline=None)
@given(workloads(requests=14, depth=4, page_tokens=256), st.integers(1, 20), st.sampled_from(sorted(POLICIES)))
def test_counts_add_up_and_nothing_beats_the_optimum(work: Workload, capacity: int, name: str) -> None:
    best, forever = optimum(work, capacity), infinite(work)
    counts = simulate(work, capacity, POLICIES[name]())
    for found in (counts, best, plain_lru(work, capacity), forever):
        assert found.hits + found.cold + found.absent == work.references
        assert found.hits <= best.hits <= forever.hits or found is forever
    for found in (counts, plain_lru(work, capacity)):
        assert 0 <= found.written - found.evictions <= capacity
    assert counts.written + counts.unstored == counts.cold + counts.absent
    assert forever == Counts(
        hits=forever.hits,
        cold=len(work.names),
        hit_blocks=forever.hits // 2,
        hit_tokens=256 * forever.hits,
        written=len(work.names),
    )
    if capacity >= len(work.names):
        assert counts == forever


@settings(max_examples=50, deadline=None)
@given(workloads(requests=10), st.integers(1, 12))
def test_more_room_never_costs_the_optimum_a_hit(work: Workload, capacity: int) -> None:
    assert optimum(work, capacity).hits <= optimum(work, capacity + 1).hits


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    prompts = [[1, 2, 3], [4], [1, 2, 3], [5], [4]]
    return write(tmp_path / "trace.jsonl", *[line(blocks, timestamp=i) for i, blocks in enumerate(prompts)])


@pytest.mark.parametrize(
    ("text", "pages"),
    [("5", 5), ("1e3", 1000), ("10%", 19), ("0.5%", 1), ("100%", 190), (" 5 ", 5), ("0.001%", 1), ("55.5 %", 105)],
)
def test_capacities_are_pages_or_percent(text: str, pages: int) -> None:
    assert pages_of(text, 190, None, "--capacity") == pages


@pytest.mark.parametrize("text", ["", "%", "0", "-1", "0%", "1.5", "x", "nan", "inf%", "1/2", "5GiB"])
def test_other_capacities_are_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"--capacity .* is no capacity"):
        pages_of(text, 190, None, "--capacity")


def test_options_are_lists_by_commas_or_given_twice() -> None:
    assert listed(["1%,5%", "5%", "7"]) == ("1%", "5%", "7")
    assert listed(None) == ()


def test_the_report_as_json(gdscache, trace: Path) -> None:
    status, out, err = gdscache("replay", trace, "--capacity", "3", "--policy", "lru", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert (report["schema"], report["mode"], report["traces"]) == ("gdscache.replay/3", "one_tier", [str(trace)])
    assert report["workload"] == {
        "requests": 5,
        "page_tokens": 512,
        "partial_pages": True,
        "pages": 9,
        "unique_pages": 5,
        "blocks": 9,
        "tokens": 4608,
        "seconds": 0.0,
    }
    [row] = report["runs"]
    assert row.pop("seconds") >= 0
    best = report["optimum"][0]["hit_pages"]
    assert best == 3
    base = report["plain_lru"][0]["hit_pages"]
    assert base == 0
    assert row == {
        "policy": "lru",
        "capacity_pages": 3,
        "capacity_percent": 60.0,
        "hit_rate": 2 / 9,
        "hit_pages": 2,
        "miss_pages": {"cold": 5, "absent": 2},
        "written_pages": 7,
        "evictions": 4,
        "hit_blocks": 2,
        "hit_tokens": 1024,
        "token_hit_rate": 2 / 9,
        "unstored_pages": 0,
        "of_optimum": 2 / 3,
        "of_plain_lru": None,
        "gap_closed": 2 / 3,
    }
    assert report["infinite"]["hit_rate"] == 4 / 9


def test_a_sweep_has_a_row_for_each_capacity_and_policy(gdscache, trace: Path) -> None:
    status, out, _ = gdscache("replay", trace, "--sweep", "--capacity", "20%,40%", "--capacity", "5", "--json")
    assert status == 0
    report = json.loads(out)
    wanted = [(pages, name) for pages in (1, 2, 5) for name in POLICIES]
    assert [(run["capacity_pages"], run["policy"]) for run in report["runs"]] == wanted
    assert [row["capacity_pages"] for row in report["optimum"]] == [1, 2, 5]
    assert [row["capacity_pages"] for row in report["plain_lru"]] == [1, 2, 5]


def test_the_table_names_every_run(gdscache, trace: Path) -> None:
    status, out, err = gdscache("replay", trace, "--capacity", "60%")
    assert (status, err) == (0, "")
    first = [row.split()[0] for row in out.splitlines() if row.strip()]
    assert first == ["5", "policy", "infinite", "optimum", "plain", "lifetime"]
    assert "0.4444" in out
    assert "0.2222" in out


@pytest.mark.suite
def test_a_plot_is_drawn(gdscache, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    drawn = tmp_path / "hits.svg"
    assert gdscache("replay", trace, "--sweep", "--capacity", "1,3,5", "--plot", drawn)[0] == 0
    text = drawn.read_text()
    assert text.startswith("<?xml")
    for label in ("optimum (Belady)", "infinite cache", *POLICIES):
        assert f"<!-- {label} -->" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--capacity", "much"], "is no capacity"),
        (["--policy", "clock"], "no policy is named 'clock'"),
        (["--page-tokens", "100"], "do not divide"),
        (["--plot", "hits.txt"], "no plot can be written"),
    ],
)
def test_what_cannot_be_done_is_a_message_and_status_2(gdscache, trace: Path, arguments: list[str], said: str) -> None:
    status, out, err = gdscache("replay", trace, *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert "hint: " in err


def test_a_trace_without_a_full_page_is_refused(gdscache, tmp_path: Path) -> None:
    trace = write(tmp_path / "short.jsonl", line([1], tokens=100))
    assert gdscache("replay", trace)[0] == 0
    status, _, err = gdscache("replay", trace, "--full-pages")
    assert status == 2
    assert "full page of 512 tokens" in err


def test_a_bad_trace_is_a_message_with_its_line(gdscache, trace: Path) -> None:
    trace.write_text(trace.read_text() + "oops\n")
    status, out, err = gdscache("replay", trace)
    assert (status, out) == (2, "")
    assert f"{trace}:6: not JSON" in err


# -- drawn traffic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_traffic_is_a_trace_of_an_hour_and_its_seed_s(family: str, tmp_path: Path) -> None:
    made = drawn(family, 3, 5000)
    assert made == drawn(family, 3, 5000)
    assert made != drawn(family, 4, 5000)
    for name in ("t.jsonl", "t.gz"):
        write_trace(tmp_path / name, made)
        assert read_trace([tmp_path / name]) == made  # every id follows one block
    assert (tmp_path / "t.gz").read_bytes()[:2] == b"\x1f\x8b"
    times = [r.timestamp for r in made]
    assert times == sorted(times)
    assert 0 <= times[0] < 600_000
    assert 3_000_000 < times[-1] < 3_600_000
    assert all(r.output_tokens >= 1 for r in made)
    if family != "worst":  # whose rounds may be longer than this
        assert infinite(expand(made)).hits > 0


prompts_ = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(prompts_, st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_blocks_have_one_id_where_all_pages_up_to_their_end_are_equal(
    prompts: list[list[str]], lengths: list[int]
) -> None:
    of = dict(zip("abc", lengths, strict=True))
    given: Ids = {}
    ids: dict[tuple[object, ...], int] = {}
    for names in prompts:
        prompt: Prompt = tuple((name, of[name]) for name in names)
        pages = [(name, i) for name, length in prompt for i in range(length)]
        blocks = blocks_of(prompt, given)
        assert len(blocks) == len(pages)
        for end, block in enumerate(blocks, 1):
            assert ids.setdefault(tuple(pages[:end]), block) == block
    assert len(set(ids.values())) == len(ids)


def test_a_turn_s_prompt_goes_on_from_the_prompt_before() -> None:
    made = drawn("chat", 1, 20_000)
    seen: dict[int, int] = {}  # the last block of each prompt -> its request
    turns = 0
    for number, r in enumerate(made):
        turns += any(block in seen for block in r.blocks[:-1])
        seen[r.blocks[-1]] = number
    assert turns > len(made) / 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("synthetic:poems", "no family of traffic is named 'poems'"),
        ("synthetic:chat:x", "seed 'x' is no whole number"),
    ],
)
def test_traffic_that_cannot_be_made_is_refused(name: str, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        read_trace([Path(name)])


def test_drawn_traffic_is_replayed_alone_by_its_name(tmp_path: Path) -> None:
    assert read_trace([Path("synthetic:drift:5")]) == drawn("drift", 5)
    assert read_trace([Path("synthetic:drift")]) == drawn("drift", 0)
    with pytest.raises(TraceError, match="beside other traces"):
        read_trace([Path("synthetic:drift"), write(tmp_path / "a.jsonl", line([1]))])


def test_make_trace_writes_what_replay_reads(gdscache, tmp_path: Path) -> None:
    few = ("--references", "3000")
    status, out, err = gdscache("make-trace", "agents", tmp_path / "a.gz", "--seed", "2", *few)
    assert (status, err) == (0, "")
    assert "a.gz" in out
    assert read_trace([tmp_path / "a.gz"]) == drawn("agents", 2, 3000)
    for name in ("a.gz", "a.GZ"):
        (tmp_path / "a.GZ").write_text("mine")
        before = (tmp_path / name).read_bytes()
        status, _, err = gdscache("make-trace", "chat", tmp_path / name, *few)
        assert (status, (tmp_path / name).read_bytes()) == (2, before)
        assert "--force" in err
    assert gdscache("make-trace", "agents", tmp_path / "a.GZ", "--seed", "2", *few, "--force")[0] == 0
    assert read_trace([tmp_path / "a.GZ"]) == drawn("agents", 2, 3000)
    status, _, err = gdscache("make-trace", "poems", tmp_path / "b")
    assert (status, (tmp_path / "b").exists()) == (2, False)
    assert "no family of traffic" in err
    assert gdscache("make-trace", "chat", tmp_path / "none" / "b")[0] == 2


# -- the conversation trace ---------------------------------------------------------------------------------------


@pytest.mark.suite
@pytest.mark.skipif(
    TRACE is None, reason="GDSCACHE_CONVERSATION_TRACE does not name Mooncake's conversation_trace.jsonl"
)
def test_the_figures_of_the_conversation_trace() -> None:
    assert TRACE is not None
    work = expand(read_trace([Path(TRACE)]))
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
