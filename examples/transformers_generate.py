"""Hugging Face `generate` that computes a conversation's prefix once, also over a restart.

    python examples/transformers_generate.py

A tiny Llama with random weights stands in for your model; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from gdscache import CacheEngine
from gdscache.integrations.transformers import PrefixCache, model_section

GREEDY = {"max_new_tokens": 16, "do_sample": False}


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=256, bos_token_id=None, eos_token_id=None)
    return AutoModelForCausalLM.from_config(config).to("cuda" if torch.cuda.is_available() else "cpu").eval()


def chat(engine: CacheEngine, model: PreTrainedModel, turns: list[str]) -> torch.Tensor:
    """A conversation, a `generate` for each turn; its token ids, (1, tokens)."""
    prefixes = PrefixCache(engine, model)
    said = torch.empty((1, 0), dtype=torch.long, device=model.device)
    for turn in turns:
        said = torch.cat([said, torch.tensor([list(turn.encode())], device=model.device)], dim=1)
        inputs = {"input_ids": said, "attention_mask": torch.ones_like(said)}  # as a tokenizer returns them
        with prefixes.open(**inputs) as cache:  # holds the longest cached prefix of the conversation
            print(f"  {said.shape[1]:4} tokens of prompt, {cache.cached_tokens:4} from the cache {cache.sources or ''}")
            said = model.generate(**inputs, past_key_values=cache, **GREEDY)
            cache.commit(said)  # the prompt and the answer, for the next turn and for the next process
    return said


def main(directory: Path) -> None:
    model = make_model()
    config = {
        "model": model_section(model.config, dtype=model.dtype, name="tiny-llama", page_tokens=16),
        "gpu": {"device": model.device.type, "capacity": "16MiB"},
        "cpu": {"capacity": "32MiB"},
        "ssd": {"path": directory, "capacity": "64MiB"},
    }
    turns = ["You answer questions about the sea. " * 4, "Why is it salty?", "And why is it blue?"]
    answers = []
    for run in ("a new conversation", "the same one after a restart"):
        print(run)
        with CacheEngine.from_config(config) as engine:
            answers.append(chat(engine, model, turns))

    said = answers[0]  # the last answer once more, without a cache
    plain = model.generate(said[:, : -GREEDY["max_new_tokens"]], **GREEDY)
    same = torch.equal(answers[0], answers[1]) and torch.equal(answers[0], plain)
    print(f"same tokens as without the cache: {'yes' if same else 'no'}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as fresh:
        main(Path(fresh))
