"""`gdscache replay` through all tiers: virtual time by hand, figures by hand, and what holds for any traffic."""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.commands.replay import clock
from gdscache.commands.replay import report as reports
from gdscache.commands.replay.clock import Clock, DiskModel, Done, MachineModel, Pipe, Process
from gdscache.commands.replay.hierarchy import Hierarchy, Ledger, open_pools
from gdscache.commands.replay.setup import MODELS, base_of, config_of, page_tokens_of
from gdscache.commands.replay.trace import Workload, expand
from gdscache.commands.replay.traffic import Found, Outcome, Traffic
from gdscache.config import Config, EvictionOrder
from gdscache.errors import ConfigError, InvalidValueError
from gdscache.limits import EngineLimits
from gdscache.pages.keys import Page
from gdscache.policies import POLICIES
from tests.support.bounds import optimum
from tests.support.interpreters import PACKAGE, python
from tests.support.one_tier import simulate
from tests.support.places import ROOT
from tests.support.replays import INSTANT, PAGE, Counted, adds_up, make, problems, run, work_of
from tests.support.traces import conversation, line, needs_conversation, request, workloads, write

pytestmark = pytest.mark.suite


def ends(clock: Clock, **events: Done) -> dict[str, float]:
    found: dict[str, float] = {}

    def wait(name: str, done: Done) -> Process:
        yield done
        found[name] = clock.now

    for name, done in events.items():
        clock.start(wait(name, done))
    clock.run()
    return found


def test_a_pipe_moves_one_after_the_other() -> None:
    clock = Clock()
    pipe = Pipe(clock, 10.0)
    assert ends(clock, a=pipe.move(20), b=pipe.move(5)) == {"a": 2.0, "b": 2.5}
    assert ends(clock, late=pipe.move(10)) == {"late": 3.5}


def test_an_infinite_pipe_takes_no_time() -> None:
    clock = Clock()
    assert Pipe(clock, math.inf).move(1 << 60).happened


def test_a_disk_alone_has_its_rate_and_latency_does_not_keep_it_busy() -> None:
    clock = Clock()
    disk = DiskModel(clock, read=10.0, write=5.0, latency=0.5)
    assert ends(clock, a=disk.read(20), b=disk.read(10)) == {"a": 2.5, "b": 3.5}
    start = clock.now
    assert ends(clock, w=disk.write(10)) == {"w": start + 2.5}


def test_reads_go_before_writes_which_keep_their_share() -> None:
    clock = Clock()
    disk = DiskModel(clock, read=8.0, write=1.0)  # together: in 2 s, 8 bytes are read and 1 written
    found = ends(clock, w=disk.write(2), r=disk.read(8))
    assert found["r"] == pytest.approx(2.0)
    assert found["w"] == pytest.approx(2.0 + 1.0)  # one byte was left, and the disk its own


def test_reads_that_never_end_do_not_starve_writes() -> None:
    clock = Clock()
    disk = DiskModel(clock, read=100.0, write=50.0)
    reads = {f"r{i}": disk.read(80) for i in range(50)}
    found = ends(clock, w=disk.write(10), **reads)
    assert found["w"] == pytest.approx(1.0)  # of a second for 80 bytes read and 10 written
    assert found["r49"] == pytest.approx(41.0 - 0.8 + 0.0, abs=0.5)


def test_things_of_one_time_happen_in_order_and_time_does_not_go_back() -> None:
    clock = Clock()
    seen: list[tuple[float, int]] = []
    for number in range(4):
        clock.call(2.0, lambda n=number: seen.append((clock.now, n)))  # type: ignore[misc]
    clock.call(1.0, lambda: clock.call(0.0, lambda: seen.append((clock.now, 9))))
    clock.run(until=1.5)
    assert seen == [(1.0, 9)]
    assert clock.now == 1.5
    clock.run()
    assert seen == [(1.0, 9), *((2.0, n) for n in range(4))]


@pytest.mark.parametrize(
    ("option", "rate"), [("ssd-read-gbps", "0"), ("link-gbps", "-1"), ("prefill-tokens-per-second", "nan")]
)
def test_machines_that_are_none_are_refused(gdscache, trace: Path, option: str, rate: str) -> None:
    for command in ("replay", "plan"):
        status, out, err = gdscache(command, trace, "--prefill-tokens-per-second", "9", f"--{option}", rate)
        assert (status, out) == (2, "")
        assert f"error: --{option} is {rate}\n" in err


def test_what_is_said_twice_is_the_same() -> None:
    library = (ROOT / "csrc" / "host" / "moves" / "moves_io.cc").read_text()
    assert f"kReadsPerWrite = {clock.READS_PER_WRITE};" in library


def test_a_simulation_needs_no_torch() -> None:
    code = (
        "import importlib, sys, types; sys.modules['torch'] = None;"
        f"package = types.ModuleType('gdscache'); package.__path__ = [{str(PACKAGE)!r}];"
        "sys.modules['gdscache'] = package;"
        "import gdscache.commands.replay.report, gdscache.commands.replay.setup"
    )
    assert python(code) == ""


def test_pages_are_found_where_they_are() -> None:
    work = work_of([1, 2], [3, 4], [1, 2, 5], [1])
    tiers, outcome = run(work, make(cpu=2, ssd=8))
    # 3 and 4 push 1 and 2 out of the CPU tier; they come back from the SSD, and 5 finds no slot beside them
    assert outcome.found == [Found(0, 0, 0), Found(0, 0, 0), Found(0, 2, 2), Found(1, 0, 1)]
    assert outcome.misses == {"cold": 5}
    assert tiers.ledger.stored == {"cpu": 4, "ssd": 5}
    assert tiers.executor.promoted == 2
    assert tiers.moved.written == {"cpu": 4, "ssd": 5}
    assert tiers.moved.read == {"cpu": 4 + 1, "ssd": 2}  # four on their way to the SSD, one by a load
    assert problems(tiers) == []


HYBRID = [{"name": "all", "layers": [0]}, {"name": "window", "layers": [0], "window": 1024}]


def hybrid(every: int, **sizes: Any) -> Config:
    """A model of whose two groups one keeps the last 1,024 tokens: two pages, and the third that these begin in."""
    fields = make(**sizes).dump()
    return Config.from_dict(fields | {"model": {**fields["model"], "groups": HYBRID}, "store": {"window_every": every}})


def test_a_hybrid_model_finds_lengths_at_which_all_its_groups_have_their_part() -> None:
    work = work_of([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], tokens=4 * 512)
    tiers, outcome = run(work, hybrid(0, cpu=64, ssd=None))
    assert getattr(tiers.cpu.index.orders.policy, "groups", 0) == 2
    # The third prompt parts where no window was kept, and computes all; it keeps one there, and the fourth finds it.
    assert outcome.found == [Found(0, 0, 0), Found(6, 0, 6), Found(0, 0, 0), Found(5, 0, 5)]
    assert outcome.hit_tokens == 2048 + 1536
    assert problems(tiers) == []
    _, often = run(work, hybrid(512, cpu=64, ssd=None))
    assert often.hit_tokens == 2048 + 1536 + 1536


def stateful(cpu: str, *prompts: list[int], tokens: int) -> tuple[list[Hierarchy], Outcome]:
    """Prompts of an LFM2, one after the other: pages of 6 MiB, and a state of two pages of 40 KiB."""
    config = config_of(base_of(None, "lfm2-1.2b"), [f"cpu.capacity={cpu}"])
    pools, work = open_pools(config, INSTANT, Clock()), work_of(*prompts, tokens=tokens)
    return pools, Traffic(work, pools, config, INSTANT, [0.0] * len(prompts), serial=True).run()


def test_a_model_with_states_finds_the_lengths_at_which_one_is_kept() -> None:
    pools, outcome = stateful(
        "1GiB", [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8], [1, 2, 3, 9, 10], tokens=4 * 512 + 1
    )
    assert [found and found.cpu for found in outcome.found] == [0, 4 + 2, 0, 3 + 2]
    assert outcome.hit_tokens == 2048 + 1536
    assert [problem for pool in pools for problem in problems(pool)] == []
    _, outcome = stateful("1GiB", [1, 2, 3, 4], [1, 2, 3, 4], tokens=4 * 512)
    assert outcome.hit_tokens == 1536, "a token is computed"


def test_a_prompt_without_tokens_asks_for_no_state() -> None:
    _, outcome = stateful("1GiB", [], [1, 2], [], tokens=0)
    assert outcome.hit_tokens == 0


@pytest.mark.parametrize("tokens", [256, 512, 1024])
def test_groups_may_have_pages_of_other_sizes_than_the_model(tokens: int) -> None:
    groups = [{"name": "all", "layers": [0], "page_tokens": tokens}, {"name": "window", "layers": [1], "window": 100}]
    model = {"name": "two", "layers": 2, "kv_heads": 1, "head_dim": 8, "page_tokens": 512, "groups": groups}
    config = config_of({"model": model, "cpu": {"capacity": "8MiB"}}, [])
    work = expand([request([1, 2, 3, 4])] * 2, page_tokens_of(config.model))
    found = reports.replay(work, [0.0, 1.0], config, INSTANT, serial=True)
    assert adds_up(found)
    assert found["hit_tokens"] == 4 * 512
    infinite = reports.describe_infinite(work, config.model)
    assert infinite["bytes"] == 4 * 512 * config.model.layout().token_bytes // 2, "of the layer that keeps all"


def test_a_page_without_its_window_is_in_a_tier_all_the_same() -> None:
    _, outcome = run(work_of([1, 2, 3, 4], [1, 2, 3, 5], tokens=4 * 512), hybrid(0, cpu=64, ssd=None))
    assert outcome.misses == {"cold": 4 + 1, "behind": 3}, "no window was kept where the prompts part"


def test_states_leave_with_their_pages_and_not_before() -> None:
    prompts = [[4 * n + i for i in range(4)] + [100 + n] for n in range(6)]
    pools, _ = stateful("60MiB", *prompts, tokens=4 * 512 + 1)
    pages, states = (pool.manager.tiers["cpu"].index for pool in pools)
    assert (len(pages), pages.slots, states.slots) == (9, 9, 15)
    assert len(states) == 2 * 3, "of two prompts, and of one whose last page went when the second was stored"


@pytest.mark.parametrize("seed", range(4))
def test_the_last_window_of_a_prefix_lives_no_shorter_than_its_pages(seed: int) -> None:
    """Prompts of one use push out whatever is colder than what is asked for again and again."""
    draw = random.Random(seed)
    hot = [1, 2, 3, 4, 5, 6]
    prompts, cold = [hot], itertools.count(100)
    for _ in range(60):
        prompts.append([next(cold) for _ in range(draw.randrange(2, 7))])
        prompts.append(hot)
    tiers, outcome = run(work_of(*prompts), hybrid(0, cpu=24, ssd=None))
    assert outcome.hit_tokens == 60 * 6 * 512
    assert problems(tiers) == []


def test_misses_have_their_cause() -> None:
    config = make(cpu=2, ssd=None)
    _, outcome = run(work_of([1, 2], [3, 4], [1, 2]), config)
    assert outcome.misses == {"cold": 4, "absent": 2}
    # without its head the tail is of no use: 1 is gone from the one tier that had both, and the SSD has only 2
    work = work_of([1, 2], [3, 4], [1, 2])
    tiers = Counted(make(cpu=2, ssd=8), INSTANT)
    traffic = Traffic(work, [tiers], tiers.config, INSTANT, [0.0] * 3, serial=True)
    lost = work.names[0]
    inner = tiers.store

    def store(pages: list[Page]) -> None:
        inner(pages)
        if pages[0].key == work.names[2].key:
            tiers.clock.run()
            tiers.ssd.index.drop(tiers.ssd.index.find(lost.key))

    tiers.store = store  # type: ignore[method-assign,assignment]
    assert traffic.run().misses == {"cold": 4, "absent": 1, "behind": 1}


def test_a_load_takes_the_time_of_its_bytes_and_the_rest_is_computed() -> None:
    machine = MachineModel(ssd_read=4 * PAGE, ssd_write=math.inf, link=8 * PAGE, latency=0.0, prefill=512.0)
    work = expand([request([1, 2], tokens=1024 + 256), request([3, 4]), request([1, 2, 5])])
    _, outcome = run(work, make(cpu=2, ssd=8), machine)
    # the third reads two pages (0.5 s), copies them at once (0.25 s) and computes one
    assert outcome.first_token == pytest.approx([2.5, 2.0, 0.5 + 0.25 + 1.0])


def test_a_prompt_that_is_there_computes_a_token() -> None:
    _, outcome = run(work_of([1], [1]), make(), MachineModel(prefill=512.0))
    assert outcome.first_token == pytest.approx([1.0, 1 / 512])


def test_pages_that_are_still_computed_are_no_hits() -> None:
    work, machine = work_of([1, 2], [1, 2], [1, 2]), MachineModel(prefill=512.0)
    _, outcome = run(work, make(), machine, [0.0, 1.0, 3.0], serial=False)
    assert [found and found.cpu for found in outcome.found] == [0, 0, 2]
    assert outcome.misses == {"cold": 2, "absent": 2}


def test_two_loads_read_a_page_of_the_ssd_once() -> None:
    machine = MachineModel(ssd_read=PAGE, link=math.inf)
    work = work_of([1, 2], [3, 4], [1, 2], [1, 2])
    tiers, outcome = run(work, make(cpu=2, ssd=8), machine, [0.0, 1.0, 2.0, 2.5], serial=False)
    assert tiers.moved.read["ssd"] == 2
    assert outcome.first_token == pytest.approx([0.0, 0.0, 2.0, 1.5])
    assert problems(tiers) == []


def test_only_so_many_loads_move_at_once() -> None:
    machine = MachineModel(ssd_read=PAGE, link=math.inf)
    work = work_of([1], [2], [1], [2])
    config = make(cpu=None, ssd=8)
    _, outcome = run(work, config, machine, [0.0, 1.0, 5.0, 5.0], serial=False, limits=EngineLimits(load_threads=1))
    assert outcome.first_token == pytest.approx([0.0, 0.0, 1.0, 2.0])


def test_a_full_queue_drops_tails_and_counts_them() -> None:
    machine = MachineModel(ssd_write=PAGE)
    config = make(cpu=8, ssd=8, store={"queue": 3 * PAGE})
    tiers, outcome = run(work_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]), config, machine, [0.0, 100.0], serial=False)
    assert tiers.ledger.dropped == {"queue_full": 2}
    assert tiers.moved.most_queued == 3
    assert outcome.found[1] == Found(3, 0, 3)


def test_a_batch_that_misses_its_deadline_is_dropped() -> None:
    machine = MachineModel(ssd_write=PAGE)
    tiers, _ = run(work_of([1, 2, 3]), make(cpu=8, ssd=8, deadline=2.0), machine)
    assert tiers.ledger.dropped == {"deadline": 3}
    assert len(tiers.ssd.index) == 0
    assert problems(tiers) == []


def test_stores_wait_for_the_bounce_reserve() -> None:
    machine = MachineModel(ssd_write=PAGE)
    tiers, outcome = run(work_of([1, 2, 3, 4, 5]), make(cpu=None, ssd=8, host_buffer=4 * PAGE), machine)
    assert tiers.moved.written == {"ssd": 5}
    assert outcome.seconds == pytest.approx(5.0)
    assert problems(tiers) == []


def test_a_direct_route_leaves_the_cpu_tier_alone() -> None:
    tiers, outcome = run(work_of([1, 2], [3, 4], [1, 2]), make(cpu=2, ssd=8, ssd_={"route": "direct"}))
    assert outcome.hits("ssd") == 2
    assert tiers.executor.promoted == 0


@st.composite
def configs(draw: st.DrawFn) -> Config:
    cpu = draw(st.one_of(st.none(), st.integers(1, 10)))
    ssd = draw(st.integers(1, 16) if cpu is None else st.one_of(st.none(), st.integers(1, 16)))
    policy = draw(st.sampled_from(["write_through", "write_through_selective", "write_back", "never"]))
    if cpu is None and policy in ("write_through_selective", "write_back"):
        policy = "write_through"
    return make(
        cpu,
        ssd,
        draw(st.sampled_from([8, 16384])),  # with the latter a batch is four pages
        gpu_={"staging": "64MiB"},
        ssd_={"endurance": draw(st.sampled_from([None, "1GiB"]))},
        eviction=draw(st.sampled_from(sorted(get_args(EvictionOrder)))),
        store={
            "write_policy": policy,
            "admission": draw(st.sampled_from(["all", "second_offer", "tinylfu"])),
            "queue": draw(st.integers(1, 12)) * 8 << 20,
        },
        host_buffer=draw(st.integers(2, 6)) * 8 << 20,
    )


limits = st.builds(
    EngineLimits, ssd_reserve=st.integers(0, 4), write_hits=st.integers(1, 3), load_threads=st.integers(1, 3)
)
machines = st.builds(
    MachineModel,
    st.sampled_from([math.inf, 1e6, 1e4]),
    st.sampled_from([math.inf, 1e6, 1e4]),
    st.sampled_from([math.inf, 1e6, 1e4]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([math.inf, 1000.0]),
)


@settings(max_examples=200, deadline=None)
@given(
    workloads(requests=24, depth=5),
    configs(),
    limits,
    machines,
    st.lists(st.floats(0, 10), min_size=24, max_size=24),
    st.booleans(),
)
def test_everything_adds_up(
    work: Workload, config: Config, limits: EngineLimits, machine: MachineModel, gaps: list[float], serial: bool
) -> None:
    times = [sum(gaps[: i + 1]) for i in range(len(work.prompts))]
    tiers, outcome = run(work, config, machine, times, serial=serial, limits=limits)
    assert problems(tiers) == []
    counts, ledger = tiers.manager.counts, tiers.ledger
    found = [found for found in outcome.found if found is not None]
    assert len(found) == len(work.prompts)
    hits = sum(outcome.hits(name) for name in ("cpu", "ssd"))
    assert counts["lookups", "pages"] == hits + sum(outcome.misses.values())
    for name in ("cpu", "ssd"):
        assert counts["hits", name] == outcome.hits(name)
    assert counts["loaded", "cpu"] + counts["loaded", "ssd"] == sum(f.loaded for f in found)
    assert counts["loaded", "ssd"] == tiers.moved.read["ssd"]
    assert ledger.offered == ledger.finished
    assert counts["stores", "present"] + sum(ledger.dropped.values()) <= ledger.offered
    assert tiers.moved.most_queued <= config.store.queue // tiers.extent_bytes
    assert tiers.moved.most_to_ssd <= config.store.queue // tiers.extent_bytes
    assert tiers.moved.written["ssd"] == counts["stored", "ssd"] + tiers.moved.not_written["deadline"]
    # A page on its way takes no slot yet: it may evict a page after the hit that would have been the price of it.
    under_way = 0 if serial else config.store.queue // tiers.extent_bytes
    slots = sum(tier.index.slots for tier in tiers.manager.tiers.values())
    assert hits <= optimum(work, slots + under_way).hits
    for name, tier in tiers.manager.tiers.items():
        assert len(tier.index) <= tier.index.slots, name
    assert all(seconds >= 0 for seconds in outcome.first_token)


@settings(max_examples=100, deadline=None)
@given(workloads(requests=30, depth=4), st.integers(1, 12), st.sampled_from(sorted(get_args(EvictionOrder))))
def test_one_tier_in_series_is_the_index_without_time(work: Workload, capacity: int, policy: str) -> None:
    tiers, outcome = run(work, make(cpu=capacity, ssd=None, eviction=policy))
    plain = simulate(work, capacity, POLICIES[policy]())
    assert outcome.hits("cpu") == plain.hits
    assert dict(outcome.misses) == {k: n for k, n in (("cold", plain.cold), ("absent", plain.absent)) if n}
    assert tiers.moved.written["cpu"] == plain.written
    assert tiers.ledger.dropped["cpu_full"] == plain.cold + plain.absent - plain.written
    assert tiers.manager.tiers["cpu"].index.evictions == plain.evictions


def test_a_config_is_taken_as_it_is_and_keys_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {name: m, layers: 2, kv_heads: 1, head_dim: 64, page_tokens: 64}\n"
        "cpu: {capacity: 1GiB}\nssd: {path: /nowhere, capacity: 2GiB, endurance: 1TiB}\n"
    )
    base = base_of(path, "llama-3-8b")
    config = config_of(base, ["store.queue=4GiB", "store.queue=8GiB", "store.admission=tinylfu"])
    assert config.model.page_tokens == 64
    assert config.store.queue == 8 << 30
    assert (config.ssd.capacity, config.ssd.endurance) == (2 << 30, 1 << 40)
    assert config.store.admission == "tinylfu"
    assert config_of(base, ["ssd=null"]).ssd is None
    with pytest.raises(ConfigError, match=r"store\.admission"):
        config_of(base, ["store.admission=some"])
    with pytest.raises(InvalidValueError, match="has no value"):
        config_of(base, ["store.queue"])


def test_a_config_without_a_model_has_that_of_the_option(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("cpu: {capacity: 1GiB}\ngpu: {staging: 1GiB}\nhost_buffer: 1GiB\n")
    config = config_of(base_of(path, "qwen3-32b"), ["model.page_tokens=64", "ssd.capacity=8GiB"])
    assert config.model.layout().extent_bytes == 64 * 2 * 2 * 64 * 8 * 128
    assert (config.cpu and config.cpu.capacity, config.ssd and config.ssd.capacity) == (1 << 30, 8 << 30)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_replayed_in_any_pages_of_a_trace(model: str) -> None:
    for tokens in (512, 16):
        config = config_of(base_of(None, model), [f"model.page_tokens={tokens}", "cpu.capacity=4GiB"])
        work = work_of([1, 2], [1, 2], tokens=1025) if tokens == 512 else expand([request([1, 2])] * 2, tokens)
        found = reports.replay(work, [0.0, 1.0], config, INSTANT, serial=True)
        assert adds_up(found)
        assert found["hit_tokens"] >= 1024 - tokens


@pytest.mark.parametrize("model", MODELS)
def test_the_tokens_of_the_tiers_are_those_of_the_hits(model: str) -> None:
    """Also where a hit has pages of several groups."""
    prompts = [[n, *range(100 + 10 * n, 104 + 10 * n)] for n in (1, 2, 3, 1, 2, 3)]
    config = config_of(base_of(None, model), ["cpu.capacity=0.6GiB", "ssd.capacity=8GiB"])
    found = reports.replay(work_of(*prompts), [*map(float, range(6))], config, INSTANT, serial=True)
    tiers = found["tiers"].values()
    assert found["hit_tokens"] == sum(tier["hit_tokens"] for tier in tiers) > 0
    assert found["token_hit_rate"] == pytest.approx(sum(tier["token_hit_rate"] for tier in tiers))
    assert found["hit_rate"] == pytest.approx(found["hit_tokens"] / 512 / 30)
    if not config.model.groups:
        assert all(tier["hit_tokens"] == 512 * tier["hit_pages"] for tier in tiers)


def test_directories_of_another_machine_are_not_needed(gdscache, trace: Path, tiny: Path) -> None:
    ssd = "{path: /a/$GDSCACHE_DP_RANK, stripes: [/b/$GDSCACHE_DP_RANK], capacity: 20KiB}"
    tiny.write_text(f"{tiny.read_text()}\nssd: {ssd}\nstatus: {{path: /c/$GDSCACHE_DP_RANK}}\n")
    assert gdscache("replay", trace, "--config", tiny)[::2] == (0, "")


def test_wear_is_of_the_time_that_is_said(gdscache, trace: Path, tiny: Path) -> None:
    """Computing takes far longer than the trace."""
    for options in ([], ["--serial"]):
        slow = ["--config", tiny, "--ssd", "20KiB", "--prefill-tokens-per-second", "5", *options]
        run = json.loads(gdscache("replay", trace, *slow, "--json")[1])["run"]
        assert run["virtual_seconds"] > 40
        assert run["ssd"]["written_bytes_per_day"] == run["ssd"]["written_bytes"] * 86_400 / 4
        assert "as these 4 s" in gdscache("replay", trace, *slow)[1]
    at_once = write(trace, *[line([n]) for n in range(5)])
    assert "as these 512 s" in gdscache("replay", at_once, *slow)[1]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A configuration of a model with pages of 4 KiB."""
    path = tmp_path / "tiny.yaml"
    path.write_text("model: {name: m, layers: 1, page_tokens: 512, planes: [{name: k, shape: [8], dtype: uint8}]}")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    prompts = [[1, 2, 3], [4], [1, 2, 3], [5], [4]]
    return write(tmp_path / "trace.jsonl", *[line(blocks, timestamp=1000 * i) for i, blocks in enumerate(prompts)])


@pytest.mark.parametrize("serial", [[], ["--serial"]])
def test_ctrl_c_breaks_no_decision_off(
    gdscache, trace: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, serial: list[str]
) -> None:
    """An engine's threads get none, and its code would tell what it could not end, in tracebacks."""
    finish = Ledger.finish

    def interrupted(self: Ledger, *given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        finish(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "finish", interrupted)
        ended = gdscache("replay", trace, "--config", tiny, "--cpu", "12KiB", "--ssd", "20KiB", *serial)
    assert ended == (130, "", "interrupted: the replay is not complete\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_last_step_ends_a_replay_too() -> None:
    clock, ended = Clock(), list[float]()

    def process() -> Process:
        yield clock.wait(1)
        signal.raise_signal(signal.SIGINT)
        ended.append(clock.now)

    @clock.interruptible()
    def replayed() -> None:
        clock.start(process())
        clock.run()

    with pytest.raises(KeyboardInterrupt):
        replayed()
    assert ended == [1]
    with pytest.raises(KeyboardInterrupt):
        clock.interruptible()(signal.raise_signal)(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_report_as_json(gdscache, trace: Path, tiny: Path) -> None:
    options = ["--config", tiny, "--cpu", "12KiB", "--ssd", "20KiB", "--json"]
    status, out, err = gdscache("replay", trace, *options, "--prefill-tokens-per-second", "5120")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["schema"] == "gdscache.replay/6"
    assert report["workload"] == {
        "requests": 5, "page_tokens": 512, "pages": 9, "unique_pages": 5, "tokens": 4608, "seconds": 4.0,
    }  # fmt: skip
    assert report["infinite"] == {"hit_rate": 4 / 9, "token_hit_rate": 4 / 9, "bytes": 5 * PAGE}
    found = report["run"]
    assert found["hit_pages"] == found["lookup_pages"] - 5 == 4
    assert adds_up(found)
    assert found["miss_pages"] == {"cold": 5, "absent": 0, "behind": 0}
    assert found["tiers"]["ssd"]["written_bytes"] == 5 * PAGE
    assert found["ssd"]["drive_writes_per_day"] == pytest.approx(86400 / 4, rel=0.001)
    assert found["first_token_seconds_no_cache"]["mean"] == pytest.approx(9 / 5 / 10)
    assert found["first_token_seconds"]["mean"] < found["first_token_seconds_no_cache"]["mean"]


def test_the_tables_have_hits_writes_and_causes(gdscache, trace: Path, tiny: Path) -> None:
    options = ["replay", trace, "--config", tiny, "--cpu", "12KiB"]
    status, out, err = gdscache(*options, "--ssd", "12KiB", "--set", "store.admission=second_offer")
    assert (status, err) == (0, "")
    for words in ("tokens hit", "infinite tiers 44.4 %", "SSD wear", "miss: cold", "refused by the SSD: second_offer"):
        assert words in out
    assert "TTFT" not in out
    assert "TTFT" not in gdscache("replay", *[trace] * 9, "--serial")[1]  # most requests are loads, which take time
    status, out, err = gdscache(*options, "--prefill-tokens-per-second", "5120")
    assert "TTFT p99" in out
    assert "The median TTFT is above that without a cache" in out
    assert "SSD wear" not in out


def test_without_a_size_the_cpu_tier_has_64_gib(gdscache, trace: Path) -> None:
    tiers = json.loads(gdscache("replay", trace, "--json")[1])["run"]["tiers"]
    assert {name: tier["capacity_bytes"] for name, tier in tiers.items()} == {"cpu": 64 << 30}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cpu", "much"], "--cpu is 'much'"),
        (["--cpu", "1KiB"], "cpu.capacity is 1KiB"),
        (["--set", "cpu=null"], "there is no tier"),
        (["--set", "store.write_policy=sometimes"], "store.write_policy"),
        (["--model", "unknown"], "no model is named"),
        (["--set", "model.page_tokens=100"], "do not divide"),
    ],
)
def test_what_cannot_be_is_refused(gdscache, trace: Path, arguments: list[str], said: str) -> None:
    status, out, err = gdscache("replay", trace, *arguments)
    assert (status, out) == (2, "")
    assert said in err


@needs_conversation
def test_the_conversation_trace_takes_seconds() -> None:
    requests = conversation()
    work = expand(requests)
    config = make(cpu=2000, ssd=17000, eviction="lru")
    machine = MachineModel(6e9, 3e9, 50e9, 1e-4, 20000.0)
    begun = time.process_time()
    found = reports.replay(work, [r.timestamp / 1000 for r in requests], config, machine)
    assert time.process_time() - begun <= 10
    assert adds_up(found)
    assert found["lookup_pages"] == 276_491
    assert found["miss_pages"]["cold"] == 170_899
