"""What the installed vLLM has of everything that the connector was written for, as JSON:

    vllm_contract.py [FILE | --names]

The tests run it in vLLM's environment. With FILE it records that version as the one that the connector is written for;
for --names see `names`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CLASSES = [
    f"{BASE}:KVConnectorBase_V1",
    f"{BASE}:SupportsHMA",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics",
]
FIELDS = {  # what is read of objects that vLLM hands over
    "vllm.v1.core.sched.output:SchedulerOutput": [
        "scheduled_cached_reqs", "num_scheduled_tokens", "kv_connector_block_state", "finished_req_ids",
    ],
    "vllm.forward_context:ForwardContext": ["attn_metadata", "cudagraph_runtime_mode"],
    "vllm.v1.core.sched.output:CachedRequestData": ["req_ids", "resumed_req_ids", "new_block_ids"],
    "vllm.v1.kv_cache_interface:KVCacheConfig": ["num_blocks", "kv_cache_groups", "kv_cache_layout", "hash_block_size"],
    "vllm.config:KVTransferConfig": ["engine_id", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config"],
    "vllm.config:CacheConfig": ["cache_dtype", "prefix_caching_hash_algo"],
    "vllm.config:ParallelConfig": [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "worker_cls",
    ],
    "vllm.config:ModelConfig": ["model", "dtype", "quantization", "enable_sleep_mode"],
    "vllm.config:SchedulerConfig": ["async_scheduling"],
    "vllm.config:VllmConfig": ["speculative_config", "weight_transfer_config", "load_config"],
}  # fmt: skip


def found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def members(kind: type) -> dict[str, str]:
    """Each public method, `__init__` and property with its parameters: names, kinds and whether they have a default."""
    told = {}
    for name, member in inspect.getmembers_static(kind):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property):
            told[name] = "property"
        elif isinstance(member, (staticmethod, classmethod)) or inspect.isfunction(member):
            function = member if inspect.isfunction(member) else member.__func__
            parameters = [_told(parameter) for parameter in inspect.signature(function).parameters.values()]
            told[name] = f"{type(member).__name__}({', '.join(parameters)})"
    return told


def _told(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    return stars + parameter.name + ("" if parameter.default is parameter.empty else "=")


def configuration(folder: str) -> Any:
    """What `vllm serve` makes of a small Llama's `config.json`."""
    import transformers
    from vllm.engine.arg_utils import EngineArgs

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    transformers.LlamaConfig(**shape, **heads, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    args = EngineArgs(model=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=1024, dtype="bfloat16")
    return args.create_engine_config()


def names() -> dict[str, list[str]]:
    """Of vLLM's configuration, by our table of fields: those that it does not know; those that differ between two
    starts of one command; those that are held, and whose change is not seen."""
    import vllm.config
    import vllm.envs

    from gdscache.integrations.fields import ENVIRONMENT
    from gdscache.integrations.vllm.setup import table

    known = table()
    with tempfile.TemporaryDirectory() as folder:
        first, second = configuration(folder), configuration(folder)
    before, again = known.facts([first]), known.facts([second])
    unknown = known.unknown([first])
    for owner in sorted({name.split(".")[0] for name in known.kinds} - {ENVIRONMENT}):
        fields = [field.name for field in dataclasses.fields(getattr(vllm.config, owner))]
        unknown += [f"{owner}.{name}" for name in fields if name[0] != "_" and f"{owner}.{name}" not in known.kinds]
    variables = set(vllm.envs.environment_variables)  # and those that the code has beside them
    for file in Path(vllm.__file__).parent.rglob("*.py"):
        variables.update(re.findall(r"""["'](VLLM_[A-Z0-9_]+)["']""", file.read_text(encoding="utf-8")))
    unknown += [one for name in variables if (one := f"{ENVIRONMENT}.{name}") not in known.kinds]
    objects = {type(one).__name__: one for one in [first, *vars(first).values()]}
    unseen = []
    for line in before:
        owner, _, field = line.partition(".")
        plain = getattr(objects[owner], field)
        object.__setattr__(objects[owner], field, "another")
        now = known.facts([first])
        unseen += [] if {name for name in now if now[name] != before[name]} == {line} else [line]
        object.__setattr__(objects[owner], field, plain)
    return {
        "unknown": sorted(set(unknown)),
        "restarted": [name for name in before if before[name] != again[name]],
        "unseen": unseen,
        "lines": list(before),
    }


def contract() -> dict[str, Any]:
    import vllm

    fields = {}
    for name, wanted in FIELDS.items():
        have = {field.name for field in dataclasses.fields(found(name))}
        fields[name] = {field: field in have for field in wanted}
    return {"version": vllm.__version__, "classes": {name: members(found(name)) for name in CLASSES}, "fields": fields}


if __name__ == "__main__":
    if sys.argv[1:] == ["--names"]:
        print("\n" + json.dumps(names()))
    else:
        text = json.dumps(contract(), indent=1, sort_keys=True) + "\n"
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(text)
        print("\n" + text)
