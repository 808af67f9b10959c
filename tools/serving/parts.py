"""What the runs of `serving` share: prompts, what a run is told, and when it may measure.

A run is a process with one engine and one way of keeping the KV cache. All runs of a stage start together; each says
that it is ready, and measures when it is told to, alone.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FULL, WINDOW = "full_attention", "sliding_attention"
STATES = ("qwen3-next", "bamba-9b")  # shapes of models that keep a state
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "llama-3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "layer_types": [FULL if layer % 6 == 5 else WINDOW for layer in range(34)],
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": [WINDOW, FULL] * 12,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
    },
    # Qwen3-Next with 32 of its 512 experts: a token still goes through 10 of them.
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "layer_types": [FULL if layer % 4 == 3 else "linear_attention" for layer in range(48)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 32,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
    },
    "bamba-9b": {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "attn_layer_indices": [9, 18, 27],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_rotary_emb": 64,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 8192,
    },
}
OF_ALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
WORDS = 4000  # numbers of tokens lie below
CLIENTS = 64  # requests at a time
GRAPHS = [1, 2, 4, 8, 16, 24, 32, 48, CLIENTS]  # requests of a step that decodes, for which there is a CUDA graph
CALLS = "GDSCACHE_SERVING_CALLS"  # the file that `Calls` reads
SETTLE_S = 4.0  # until what is stored in the background is there
DOCUMENTS, USES, PART, ANSWER = 48, 3, 2048, 16  # requests that have the first half of their prompt in common


def token_bytes(shape: str) -> int:
    """Bytes of a token in all layers with keys and values, as if none of them had a window."""
    of = OF_ALL | SHAPES[shape]
    layers = len(of.get("attn_layer_indices", ())) or sum(
        kind in (FULL, WINDOW) for kind in of.get("layer_types", [FULL] * of["num_hidden_layers"])
    )
    heads: int = layers * of["num_key_value_heads"]
    return 2 * heads * of["head_dim"] * 2


def write_model(folder: Path, shape: str) -> None:
    """A model's configuration; its weights are made up when an engine opens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(OF_ALL | SHAPES[shape]))


def words(seed: str, number: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, WORDS) for _ in range(number)]


def prompt(beginning: int, end: int, order: dict[str, Any]) -> list[int]:
    """`order["tokens"]` tokens, of which the first `order["cached"]` follow from `beginning` alone."""
    cached = order["cached"]
    return words(f"beginning {beginning}", cached) + words(f"end {end}", order["tokens"] - cached)


def shared_prompts(part: int, turn: int) -> list[list[int]]:
    """Prompts of two parts, of which `USES` have the first one in common, in an order drawn at random."""
    found = [
        words(f"document {turn} {document}", part) + words(f"question {turn} {document} {use}", part)
        for use in range(USES)
        for document in range(DOCUMENTS)
    ]
    random.Random(turn).shuffle(found)
    return found


def lone_prompts(part: int, turn: int) -> list[list[int]]:
    """Prompts that nothing has been asked for before."""
    return [words(f"lone {turn} {number}", 2 * part) for number in range(DOCUMENTS)]


def traffic(order: dict[str, Any]) -> Iterator[tuple[str, list[list[int]]]]:
    """Loads of both kinds in turns, `order["turns"]` of each."""
    for turn in range(order["turns"]):
        yield "shared", shared_prompts(order["part"], turn)
        yield "lone", lone_prompts(order["part"], turn)


Generate = Callable[[Sequence[list[int]], int], Sequence[int]]  # prompts, tokens to answer: cached tokens of each


def warm_up(generate: Generate, order: dict[str, Any]) -> None:
    """Have the kernels of traffic compiled, by a load of it that nothing is measured of."""
    generate(shared_prompts(order["part"], -1)[: CLIENTS // 2], ANSWER)


class Answers:
    """What a run says. Written as it comes, so that a run that is killed leaves what it had."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
        self._path = Path(sys.argv[2])
        self._found: dict[str, Any] = {}

    def say(self, **found: Any) -> None:
        self._found |= found
        self._path.write_text(json.dumps(self._found))

    def add(self, name: str, value: object) -> None:
        """One more value of a series."""
        self.say(**{name: [*self._found.get(name, []), value]})

    def wait_for_turn(self) -> None:
        """Everything is open. Returns when no other run measures."""
        Path(f"{self._path}.ready").touch()
        while not Path(f"{self._path}.go").exists():
            time.sleep(0.05)


class Calls:
    """Seconds that a linker has spent in its calls, by their names; its process writes them to a file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        os.environ[CALLS] = path  # for the process that has the linker

    def told(self, before: dict[str, float] | None = None) -> dict[str, float]:
        """What there is by now, less what there was before."""
        found: dict[str, float] = json.loads(self._path.read_text()) if self._path.exists() else {}
        return {name: value - (before or {}).get(name, 0.0) for name, value in found.items()}


def rate(generate: Generate, name: str, prompts: list[list[int]], answers: Answers) -> None:
    """Requests a second, all handed over at once; and the share of the prompts' tokens that were cached, anywhere."""
    start = time.perf_counter()
    cached = generate(prompts, ANSWER)
    answers.add(f"{name}_requests_per_s", len(prompts) / (time.perf_counter() - start))
    answers.add(f"{name}_cached", sum(cached) / sum(map(len, prompts)))


def first_tokens(generate: Generate, forget: Callable[[], object], answers: Answers) -> None:
    """Milliseconds to the first token, and how many tokens were cached, of `order["repeat"]` prompts each way.

    `forget()` has the engine's own GPU cache forget what it has.
    """
    order = answers.order
    found: dict[str, Any] = {}

    def turn(name: str, number: int, end: int) -> None:
        asked, start = prompt(number, end, order), time.perf_counter()
        (cached,) = generate([asked], 1)
        ms = (time.perf_counter() - start) * 1e3
        row = found.setdefault(name, {"ms": [], "cached": []})
        row["ms"].append(ms)
        row["cached"].append(cached)
        answers.say(first=found)

    generate([prompt(98, 98, order)], 1)  # kernels are loaded
    if not order["restarted"]:
        for n in range(order["repeat"]):
            turn("recomputed", n, n)
            if order["groups"]:  # windows and states are kept where prompts part, once two have parted there
                turn("parted", n, 200 + n)
            turn("resident", n, 100 + n)
        time.sleep(SETTLE_S)
        if order["way"] == "none":
            return
    for n in range(order["repeat"]):
        if not order["restarted"]:
            forget()
        turn("loaded", n, order["ends"] + n)
