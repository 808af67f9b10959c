"""Hybrid models in vLLM's real engine: groups of layers that keep different tokens, each with pages of its own."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import vllm_parts as parts
from tests.engines.vllm_parts import BRANCH, EXACT, LONG, OTHER
from tests.engines.vllm_script import DRAIN, METRICS, RESET, TELL, Answers, Script, ask, at_rest, each, follows

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(parts.KIND == "mla", reason="other models than these tests are about"),
]

FAULTY = "gdscache.testing.faults:FaultyTransport"

PROMPTS = [LONG, BRANCH, OTHER, EXACT]
LONGER: dict[str, Any] = {"parts": [[0, 1500], [20, 300]]}
PARTINGS = (600, 1400, 1500)  # of others from LONG: before, in and behind its last window
JUNCTIONS = [{"parts": [[0, at], [30 + number, 200]]} for at, number in itertools.product(PARTINGS, range(2))]
CROWD: list[dict[str, Any]] = [{"parts": [[seed, 500]], "most": 100} for seed in (10, 11, 12)]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model of `vllm_child.HYBRIDS`. `align`: tokens of which a hit is a multiple; `groups`: what each keeps.
    `every`: tokens from one window of a prompt that is stored to the next.

    `junctions`: tokens that are cached of `JUNCTIONS`, of which the second of each pair parts where the first one did.
    """

    name: str
    groups: tuple[str, ...]
    junctions: tuple[int, ...]
    align: int = 32
    every: int = 4096

    def whole(self, *prompts: dict[str, Any]) -> list[int]:
        """Tokens of each prompt that can be cached: one token is left to compute."""
        return [(sum(number for _, number in prompt["parts"]) - 1) // self.align * self.align for prompt in prompts]

    def cache(self, directory: Path, **changes: Any) -> dict[str, Any]:
        sections = {"ssd": {"capacity": "64MiB"}, "store": {"window_every": self.every}}
        return parts.cache(directory, **sections | changes)


WINDOWS = Kind("windows", ("window",) * 3 + ("all",), (0, 576, 992, 1376, 1472, 1472))
UNEQUAL = Kind("unequal", ("window", "window", "all"), (0, 576, 960, 1344, 1472, 1472), align=64)
SINKS = Kind("sinks", ("window", "all"), (0, 576, 992, 1376, 1472, 1472))
# The first prompt that parts at token 600 leaves two windows, up to 512 and behind it: that of a hit of 576 is in both.
SLIDING = Kind("sliding", ("window",), (512, 576, 1024, 1024, 1472, 1472), every=512)
CHUNKS = Kind("chunks", ("chunk",) * 3 + ("all",), (512, 576, 1376, 1376, 1472, 1472))
CROWDED = (WINDOWS, CHUNKS)
KINDS = (WINDOWS, UNEQUAL, SINKS, SLIDING, CHUNKS)


@dataclasses.dataclass(frozen=True)
class Story:
    """A model, what it answers without a cache, and with ours from a directory that is filled then."""

    kind: Kind
    model: Path
    directory: Path
    plain: dict[str, Answers]
    asked: dict[str, Answers]
    rest: dict[str, list[Any]]

    def of(self, *prompts: dict[str, Any]) -> Answers:
        """What the model answers to them without a cache."""
        known = [*PROMPTS, LONGER, *JUNCTIONS]
        return [self.plain["alone"][known.index(prompt)] for prompt in prompts]

    def copy(self, folder: Path) -> Path:
        """The directory again, for those who change it."""
        return Path(shutil.copytree(self.directory, folder / "ssd"))


def _plain(folder: Path, model: Path, crowd: bool) -> dict[str, Answers]:
    script = Script()
    script.add("alone", ask(*PROMPTS, LONGER, *JUNCTIONS))
    script.add("crowd", *([ask(*CROWD, together=True)] if crowd else []))
    asked, _ = script.play(folder, model, None, llm={"enable_prefix_caching": False})
    for a, b in itertools.combinations(asked["alone"][: len(PROMPTS)], 2):
        assert parts.drift(a, b) > 2 * parts.DRIFT, "prompts that answer alike prove nothing"
    return asked


def _story(kind: Kind, folder: Path) -> Story:
    model = parts.made(folder, kind.name)
    plain = _plain(folder, model, kind in CROWDED)
    groups, script = range(len(kind.groups)), Script()
    script.add("", ("groups", {}))
    script.add("cold", RESET, ask({**LONG, "most": 1}), ("bytes", {}), DRAIN, *each(PROMPTS))
    script.add("once", RESET, ask({**LONG, "most": 1}), ("bytes", {}))
    script.add("hits", *each(PROMPTS))
    script.add("together", RESET, ask(*PROMPTS, together=True))
    script.add("junctions", *each(JUNCTIONS))
    script.add("longer", *each([LONGER]), RESET, ask(LONG, LONGER))
    for group in groups:
        script.add("forgotten", RESET, ask(LONG), ("forget", {"group": group}), ask(LONG))
        script.add("forgotten", ("forget", {"group": group, "last": 1}), ask(LONG))
    for group in groups:
        script.add("blank", RESET, ask(LONG), ("blank", {"group": group}), ask(LONG), RESET)
    script.add("", METRICS, TELL)
    asked, rest = script.play(folder, model, kind.cache(folder / "ssd"))
    again = Script()
    again.add("again", *each(PROMPTS), METRICS)
    again.add("again together", RESET, ask(*PROMPTS, together=True))
    for group in groups:
        again.add("flipped", RESET, ("flip", {"tier": "ssd", "group": group}), ask(LONG), DRAIN)
        again.add("mended", RESET, ask(LONG), DRAIN)
    again.add("", METRICS, TELL)
    shutil.copytree(folder / "ssd", folder / "copy")
    asked_again, rest_again = again.play(folder, model, kind.cache(folder / "copy"))
    asked |= asked_again
    for step, answers in rest_again.items():
        rest[step] += answers
    return Story(kind, model, folder / "ssd", plain, asked, rest)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    kind: Kind = request.param
    return _story(kind, tmp_path_factory.mktemp(kind.name))


def test_a_hit_is_what_all_groups_have(story: Story) -> None:
    """Cold, from the CPU tier, several requests at once, and from the SSD behind a restart."""
    assert [group["keeps"] for group in story.rest["groups"][0]] == list(story.kind.groups)
    whole = story.kind.whole(*PROMPTS)
    parts.same(story.asked["cold"][1:], story.of(*PROMPTS))
    assert story.asked["cold"][0]["cached"] == 0
    for name in ("hits", "together", "again", "again together"):
        assert parts.cached(story.asked[name]) == whole
        parts.same(story.asked[name], story.of(*PROMPTS))
    for place, source in ((0, "host"), (1, "disk")):
        metrics = story.rest["metrics"][place]
        assert any(source in name and value for name, value in metrics.items()), metrics
    for told in story.rest["tell"]:
        at_rest(told)


def test_bytes_under_a_name_are_those_that_were_computed(story: Story) -> None:
    """Blocks that fall out of a window go to another group in the next step, before or after they were stored."""
    computed, loaded = story.rest["bytes"]
    both = computed.keys() & loaded.keys()
    assert len(both) >= len(story.kind.groups)
    assert [name for name in both if computed[name] != loaded[name]] == []
    assert story.asked["once"][0]["cached"] == story.kind.whole(LONG)[0]


def test_a_prefix_that_others_share_is_hit_where_they_part(story: Story) -> None:
    """Not a repeated prompt alone: the third one that parts at a place finds what all groups need there."""
    asked = story.asked["junctions"]
    assert parts.cached(asked) == list(story.kind.junctions)
    parts.same(asked, story.of(*JUNCTIONS))


def test_what_vllm_has_itself_is_not_loaded(story: Story) -> None:
    asked = story.asked["longer"]
    assert parts.cached(asked)[-2:] == story.kind.whole(LONG, LONGER)
    parts.same(asked, story.of(LONGER, LONG, LONGER))


def test_the_longest_group_does_not_speak_for_one_that_vllm_has_evicted(story: Story) -> None:
    asked = story.asked["forgotten"]
    assert min(story.rest["forget"]) > 0
    assert parts.cached(asked) == story.kind.whole(LONG) * len(asked)
    parts.same(asked, story.of(LONG) * len(asked))


def test_a_wrong_block_of_any_group_would_show(story: Story) -> None:
    """What the other tests rely on: zeros in one group's blocks, behind everybody's back, are another answer."""
    assert min(story.rest["blank"]) > 0
    good, bad = story.asked["blank"][::2], story.asked["blank"][1::2]
    parts.same(good, story.of(LONG) * len(good))
    drifts = [parts.drift(answer, *story.of(LONG)) for answer in bad]
    assert min(drifts) > parts.DRIFT, drifts


def test_a_flipped_bit_in_one_group_is_computed(story: Story) -> None:
    """On the SSD. All groups have what was bad again, when it has been computed."""
    asked = story.asked["flipped"]
    assert min(story.rest["flip"]) > 0
    assert max(parts.cached(asked)) < story.kind.whole(LONG)[0]
    parts.same(asked, story.of(LONG) * len(asked))
    mended = story.asked["mended"]
    assert parts.cached(mended) == story.kind.whole(LONG) * len(mended)
    parts.same(mended, story.of(LONG) * len(mended))


# -- few blocks, little room, slow disks, several ranks: each of some models -----------------------------------------

SMALL = {"cpu": {"capacity": "1MiB"}}  # too few pages for any hit


def of(*kinds: Kind) -> pytest.MarkDecorator:
    """The test is about these models."""
    return pytest.mark.parametrize("story", kinds, indirect=True, ids=[kind.name for kind in kinds])


@of(*CROWDED)
def test_chunks_and_preemptions_where_blocks_go_from_group_to_group(story: Story, tmp_path: Path) -> None:
    """Chunks of prefills end within blocks; what a window frees is taken by whoever computes next."""
    script = Script()
    script.add("first", ask(*CROWD, together=True))
    script.add("again", RESET, ask(*CROWD, together=True))
    script.add("chunks", RESET, ask(*PROMPTS[:2]), DRAIN, RESET, ask(*PROMPTS[:2]))
    script.add("", DRAIN, TELL, METRICS)
    blocks = 115 if torch.cuda.is_available() else 90  # vLLM 0.33 wants more for one request
    llm = {"num_gpu_blocks_override": blocks, "max_num_seqs": 3, "max_model_len": 1600, "max_num_batched_tokens": 100}
    asked, rest = script.play(tmp_path, story.model, story.kind.cache(tmp_path / "ssd"), llm=llm)
    for name in ("first", "again"):
        follows(asked[name], story.plain["crowd"])
    assert sum(parts.cached(asked["again"])) > 0
    parts.same(asked["chunks"], story.of(*PROMPTS[:2]) * 2)
    assert parts.cached(asked["chunks"])[2:] == story.kind.whole(*PROMPTS[:2])
    at_rest(rest["tell"][0])
    preemptions = rest["metrics"][0].get("vllm:num_preemptions", 0)
    assert (preemptions > 0) == (story.kind is WINDOWS)  # chunks leave room for all three requests


@of(WINDOWS, UNEQUAL)
def test_a_bad_page_between_steps_is_told_by_its_request_and_asked_again(story: Story, tmp_path: Path) -> None:
    """Numbers of blocks end vLLM there. In each group alone, on the SSD and in a CPU tier that has few of the pages."""
    script = Script()
    script.add("good", *each(PROMPTS))
    script.add("good", RESET, ask(*PROMPTS, together=True))
    for tier in ("ssd", "cpu"):
        for group in range(len(story.kind.groups)):
            script.add("bad", RESET, ask(LONG), DRAIN, RESET, ("flip", {"tier": tier, "group": group}))
            script.add("bad", TELL, ask(LONG), DRAIN, TELL)
    script.add("bad together", RESET, ("flip", {"tier": "ssd", "group": 0}), ask(*PROMPTS, together=True))
    script.add("", DRAIN, TELL)
    asked, rest = script.play(tmp_path, story.model, story.kind.cache(story.copy(tmp_path), **SMALL))
    assert parts.cached(asked["good"]) == story.kind.whole(*PROMPTS) * 2
    parts.same(asked["good"], story.of(*PROMPTS) * 2)
    parts.same(asked["bad"], story.of(LONG) * len(asked["bad"]))
    parts.same(asked["bad together"], story.of(*PROMPTS))
    bad = [told["misses"].get("checksum", 0) for told in rest["tell"][:-1]]
    for flipped, before, after in zip(rest["flip"], bad[::2], bad[1::2], strict=False):
        assert after > before or not flipped, (rest["flip"], bad)
    assert min(rest["flip"][: len(story.kind.groups)]) > 0
    assert max(rest["flip"][len(story.kind.groups) : -1]) > 0
    at_rest(rest["tell"][-1])


@of(SINKS)
def test_loads_that_always_fail_are_not_asked_for_ever(story: Story, tmp_path: Path) -> None:
    flips = {"rules": [{"fault": "flip", "op": "read", "bit": 5}], "inner": "posix"}
    changes = {"ssd": {"transport": FAULTY, "capacity": "64MiB"}, **SMALL}
    script = Script()
    script.add("asked", RESET, ask(*PROMPTS, together=True), DRAIN, TELL, METRICS)
    connector = story.kind.cache(story.copy(tmp_path), **changes)
    asked, rest = script.play(tmp_path, story.model, connector, faults=flips)
    parts.same(asked["asked"], story.of(*PROMPTS))
    assert rest["metrics"][0]["vllm:gdscache_bad_pages"] > 0
    assert rest["metrics"][0]["vllm:gdscache_loads"] <= 2 * len(PROMPTS)
    at_rest(rest["tell"][0])


@of(SINKS)
@pytest.mark.parametrize("room", ["much", "little"])
def test_aborts_while_pages_come(story: Story, tmp_path: Path, room: str) -> None:
    slow = {"rules": [{"fault": "delay", "op": "read", "seconds": 0.2}], "inner": "posix"}
    changes = {"ssd": {"transport": FAULTY, "capacity": "64MiB"}, **(SMALL if room == "little" else {})}
    script = Script()
    for steps, prompt in itertools.product((1, 5, 40), (LONG, EXACT)):
        script.add("", ("abort", {"prompt": prompt, "steps": steps}))
    script.add("after", *each(PROMPTS[:2]))
    script.add("", TELL, METRICS)
    connector = story.kind.cache(story.copy(tmp_path), **changes)
    asked, rest = script.play(tmp_path, story.model, connector, faults=slow)
    parts.same(asked["after"], story.of(*PROMPTS[:2]))
    at_rest(rest["tell"][0])
    assert rest["metrics"][0]["vllm:gdscache_deferred"] > 0


@of(WINDOWS, UNEQUAL)
def test_heads_of_all_groups_on_each_rank(story: Story, tmp_path: Path) -> None:
    """Tensor parallelism. Then, behind a restart, loads go between steps, and bytes of one rank alone are bad."""
    ranks: dict[str, Any] = {
        "llm": {"tensor_parallel_size": parts.TP, "distributed_executor_backend": "mp"},
        "environment": {"OMP_NUM_THREADS": "1"},
        "limit": 400.0,
    }
    whole = story.kind.whole(*PROMPTS)
    script = Script()
    script.add("cold", *each(PROMPTS))
    script.add("hits", *each(PROMPTS), RESET, ask(*PROMPTS, together=True))
    script.add("parted", *each(JUNCTIONS[:2]))
    script.add("", METRICS, TELL)
    asked, rest = script.play(tmp_path, story.model, story.kind.cache(tmp_path / "ssd"), **ranks)
    parts.same(asked["cold"], story.of(*PROMPTS))
    assert parts.cached(asked["hits"]) == whole * 2
    parts.same(asked["hits"], story.of(*PROMPTS) * 2)
    assert parts.cached(asked["parted"]) == list(story.kind.junctions[:2])
    parts.same(asked["parted"], story.of(*JUNCTIONS[:2]))
    at_rest(rest["tell"][0])
    again = Script()
    again.add("again", *each(PROMPTS), RESET, ask(*PROMPTS, together=True))
    for group in range(len(story.kind.groups)):
        again.add("bad", RESET, TELL, ("flip", {"tier": "ssd", "group": group}), ask(LONG), DRAIN, TELL)
    asked, rest = again.play(tmp_path, story.model, story.kind.cache(tmp_path / "ssd", **SMALL), **ranks)
    assert parts.cached(asked["again"]) == whole * 2
    parts.same(asked["again"], story.of(*PROMPTS) * 2)
    parts.same(asked["bad"], story.of(LONG) * len(asked["bad"]))
    bad = [told["misses"].get("checksum", 0) for told in rest["tell"]]
    assert all(after > before for before, after in zip(bad[::2], bad[1::2], strict=True)), bad
    at_rest(rest["tell"][-1])
