"""The demo: long documents, each asked several questions, by two processes one after the other.

    python examples/demo.py [--quick] [--dir DIRECTORY] [--json FILE]

A small Llama-shaped model with seeded random weights reads real text byte by byte (the help pages that come with
Python). Each answer is computed without any cache too, and must be the same, token for token, wherever the document's
KV cache came from: the GPU pool, the CPU pool, the SSD, or the SSD after a restart. On a machine without a GPU the GPU
pool lies in host memory. The answers themselves mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import rich.box
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from gdscache import CacheEngine
from gdscache.config import ModelConfig
from gdscache.integrations.transformers import PrefixCache, model_section

DOCUMENTS, QUESTION_TOKENS, NEW_TOKENS = 4, 96, 16
QUESTIONS = ("What is this about?", "Which rule matters most?", "What is said about errors?", "Is there an exception?")
LAST = DOCUMENTS - 1


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the demo is. A page is 64 tokens."""

    document_tokens: int
    hidden: int
    layers: int

    @property
    def pool_pages(self) -> int:
        """Pages of one request, its answer included."""
        return -(-(self.document_tokens + QUESTION_TOKENS + NEW_TOKENS) // 64)


FULL, QUICK = Size(3072, 512, 8), Size(512, 128, 4)


@dataclasses.dataclass(frozen=True)
class Result:
    """One request: how it went, and the tokens of its answer."""

    phase: str
    seconds: float  # to the first token, opening the cache included
    answer: list[int]
    sources: dict[str, int] = dataclasses.field(default_factory=dict)  # tokens reused, by the tier they came from
    load_seconds: float = 0.0

    @property
    def source(self) -> str:
        """The tier that most of the reused tokens came from."""
        return max(self.sources, key=lambda tier: self.sources[tier], default="cold")


class FirstToken(BaseStreamer):
    """Notes when `generate` has its first token: `put` is called with the prompt, then with each token."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def make_model(size: Size) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def make_config(model: PreTrainedModel, size: Size, directory: Path) -> dict[str, Any]:
    """Pools so small that each tier gets its turn: the GPU pool holds one request, the CPU pool two documents."""
    section = model_section(model.config, dtype=model.dtype, name="demo", page_tokens=64)
    page = ModelConfig(**section).layout().extent_bytes
    document = size.document_tokens // 64
    return {
        "model": section,
        "gpu": {"device": model.device.type, "capacity": size.pool_pages * page, "staging": "64MiB"},
        "cpu": {"capacity": 2 * (document + 3) * page},
        "ssd": {"path": str(directory), "capacity": DOCUMENTS * (document + 8) * page * 5 // 4},
        "host_buffer": "32MiB",
    }


def prompt(size: Size, document: int, question: int) -> torch.Tensor:
    """Token ids (1, tokens): a document, then a question."""
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))
    text = topics[longest[document]].encode("ascii", "replace")[: size.document_tokens]
    return torch.tensor([list(text + QUESTIONS[question].encode().ljust(QUESTION_TOKENS))])


def ask(model: PreTrainedModel, ids: torch.Tensor, prefixes: PrefixCache | None, phase: str) -> Result:
    """Answer one prompt, through the cache if there is one."""
    first, ids = FirstToken(), ids.to(model.device)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "streamer": first}
    started = time.perf_counter()
    if prefixes is None:
        tokens = model.generate(ids, **options)
        return Result(phase, first.at - started, tokens[0, ids.shape[1] :].tolist())
    with prefixes.open(ids) as cache:
        tokens = model.generate(ids, past_key_values=cache, **options)
        cache.commit(tokens)
        answer = tokens[0, ids.shape[1] :].tolist()
        result = Result(phase, first.at - started, answer, cache.sources, cache.load_seconds)
    prefixes.engine.drain(60)  # so that the next measurement has the machine to itself
    return result


# -- the two processes -------------------------------------------------------------------------------------------------

# (document, question), in an order that makes documents leave the GPU pool, and then the CPU pool.
FIRST = [(d, q) for d in range(DOCUMENTS) for q in (0, 1)] + [(LAST - 1, 2), (0, 2)]
RESTART = [(d, 3) for d in range(DOCUMENTS)] + [(LAST, 2)]


def run_phase(phase: str, size: Size, directory: Path) -> None:
    """What a child process does: each request without the cache, then with it; the results go to `phase`.json."""
    model = make_model(size)
    ask(model, prompt(size, 0, 0)[:, :64], None, "warm up")
    name, requests = ("first process", FIRST) if phase == "first" else ("second process, after a restart", RESTART)
    results: list[dict[str, Any]] = []
    bars = (TextColumn("{task.description:<31}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with CacheEngine.from_config(make_config(model, size, directory / "cache")) as engine, Progress(*bars) as progress:
        if phase == "first":
            engine.clear()  # what an earlier run left in a given directory: this process starts cold
        for document, question in progress.track(requests, description=name):
            ids = prompt(size, document, question)
            pair = ask(model, ids, None, "no cache"), ask(model, ids, PrefixCache(engine, model), phase)
            results += [{"request": [document, question], **dataclasses.asdict(result)} for result in pair]
    (directory / f"{phase}.json").write_text(json.dumps(results))


# -- the process that starts them --------------------------------------------------------------------------------------


def summary(results: Sequence[tuple[tuple[int, int], Result]], token_bytes: int) -> list[dict[str, Any]]:
    """A row for each phase and source: what the requests had in common."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for _, result in results:
        groups.setdefault((result.phase, result.source), []).append(result)
    rows = []
    for (phase, source), members in groups.items():
        loaded = sum(m.sources.get(source, 0) for m in members if source in ("cpu", "ssd"))
        seconds = sum(m.load_seconds for m in members)
        rows.append(
            {
                "phase": phase,
                "source": source,
                "requests": len(members),
                "tokens_reused": sum(sum(m.sources.values()) for m in members),
                "first_token_seconds": statistics.median(m.seconds for m in members),
                "gb_per_second": loaded * token_bytes / seconds / 1e9 if loaded else None,
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]], prompt_tokens: int) -> Table:
    tiers = {"cold": "nothing yet", "gpu": "GPU pool", "cpu": "CPU pool", "ssd": "SSD"}
    table = Table(
        title=f"prompts of {prompt_tokens:,} tokens: tokens reused, time to the first token", box=rich.box.SIMPLE
    )
    for column in ("prefix from", "prompts", "reused", "first token", "speed-up", "load"):
        table.add_column(column, justify="left" if column == "prefix from" else "right", no_wrap=True)
    base = next(row["first_token_seconds"] for row in rows if row["phase"] == "no cache")
    for row in rows:
        name = ("restart: " if row["phase"] == "restart" else "") + tiers[row["source"]]
        rate = row["gb_per_second"]
        table.add_row(
            "(no cache)" if row["phase"] == "no cache" else name,
            str(row["requests"]),
            f"{row['tokens_reused']:,}",
            f"{row['first_token_seconds'] * 1e3:,.0f} ms",
            f"{base / row['first_token_seconds']:.1f} x",
            f"{rate:.2f} GB/s" if rate else "in place" if row["source"] == "gpu" else "",
        )
    return table


def run_demo(size: Size, directory: Path, options: argparse.Namespace, console: Console) -> bool:
    """Both processes and the table; True when all answers are the same as without the cache."""
    results: list[tuple[tuple[int, int], Result]] = []
    for phase in ("first", "restart"):
        quick = ["--quick"] if options.quick else []
        command = [sys.executable, __file__, "--phase", phase, "--dir", str(directory), *quick]
        subprocess.run(command, check=True)
        lines = json.loads((directory / f"{phase}.json").read_text())
        results += [(tuple(line.pop("request")), Result(**line)) for line in lines]

    expected = {request: result.answer for request, result in results if result.phase == "no cache"}
    through_cache = [(request, result) for request, result in results if result.phase != "no cache"]
    wrong = [request for request, result in through_cache if result.answer != expected[request]]
    rows = summary(results, token_bytes=2 * size.layers * 4 * 64 * 4)  # K and V, 4 heads of 64 float32
    console.print(show(rows, size.document_tokens + QUESTION_TOKENS))
    console.print(f"{len(through_cache)} answers of {NEW_TOKENS} tokens compared; SSD tier in {directory / 'cache'}")
    console.print(f"same tokens as without the cache: {'no' if wrong else 'yes'}", highlight=False)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"same_tokens": not wrong, "different": wrong, "rows": rows}, indent=1) + "\n"
        )
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="gdscache: the demo")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short documents")
    parser.add_argument("--dir", type=Path, help="where the SSD tier lies, and stays; a temporary directory by default")
    parser.add_argument("--json", type=Path, help="write the table as JSON too")
    parser.add_argument("--phase", choices=("first", "restart"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.phase is not None:
        run_phase(options.phase, size, options.dir)
        return 0
    console = Console()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: its pool is host memory"
    console.print(
        f"a Llama of {size.layers} layers, {DOCUMENTS} documents of {size.document_tokens:,} tokens; {device}"
    )
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
        return 0 if run_demo(size, options.dir, options, console) else 1
    with tempfile.TemporaryDirectory(prefix="gdscache-demo-") as fresh:
        return 0 if run_demo(size, Path(fresh), options, console) else 1


if __name__ == "__main__":
    sys.exit(main())
