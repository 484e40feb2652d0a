"""Training loss in bf16 and with FP8 products, from `benchmarks/results/float8_loss.json`."""

import json
import math
from itertools import accumulate
from pathlib import Path

from svg import GREEN, INK, LINE, MUTED, Picture


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "float8_loss.json"
WINDOW = 50
LEFT, RIGHT = 84, 612
LOSS, DIFFERENCE = (186, 400), (462, 640)
COLORS = {"bf16": INK, "FP8": GREEN, "bf16, other order": "#b8620a"}


def main() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    runs = compared_runs(results["runs"])
    means = {name: moving_mean(run["loss"]) for name, run in runs.items()}
    run, steps = runs["bf16"], runs["bf16"]["steps"]
    picture = Picture(
        690, "Training loss over the steps in bf16, with FP8, and in bf16 with another order of documents"
    )
    picture.text(24, 44, f"Training loss, mean of {WINDOW} steps", 25, font_weight="700")
    setting = f"{results['machine']}, Qwen3.5 {run['model']} shape, {run['tokens']:,} tokens a step"
    picture.text(24, 74, setting, 20, MUTED)
    for name, x in zip(means, (24, 150, 260), strict=False):
        picture.line(x, 106, x + 30, 106, COLORS[name], 4)
        picture.text(x + 40, 113, name, 20)
    losses = [x for found in means.values() for x in found]
    low, high = math.floor(min(losses)), math.ceil(max(losses))
    axis(picture, "Loss", LOSS, [low, (low + high) / 2, high])
    base = means["bf16"]
    for name, found in means.items():
        # Wide, because the curve of FP8 may cover it.
        curve(picture, found, LOSS, (low, high), COLORS[name], 6 if name == "bf16" else 2.5)
    differences = {
        name: [100 * (x / y - 1) for x, y in zip(found, base, strict=True)]
        for name, found in means.items()
        if name != "bf16"
    }
    bound = rounded_up(max(abs(x) for found in differences.values() for x in found))
    least, most = (f"{found(differences['FP8']):+.2f}".replace("-", "−") for found in (min, max))
    label = f"Difference to bf16, % (FP8: {least} to {most})"
    axis(picture, label, DIFFERENCE, [-bound, 0, bound], signed=True)
    # FP8 on top of the wider curve.
    for name in reversed(differences):
        curve(picture, differences[name], DIFFERENCE, (-bound, bound), COLORS[name])
    picture.text(RIGHT, 676, f"{steps:,} steps", 20, MUTED, text_anchor="end")
    picture.text(LEFT, 676, str(WINDOW), 20, MUTED, text_anchor="middle")
    picture.write(__file__)


def compared_runs(runs: list[dict]) -> dict[str, dict]:
    """The first bf16 run, the FP8 run on the same rows, and the bf16 run in another order."""
    first = next(run for run in runs if run["arm"] == "bf16")
    other = next(run for run in runs if run["arm"] == "bf16" and run["order"] != first["order"])
    float8 = next(run for run in runs if run["arm"] == "float8" and run["order"] == first["order"])
    return dict(zip(COLORS, (first, float8, other), strict=True))


def moving_mean(losses: list[float]) -> list[float]:
    """The mean of each step and the `WINDOW - 1` steps before it; the first value is of step `WINDOW`."""
    sums = [0.0, *accumulate(losses)]
    return [(end - start) / WINDOW for start, end in zip(sums, sums[WINDOW:], strict=False)]


def rounded_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(value)) if value else 1.0
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value)


def axis(picture: Picture, label: str, place: tuple[int, int], ticks: list[float], signed: bool = False) -> None:
    top, bottom = place
    picture.text(24, top - 22, label, 21, font_weight="600")
    for tick in ticks:
        y = bottom - (tick - ticks[0]) / (ticks[-1] - ticks[0]) * (bottom - top)
        picture.line(LEFT, y, RIGHT, y, LINE, 1.5)
        number = f"{tick:+g}" if signed and tick else f"{tick:g}"
        picture.text(LEFT - 12, y + 7, number.replace("-", "−"), 20, MUTED, text_anchor="end")


def curve(
    picture: Picture,
    values: list[float],
    place: tuple[int, int],
    limits: tuple[float, float],
    color: str,
    width: float = 2.5,
) -> None:
    (top, bottom), (low, high) = place, limits
    # One point for each unit of the width is enough.
    stride = max(1, len(values) // (RIGHT - LEFT))
    points = []
    for i in range(0, len(values), stride):
        x = LEFT + (RIGHT - LEFT) * i / max(1, len(values) - 1)
        points.append(f"{x:.1f},{bottom - (values[i] - low) / (high - low) * (bottom - top):.1f}")
    attributes = f'fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round"'
    picture.parts.append(f'<polyline points="{" ".join(points)}" {attributes}/>')


if __name__ == "__main__":
    main()
