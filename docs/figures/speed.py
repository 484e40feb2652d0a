"""Milliseconds of a training step on an H200, from `benchmarks/results/step.json`."""

import json
from pathlib import Path

from svg import GREEN, MUTED, Picture


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "step.json"
TOKENS = 16_384
ARMS = {
    "ours": ("ours", GREEN),
    "packed+varlen+liger": ("stock, packed", "#6e7781"),
    "padded+liger": ("stock, padded", "#aeb6be"),
}
LEFT, WIDEST = 186, 250


def main() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    runs = [compared_run(results["runs"], model) for model in ("0.8B", "4B")]
    scale = WIDEST / max(arm["median_ms"] for run in runs for arm in run["arms"].values())
    bars = sum(len(run["arms"]) for run in runs)
    picture = Picture(
        84 + 62 * len(runs) + 42 * bars, "Milliseconds of forward and backward: ours, stock packed, stock padded"
    )
    picture.text(24, 44, "Forward + backward of 16,384 tokens, ms", 25, font_weight="700")
    picture.text(24, 74, f"{results['machine']}, bfloat16. Stock with Liger and FlashQLA.", 20, MUTED)
    y = 74
    for run in runs:
        y += 48
        picture.text(24, y, f"Qwen3.5 {run['model']}, {run['documents']} documents", 21, font_weight="600")
        y += 14
        for name, (label, color) in ARMS.items():
            if name not in run["arms"]:
                continue
            milliseconds = run["arms"][name]["median_ms"]
            width = milliseconds * scale
            picture.text(24, y + 24, label, 21)
            picture.rect(LEFT, y, width, 32, color, 3)
            ratio = milliseconds / run["arms"]["ours"]["median_ms"]
            beside = f"{milliseconds:,.0f}" if name == "ours" else f"{milliseconds:,.0f} ({ratio:.3g} ×)"
            picture.text(LEFT + width + 10, y + 24, beside, 21, font_weight="600" if name == "ours" else "400")
            y += 42
    picture.write(__file__)


def compared_run(runs: list[dict], model: str) -> dict:
    """The last run of a model that has the stock class beside ours, on documents of mixed lengths."""
    fits = [
        run
        for run in runs
        if (run["model"], run["tokens"], run["lengths"], run["checkpointing"]) == (model, TOKENS, "lognormal", False)
        and len(run["arms"].keys() & ARMS.keys()) > 1
    ]
    return fits[-1]


if __name__ == "__main__":
    main()
