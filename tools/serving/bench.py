"""First tokens and requests a second in vLLM or SGLang: their own caches, and gdscache. On a GPU, in turns.

    python tools/serving/bench.py vllm --ram /dev/shm/serving --disk /root/serving --json FILE --plot FILE
    python tools/serving/bench.py --from FILE --plot FILE

Needs an environment with the engine and gdscache. Llama-3-8B's shape with made-up weights; 32,768 tokens, of which
29,440 were asked for before. The engines open side by side, which takes a minute or two, and measure one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import parts

from gdscache.commands.bench import machine

HERE = Path(__file__).parent
OPEN_S, MEASURE_S = 400.0, 300.0
# Of each stage: the way, whether it begins after a restart, where its files are, and whether it serves traffic, too.
# That pushes the pages of first tokens out of our files, so it comes behind their restart.
STAGES = {
    "vllm": [
        [
            ("none", False, "ram", True),
            ("cpu", False, "ram", True),
            ("files", False, "ram", False),
            ("gdscache", False, "ram", False),
        ],
        [("files", True, "ram", False), ("gdscache", True, "ram", True), ("gdscache", False, "disk", False)],
        [("gdscache", True, "disk", True)],  # what loads from the disk take is not known yet
        [("gdscache", True, "disk", False)],
    ],
    "sglang": [
        [
            ("none", False, "ram", True),
            ("hicache", False, "ram", True),
            ("storage", False, "ram", False),
            ("linker", False, "ram", False),
        ],
        [
            ("hicache", True, "ram", False),
            ("storage", True, "ram", False),
            ("linker", True, "ram", True),
            ("storage", False, "disk", False),
        ],
        [("storage", True, "disk", False), ("linker", False, "disk", True)],
        [("storage", True, "disk", False)],
    ],
}
OURS = ("gdscache", "storage", "linker")
HICACHE = ("hicache", "storage")
POLICIES = {"ram": "wait_complete", "disk": "best_effort"}  # a slow disk takes longer than computing
KINDS = {"shared": "half of each prompt shared", "lone": "nothing shared"}
DISKS = {"ram": "RAM disk", "disk": "root disk"}
NAMES = {
    "none": "no cache",
    "cpu": "vLLM's CPU offloading",
    "files": "vLLM's file tier",
    "gdscache": "gdscache",
    "hicache": "HiCache",
    "storage": "gdscache under HiCache",
    "linker": "gdscache's linker",
}


Bar = tuple[str, list[float], str]  # what it is of, its values, its colour
Run = tuple[dict[str, Any], Path, Path, "subprocess.Popen[bytes]"]  # an order, its answers, its log, the process


class Bench:
    """One run of the whole."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.work: Path = given.ram
        self.model = self.work / "model"
        self.rows: list[dict[str, Any]] = []
        self.machine = machine.describe(given.ram)

    def order(self, way: str, restarted: bool, where: str, traffic: bool) -> dict[str, Any]:
        given = self.given
        small = given.shape == "tiny"
        of, token_bytes = parts.SHAPES[given.shape], parts.token_bytes(given.shape)
        prompt = 1 << 30 if small else max(given.tokens * token_bytes, 6 << 30 if given.shape in parts.STATES else 0)
        return {
            "way": way,
            "restarted": restarted,
            "where": where,
            "folder": str(given.disk if where == "disk" else given.ram),
            "policy": (given.policy or POLICIES[where]) if way in HICACHE else None,
            "traffic": traffic and given.turns > 0,
            "turns": given.turns,
            "model": str(self.model),
            "tokens": given.tokens,
            "cached": given.tokens * 9 // 10 // 128 * 128,
            "part": parts.PART if not small else 128,
            "repeat": given.repeat,
            "attention": given.attention or ("FLASH_ATTN" if given.engine == "vllm" else "triton"),
            "gpu": not small,
            "groups": "layer_types" in of or "attn_layer_indices" in of,
            "states": given.shape in parts.STATES,
            "block": given.block,
            "graphs": given.graphs,
            "tp": given.tp,
            "kv_cache": 9 * prompt // 4 // given.tp,  # of each GPU
            "token_bytes": token_bytes,
            "cpu": 1 << 30 if small else 9 * prompt // 2,
            "ssd": 1 << 30 if small else 11 * prompt // 2,
            "host_buffer": "64MiB" if small else "512MiB",
            "threads": given.threads if where == "ram" else 8,  # the default, 8, keeps a disk busy and no RAM disk
        }

    def gpus(self, number: int) -> str:
        """Those of the engine of that number, of those that are open side by side."""
        first = number % (self.given.gpus // self.given.tp) * self.given.tp
        return ",".join(str(gpu) for gpu in range(first, first + self.given.tp))

    def stage(self, ways: list[tuple[str, bool, str, bool]]) -> None:
        """Open all, and have one after the other measure."""
        runs: list[Run] = []
        try:
            self._measure(ways, runs)
        finally:
            for _, _, _, child in runs:
                end(child)

    def _measure(self, ways: list[tuple[str, bool, str, bool]], runs: list[Run]) -> None:
        for way in ways:
            order = self.order(*way) | {"ends": 500 + 100 * (len(self.rows) + len(runs))}  # no run's are another's
            name = self.work / f"{len(self.rows) + len(runs)}-{way[0]}-{'again' if way[1] else 'first'}-{way[2]}"
            order_file, answers, log = (name.with_suffix(suffix) for suffix in (".order", ".json", ".log"))
            order_file.write_text(json.dumps(order))
            command = [sys.executable, str(HERE / f"{self.given.engine}_run.py"), str(order_file), str(answers)]
            one = {"CUDA_VISIBLE_DEVICES": self.gpus(len(runs))} if self.given.gpus > 1 else {}
            with log.open("w") as out:
                child = subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | one
                )
            runs.append((order, answers, log, child))
        opened = time.monotonic()
        while time.monotonic() - opened < OPEN_S:
            if all(Path(f"{a}.ready").exists() or c.poll() is not None for _, a, _, c in runs):
                break
            time.sleep(0.2)
        print(f"{len(runs)} engines: {time.monotonic() - opened:.0f} s", file=sys.stderr, flush=True)
        for order, answers, log, child in runs:
            Path(f"{answers}.go").touch()
            try:
                status: int | None = child.wait(MEASURE_S if Path(f"{answers}.ready").exists() else 1)
            except subprocess.TimeoutExpired:
                status = None
            end(child)
            found = json.loads(answers.read_text()) if answers.exists() else {}
            row = {k: order[k] for k in ("way", "restarted", "where", "policy")} | found
            if status != 0:
                row["error"] = f"status {status}"
                print(f"{log.name}: status {status}\n{log.read_text()[-1500:]}", file=sys.stderr, flush=True)
            print(line(row), file=sys.stderr, flush=True)
            self.rows.append(row)
            self.save()

    def save(self) -> None:
        """Write what there is by now: a machine may be gone before the last run ends."""
        if self.given.json is not None:
            self.given.json.write_text(json.dumps(self.report(), indent=1))

    def report(self) -> dict[str, Any]:
        given = self.given
        about = {
            "tokens": given.tokens,
            "repeat": given.repeat,
            "threads": given.threads,
            "shape": given.shape,
            "tp": given.tp,
            "block": given.block,
            "graphs": given.graphs,
        }
        versions = {given.engine: _version(given.engine)}
        return {
            "schema": 2,
            "engine": given.engine,
            **about,
            "versions": versions,
            "machine": self.machine,
            "rows": self.rows,
        }


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill a run, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _version(engine: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return None


def line(row: dict[str, Any]) -> str:
    """A run in one line."""
    said = [NAMES[row["way"]], "restarted" if row["restarted"] else "", f"({row['where']})", row["policy"]]
    for name, found in row.get("first", {}).items():
        said.append(f"{name} {statistics.median(found['ms']):.0f} ms {found['cached']}")
    for kind in KINDS:
        for name, form in ((f"{kind}_requests_per_s", ".2f"), (f"{kind}_cached", ".1%")):
            said += [f"{name} " + " ".join(f"{value:{form}}" for value in row[name])] if name in row else []
    for name in ("shared_step_us", "lone_step_us", "lone_thread_s", "shared_calls_s", "lone_calls_s"):
        for found in row.get(name, [])[-1:]:
            said.append(f"{name}: " + " ".join(f"{key} {value:.4g}" for key, value in found.items()))
    return " ".join(filter(None, said))


def first_bars(report: dict[str, Any]) -> list[Bar]:
    """Milliseconds to the first token, way by way."""
    plain: dict[str, Any] = next((row["first"] for row in report["rows"] if "recomputed" in row.get("first", {})), {})
    bars: list[Bar] = [("recomputed", plain["recomputed"]["ms"], "0.6")] if plain else []
    for row in report["rows"]:
        found = row.get("first", {}).get("loaded")
        if found and (row["restarted"] or row["where"] == "ram"):  # host memory is the same whatever is below it
            of = f"\nafter a restart, {DISKS[row['where']]}" if row["restarted"] else ", CPU memory"
            name = NAMES[row["way"]] + of + (f", {row['policy']}" if row["restarted"] and row.get("policy") else "")
            name += ", again" if name in (bar[0] for bar in bars) else ""
            bars.append((name, found["ms"], colour(row)))
    return [*bars, ("resident on the GPU", plain["resident"]["ms"], "0.8")] if "resident" in plain else bars


def traffic_bars(report: dict[str, Any], kind: str) -> list[Bar]:
    """Requests a second, way by way."""
    bars: list[Bar] = []
    for row in report["rows"]:
        if found := row.get(f"{kind}_requests_per_s"):
            name = NAMES[row["way"]] + (", after a restart" if row["restarted"] else "")
            name += f", {DISKS[row['where']]}" if row["restarted"] or row["where"] == "disk" else ""
            bars.append((name, found if isinstance(found, list) else [found], colour(row)))  # schema 1: one turn
    return bars


def colour(row: dict[str, Any]) -> str:
    return "tab:green" if row["way"] in OURS else "0.6" if row["way"] == "none" else "tab:orange"


def draw(axes: Any, bars: list[Bar], longest: float, label: str, form: str) -> None:
    """Bars of medians with their figures, and a dot for each single value; `longest` is the largest of these."""
    for place, (_, values, filled) in enumerate(bars):
        median = statistics.median(values)
        axes.barh(place, median, color=filled)
        axes.plot(values, [place] * len(values), ".", color="black", markersize=4)
        axes.annotate(form % median, (0, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.06 * longest)
    axes.set_xlabel(label, fontsize=9)


def plot(reports: list[dict[str, Any]], path: Path) -> None:
    """A column a report: first tokens, and below them requests a second. What was not measured has no panel."""
    from gdscache.commands.console import require_matplotlib

    columns = []
    for report in reports:
        bars = {"first": first_bars(report)} | {kind: traffic_bars(report, kind) for kind in KINDS}
        kinds = [kind for kind in KINDS if bars[kind]]
        columns.append((report, bars, [["first"] * 2] * bool(bars["first"]) + [(kinds * 2)[:2]] * bool(kinds)))
    lines = max(sum(len(bars[row[0]]) + 3 for row in rows) for _, bars, rows in columns)
    size = (8 * len(reports), 0.7 + 0.33 * lines)
    figure = require_matplotlib(path).figure.Figure(figsize=size, layout="constrained")
    for part, (report, bars, rows) in zip(figure.subfigures(1, len(reports), squeeze=False)[0], columns, strict=True):
        gpus = report["machine"]["gpus"] or ["no GPU"]
        tp = report.get("tp", 1)  # reports of one GPU an engine do not say it
        where = f"{tp} of {len(gpus)} {gpus[0]} an engine" if tp > 1 else gpus[0]
        part.suptitle(f"{report['engine']} {report['versions'][report['engine']]}, {where}", fontsize=10)
        part.supxlabel("bars: medians; dots: single prompts and turns", fontsize=8)
        panels = part.subplot_mosaic(rows, height_ratios=[len(bars[r[0]]) + 1 for r in rows]) if rows else {}
        for row in rows:
            longest = max(max(values) for name in row for _, values, _ in bars[name])  # one scale side by side
            for name in set(row):
                if name == "first":
                    label = f"ms to the first token; {report['tokens']:,} tokens, 90 % cached"
                    draw(panels[name], bars[name], longest, label, "%.0f")
                else:
                    draw(panels[name], bars[name], longest, "requests a second", "%.1f")
                    panels[name].set_title(KINDS[name], fontsize=9)
        if "lone" in panels and [bar[0] for bar in bars["shared"]] == [bar[0] for bar in bars["lone"]]:
            panels["lone"].tick_params(labelleft=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", nargs="?", choices=sorted(STAGES))
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm/serving"), help="a folder on a RAM disk; emptied")
    parser.add_argument("--disk", type=Path, help="a folder on a disk, for restarts from there; emptied")
    parser.add_argument(
        "--policy",
        choices=("wait_complete", "best_effort", "timeout"),
        help="when HiCache stops fetching a request's pages from files; if not given, wait_complete where these "
        "are on the RAM disk, and best_effort on the disk",
    )
    parser.add_argument("--ways", help="only these, with commas between")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--block", type=int, default=64, help="tokens of a page")
    parser.add_argument("--repeat", type=int, default=3, help="prompts a figure is the median of")
    parser.add_argument("--attention", help="the engine's attention backend")
    parser.add_argument("--shape", choices=sorted(parts.SHAPES), default="llama-3-8b", help="tiny: without a GPU")
    parser.add_argument("--at-once", type=int, default=4, help="engines that are open side by side")
    parser.add_argument("--gpus", type=int, default=1, help="that they are spread over; one at a time measures")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of an engine, over which its heads are divided")
    cores = min(28, os.cpu_count() or 1)
    parser.add_argument("--threads", type=int, default=cores, help="of gdscache's, for files on the RAM disk")
    parser.add_argument("--turns", type=int, default=3, help="loads of traffic of each kind; 0: first tokens only")
    parser.add_argument("--stages", type=int, help="only so many, from the first on; restarts begin with the second")
    parser.add_argument("--graphs", action="store_true", help="decode by CUDA graphs; if not given, kernel by kernel")
    parser.add_argument("--where", choices=sorted(DISKS), help="only runs with files there, and those without a cache")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--also", type=Path, help="a report of the other engine, for the plot")
    parser.add_argument("--from", dest="drawn", type=Path, help="measure nothing, and draw this report")
    given = parser.parse_args()
    also = [json.loads(given.also.read_text())] if given.also is not None else []
    if given.drawn is not None:
        if given.plot is None:
            parser.error("--from FILE needs --plot FILE")
        return plot([json.loads(given.drawn.read_text()), *also], given.plot)
    if given.engine is None:
        parser.error("which engine?")
    if given.tp > given.gpus and given.shape != "tiny":
        parser.error(f"--tp {given.tp} needs --gpus {given.tp} at least")
    if given.engine == "sglang" and given.repeat < 3:
        parser.error("--repeat 3 at least: SGLang's GPU cache holds two of the prompts")
    if given.where == "disk" and given.disk is None:
        parser.error("--where disk needs --disk FOLDER")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is killed
    shutil.rmtree(given.ram, ignore_errors=True)
    given.ram.mkdir(parents=True)
    if given.disk is not None:
        shutil.rmtree(given.disk, ignore_errors=True)
        given.disk.mkdir(parents=True)
    bench = Bench(given)
    parts.write_model(bench.model, given.shape)
    chosen = set(given.ways.split(",")) if given.ways else set(NAMES)
    places = {given.where} if given.where else {"ram", "disk"} if given.disk is not None else {"ram"}
    try:
        for stage in STAGES[given.engine][: given.stages]:
            ways = [way for way in stage if way[0] in chosen and way[2] in places]
            for first in range(0, len(ways), given.at_once):
                bench.stage(ways[first : first + given.at_once])
    finally:
        bench.save()
        for row in bench.rows:
            print(line(row))
    if given.plot is not None:
        plot([bench.report(), *also], given.plot)


if __name__ == "__main__":
    main()
