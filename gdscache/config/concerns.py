"""Settings that are allowed but probably unintended: reported when an engine opens, with the figures.

`Config` refuses settings that cannot work. These work and disappoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gdscache.config import Config
from gdscache.limits import SMALL_BATCH_BYTES
from gdscache.sizes import format_size

SEGMENTS = 3  # least number of pages in half of the staging ring for copies and kernels to overlap
_BOUNCED_BYTES = 32 << 20  # for half of the bounce reserve, so that reads are large enough


def concerns(config: Config, gpu_pages: int, *, on_gpu: bool) -> list[str]:
    """One sentence each, with the setting to change.

    `gpu_pages`: pages that the planes hold, attached or owned. `on_gpu`: they lie on a GPU, not in host memory.
    """
    found = [*_pools(config, gpu_pages), *_buffers(config, on_gpu), *_policies(config)]
    if config.ssd is not None and config.status is not None:
        found.append(f"status.path has no effect: the status page is in {config.ssd.path}. Take status out")
    return found


def _pools(config: Config, gpu_pages: int) -> Iterator[str]:
    extent = config.model.layout().extent_bytes
    states = [group.keeps == "state" for group in config.model.layer_groups()]
    # A state's planes have as many blocks as those of other layers, and few of them hold a state.
    pools = [] if states and all(states) else [("the GPU's planes", gpu_pages, "gpu.capacity")]
    if config.cpu is not None:
        pools.append(("the CPU pool", config.cpu.capacity // extent, "cpu.capacity"))
    if config.ssd is not None:
        pools.append(("the SSD", config.ssd.capacity // extent, "ssd.capacity"))
    for (above, more, _), (below, fewer, setting) in itertools.pairwise(pools):
        if fewer < more:
            yield (
                f"{below} holds {_pages(fewer)} and {above} {more:,}: most pages evicted from {above} "
                f"have left {below} as well. Raise {setting} above {format_size(more * extent)}"
            )


def _buffers(config: Config, on_gpu: bool) -> Iterator[str]:
    layout = config.model.layout()
    extent, below = layout.extent_bytes, config.cpu is not None or config.ssd is not None
    fit = config.gpu.staging // 2 // extent
    if below and on_gpu and fit < SEGMENTS:
        yield (
            f"half of gpu.staging holds {_pages(fit)} of {format_size(extent)}: copies and kernels overlap only if it "
            f"holds {SEGMENTS}. Raise gpu.staging to {format_size(2 * SEGMENTS * extent)}, or lower model.page_tokens"
        )
    bounced = config.host_buffer // 2 // extent
    if config.ssd is not None and bounced < 2:
        yield (
            f"half of host_buffer holds {_pages(bounced)}: pages pass through it one at a time. "
            f"Raise host_buffer to {format_size(2 * max(4 * extent, _BOUNCED_BYTES))}"
        )
    if below and config.store.queue < min(SMALL_BATCH_BYTES, 16 * extent):
        yield (
            f"store.queue holds {_pages(config.store.queue // extent)}: long "
            f"prompts are stored in part. Raise it above {format_size(min(SMALL_BATCH_BYTES, 16 * extent))}"
        )


def _policies(config: Config) -> Iterator[str]:
    ssd = config.ssd
    if ssd is not None and ssd.endurance is not None and ssd.endurance < ssd.capacity // 100:
        yield (
            f"ssd.endurance is {format_size(ssd.endurance)} a day: filling ssd.capacity once takes "
            f"{ssd.capacity // ssd.endurance:,} days. Raise it, or lower ssd.capacity"
        )
    if ssd is None and not config.tiers:
        for key in ("write_policy", "admission"):
            value = getattr(config.store, key)
            if value != type(config.store).model_fields[key].default:
                yield f"store.{key} is {value}, but there is no SSD tier: it has no effect. Add ssd"
    if (events := config.events) is not None and events.endpoint is None and (events.replay or events.topic):
        key = "replay" if events.replay else "topic"
        yield f"events.{key} is given, but no endpoint: it has no effect. Add events.endpoint"


def _pages(n: int) -> str:
    return f"{n:,} page" if n == 1 else f"{n:,} pages"
