"""Namespaces under SGLang's own settings, models and names of pages.  sglang_namespace_cases.py CASE FOLDER"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import process_model_config
from sglang.srt.sampling.sampling_params import SamplingParams

from gdscache.errors import IntegrationError, MediaUnsupportedError, RopeByLengthError
from gdscache.integrations.sglang.planes import host_planes
from gdscache.integrations.sglang.setup import facts_of, refuse_model, resolved, table
from tests.engines import sglang_host_rig as host
from tests.engines import sglang_rig as rig
from tests.engines.sglang_case import case, run_case

OTHERS: dict[str, Any] = {  # what a user may set on a machine without a GPU, and what another value of it is
    "kv_cache_dtype": "fp8_e4m3",
    "dtype": "float32",
    "json_model_override_args": json.dumps({"rope_theta": 5e5}),
    "context_length": 1024,
    "trust_remote_code": True,
    "triton_attention_reduce_in_fp32": True,
    "model_impl": "transformers",
    "revision": "other",
}
DIFFERS: dict[str, Any] = {
    "port": 31234, "random_seed": 7, "served_model_name": "x", "log_level": "error", "nccl_port": 3,
}  # fmt: skip


def facts(args: Any) -> dict[str, object]:
    planes = host_planes(host.host_pool("mha", "page_first"))
    return facts_of(resolved(args), process_model_config(), planes, "0.5.23", os.environ)


@case
def a_restart_of_the_same_command(folder: Path) -> None:
    """Two processes, with ports, seeds and names that differ from start to start, have the same facts."""
    again = [sys.executable, __file__, "tell_facts", str(folder)]
    outputs = [
        subprocess.run(again, env={**os.environ, "SGLANG_RUN_ID": name}, text=True, capture_output=True, check=True)
        for name in ("a", "b")
    ]
    told = [next(line for line in one.stdout.splitlines() if line.startswith("FACTS")) for one in outputs]
    assert told[0] == told[1]
    assert json.loads(told[0][5:]) == json.loads(json.dumps(facts(rig.server_args(folder, **DIFFERS))))


@case
def tell_facts(folder: Path) -> None:
    print("FACTS", json.dumps(facts(rig.server_args(folder)), sort_keys=True))


@case
def settings_that_differ_find_nothing(folder: Path) -> None:
    """SGLang's own settings, one changed at a time: a server that starts with it finds no page."""
    found = host.HostRig(folder)
    keys = found.keys(rig.prompt(1, 40))
    found.fill(range(10), 1)
    assert found.backup(keys, range(10))
    found.close()
    for name, value in OTHERS.items():
        other = host.HostRig(folder, server={name: value})
        assert other.prefetch(keys, range(10)) == 0, name
        other.close()
    again = host.HostRig(folder, server=DIFFERS)
    assert again.prefetch(keys, range(10)) == 10
    again.close()


@case
def every_held_field_counts(folder: Path) -> None:
    """Each field that is held, of SGLang's own objects: they have it, and another value of it is another fact."""
    args, model = resolved(rig.server_args(folder)), process_model_config()
    planes = host_planes(host.host_pool("mha", "page_first"))
    plain = facts_of(args, model, planes, "0.5.23", {})
    for line in table().named("held"):
        owner, _, name = line.rpartition(".")
        if owner == "environment":
            assert facts_of(args, model, planes, "0.5.23", {name: "another"}) != plain, line
            continue
        one = args if owner == "ServerArgs" else model
        before = getattr(one, name)  # it has it
        setattr(one, name, "another")
        assert facts_of(args, model, planes, "0.5.23", {}) != plain, line
        setattr(one, name, before)
    assert facts_of(args, model, planes, "0.5.23", {}) == plain


@case
def names_of_pages_have_the_requests_keys(folder: Path) -> None:
    """`extra_key`, `cache_salt` and the adapter are in the name of a request's first page, and so of all."""
    tokens = rig.prompt(1, 40)

    def names(**given: Any) -> list[str]:
        request = Req("r", "", array("q", tokens), SamplingParams(), **given)
        key = RadixKey(array("q", tokens), request.extra_key, cache_salt=request.cache_salt)
        found = get_storage_hash_str(key, page_size=rig.PAGE)
        assert isinstance(found, list)
        return found

    every = [
        names(),
        names(extra_key="a"),
        names(cache_salt="a"),
        names(extra_key="a", cache_salt="a"),
        names(lora_id="a" * 32),
        names(lora_id="b" * 32),
    ]
    for pages in zip(*every, strict=True):
        assert len(set(pages)) == len(every)
    assert names() == every[0]


@case
def models_that_are_refused(folder: Path) -> None:
    """SGLang's own `ModelConfig`: longrope by the length that is served, and models that take images."""
    factors = [1.0] * 32
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    rope["original_max_position_embeddings"] = 1024
    text = {"max_position_embeddings": 4096, "rope_scaling": rope}
    assert refusal(folder, text) is RopeByLengthError
    assert refusal(folder, text, context_length=1024) is None
    assert refusal(folder, text, context_length=1025) is RopeByLengthError
    del rope["original_max_position_embeddings"]
    beside = {**text, "original_max_position_embeddings": 1024}  # transformers writes 4096 into the rope
    assert refusal(folder, beside) is RopeByLengthError
    assert refusal(folder, beside, context_length=1024) is None
    assert refusal(folder, {"max_position_embeddings": 4096}) is None
    vision = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": dict(rig.MODEL)}
    assert refusal(folder, vision) is MediaUnsupportedError


def refusal(folder: Path, model: dict[str, Any], **changes: Any) -> type[IntegrationError] | None:
    place = folder / str(len(list(folder.iterdir())))  # SGLang reads a model's configuration once a path
    place.mkdir()
    rig.server_args(place, json_model_override_args="{}", **changes, model=model)
    try:
        refuse_model(process_model_config())
    except IntegrationError as error:
        return type(error)
    return None


if __name__ == "__main__":
    run_case()
