"""Hybrid models in vLLM's real engine: groups of layers that keep different tokens, or one state a sequence, which
stands for all tokens before it. Each group has pages of its own.

With a state of zeros the tokens may be the same all the same: models with states are held to their log-probabilities,
to the last digit. What is compared then is computed in the same chunks: vLLM without a cache of ours, and with an empty
prefix cache of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gdscache.commands.inspect.reading import directories_of, inspect
from gdscache.config.pools import PLAIN_DIRECTORY
from tests.engines import vllm_parts as parts
from tests.engines.vllm_parts import BRANCH, EXACT, LONG, OTHER
from tests.engines.vllm_script import (
    DIGITS,
    DRAIN,
    MANY,
    METRICS,
    RESET,
    TELL,
    Answers,
    Script,
    Step,
    ask,
    at_rest,
    each,
    equal,
    follows,
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(parts.KIND == "mla", reason="other models than these tests are about"),
]

FAULTY = "tests.support.faults:FaultyTransport"

EDGES: list[dict[str, Any]] = [{"parts": [[60 + more, 1152 + more]]} for more in (-1, 0, 1)]  # of blocks with a state
ONCE: dict[str, Any] = {"parts": [[9, 1500]], "most": 1}
LONGER: dict[str, Any] = {"parts": [[0, 1500], [20, 300]]}
PARTINGS = (600, 1400, 1500)  # of others from LONG: before, in and behind its last window
JUNCTIONS = [{"parts": [[0, at], [30 + number, 200]]} for at, number in itertools.product(PARTINGS, range(2))]
CROWD: list[dict[str, Any]] = [{"parts": [[seed, 500]], "most": 100} for seed in (10, 11, 12)]
BYTES: Step = ("bytes", {})
GPU = torch.cuda.is_available()


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model of `vllm_child.HYBRIDS`. `groups`: what each keeps; `align`: tokens that a hit is a multiple of; `every`:
    tokens from one window of a prompt that is stored to the next; `content`: bytes of a state of a group, or 0.

    `junctions`: tokens that are cached of `JUNCTIONS`, of which the second of each pair parts where the first one did.
    `crowd`: blocks in which not all requests of a crowd have room, and tokens of a step. `steady`: its answers hardly
    depend on what else is in a batch. An LFM2's do on a CPU, by 0.3 and without any cache.
    """

    name: str
    groups: tuple[str, ...]
    junctions: tuple[int, ...]
    align: int = 32
    every: int = 4096
    content: int = 0
    crowd: tuple[int, int] | None = None
    steady: bool = True

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """Of a model with states none begins as another does, so that each is computed in the same chunks."""
        return [LONG, OTHER, EXACT, *EDGES] if self.content else [LONG, BRANCH, OTHER, EXACT]

    def whole(self, *prompts: dict[str, Any]) -> list[int]:
        """Tokens of each prompt that can be cached: one token is left to compute."""
        return [(sum(number for _, number in prompt["parts"]) - 1) // self.align * self.align for prompt in prompts]

    def play(
        self, script: Script, folder: Path, model: Path, directory: Path | None, **given: Any
    ) -> tuple[dict[str, Answers], dict[str, list[Any]]]:
        """Play it with our cache in that directory, or without one. `cache` has other settings of it."""
        sections = {"ssd": {"capacity": "64MiB"}, "store": {"window_every": self.every}} | given.pop("cache", {})
        given["llm"] = {"enable_prefix_caching": bool(directory or self.content)} | given.get("llm", {})
        if self.content:
            given["environment"] = parts.WITH_STATES | given.get("environment", {})
        return script.play(folder, model, directory and parts.cache(directory, **sections), **given)

    def same(self, found: Answers, wanted: Answers) -> None:
        equal(found, wanted, DIGITS) if self.content else parts.same(found, wanted)

    def alone(self, folder: Path, model: Path, *prompts: dict[str, Any], **given: Any) -> dict[str, Answers]:
        """What it answers to each prompt, and to a crowd, without a cache."""
        script = Script()
        for prompt in prompts:
            script.add("alone", RESET, ask(prompt))
        script.add("crowd", RESET, ask(*CROWD, together=True))
        return self.play(script, folder, model, None, **given)[0]


WINDOWS = Kind(
    "windows", ("window",) * 3 + ("all",), (0, 576, 992, 1376, 1472, 1472), crowd=(115 if GPU else 90, 100)
)  # vLLM 0.33 wants more blocks for one request
UNEQUAL = Kind("unequal", ("window", "window", "all"), (0, 576, 960, 1344, 1472, 1472), align=64)
SINKS = Kind("sinks", ("window", "all"), (0, 576, 992, 1376, 1472, 1472))
# The first prompt that parts at token 600 leaves two windows, up to 512 and behind it: that of a hit of 576 is in both.
SLIDING = Kind("sliding", ("window",), (512, 576, 1024, 1024, 1472, 1472), every=512)
CHUNKS = Kind("chunks", ("chunk",) * 3 + ("all",), (512, 576, 1376, 1376, 1472, 1472), crowd=WINDOWS.crowd)
GDN = Kind(
    "gdn", ("state",) * 3 + ("all",), (0, 576, 576, 1152, 1440, 1440), align=288, content=268_288, crowd=(16, 300)
)
CONVOLUTIONS = Kind(
    "convolutions",
    ("state", "all"),
    (0, 576, 576, 1376, 1472, 1472),
    content=2 * 1_024,
    crowd=(56, 300),
    steady=False,
)
CROWDED = (WINDOWS, CHUNKS, GDN, CONVOLUTIONS)
STATES = (GDN, CONVOLUTIONS)
OTHERS = (WINDOWS, UNEQUAL, SINKS, SLIDING, CHUNKS)


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
        known = [*self.kind.prompts, LONGER, *JUNCTIONS]
        return [self.plain["alone"][known.index(prompt)] for prompt in prompts]

    def copy(self, folder: Path) -> Path:
        """The directory again, for those who change it."""
        return Path(shutil.copytree(self.directory, folder / "ssd"))

    def play(self, script: Script, folder: Path, directory: Path, **given: Any) -> Any:
        return self.kind.play(script, folder, self.model, directory, **given)


def _story(kind: Kind, folder: Path) -> Story:
    model = parts.made(folder, kind.name)
    plain = kind.alone(folder, model, *kind.prompts, LONGER, *JUNCTIONS)
    for a, b in itertools.combinations(plain["alone"][: len(kind.prompts)], 2):
        assert parts.drift(a, b) > 2 * (DIGITS if kind.content else parts.DRIFT), (
            "prompts that answer alike prove nothing"
        )
    groups, script = range(len(kind.groups)), Script()
    script.add("", ("groups", {}), ("sizes", {}))
    script.add("once", RESET, ask(ONCE), BYTES, DRAIN, RESET, ask(ONCE), BYTES)
    script.add("cold", *each(kind.prompts))
    script.add("hits", *each(kind.prompts))
    script.add("together", RESET, ask(*kind.prompts, together=True), DRAIN)
    script.add("junctions", *each(JUNCTIONS))
    script.add("longer", *each([LONGER]), RESET, ask(LONG, LONGER))
    for group in groups if kind not in STATES else ():
        script.add("forgotten", RESET, ask(LONG), ("forget", {"group": group}), ask(LONG))
        script.add("forgotten", ("forget", {"group": group, "last": 1}), ask(LONG))
    for group, (name, lose) in itertools.product(
        groups if kind in STATES else (),
        {"zeroed": ("flip", {"tier": "cpu", "zero": True}), "lost": ("lose", {})}.items(),
    ):
        script.add(name, RESET, (lose[0], {**lose[1], "group": group}), ask(LONG), DRAIN)
        script.add("mended", RESET, ask(LONG), DRAIN)
    for group in groups:
        script.add("blank", RESET, ask(LONG), ("blank", {"group": group}), ask(LONG), RESET)
    script.add("", *each(kind.prompts))  # what was lost is stored again
    script.add("", METRICS, TELL)
    asked, rest = kind.play(script, folder, model, folder / "ssd")
    again = Script()
    again.add("again", *each(kind.prompts), METRICS)
    again.add("again together", RESET, ask(*kind.prompts, together=True), DRAIN)
    for zero, group in itertools.product((False, True), groups):
        flip = ("flip", {"tier": "ssd", "group": group, "zero": zero})
        again.add("flipped", RESET, flip, ask(LONG), DRAIN)
        again.add("mended", RESET, ask(LONG), DRAIN)
    again.add("", METRICS, TELL)
    shutil.copytree(folder / "ssd", folder / "copy")
    more = kind.play(again, folder, model, folder / "copy")
    for all_of_them, some in ((asked, more[0]), (rest, more[1])):
        for name, found in some.items():
            all_of_them[name] = [*all_of_them.get(name, ()), *found]
    return Story(kind, model, folder / "ssd", plain, asked, rest)


@pytest.fixture(scope="module", params=(*OTHERS, *STATES), ids=lambda kind: kind.name)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    kind: Kind = request.param
    return _story(kind, tmp_path_factory.mktemp(kind.name))


def of(*kinds: Kind) -> pytest.MarkDecorator:
    """The test is about these models."""
    return pytest.mark.parametrize("story", kinds, indirect=True, ids=[kind.name for kind in kinds])


def test_a_hit_is_what_all_groups_have(story: Story) -> None:
    """Cold, from the CPU tier, several requests at once, and from the SSD behind a restart."""
    assert [group["keeps"] for group in story.rest["groups"][0]] == list(story.kind.groups)
    prompts = story.kind.prompts
    assert parts.cached(story.asked["cold"]) == [0] * len(prompts) or (BRANCH in prompts)
    story.kind.same(story.asked["cold"], story.of(*prompts))
    for name in ("hits", "again", "together", "again together"):
        assert parts.cached(story.asked[name]) == story.kind.whole(*prompts)
        if "together" not in name:
            story.kind.same(story.asked[name], story.of(*prompts))
        elif story.kind.steady:
            parts.same(story.asked[name], story.of(*prompts))
    for place, source in ((0, "host"), (1, "disk")):
        metrics = story.rest["metrics"][place]
        assert any(source in name and value for name, value in metrics.items()), metrics
    for told in story.rest["tell"]:
        at_rest(told)


@of(WINDOWS, GDN)
def test_packed_pages(story: Story, tmp_path: Path) -> None:
    """`model.pack`: groups of attention are packed and states are not, out of the CPU tier and behind a restart."""
    prompts, script = story.kind.prompts, Script()
    script.add("packed", *each(prompts), *each(prompts), TELL)
    for directory, hits in ((tmp_path / "ssd", [0, 1]), (tmp_path / "ssd", [1, 1])):
        asked, rest = story.play(script, tmp_path, directory, cache={"model": {"pack": "on"}})
        for hit, found in zip(hits, (asked["packed"][: len(prompts)], asked["packed"][len(prompts) :]), strict=True):
            story.kind.same(found, story.of(*prompts))
            assert not hit or parts.cached(found) == story.kind.whole(*prompts)
        at_rest(rest["tell"][0])
    directories = [path for path in directories_of(tmp_path / "ssd") if path.name != PLAIN_DIRECTORY]
    packed = [inspect(path)["namespaces"][0]["fields"].get("packed") for path in directories]
    assert packed == ([None, 1] if story.kind in STATES else [1])


@of(*STATES)
def test_a_state_takes_its_own_bytes(story: Story) -> None:
    states, attention = story.rest["sizes"][0]
    assert states["content"] == story.kind.content
    assert states["extent"] <= 1.05 * states["content"] + 4096
    assert attention["extent"] == attention["content"] > states["content"]
    assert {path.name for path in story.directory.glob("groups-*/slab*")} == {"slab-0.bin"}


@of(*OTHERS)
def test_bytes_under_a_name_are_those_that_were_computed(story: Story) -> None:
    """Blocks that fall out of a window go to another group in the next step, before or after they were stored."""
    computed, loaded = story.rest["bytes"]
    both = computed.keys() & loaded.keys()
    assert len(both) >= len(story.kind.groups)
    assert [name for name in both if computed[name] != loaded[name]] == []
    assert parts.cached(story.asked["once"]) == [0, *story.kind.whole(ONCE)]


def test_a_prefix_that_others_share_is_hit_where_they_part(story: Story) -> None:
    """Not a repeated prompt alone: the third one that parts at a place finds what all groups need there."""
    asked = story.asked["junctions"]
    assert parts.cached(asked) == list(story.kind.junctions)
    parts.same(asked, story.of(*JUNCTIONS))


def test_what_vllm_has_itself_is_not_loaded(story: Story) -> None:
    asked = story.asked["longer"]
    assert parts.cached(asked)[-2:] == story.kind.whole(LONG, LONGER)
    parts.same(asked, story.of(LONGER, LONG, LONGER))


@of(*OTHERS)
def test_the_longest_group_does_not_speak_for_one_that_vllm_has_evicted(story: Story) -> None:
    asked = story.asked["forgotten"]
    assert min(story.rest["forget"]) > 0
    assert parts.cached(asked) == story.kind.whole(LONG) * len(asked)
    parts.same(asked, story.of(LONG) * len(asked))


def test_a_wrong_block_of_any_group_would_show(story: Story) -> None:
    """What the other tests rely on: zeros in one group's blocks, behind everybody's back, are another answer."""
    assert min(story.rest["blank"]) > 0
    good, bad = story.asked["blank"][::2], story.asked["blank"][1::2]
    story.kind.same(good, story.of(LONG) * len(good))
    drifts = [parts.drift(answer, *story.of(LONG)) for answer in bad]
    assert min(drifts) > (2 * DIGITS if story.kind.content else parts.DRIFT), drifts


def computed_again(story: Story, asked: Answers) -> None:
    """What was bad or gone was computed, and all groups have it again."""
    story.kind.same(asked, story.of(LONG) * len(asked))
    mended = story.asked["mended"]
    assert parts.cached(mended) == story.kind.whole(LONG) * len(mended)
    story.kind.same(mended, story.of(LONG) * len(mended))


def test_what_is_bad_in_one_group_is_computed(story: Story) -> None:
    """A bit, and zeros, on the SSD."""
    asked = story.asked["flipped"]
    assert len(asked) == 2 * len(story.kind.groups)
    assert min(story.rest["flip"]) > 0
    assert max(parts.cached(asked)) < story.kind.whole(LONG)[0]
    computed_again(story, asked)


@of(*STATES)
@pytest.mark.parametrize("what", ["zeroed", "lost"])
def test_a_state_that_is_bad_or_evicted_alone_is_computed(story: Story, what: str) -> None:
    """Zeros in the CPU tier, where a load between steps brings them and vLLM counts what was promised."""
    asked = story.asked[what]
    assert len(asked) == len(story.kind.groups)
    if what == "zeroed":
        assert story.rest["metrics"][0]["vllm:gdscache_bad_pages"] >= len(asked)
    else:
        assert min(story.rest["lose"]) > 0
        assert max(parts.cached(asked)) < story.kind.whole(LONG)[0]
    computed_again(story, asked)


# -- few blocks, little room, slow disks, several ranks: each of some models -----------------------------------------

SMALL = {"cpu": {"capacity": "1MiB"}}  # too few pages for any hit


@of(*CROWDED)
def test_few_blocks_and_chunks_that_end_within_them(story: Story, tmp_path: Path) -> None:
    """What a window frees is taken by whoever computes next. Requests are preempted and come back, and some are
    aborted, at all times. What a request had generated is computed again as a prompt then, which is not the same to the
    last digit, also without a cache."""
    two = story.kind.prompts[:2]
    script = Script()
    script.add("crowd", ask(*CROWD, together=True), DRAIN)
    script.add("crowd", RESET, ask(*CROWD, together=True), DRAIN)
    script.add("cold", *each(two))
    script.add("hits", *each(two))
    for steps in (1, 2, 3, 5, 40):
        script.add("", RESET, ("abort", {"prompt": LONG, "steps": steps}))
        script.add("", RESET, ("abort", {"prompt": {"parts": [[80 + steps, 1300]]}, "steps": steps}))
    script.add("hits", *each(two))
    script.add("", TELL, METRICS)
    assert story.kind.crowd is not None
    blocks, step = story.kind.crowd
    llm = {"num_gpu_blocks_override": blocks, "max_num_seqs": 3, "max_model_len": 1600, "max_num_batched_tokens": step}
    asked, rest = story.play(script, tmp_path, tmp_path / "ssd", llm=llm)
    if not story.kind.content:
        follows(asked["crowd"], story.plain["crowd"] * 2)
    elif story.kind.steady:
        first = [[answer["tokens"][:MANY] for answer in some] for some in (asked["crowd"], story.plain["crowd"] * 2)]
        assert first[0] == first[1]
    assert [(answer["why"], len(answer["tokens"])) for answer in asked["crowd"]] == [("length", 100)] * 6
    assert sum(parts.cached(asked["crowd"][3:])) > 0
    parts.same(asked["cold"], story.of(*two))
    assert parts.cached(asked["hits"]) == story.kind.whole(*two) * 2
    story.kind.same(asked["hits"], asked["cold"] * 2)
    at_rest(rest["tell"][0])
    preemptions = rest["metrics"][0].get("vllm:num_preemptions", 0)
    assert (preemptions > 0) == (story.kind is not CHUNKS)  # which leave room for all three requests


@of(WINDOWS, UNEQUAL)
def test_a_bad_page_between_steps_is_told_by_its_request_and_asked_again(story: Story, tmp_path: Path) -> None:
    """Numbers of blocks end vLLM there. In each group alone, on the SSD and in a CPU tier that has few of the pages."""
    script = Script()
    script.add("good", *each(story.kind.prompts))
    script.add("good", RESET, ask(*story.kind.prompts, together=True))
    for tier in ("ssd", "cpu"):
        for group in range(len(story.kind.groups)):
            script.add("bad", RESET, ask(LONG), DRAIN, RESET, ("flip", {"tier": tier, "group": group}))
            script.add("bad", TELL, ask(LONG), DRAIN, TELL)
    script.add("bad together", RESET, ("flip", {"tier": "ssd", "group": 0}), ask(*story.kind.prompts, together=True))
    script.add("", DRAIN, TELL)
    asked, rest = story.play(script, tmp_path, story.copy(tmp_path), cache=SMALL)
    assert parts.cached(asked["good"]) == story.kind.whole(*story.kind.prompts) * 2
    parts.same(asked["good"], story.of(*story.kind.prompts) * 2)
    parts.same(asked["bad"], story.of(LONG) * len(asked["bad"]))
    parts.same(asked["bad together"], story.of(*story.kind.prompts))
    bad = [told["misses"].get("checksum", 0) for told in rest["tell"][:-1]]
    groups = len(story.kind.groups)
    own = [0] * groups + [1] * groups  # the CPU tier may have a group's page of the answer, which is in no hit
    for flipped, most, before, after in zip(rest["flip"][:-1], own, bad[::2], bad[1::2], strict=True):
        assert after > before or flipped <= most, (rest["flip"], bad)
    assert min(rest["flip"][:groups]) > 0
    assert max(rest["flip"][groups:-1]) > 1
    at_rest(rest["tell"][-1])


@of(SINKS)
def test_loads_that_always_fail_are_not_asked_for_ever(story: Story, tmp_path: Path) -> None:
    flips = {"rules": [{"fault": "flip", "op": "read", "bit": 5}], "inner": "posix"}
    changes = {"ssd": {"transport": FAULTY, "capacity": "64MiB"}, **SMALL}
    script = Script()
    script.add("asked", RESET, ask(*story.kind.prompts, together=True), DRAIN, TELL, METRICS)
    asked, rest = story.play(script, tmp_path, story.copy(tmp_path), cache=changes, faults=flips)
    parts.same(asked["asked"], story.of(*story.kind.prompts))
    assert rest["metrics"][0]["vllm:gdscache_bad_pages"] > 0
    assert rest["metrics"][0]["vllm:gdscache_loads"] <= 2 * len(story.kind.prompts)
    at_rest(rest["tell"][0])


@of(SINKS)
@pytest.mark.parametrize("room", ["much", "little"])
def test_aborts_while_pages_come(story: Story, tmp_path: Path, room: str) -> None:
    slow = {"rules": [{"fault": "delay", "op": "read", "seconds": 0.2}], "inner": "posix"}
    changes = {"ssd": {"transport": FAULTY, "capacity": "64MiB"}, **(SMALL if room == "little" else {})}
    script = Script()
    for steps, prompt in itertools.product((1, 5, 40), (LONG, EXACT)):
        script.add("", ("abort", {"prompt": prompt, "steps": steps}))
    script.add("after", *each(story.kind.prompts[:2]))
    script.add("", TELL, METRICS)
    asked, rest = story.play(script, tmp_path, story.copy(tmp_path), cache=changes, faults=slow)
    parts.same(asked["after"], story.of(*story.kind.prompts[:2]))
    at_rest(rest["tell"][0])
    come = "deferred" if room == "much" else "loads"  # between steps, since their pages do not fit in the CPU tier
    assert rest["metrics"][0][f"vllm:gdscache_{come}"] > 0


def two_ranks() -> dict[str, Any]:
    if GPU and torch.cuda.device_count() < parts.TP:
        pytest.skip("too few GPUs")
    return {
        "llm": {"tensor_parallel_size": parts.TP, "distributed_executor_backend": "mp"},
        "environment": {"OMP_NUM_THREADS": "1"},
        "limit": 400.0,
    }


@of(WINDOWS, UNEQUAL, CONVOLUTIONS)
def test_a_part_of_each_group_on_each_rank(story: Story, tmp_path: Path) -> None:
    """Tensor parallelism. Then, behind a restart, loads go between steps, and bytes of the last rank alone are bad."""
    kind, ranks = story.kind, two_ranks()
    prompts, whole = kind.prompts[:4], kind.whole(*kind.prompts[:4])
    plain = kind.alone(tmp_path, story.model, *prompts, *JUNCTIONS[:2], **ranks)["alone"]  # other sums than one rank's
    plain, parted = plain[: len(prompts)], plain[len(prompts) :]
    script = Script()
    script.add("", ("sizes", {}))
    script.add("cold", *each(prompts))
    script.add("hits", *each(prompts))
    script.add("together", RESET, ask(*prompts, together=True), DRAIN)
    script.add("parted", *each(JUNCTIONS[:2]))
    script.add("", METRICS, TELL)
    asked, rest = story.play(script, tmp_path, tmp_path / "ssd", **ranks)
    if kind.content:
        assert rest["sizes"][0][0] == {"content": kind.content // parts.TP, "extent": 4096}
    kind.same(asked["cold"], plain)
    kind.same(asked["hits"], plain)
    assert parts.cached(asked["hits"]) == parts.cached(asked["together"]) == whole
    assert parts.cached(asked["parted"]) == list(kind.junctions[:2])
    parts.same(asked["parted"], parted)
    assert not rest["metrics"][0].get("vllm:gdscache_bad_pages")
    at_rest(rest["tell"][0])
    again = Script()
    again.add("again", *each(prompts))
    again.add("together", RESET, ask(*prompts, together=True), DRAIN)
    for zero, group in itertools.product((False, True), range(len(kind.groups))):
        flip = ("flip", {"tier": "ssd", "group": group, "zero": zero})
        again.add("between", *each(prompts[1:2]))  # whose last state is stored in the next request's first step
        again.add("bad", RESET, TELL, flip, ask(LONG), DRAIN, TELL)
        again.add("mended", RESET, ask(LONG), DRAIN)
    asked_again, rest = story.play(again, tmp_path, tmp_path / "ssd", cache=SMALL, **ranks)
    assert parts.cached(asked_again["again"]) == parts.cached(asked_again["together"]) == whole
    kind.same(asked_again["again"], plain)
    if kind.steady:
        parts.same([*asked["together"], *asked_again["together"]], plain * 2)
    assert parts.cached(asked_again["mended"]) == whole[:1] * 2 * len(kind.groups)
    kind.same([*asked_again["bad"], *asked_again["mended"]], plain[:1] * 4 * len(kind.groups))
    kind.same(asked_again["between"], plain[1:2] * 2 * len(kind.groups))
    bad = [told["misses"].get("checksum", 0) for told in rest["tell"]]
    assert all(after > before for before, after in zip(bad[::2], bad[1::2], strict=True)), bad
    at_rest(rest["tell"][-1])
