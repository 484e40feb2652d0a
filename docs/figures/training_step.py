"""Milliseconds of a step of 16,384 tokens beside other tools, from `benchmarks/results/peers.json`."""

import json
import sys
from pathlib import Path

from svg import GREEN, MUTED, Picture


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "utils" / "measured"))
from other_tools import gpu, grouped, label, training  # noqa: E402


RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
COLORS = {"ours": GREEN, "ours+float8": GREEN, "unsloth": "#6e7781", "liger": "#aeb6be"}
LEFT, WIDEST = 222, 228


def draw(tokens: int, target: str) -> None:
    cells = grouped(json.loads(RESULTS.read_text(encoding="utf-8"))["runs"])
    cells = {
        key: runs
        for key, runs in cells.items()
        if key.task == "sft" and key.tokens == tokens and "step_ms" in runs.get("ours", {})
    }
    bars = [
        (key, [(tool, runs[tool]) for tool in COLORS if "step_ms" in runs.get(tool, {})])
        for key, runs in cells.items()
    ]
    scale = WIDEST / max(run["step_ms"] for _, arms in bars for _, run in arms)
    height = 92 + sum(58 + 36 * len(arms) for _, arms in bars)
    picture = Picture(height, f"Milliseconds of a step of {tokens:,} tokens: ours, Unsloth, TRL with Liger")
    picture.text(24, 44, f"A step of {tokens:,} tokens in SFTTrainer, ms", 25, font_weight="700")
    picture.text(24, 74, "bfloat16, the same samples, without padding", 20, MUTED)
    y = 74
    for key, arms in bars:
        y += 44
        shape = "12 layers of Qwen3.5-35B-A3B" if key.model == "35B-A3B-12L" else f"Qwen3.5 {key.model}"
        picture.text(24, y, f"{shape}, {training(key)}, {gpu(key.machine)}", 21, font_weight="600")
        y += 14
        ours = dict(arms)["ours"]["step_ms"]
        for tool, run in arms:
            milliseconds, own = run["step_ms"], tool.startswith("ours")
            picture.text(24, y + 21, label(tool, run), 20)
            picture.rect(LEFT, y, milliseconds * scale, 27, COLORS[tool], 3)
            beside = f"{milliseconds:,.0f}" if tool == "ours" else f"{milliseconds:,.0f} ({milliseconds / ours:.2f} ×)"
            picture.text(LEFT + milliseconds * scale + 10, y + 21, beside, 20, font_weight="600" if own else "400")
            y += 36
    picture.write(target)


if __name__ == "__main__":
    draw(16384, __file__)
