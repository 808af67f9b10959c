"""Models with states in vLLM's real engine: one state a sequence, which stands for all tokens before it.

Log-probabilities are compared, and to the last digit: with a state of zeros the tokens may be the same all the same.
What is compared is computed in the same chunks: vLLM without a cache, and with an empty prefix cache of its own.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_parts as parts
from tests.engines.vllm_parts import EXACT, LONG, OTHER
from tests.engines.vllm_script import (
    DIGITS,
    DRAIN,
    MANY,
    METRICS,
    RESET,
    TELL,
    Answers,
    Script,
    ask,
    at_rest,
    each,
    equal,
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(parts.KIND == "mla", reason="other models than these tests are about"),
]

LLM = {"enable_prefix_caching": True}
EDGES: list[dict[str, Any]] = [{"parts": [[60 + more, 1152 + more]]} for more in (-1, 0, 1)]  # of blocks of both models
PROMPTS = [LONG, OTHER, EXACT, *EDGES]  # none begins as another does
SHARED: list[dict[str, Any]] = [{"parts": [[50, 900], [40 + number, 300]]} for number in range(3)]
CROWD: list[dict[str, Any]] = [{"parts": [[seed, 500]], "most": 100} for seed in (10, 11, 12)]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model of `vllm_child.HYBRIDS`: tokens of its blocks, bytes of a state of a group, and blocks in which not all
    requests of a crowd have room. `steady`: its answers hardly depend on what else is in a batch. An LFM2's do on a
    CPU, by 0.3 and without any cache, so that what is asked together is asked again by itself.
    """

    name: str
    groups: tuple[str, ...]
    tokens: int
    content: int
    few: int
    steady: bool

    def whole(self, *prompts: dict[str, Any]) -> list[int]:
        """Tokens of each prompt that can be cached: one token is left to compute."""
        return [(sum(number for _, number in prompt["parts"]) - 1) // self.tokens * self.tokens for prompt in prompts]


GDN = Kind("gdn", ("state",) * 3 + ("all",), 288, 268_288, 16, True)
CONVOLUTIONS = Kind("convolutions", ("state", "all"), 32, 2 * 1_024, 56, False)


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
        known = [*PROMPTS, *SHARED]
        return [self.plain["alone"][known.index(prompt)] for prompt in prompts]


@pytest.fixture(scope="module", params=[GDN, CONVOLUTIONS], ids=lambda kind: kind.name)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(kind.name)
    model, groups = parts.made(folder, kind.name), range(len(kind.groups))
    alone = Script()
    for prompt in (*PROMPTS, *SHARED):
        alone.add("alone", RESET, ask(prompt))
    alone.add("crowd", RESET, ask(*CROWD, together=True))
    plain, _ = alone.play(folder, model, None, llm=LLM, environment=parts.WITH_STATES)
    script = Script()
    script.add("", ("groups", {}), ("sizes", {}))
    script.add("cold", *each(PROMPTS))
    script.add("hits", *each(PROMPTS))
    script.add("together", RESET, ask(*PROMPTS, together=True), DRAIN)
    script.add("shared", *each(SHARED))
    for group in groups:
        script.add("zeroed", RESET, ("flip", {"tier": "cpu", "group": group, "zero": True}), ask(LONG), DRAIN)
        script.add("mended", RESET, ask(LONG), DRAIN)
    for group in groups:
        script.add("lost", RESET, ("lose", {"group": group}), ask(LONG), DRAIN)
        script.add("mended", RESET, ask(LONG), DRAIN)
    for group in groups:
        script.add("blank", RESET, ask(LONG), ("blank", {"group": group}), ask(LONG), RESET)
    script.add("", *each(PROMPTS))  # what was lost is stored again
    script.add("", METRICS, TELL)
    asked, rest = script.play(folder, model, parts.cache(folder / "ssd"), llm=LLM, environment=parts.WITH_STATES)
    again = Script()
    again.add("again", *each(PROMPTS), METRICS)
    for zero in (False, True):
        for group in groups:
            flip = ("flip", {"tier": "ssd", "group": group, "zero": zero})
            again.add("flipped", RESET, flip, ask(LONG), DRAIN)
            again.add("mended", RESET, ask(LONG), DRAIN)
    again.add("", TELL)
    shutil.copytree(folder / "ssd", folder / "copy")
    more = again.play(folder, model, parts.cache(folder / "copy"), llm=LLM, environment=parts.WITH_STATES)
    for all_of_them, some in ((asked, more[0]), (rest, more[1])):
        for name, found in some.items():
            all_of_them[name] = [*all_of_them.get(name, ()), *found]
    return Story(kind, model, folder / "ssd", plain, asked, rest)


def test_a_state_comes_with_what_is_in_front_of_it(story: Story) -> None:
    """Cold, from the CPU tier, and from the SSD behind a restart; prompts that end on blocks, before and behind."""
    assert [group["keeps"] for group in story.rest["groups"][0]] == list(story.kind.groups)
    whole = story.kind.whole(*PROMPTS)
    assert parts.cached(story.asked["cold"]) == [0] * len(PROMPTS)
    equal(story.asked["cold"], story.of(*PROMPTS), DIGITS)
    for name in ("hits", "again"):
        assert parts.cached(story.asked[name]) == whole
        equal(story.asked[name], story.of(*PROMPTS), DIGITS)
    assert parts.cached(story.asked["together"]) == whole
    if story.kind.steady:
        parts.same(story.asked["together"], story.of(*PROMPTS))
    for place, source in ((0, "host"), (1, "disk")):
        metrics = story.rest["metrics"][place]
        assert any(source in name and value for name, value in metrics.items()), metrics
    for told in story.rest["tell"]:
        at_rest(told)


def test_a_state_takes_its_own_bytes(story: Story) -> None:
    states, attention = story.rest["sizes"][0]
    assert states["content"] == story.kind.content
    assert states["extent"] <= 1.05 * states["content"] + 4096
    assert attention["extent"] == attention["content"] > states["content"]
    assert {path.name for path in story.directory.glob("groups-*/slab*")} == {"slab-0.bin"}


def test_the_third_prompt_with_a_common_beginning_hits(story: Story) -> None:
    """The second one finds no state where it parts and has one made. Its chunks end there, and so are others."""
    assert parts.cached(story.asked["shared"]) == [0, 0, 900 // story.kind.tokens * story.kind.tokens]
    parts.same(story.asked["shared"], story.of(*SHARED))


def test_a_wrong_state_would_show(story: Story) -> None:
    """What the other tests rely on: zeros in one group's blocks, behind everybody's back, are another answer."""
    assert min(story.rest["blank"]) > 0
    good, bad = story.asked["blank"][::2], story.asked["blank"][1::2]
    equal(good, story.of(LONG) * len(good), DIGITS)
    drifts = [parts.first_drift(answer, *story.of(LONG)) for answer in bad]
    assert min(drifts) > 2 * DIGITS, drifts


@pytest.mark.parametrize("what", ["zeroed", "flipped", "lost"])
def test_what_one_group_lacks_is_computed(story: Story, what: str) -> None:
    """Zeros in the CPU tier; a bit, and zeros, on the SSD; pages that were evicted alone. Then all of it is there
    again."""
    asked, groups = story.asked[what], len(story.kind.groups)
    assert len(asked) == groups * (2 if what == "flipped" else 1)
    if what == "zeroed":  # between steps, where vLLM counts what was promised
        assert story.rest["metrics"][0]["vllm:gdscache_bad_pages"] >= groups
    else:
        assert max(parts.cached(asked)) < story.kind.whole(LONG)[0]
    equal(asked, story.of(LONG) * len(asked), DIGITS)
    assert min(story.rest["lose" if what == "lost" else "flip"]) > 0
    mended = story.asked["mended"]
    assert parts.cached(mended) == story.kind.whole(LONG) * 4 * groups
    equal(mended, story.of(LONG) * len(mended), DIGITS)


def test_few_blocks_and_chunks_that_end_within_them(story: Story, tmp_path: Path) -> None:
    """Requests are preempted and come back, and some are aborted, at all times. What a request had generated is
    computed again as a prompt then, which is not the same to the last digit, also without a cache."""
    script = Script()
    script.add("first", ask(*CROWD, together=True), DRAIN)
    script.add("again", RESET, ask(*CROWD, together=True), DRAIN)
    script.add("cold", *each(PROMPTS[:2]))
    script.add("hits", *each(PROMPTS[:2]))
    for steps in (1, 2, 3, 5, 40):
        script.add("", RESET, ("abort", {"prompt": LONG, "steps": steps}))
        script.add("", RESET, ("abort", {"prompt": {"parts": [[80 + steps, 1300]]}, "steps": steps}))
    script.add("after", *each(PROMPTS[:2]))
    script.add("", TELL, METRICS)
    llm = {"max_num_seqs": 3, "max_model_len": 1600, "max_num_batched_tokens": 300}
    llm |= {"num_gpu_blocks_override": story.kind.few}
    asked, rest = script.play(
        tmp_path, story.model, parts.cache(tmp_path / "ssd"), llm={**LLM, **llm}, environment=parts.WITH_STATES
    )
    for found, wanted in zip([*asked["first"], *asked["again"]], story.plain["crowd"] * 2, strict=True):
        assert (found["why"], len(found["tokens"])) == ("length", 100)
        assert found["tokens"][:MANY] == wanted["tokens"][:MANY] or not story.kind.steady
    assert sum(parts.cached(asked["again"])) > 0
    assert parts.cached(asked["cold"]) == [0, 0]
    parts.same(asked["cold"], story.of(*PROMPTS[:2]))
    for name in ("hits", "after"):
        assert parts.cached(asked[name]) == story.kind.whole(*PROMPTS[:2])
        equal(asked[name], asked["cold"], DIGITS)
    at_rest(rest["tell"][0])
    assert rest["metrics"][0]["vllm:num_preemptions"] > 0
