"""The time of a step of 16,384 tokens over ours, beside other tools, from `benchmarks/results/peers.json`."""

import json
import sys
from pathlib import Path

from svg import GREEN, MUTED, Picture


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "utils" / "measured"))
from other_tools import TOOLS, Cell, gpu, grouped, trained  # noqa: E402


RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
COLORS = {"ours": GREEN, "unsloth": "#6e7781", "liger": "#aeb6be"}
LEFT, WIDEST = 206, 256
# Of a shape, of a bar, and from bar to bar. Type of 17 fits because digits have no descenders.
ROW, BAR, STEP, TOP = 57, 13, 16.5, 76


def draw(tokens: int, target: str) -> None:
    cells = {
        key: {tool: run["step_ms"] for tool, run in runs.items() if tool in COLORS and "step_ms" in run}
        for key, runs in grouped(json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]).items()
        if key.task == "sft" and key.tokens == tokens and "step_ms" in runs.get("ours", {})
    }
    picture = Picture(
        TOP + ROW * len(cells),
        f"Time of a step of {tokens:,} tokens over ours: Unsloth and TRL with Liger, for each shape",
    )
    picture.text(24, 38, f"A step of {tokens:,} tokens in SFTTrainer", 22, font_weight="700")
    legend(picture)
    scale = WIDEST / max(time / steps["ours"] for steps in cells.values() for time in steps.values())
    for n, (key, steps) in enumerate(cells.items()):
        draw_shape(picture, TOP + ROW * n, key, steps, scale)
    picture.write(target)


def legend(picture: Picture) -> None:
    x = 24
    for tool, color in COLORS.items():
        picture.rect(x, 52, 14, 14, color, 3)
        picture.text(x + 20, 65, TOOLS[tool], 18, MUTED)
        x += 42 + 9 * len(TOOLS[tool])
    picture.text(616, 65, "time, and its ratio to ours", 18, MUTED, text_anchor="end")


def draw_shape(picture: Picture, top: float, key: Cell, steps: dict[str, float], scale: float) -> None:
    """The name of a shape, and a bar for each tool."""
    model, few = key.model.removesuffix("-12L"), key.model.endswith("-12L")
    details = ["12 layers"] * few + ["checkpoints"] * key.checkpointing + [gpu(key.machine)]
    picture.text(24, top + 18, f"{model}, {trained(key)}", 19, font_weight="600")
    picture.text(24, top + 40, ", ".join(details), 18, MUTED)
    for n, tool in enumerate(tool for tool in COLORS if tool in steps):
        y, ratio = top + STEP * n, steps[tool] / steps["ours"]
        picture.rect(LEFT, y, ratio * scale, BAR, COLORS[tool], 3)
        beside = f"{steps[tool]:,.0f} ms" + f", {ratio:.2f} ×" * (tool != "ours")
        weight = "600" if tool == "ours" else "400"
        picture.text(LEFT + ratio * scale + 8, y + BAR, beside, 17, font_weight=weight)


if __name__ == "__main__":
    draw(16384, __file__)
