"""First tokens and requests a second in vLLM or SGLang: their own caches, and gdscache. Behind `gdscache bench ttft`.

A run is a process with one engine and one way of keeping the KV cache (`serving_run.py`). Runs of a stage open their
engines at the same time, which takes a minute or two, and measure one at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer

from gdscache.commands.bench import kit, machine, serving_run
from gdscache.commands.bench.figures import Bar, Values
from gdscache.commands.bench.shapes import HYBRIDS, LLAMAS, MOST_POSITIONS, STATES, model_config, token_bytes
from gdscache.commands.console import figure
from gdscache.errors import InvalidValueError, MissingPackageError
from gdscache.sizes import GIB

OPEN_S, MEASURE_S, PROBE_S = 400.0, 300.0, 120.0
MOST_TOKENS = MOST_POSITIONS - serving_run.SPARE
END_S = 30.0  # seconds for a killed process to end
POLICIES = ("wait_complete", "best_effort", "timeout")
HICACHE = ("hicache", "storage")  # ways that fetch pages from files by HiCache's policy
TRAFFIC = ("none", "cpu", "gdscache", "hicache", "linker")  # ways that also serve traffic
GPU_ONLY = {"cpu", "files"}  # ways that vLLM refuses without a GPU
TAIL = 1500  # characters of a failed run's log
KINDS = {"shared": "half of each prompt shared", "lone": "nothing shared"}
DISKS = {"ram": "RAM disk", "disk": "disk"}
NAMES = {
    "none": "no cache",
    "cpu": "vLLM's CPU offloading",
    "files": "vLLM's file tier",
    "gdscache": "gdscache",
    "hicache": "HiCache",
    "storage": "gdscache under HiCache",
    "linker": "gdscache's linker",
}
OURS = ("gdscache", "storage", "linker")


class Way(NamedTuple):
    """A run of a stage. `second`: its files are in the directory of --disk."""

    way: str
    restarted: bool = False
    second: bool = False


STAGES = {
    "vllm": (
        (Way("none"), Way("cpu"), Way("files"), Way("gdscache")),
        (Way("files", restarted=True), Way("gdscache", restarted=True), Way("gdscache", second=True)),
        (Way("gdscache", restarted=True, second=True),),  # times of loads from the disk are not known yet
        (Way("gdscache", restarted=True, second=True),),
    ),
    "sglang": (
        (Way("none"), Way("hicache"), Way("storage"), Way("linker")),
        (*(Way(way, restarted=True) for way in ("hicache", "storage", "linker")), Way("storage", second=True)),
        (Way("storage", restarted=True, second=True), Way("linker", second=True)),
        (Way("storage", restarted=True, second=True),),
    ),
}
_PROBE = """
import importlib.metadata as metadata, importlib.util, json, sys
names, found = metadata.packages_distributions(), {}
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is not None:
        found[name] = metadata.version(names[name][0]) if name in names else "a source tree"
import torch
print(json.dumps([found, torch.cuda.device_count()]))
"""


class Probed(NamedTuple):
    """A Python's packages: versions by name, and the number of GPUs that its torch sees."""

    versions: dict[str, str]
    gpus: int


def probe(engine: str, python: str) -> Probed:
    """Ask the engine's Python. Raises `InvalidValueError` if it does not run, and `MissingPackageError` if it lacks the
    engine or gdscache."""
    needed = (engine, "gdscache", "torch")
    try:
        ended = subprocess.run([python, "-c", _PROBE, *needed], capture_output=True, text=True, timeout=PROBE_S)
        found = Probed(*json.loads(ended.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidValueError(f"--python {python} does not run: {error}", "name a Python") from None
    except (IndexError, ValueError):
        cause = (ended.stderr.splitlines() or [f"exit status {ended.returncode}"])[-1]
        raise InvalidValueError(f"--python {python} has no torch that works: {cause}", "name another Python") from None
    missing = [name for name in needed if name not in found.versions]
    if missing:
        raise MissingPackageError(
            f"{python} has no {missing[0]}", f"name a Python with {engine} and gdscache: --python PATH"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Settings(kit.Settings):
    """The bench's extent. A figure is the median of `repeat` prompts of `tokens` tokens, 90 % of them cached by an
    earlier prompt.

    `turns`: loads of traffic of each kind. `stages`: number of stages; restarts begin with the second. `ways`: only
    these, empty for all. `policy`: when HiCache stops to fetch a prompt's files, None for `wait_complete` on a RAM
    disk. `graphs`: decode by CUDA graphs. `tp`: GPUs of an engine. `at_once`: engines open at the same time. `threads`:
    of gdscache's, for files on a RAM disk. `gpus` and `versions`: of the Python.
    """

    engine: str = "vllm"
    preset: str = "8b"
    tokens: int = 32_768
    page_tokens: int = 64
    repeat: int = 3
    turns: int = 3
    stages: int = 4
    ways: tuple[str, ...] = ()
    policy: str | None = None
    graphs: bool = False
    tp: int = 1
    at_once: int = 4
    threads: int = min(28, os.cpu_count() or 1)
    python: str = sys.executable
    disk: str | None = None
    gpus: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def defaults(
        cls, *, quick: bool = False, engine: str = "vllm", python: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """`quick`, and every profile without a GPU, has a tiny model and short prompts."""
        if engine not in STAGES:
            raise InvalidValueError(f"unknown engine {engine!r}", f"choose of transformers, {', '.join(STAGES)}")
        probed = probe(engine, python or sys.executable)
        found: dict[str, Any] = {"gpus": probed.gpus, "versions": probed.versions}
        if quick:
            return found | {"preset": "tiny", "tokens": 1024, "turns": 1, "stages": 2}
        return found if probed.gpus else found | {"preset": "tiny", "tokens": 4096}

    @property
    def prompt_bytes(self) -> int:
        """Bytes of a prompt's pages, rounded up for small models and states."""
        least = GIB if self.preset == "tiny" else 6 * GIB if self.preset in STATES else 0
        return max(self.tokens * token_bytes(self.preset), least)

    @property
    def ssd_bytes(self) -> int:
        """Bytes of a way's files."""
        return GIB if self.preset == "tiny" else (2 * self.repeat + 5) * self.prompt_bytes // 2

    @property
    def needed(self) -> int:
        ways = {way.way for stage in chosen(self) for way, _ in stage if not way.second}
        return len(ways - {"none", "cpu"}) * self.ssd_bytes

    def check(self) -> None:
        """Raises `InvalidValueError` for settings without a measurement."""
        known = {way.way for stage in STAGES[self.engine] for way in stage}
        for what, values, choice in (
            ("preset", (self.preset,), (*LLAMAS, *HYBRIDS)),
            ("way", self.ways, sorted(known)),
            ("policy", (self.policy,) if self.policy else (), POLICIES),
        ):
            if wrong := [value for value in values if value not in choice]:
                raise InvalidValueError(f"unknown {what} {wrong[0]!r}", f"choose of {', '.join(choice)}")
        if self.engine == "sglang" and self.repeat < 3:
            raise InvalidValueError(f"--repeat {self.repeat}", "use 3 at least: SGLang's GPU cache holds two prompts")
        if not self.gpus and (self.engine == "sglang" or self.preset != "tiny"):
            what, hint = f"the preset {self.preset}", "use --preset tiny"
            if self.engine == "sglang":
                what, hint = "SGLang", "run it on a machine with a GPU, or name a Python whose torch sees it: --python"
            raise InvalidValueError(f"{what} needs a GPU, and torch of {self.python} sees none", hint)
        if self.tp > max(1, self.gpus):
            raise InvalidValueError(f"--tp {self.tp} with {self.gpus} GPUs", f"use at most {max(1, self.gpus)}")
        if not 256 <= self.tokens <= MOST_TOKENS:
            raise InvalidValueError(f"a prompt of {self.tokens} tokens", f"use at least 256, at most {MOST_TOKENS}")
        if self.disk is not None:
            kit.check_directory(Path(self.disk), "--disk")


def chosen(settings: Settings) -> list[list[tuple[Way, bool]]]:
    """The runs of each stage, and whether each serves traffic: only the last one of a way and a directory does. So all
    first tokens of a way are measured before traffic evicts its prompts."""
    stages = [
        [way for way in stage if (not settings.ways or way.way in settings.ways) and (settings.disk or not way.second)]
        for stage in STAGES[settings.engine][: settings.stages]
    ]
    last = {(way.way, way.second): at for at, stage in enumerate(stages) for way in stage if way.way in TRAFFIC}
    return [
        [(way, settings.turns > 0 and last.get((way.way, way.second)) == at) for way in stage]
        for at, stage in enumerate(stages)
    ]


def measure(run: kit.Run, settings: Settings, directory: Path) -> None:
    """Measure all runs. Files go into temporary directories, which are deleted. Raises `InvalidValueError`."""
    stages, serving = chosen(settings), Serving(run, settings)
    with contextlib.ExitStack() as undo:
        for one in (directory, settings.disk) if settings.disk else (directory,):
            made = tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=one)
            serving.folders.append(Path(undo.enter_context(made)))
        run.plan([serving.label(at, way) for at, stage in enumerate(stages) for way, _ in stage])
        serving.model.mkdir()
        (serving.model / "config.json").write_text(json.dumps(model_config(settings.preset)))
        for at, stage in enumerate(stages):
            some = [(way, traffic) for way, traffic in stage if settings.gpus or way.way not in GPU_ONLY]
            for way, _ in (one for one in stage if one not in some):
                run.note("cannot", serving.label(at, way), "vLLM's own offloading needs a GPU")
            for first in range(0, len(some), settings.at_once):
                serving.side_by_side(at, some[first : first + settings.at_once])


@dataclasses.dataclass
class Running:
    label: str
    order: dict[str, Any]
    answers: Path
    process: subprocess.Popen[bytes]

    def file(self, suffix: str) -> Path:
        return Path(f"{self.answers}{suffix}")

    @property
    def opened(self) -> bool:
        """Whether it waits for its turn, or has ended."""
        return self.file(".ready").exists() or self.process.poll() is not None

    def end(self) -> None:
        """Kill the process and its descendants. One in a call that the kernel does not end is left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            typer.echo(
                f"{self.label}: process {self.process.pid} has not ended {END_S:g} s after SIGKILL, since a call of "
                "the kernel does not return. It may still hold the GPU's memory, and is left behind",
                err=True,
            )


class Serving:
    """Starts runs, and lets them measure one after the other."""

    def __init__(self, run: kit.Run, settings: Settings) -> None:
        self.run, self.settings = run, settings
        self.folders: list[Path] = []
        self._started = 0

    @property
    def model(self) -> Path:
        """The directory of the model's configuration; an engine makes up the weights when it opens."""
        return self.folders[0] / "model"

    def label(self, stage: int, way: Way) -> str:
        where = DISKS[self._where(self.folders[way.second])]
        return f"stage {stage + 1}: {NAMES[way.way]}{', restarted' if way.restarted else ''}, {where}"

    @staticmethod
    def _where(directory: Path) -> str:
        return "ram" if machine.in_memory(directory) else "disk"

    def order(self, way: Way, *, traffic: bool) -> dict[str, Any]:
        """A run's order."""
        settings, folder = self.settings, self.folders[way.second]
        small = settings.preset == "tiny"
        of, where = model_config(settings.preset), self._where(folder)
        prompt = settings.prompt_bytes
        policy = settings.policy or ("wait_complete" if where == "ram" else "best_effort")  # a disk may be slow
        self._started += 1
        step = max(128, settings.page_tokens)  # no page is cached in part
        return dataclasses.asdict(settings) | {
            "way": way.way,
            "restarted": way.restarted,
            "where": where,
            "folder": str(folder),
            "policy": policy if way.way in HICACHE else None,
            "traffic": traffic,
            "model": str(self.model),
            "cached": settings.tokens * 9 // 10 // step * step,
            "part": 128 if small else min(serving_run.PART, settings.tokens // 2 // step * step),
            "ends": 500 + 100 * self._started,  # of prompts, so that runs have distinct prompts
            "gpu": settings.gpus > 0,
            "groups": "layer_types" in of,
            "states": settings.preset in STATES,
            "kv_cache": 9 * prompt // 4 // settings.tp,  # of each GPU
            "gpu_tokens": 9 * settings.tokens // 4,  # of SGLang's GPU cache: two prompts, so the third evicts the first
            "cpu": GIB if small else (2 * settings.repeat + 3) * prompt // 2,  # it holds all prompts of first tokens
            "ssd": settings.ssd_bytes,
            "host_buffer": "64MiB" if small else "512MiB",
            "threads": settings.threads if where == "ram" else 8,  # the default, 8, keeps a disk busy and no RAM disk
        }

    def gpus(self, number: int) -> str:
        """The GPUs of engine `number` of those open at the same time."""
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        every = visible or [str(gpu) for gpu in range(self.settings.gpus)]
        first = number % max(1, len(every) // self.settings.tp) * self.settings.tp
        return ",".join(every[first : first + self.settings.tp])

    def side_by_side(self, stage: int, ways: Sequence[tuple[Way, bool]]) -> None:
        """Open an engine for each way, and let them measure one after the other."""
        running: list[Running] = []
        try:
            for way, traffic in ways:
                running.append(self._start(stage, way, len(running), traffic=traffic))
            opened, begun = 0, time.monotonic()
            while opened < len(running) and time.monotonic() - begun < OPEN_S:
                opened = sum(one.opened for one in running)
                self.run.say(f"{opened} of {len(running)} engines are open")
                time.sleep(0.2)
            for one in running:
                self._measure(one)
        finally:
            for one in running:
                one.end()

    def _start(self, stage: int, way: Way, number: int, *, traffic: bool) -> Running:
        order = self.order(way, traffic=traffic)
        answers = self.folders[0] / f"{self._started}.json"
        label = self.label(stage, way)
        order_file, log = answers.with_suffix(".order"), answers.with_suffix(".log")
        order_file.write_text(json.dumps(order))
        one = {"CUDA_VISIBLE_DEVICES": self.gpus(number)} if self.settings.gpus > 1 else {}
        with log.open("w") as out:
            process = subprocess.Popen(
                [*command(self.settings), str(order_file), str(answers)],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | one,
            )
        return Running(label, order, answers, process)

    def _measure(self, one: Running) -> None:
        self.run.say(one.label)
        one.file(".go").touch()
        ready = one.file(".ready").exists()
        try:
            status: int | None = one.process.wait(MEASURE_S if ready else 1)
        except subprocess.TimeoutExpired:
            status = None
        one.end()
        found = json.loads(one.answers.read_text()) if one.answers.exists() else {}
        row = {key: one.order[key] for key in ("way", "restarted", "where", "policy")} | found
        wrong = ""
        if status != 0:
            log = one.answers.with_suffix(".log").read_text(errors="replace")
            typer.echo(f"{one.label}\n{log[-TAIL:]}", err=True)
            late = f"it measured for more than {MEASURE_S:g} s" if ready else f"it was not open after {OPEN_S:g} s"
            wrong = late if status is None else f"exit status {status}"
            if "NoSpaceError" in log:
                wrong += f"; {kit.ELSEWHERE}: {'--dir' if one.order['folder'] == str(self.folders[0]) else '--disk'}"
        self.run.add(one.label, {"rows": [row]}, wrong=wrong)
        self.run.save()  # a machine may be gone before the last run ends


def command(settings: Settings) -> list[str]:
    """The command of a run, without its files."""
    return [settings.python, "-m", "gdscache.commands.bench.serving_run", settings.engine]


# -- tables and the plot -----------------------------------------------------------------------------------------------


def first_bars(report: kit.Report) -> list[Bar]:
    """Milliseconds to the first token, way by way."""
    plain, cached = _plain(report)
    bars = [Bar("recomputed", plain["recomputed"]["ms"], "0.6")] if plain else []
    for row in report["rows"]:
        found, names = row.get("first", {}).get("loaded"), [bar.name for bar in bars]
        of = f", after a restart, {DISKS[row['where']]}" if row["restarted"] else ", CPU memory"
        name = NAMES[row["way"]] + of + (f", {row['policy']}" if row["restarted"] and row.get("policy") else "")
        if found and (row["restarted"] or name not in names):  # CPU memory is the same with every lower tier
            loaded = statistics.median(found["cached"])
            name = f"{name}, again" if name in names else name
            bars.append(Bar(f"{name}, loaded {loaded:,.0f}" if loaded < cached else name, found["ms"], _color(row)))
    return [*bars, Bar("resident on the GPU", plain["resident"]["ms"], "0.8")] if plain else bars


def _plain(report: kit.Report) -> tuple[kit.Report, float]:
    """First tokens by computing and of resident prompts, and the cached tokens of the latter; empty without them."""
    plain: kit.Report = next((row["first"] for row in report["rows"] if "resident" in row.get("first", {})), {})
    return plain, statistics.median(plain["resident"]["cached"]) if plain else 0


def traffic_bars(report: kit.Report, kind: str) -> list[Bar]:
    """Requests a second, way by way."""
    bars: list[Bar] = []
    for row in report["rows"]:
        if found := row.get(f"{kind}_requests_per_s"):
            name = NAMES[row["way"]] + (", after a restart" if row["restarted"] else "")
            name += f", {DISKS[row['where']]}" if row["restarted"] or row["where"] == "disk" else ""
            bars.append(Bar(name, found, _color(row)))
    return bars


def _color(row: kit.Report) -> str:
    return "tab:green" if row["way"] in OURS else "0.6" if row["way"] == "none" else "tab:orange"


def panels(report: kit.Report) -> list[Values]:
    """First tokens, and requests a second; medians of prompts and turns."""
    settings, cached = report["settings"], _plain(report)[1]
    tp, engine, gpus = settings["tp"], settings["engine"], settings["gpus"]
    kind = (report["machine"]["gpus"] or ["GPU"])[0]  # the engine's Python may see GPUs that this one does not
    where = "no GPU" if not gpus else f"{tp} of {gpus} {kind} an engine" if tp > 1 else kind
    by = f"{engine} {settings['versions'][engine]}, {where}"
    title = f"Time to first token; {settings['tokens']:,} tokens, {cached:,.0f} of them cached; {by}"
    found = [Values(title, first_bars(report), "ms", "{:.0f}".format)]
    for kind, words in KINDS.items():
        title = f"Requests a second, {words}; {by}"
        found.append(Values(title, traffic_bars(report, kind), "requests/s", "{:.1f}".format, less=False))
    return found


def bottom(report: kit.Report) -> list[str]:
    """A server user's gain."""
    found = {bar.name: bar.median for bar in first_bars(report)}
    computed, said = found.get("recomputed"), []
    if computed is not None and len(found) > 2:
        loaded = [
            f"{figure(ms)} ms with {name} ({figure(computed / ms)} times as fast)"
            for name, ms in found.items()
            if name not in ("recomputed", "resident on the GPU")
        ]
        said.append(
            f"A prompt of {report['settings']['tokens']:,} tokens has its first token after {figure(computed)} ms "
            f"where all of it is computed. With {_plain(report)[1]:,.0f} of them cached: {'; '.join(loaded)}."
        )
    for kind, words in KINDS.items():
        if rates := [f"{figure(bar.median)} with {bar.name}" for bar in traffic_bars(report, kind)]:
            said.append(f"Requests a second, {words}: {', '.join(rates)}.")
    return [" ".join(said)] if said else []


BENCH = kit.Bench("ttft", "gdscache.bench.serving/3", {"rows": []}, Settings, measure, panels, bottom)
