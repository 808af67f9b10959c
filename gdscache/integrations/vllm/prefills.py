"""The steps of vLLM whose times are those of a prefill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdscache.integrations.prefills import LEAST_TOKENS


def prefill_of(step: Any) -> tuple[int, int] | None:
    """(tokens, tokens before them) of a step that computes only a part of one request's prompt; else None.

    `step`: vLLM's `SchedulerOutput`.
    """
    scheduled: Mapping[str, int] = step.num_scheduled_tokens
    if len(scheduled) != 1:
        return None
    ((request, tokens),) = scheduled.items()
    if tokens < LEAST_TOKENS:
        return None
    cached = step.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs)
    return (tokens, computed[request]) if request in computed else None
