"""A small inference engine on gdscache: chunked prefill, greedy decode, a continuous batch, paged KV of its own.

    python examples/engine.py --preset tiny --requests 8
    python examples/engine.py --preset 8b --config configs/llama3_8b.yaml --prefix 8192
    python examples/engine.py --model ~/models/Qwen3-8B --prefix 8192 --json runs.json

Each request is a long document and a question, of seeded random tokens. It is answered without a cache, with an empty
one, from the engine's own pool, from the tiers below it, and after a restart of the cache. The tokens must be the same
each time. A preset's weights are random, so its answers mean nothing.

The engine is in `gdscache/commands/toy_engine/`. This file makes the model, the cache and the requests, and prints the
results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gdscache import CacheEngine, Config, GdsCacheError, load_config
from gdscache.commands.toy_engine import (
    PRESETS,
    EngineOptions,
    InferenceEngine,
    KVPool,
    Request,
    Transformer,
    fingerprint,
    load_checkpoint,
    random_model,
)
from gdscache.commands.toy_engine.report import NEAR_TIE, NO_CACHE, Answer, differences, rows_of, table_of, verdict_of
from gdscache.config import ModelConfig
from gdscache.errors import DeviceError, GeometryError, InvalidValueError
from gdscache.tracing import Timeline, TraceTimeline, timeline_from_environment

# -- making things -----------------------------------------------------------------------------------------------------


def make_model(options: argparse.Namespace, device: torch.device) -> Transformer:
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    if options.model is not None:
        return load_checkpoint(options.model.expanduser(), device, dtype)
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = PRESETS[options.preset]
    if options.layers:
        shape = dataclasses.replace(shape, layers=options.layers)
    return random_model(shape, device, dtype or default, options.seed)


def make_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceError(f"the device is to be {name!r}, and torch sees no CUDA device", "pass --device cpu")
    return torch.device(name)


def make_config(options: argparse.Namespace, model: Transformer, given: Config | None, directory: Path) -> Config:
    """The configuration of the cache: what was given, or one with room for all requests.

    The geometry in a file must be this model's. The version of the weights is filled in where the file leaves it out,
    since only we know the weights, and pages of others must not be taken for ours.
    """
    weight = next(model.parameters())
    geometry = model.shape.cache_geometry(str(weight.dtype).removeprefix("torch."))
    if given is not None:
        says = given.model.model_dump()
        wrong = [f"{key} is {says[key]!r}, not {value!r}" for key, value in geometry.items() if says[key] != value]
        if wrong:
            raise GeometryError(
                f"{options.config} is not for {model.shape.name}: in its section model, {'; '.join(wrong)}",
                f"it has to say {', '.join(f'{key}: {value}' for key, value in geometry.items())}",
            )
        if given.cpu is None and given.ssd is None:
            raise InvalidValueError(f"{options.config} has no tier below the pool", "give it a section cpu or ssd")
        named = given.model.model_copy(update={"weights": given.model.weights or fingerprint(model)})
        return given.model_copy(update={"model": named})
    section = {"name": model.shape.name, "weights": fingerprint(model), "page_tokens": options.page_tokens} | geometry
    extent = ModelConfig(**section).layout().extent_bytes
    per_request = (options.prefix + options.suffix + options.new_tokens) // options.page_tokens + 1
    room, ring = (options.requests * per_request + 8) * extent, max(64 << 20, 8 * extent)
    return Config.from_dict(
        {
            "model": section,
            "gpu": {"device": str(weight.device), "staging": ring},
            "cpu": {"capacity": room},
            "ssd": {"path": str(directory), "capacity": 2 * room},
            "host_buffer": ring,
            "store": {"queue": room},
        },
        source="the configuration made for this run",
    )


def make_prompts(options: argparse.Namespace, vocab: int) -> list[list[int]]:
    """`requests` prompts: one of the documents, then a suffix that no other prompt has."""
    draw = torch.Generator().manual_seed(options.seed)
    documents = torch.randint(0, vocab, (options.documents, options.prefix), generator=draw).tolist()
    suffixes = torch.randint(0, vocab, (options.requests, options.suffix), generator=draw).tolist()
    return [documents[number % options.documents] + suffix for number, suffix in enumerate(suffixes)]


# -- running -----------------------------------------------------------------------------------------------------------


class Runner:
    """Runs the same prompts phase by phase and keeps the answers."""

    def __init__(
        self,
        options: argparse.Namespace,
        model: Transformer,
        config: Config,
        progress: Progress,
        timeline: Timeline,
    ) -> None:
        self.options, self.model, self.config, self.progress = options, model, config, progress
        self.prompts = make_prompts(options, model.shape.vocab)
        self.salt = f"run {uuid.uuid4()}"  # what an earlier run left in a directory is none of this run's business
        weight = next(model.parameters())
        per_request = -(-(options.prefix + options.suffix + options.new_tokens) // options.block_tokens)
        blocks = options.pool_blocks or options.requests * per_request
        self.pool = KVPool(model.shape, blocks, options.block_tokens, weight.device, weight.dtype)
        self.timeline: Timeline = timeline
        self.answers: list[Answer] = []
        self.seconds: dict[str, float] = {}

    def all_phases(self) -> None:
        self.serve("warm up", None, self.prompts[:1])
        self.serve(NO_CACHE, None, self.prompts)
        with CacheEngine.from_config(self.config, planes=self.pool.planes, timeline=self.timeline) as cache:
            self.serve("first time", cache, self.prompts)
            self.serve("again", cache, self.prompts)
            self.pool.forget()
            self.serve("pool emptied", cache, self.prompts, share=False)
        with CacheEngine.from_config(self.config, planes=self.pool.planes, timeline=self.timeline) as cache:
            self.serve("restarted", cache, self.prompts, share=False)
            cache.invalidate(cache.namespace(self.salt))

    def serve(self, phase: str, cache: CacheEngine | None, prompts: Sequence[list[int]], *, share: bool = True) -> None:
        """`concurrency` requests at a time: the next is submitted when one is done."""
        options = EngineOptions(self.options.chunk_tokens, self.options.concurrency, self.options.overlap, share=share)
        engine = InferenceEngine(self.model, self.pool, cache, options, timeline=self.timeline)
        task = self.progress.add_task(phase, total=len(prompts))
        started, waiting = time.perf_counter(), list(reversed(prompts))
        running: dict[int, Request] = {}
        done: dict[int, Request] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.options.concurrency:
                    running[len(prompts) - len(waiting)] = engine.submit(
                        waiting.pop(), self.options.new_tokens, salt=self.salt
                    )
                engine.step()
                over = {number: request for number, request in running.items() if request.finished}
                done |= over
                for number in over:
                    del running[number]
                self.progress.advance(task, len(over))
        finally:
            engine.close()
        self.seconds[phase] = time.perf_counter() - started
        if cache is not None:
            cache.drain(600)  # so that the next phase has the machine to itself
        if phase != "warm up":
            self.answers += [self._answer(phase, done[number]) for number in sorted(done)]

    def _answer(self, phase: str, request: Request) -> Answer:
        source = max(request.sources, key=lambda name: request.sources[name], default="cold")
        ttft = request.first_token - request.submitted
        return Answer(
            phase, source, sum(request.sources.values()), ttft, list(request.generated), list(request.margins)
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a small inference engine on gdscache")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--preset", choices=PRESETS, default="tiny", help="a model of random weights (default: tiny)")
    what.add_argument("--model", type=Path, help="a folder with a Llama or Qwen checkpoint: config.json, *.safetensors")
    parser.add_argument("--layers", type=int, default=0, help="layers of the preset's model; by default its own number")
    parser.add_argument("--config", type=Path, help="gdscache configuration; by default one made for the run")
    parser.add_argument("--dir", type=Path, help="without --config: directory of the SSD tier, which is kept")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time")
    parser.add_argument("--documents", type=int, default=2, help="prefixes that the requests share")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens of a document")
    parser.add_argument("--suffix", type=int, default=64, help="tokens of a question")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--chunk-tokens", type=int, default=512, help="most prompt tokens in a step")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens of a block of the engine's pool")
    parser.add_argument("--page-tokens", type=int, default=64, help="without --config: tokens of a page of the cache")
    parser.add_argument("--pool-blocks", type=int, default=0, help="blocks of the pool; by default all requests fit")
    parser.add_argument("--no-overlap", dest="overlap", action="store_false", help="compute when all is loaded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, help="write a timeline here, for https://ui.perfetto.dev")
    parser.add_argument("--json", type=Path, help="write the rows here too; - is the standard output, without a table")
    options = parser.parse_args(arguments)
    if options.layers < 0:
        parser.error(f"--layers is {options.layers}, it has to be at least 1")
    for name in ("requests", "concurrency", "documents", "prefix", "suffix", "new_tokens", "chunk_tokens",
                 "block_tokens", "page_tokens"):  # fmt: skip
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, it has to be at least 1")
    return options


def run(options: argparse.Namespace, directory: Path, console: Console) -> bool:
    """All phases; True when the tokens are the same in each."""
    timeline = timeline_from_environment() if options.trace is None else TraceTimeline(options.trace)
    given = load_config(options.config) if options.config is not None else None
    device = given.gpu.device if given is not None and options.device == "auto" else options.device
    model = make_model(options, make_device(device))
    config = make_config(options, model, given, directory)
    weight, shape = next(model.parameters()), model.shape
    console.print(
        f"{shape.name}: {shape.layers} layers, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}; {options.requests} prompts of "
        f"{options.prefix + options.suffix:,} tokens, {options.new_tokens} new ones each"
    )
    bars = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bars, console=console, transient=True) as progress:
        runner = Runner(options, model, config, progress, timeline)
        try:
            runner.all_phases()
        finally:
            if isinstance(timeline, TraceTimeline):
                timeline.write()
    rows = rows_of(runner.answers, runner.seconds)
    different = differences(runner.answers, NEAR_TIE if weight.dtype.itemsize == 2 else 0.0)
    verdict = verdict_of(different)
    console.print(table_of(rows))
    console.print(f"same tokens as without the cache: {verdict}", highlight=False)
    if options.json is not None:
        report = {"model": dataclasses.asdict(shape), "dtype": str(weight.dtype), "device": str(weight.device),
                  "same_tokens": verdict, "different": different, "rows": rows}  # fmt: skip
        text = json.dumps(report, indent=1) + "\n"
        if str(options.json) == "-":
            sys.stdout.write(text)
        else:
            options.json.write_text(text)
    return verdict != "no"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(stderr=str(options.json) == "-")
    try:
        if options.config is not None or options.dir is not None:
            return 0 if run(options, options.dir or Path(), console) else 1
        with tempfile.TemporaryDirectory(prefix="gdscache-engine-") as fresh:
            return 0 if run(options, Path(fresh), console) else 1
    except GdsCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
