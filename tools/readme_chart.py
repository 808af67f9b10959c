"""Draw the picture of the README: the time to first token by the prefix's source, a bar each.

    python tools/readme_chart.py docs/results/h200/report.json docs/results/first-token.png

The report is one of `gdscache bench ttft` or `bench report`. The bars are medians, of the prompt of 32,768 tokens with
90 % cached.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PROMPT, SHARE = 32_768, 90
TIERS = {"ssd_via_cpu": "SSD tier\n(files on a RAM disk)", "cpu": "CPU tier", "gpu": "GPU pool"}


def bars(report: dict[str, Any]) -> dict[str, float]:
    """Milliseconds to the first token by label: recomputed, then from each tier."""
    wanted = {"prompt_tokens": PROMPT, "cached_percent": SHARE, "overlap": True, "gate": False}
    cells = {cell["where"]: cell for cell in report["cells"] if wanted.items() <= cell.items()}
    found = {"recomputed": cells["cpu"]["recompute_seconds"]["median"] * 1e3}
    return found | {label: cells[where]["ttft_seconds"]["median"] * 1e3 for where, label in TIERS.items()}


def draw(report: dict[str, Any], target: Path) -> None:
    """Horizontal bars, the shortest last; written to `target`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = bars(report)
    names, times = list(found)[::-1], list(found.values())[::-1]
    figure, axes = pyplot.subplots(figsize=(8, 2.6), layout="constrained")
    colours = ["#2a7f62"] * (len(names) - 1) + ["#9a9a9a"]
    for bar, time in zip(axes.barh(names, times, color=colours, height=0.62), times, strict=True):
        text = f"{time:,.0f} ms" + ("" if time == times[-1] else f"  ({times[-1] / time:.1f} times sooner)")
        axes.text(time + 12, bar.get_y() + bar.get_height() / 2, text, va="center", fontsize=9)
    gpu = report["machine"]["gpus"][0].removeprefix("NVIDIA ")
    title = f"Time to first token: {PROMPT:,} tokens, {SHARE} % cached, Llama-3-8B's shape, one {gpu}"
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlim(0, times[-1] * 1.12)
    axes.set_xlabel(f"milliseconds, median of {report['settings']['repeat']}", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the picture of the README from a report.")
    parser.add_argument("report", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    report = json.loads(options.report.read_text(encoding="utf-8"))
    draw(report.get("benches", {"ttft": report})["ttft"], options.target)


if __name__ == "__main__":
    main()
