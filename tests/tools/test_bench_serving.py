"""`gdscache bench ttft` of vLLM and SGLang: what runs are told, and the figures drawn. The engines have stand-ins."""

from __future__ import annotations

import dataclasses
import io
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.figure
import pytest

from gdscache.commands.bench import figures, kit, machine, serving, serving_run
from gdscache.commands.bench.figures import Bar
from gdscache.commands.bench.shapes import HYBRIDS, LLAMAS, token_bytes
from gdscache.errors import InvalidValueError, MissingPackageError

pytestmark = pytest.mark.suite

# A run that answers at once: every value follows from its order.
RUN = """
import json, pathlib, sys
order = json.loads(pathlib.Path(sys.argv[1]).read_text())
answers = pathlib.Path(sys.argv[2])
found = {"opened_s": 1.0, "first": {"loaded": {"ms": [9.0, 7.0, 8.0], "cached": [640] * 3}}}
if not order["restarted"]:
    found["first"] |= {name: {"ms": [ms], "cached": [0]} for name, ms in (("recomputed", 20.0), ("resident", 5.0))}
    found["first"]["resident"]["cached"] = [640]
if order["traffic"]:
    found |= {f"{kind}_requests_per_s": [4.0, 6.0] for kind in ("shared", "lone")}
    found["shared_cached"] = [0.25, 0.25]
answers.write_text(json.dumps(found))
pathlib.Path(f"{answers}.ready").touch()
assert pathlib.Path(order["model"], "config.json").exists()
mark = pathlib.Path(order["folder"], order["way"])
if order["way"] not in ("none", "cpu"):
    assert mark.exists() == order["restarted"], "a restart begins with the files of the run before"
    mark.touch()
if order["way"] == "hicache":
    print("no such backend")
    sys.exit(3)
"""
GPU = serving.Probed({"vllm": "0.33.0", "sglang": "0.5.23", "gdscache": "1", "torch": "2"}, 1)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gdscache: Any) -> Callable[..., tuple[int, Any, str]]:
    """Run the bench with stand-ins for engines and a GPU: (exit status, its report, what it printed)."""
    (tmp_path / "run.py").write_text(RUN)
    monkeypatch.setattr(serving, "probe", lambda engine, python: GPU)
    monkeypatch.setattr(serving, "command", lambda settings: [sys.executable, str(tmp_path / "run.py")])

    def start(engine: str, *arguments: str) -> tuple[int, Any, str]:
        (tmp_path / "ram").mkdir(exist_ok=True)
        file = tmp_path / "r.json"
        options = "--dir", str(tmp_path / "ram"), "--report", str(file)
        status, out, err = gdscache("bench", "ttft", "--engine", engine, *options, *arguments)
        assert list((tmp_path / "ram").iterdir()) == []
        return status, json.loads(file.read_text()), out + err

    return start


def test_all_first_tokens_of_a_way_come_before_its_traffic() -> None:
    """And a run of the first stage alone has the traffic of every way."""
    for engine, ours in ("vllm", "gdscache"), ("sglang", "linker"):
        whole = serving.Settings(engine=engine, disk="/disk")
        for stages in range(1, 5):
            runs = [one for stage in serving.chosen(dataclasses.replace(whole, stages=stages)) for one in stage]
            for second in (False, True):
                own = [traffic for way, traffic in runs if (way.way, way.second) == (ours, second)]
                assert own == [False] * (len(own) - 1) + [True] * bool(own)
            assert [way.way for way, traffic in runs if traffic].count("none") == 1
        assert not any(traffic for stage in serving.chosen(dataclasses.replace(whole, turns=0)) for _, traffic in stage)


def test_a_run_of_both_directories(bench: Callable[..., tuple[int, Any, str]], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    status, report, out = bench("vllm", "--disk", str(tmp_path / "disk"), "--plot", str(tmp_path / "r.png"))
    assert (status, report["complete"], report["left"], report["failed"]) == (0, True, [], [])
    assert [(row["way"], row["restarted"], "shared_requests_per_s" in row) for row in report["rows"]] == [
        ("none", False, True), ("cpu", False, True), ("files", False, False), ("gdscache", False, False),
        ("files", True, False), ("gdscache", True, True), ("gdscache", False, False),
        ("gdscache", True, False), ("gdscache", True, True),
    ]  # fmt: skip
    assert list((tmp_path / "disk").iterdir()) == []
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "A prompt of 32,768 tokens has its first token after 20.0 ms where all of it is computed" in out
    assert "8.00 ms with gdscache, CPU memory (2.50 times as fast)" in out
    assert "Requests a second, half of each prompt shared" in out


def test_a_run_that_fails_keeps_what_it_had(bench: Callable[..., tuple[int, Any, str]]) -> None:
    status, report, out = bench("sglang", "--turns", "0", "--stages", "1", "--policy", "timeout")
    assert (status, report["complete"]) == (1, True)
    [failed] = report["failed"]
    assert (failed["cause"], "HiCache" in failed["what"], "no such backend" in out) == ("exit status 3", True, True)
    policies = {row["way"]: row["policy"] for row in report["rows"]}
    assert policies == {"none": None, "hicache": "timeout", "storage": "timeout", "linker": None}
    assert all("loaded" in row["first"] for row in report["rows"])


def test_hicache_does_not_wait_for_a_slow_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = serving.Serving(kit.Run({"rows": []}), serving.Settings(engine="sglang"))
    run.folders = [tmp_path, tmp_path]
    for memory, policy, threads in (True, "wait_complete", run.settings.threads), (False, "best_effort", 8):
        monkeypatch.setattr(machine, "in_memory", lambda _, memory=memory: memory)
        order = run.order(serving.Way("storage"), traffic=False)
        assert (order["policy"], order["threads"]) == (policy, threads)
        found = serving_run.caching(order)
        assert found["hicache_storage_prefetch_policy"] == policy
        assert found["hicache_size"] == order["cpu"] >> 30
    assert "hicache_storage_prefetch_policy" not in serving_run.caching(order | {"way": "linker"})
    assert serving_run.caching(order | {"way": "none"}) == {}
    assert serving_run.caching(order | {"way": "storage", "tp": 2})["hicache_size"] == order["cpu"] >> 31, "of a rank"


def test_a_label_names_the_disk_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = serving.Serving(kit.Run({"rows": []}), serving.Settings())
    run.folders = [tmp_path / "ram", tmp_path / "disk"]
    monkeypatch.setattr(machine, "in_memory", lambda directory: directory.name == "ram")
    labels = [run.label(0, serving.Way("gdscache", second=second)) for second in (False, True)]
    assert [label.rpartition(", ")[2] for label in labels] == ["RAM disk", "disk"]


def test_engines_are_spread_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    run = serving.Serving(kit.Run({"rows": []}), serving.Settings(gpus=4, tp=2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [run.gpus(number) for number in range(3)] == ["0,1", "2,3", "0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [run.gpus(number) for number in range(2)] == ["5,7", "5,7"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "tgi"), "unknown engine 'tgi'"),
        (("--device", "tpu"), "--device is 'tpu'"),
        (("--device", "cuda:x"), "--device is 'cuda:x'"),
        (("--engine", "vllm", "--device", "cpu"), "--device is an option of --engine transformers"),
        (("--turns", "2"), "--turns is an option of --engine vllm and sglang"),
        (("--engine", "sglang", "--repeat", "2"), "use 3 at least"),
        (("--engine", "vllm", "--tp", "2"), "--tp 2 with 1 GPUs"),
        (("--engine", "vllm", "--way", "hicache"), "unknown way 'hicache'"),
        (("--engine", "sglang", "--policy", "never"), "unknown policy 'never'"),
        (("--engine", "vllm", "--preset", "7b"), "unknown preset '7b'"),
        (("--engine", "vllm", "--tokens", "100"), "use at least 256"),
        (("--engine", "vllm", "--tokens", "131072"), "at most 131008"),
        (("--engine", "vllm", "--disk", "/no/such"), "--disk /no/such is not a directory"),
    ],
)
def test_what_is_refused(
    gdscache: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(serving, "probe", lambda engine, python: GPU)
    status, _, err = gdscache("bench", "ttft", "--dir", str(tmp_path), *arguments)
    assert (status, words in err) == (2, True), err
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_a_model_is_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "probe", lambda engine, python: GPU._replace(gpus=0))
    settings = serving.Settings.of(engine="vllm")
    settings.check()
    assert settings.preset == "tiny"
    for change in {"preset": "8b"}, {"engine": "sglang"}:
        with pytest.raises(InvalidValueError, match="needs a GPU"):
            dataclasses.replace(settings, **change).check()


def test_a_process_that_the_kernel_keeps_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing here can have the kernel keep one: it is not killed instead."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, start_new_session=True) as process:
        running = serving.Running("stage 1", {}, tmp_path / "1.json", process)
        with monkeypatch.context() as patch:
            patch.setattr(serving, "END_S", 0.1)
            patch.setattr("os.killpg", lambda *_: None)
            running.end()
        said = capsys.readouterr().err
        assert f"stage 1: process {process.pid} has not ended 0.1 s after SIGKILL" in said
        running.end()
    assert (process.returncode, capsys.readouterr().err) == (-signal.SIGKILL, "")


def test_the_python_of_a_server(tmp_path: Path) -> None:
    without = tmp_path / "python"
    without.write_text("""#!/bin/sh\necho '[{"torch": "2.11", "gdscache": "0.2"}, 1]'\n""")
    without.chmod(0o755)
    with pytest.raises(MissingPackageError, match="has no vllm"):
        serving.probe("vllm", str(without))
    assert set(serving.probe("numpy", sys.executable).versions) == {"numpy", "gdscache", "torch"}
    for python, words in ("/no/such/python", "does not run"), ("/bin/false", "no torch that works: exit status 1"):
        with pytest.raises(InvalidValueError, match=words):
            serving.probe("vllm", python)


def test_bytes_of_a_token() -> None:
    assert token_bytes("8b") == 128 << 10
    assert token_bytes("granite-4-h-micro") == 4 * 2 * 8 * 64 * 2, "four of its layers attend"
    assert token_bytes("qwen3-next") == 12 * 2 * 2 * 256 * 2
    assert all(token_bytes(name) for name in (*LLAMAS, *HYBRIDS))


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    about = {"engine": "sglang", "versions": {"sglang": "0.5.23"}, "tokens": 1024, "tp": 1, "gpus": 1}
    return {
        "settings": about,
        "machine": {"gpus": ["a GPU"]},
        "rows": [{"restarted": False, "where": "ram", **row} for row in rows],
    }


FIRST = {"recomputed": {"ms": [20.0]}, "resident": {"ms": [5.0], "cached": [896]}}
TRAFFIC = {"shared_requests_per_s": [4.0, 7.5], "lone_requests_per_s": [3.0, 3.5]}
PANELS = ("Time to first token", "half of each prompt shared", "nothing shared")
LOADED = {
    "way": "storage",
    "restarted": True,
    "where": "disk",
    "first": {"loaded": {"ms": [9.0, 8.0, 33.0], "cached": [896] * 3}},
}


def drawn(content: dict[str, Any]) -> str:
    """A report's plot, as an SVG in which text is text."""
    figure, file = matplotlib.figure.Figure(), io.StringIO()
    figures.draw(serving.panels(content), figure)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg")
    return file.getvalue().replace("&#x27;", "'")


def test_a_plot_has_the_panels_that_there_are_values_for() -> None:
    first, lone = {"way": "none", "first": FIRST}, {"lone_requests_per_s": TRAFFIC["lone_requests_per_s"]}
    for rows, panels in (
        ([first | TRAFFIC, {"way": "linker", **TRAFFIC}], PANELS),
        ([first, LOADED], PANELS[:1]),
        ([{"way": "hicache", **TRAFFIC}], PANELS[1:]),
        ([{"way": "hicache", **lone}], PANELS[2:]),
        ([{"way": "hicache", "error": "status -9"}], ()),
    ):
        text = drawn(report(*rows))
        assert tuple(words for words in PANELS if words in text) == panels
        assert ("sglang 0.5.23, a GPU" in text) == bool(panels)


def test_a_way_that_did_not_load_its_prompts_is_no_hit() -> None:
    """As vLLM's own offloading, whose memory was too small for them: most tokens were computed."""
    none = {"way": "none", "first": FIRST}
    first = {"loaded": {"ms": [19.0, 18.0, 17.0], "cached": [0, 128, 256]}}
    found = report(none, {"way": "cpu", "first": first}, {"way": "storage", "first": LOADED["first"]})
    names = [bar.name for bar in serving.first_bars(found)]
    assert names[1:3] == ["vLLM's CPU offloading, CPU memory, loaded 128", "gdscache under HiCache, CPU memory"]
    [said] = serving.bottom(found)
    assert "With 896 of them cached: 18.0 ms with vLLM's CPU offloading, CPU memory, loaded 128" in said
    assert "1,024 tokens, 896 of them cached; sglang 0.5.23, a GPU" in serving.panels(found)[0].title
    for gpus, here, words in (0, ["a GPU"], "no GPU"), (2, [], "GPU"):
        found["settings"]["gpus"], found["machine"]["gpus"] = gpus, here
        assert serving.panels(found)[0].title.endswith(f"sglang 0.5.23, {words}")


def test_every_prompt_of_the_traffic_fits_an_engine(tmp_path: Path) -> None:
    run = serving.Serving(kit.Run({"rows": []}), serving.Settings())
    run.folders = [tmp_path]
    for tokens in (256, 300, 1024, 4096, 32_768, serving.MOST_TOKENS):
        for preset in ("tiny", "8b", "qwen3-next"):
            run.settings = serving.Settings(tokens=tokens, preset=preset, gpus=1)
            run.settings.check()
            order = run.order(serving.Way("none"), traffic=True)
            assert 2 * order["part"] + serving_run.ANSWER <= tokens + serving_run.SPARE
            assert 2 * tokens <= order["gpu_tokens"] < 3 * tokens, "the third prompt evicts the first one"
            assert order["gpu"], "engines that are open side by side share its memory"


@pytest.mark.parametrize(
    ("ready", "words"), [(True, "it measured for more than 0.1 s"), (False, "it was not open after 400 s")]
)
def test_a_run_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready: bool, words: str) -> None:
    monkeypatch.setattr(serving, "MEASURE_S", 0.1)
    bench = serving.Serving(kit.Run({"rows": []}), serving.Settings())
    order = dict.fromkeys(("way", "restarted", "where", "policy"))
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, start_new_session=True) as process:
        one = serving.Running("stage 1", order, tmp_path / "1.json", process)
        (tmp_path / "1.log").write_text("")
        if ready:
            one.file(".ready").touch()
        bench._measure(one)
    assert bench.run.found["failed"] == [{"what": "stage 1", "cause": words}]


@pytest.mark.parametrize(("folder", "option"), [("first", "--dir"), ("second", "--disk")])
def test_a_run_without_room_names_the_option_of_its_directory(tmp_path: Path, folder: str, option: str) -> None:
    bench = serving.Serving(kit.Run({"rows": []}), serving.Settings())
    bench.folders = [tmp_path / "first", tmp_path / "second"]
    order = dict.fromkeys(("way", "restarted", "where", "policy")) | {"folder": str(tmp_path / folder)}
    (tmp_path / "1.log").write_text("gdscache.errors.NoSpaceError: the slab needs more\n")
    with subprocess.Popen(["/bin/false"], start_new_session=True) as process:
        one = serving.Running("stage 1", order, tmp_path / "1.json", process)
        one.file(".ready").touch()
        bench._measure(one)
    [failed] = bench.run.found["failed"]
    assert failed["cause"] == f"exit status 1; {kit.ELSEWHERE}: {option}"


def test_a_full_disk_costs_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a kill within a write."""
    order, file = tmp_path / "order", tmp_path / "answers"
    order.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["run", "vllm", str(order), str(file)])
    answers = serving_run.Answers()
    answers.say(opened_s=1.0)
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            answers.say(more="x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert json.loads(file.read_text()) == {"opened_s": 1.0}


def test_bars_are_medians_of_prompts_and_turns() -> None:
    in_memory = {"way": "storage", "first": LOADED["first"]}
    some = {"way": "none", "first": FIRST} | TRAFFIC, in_memory, in_memory
    found = report(*some, LOADED | {"policy": "best_effort"}, LOADED, LOADED)
    assert [(name, values) for name, values, *_ in serving.first_bars(found)] == [
        ("recomputed", [20.0]),
        ("gdscache under HiCache, CPU memory", [9.0, 8.0, 33.0]),
        ("gdscache under HiCache, after a restart, disk, best_effort", [9.0, 8.0, 33.0]),
        ("gdscache under HiCache, after a restart, disk", [9.0, 8.0, 33.0]),
        ("gdscache under HiCache, after a restart, disk, again", [9.0, 8.0, 33.0]),
        ("resident on the GPU", [5.0]),
    ]
    assert serving.traffic_bars(found, "shared") == [Bar("no cache", [4.0, 7.5], "0.6")]
    one_turn = report({"way": "linker", "restarted": True, "shared_requests_per_s": [7.25]})
    assert serving.traffic_bars(one_turn, "shared") == [
        Bar("gdscache's linker, after a restart, RAM disk", [7.25], "tab:green")
    ]
    on_disk = report({"way": "linker", "where": "disk", "shared_requests_per_s": [7.0]})
    assert serving.traffic_bars(on_disk, "shared") == [Bar("gdscache's linker, disk", [7.0], "tab:green")]
