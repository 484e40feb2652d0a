"""The first drafts that a model accepts, after each stage of `benchmarks/results/mtp_acceptance.json`."""

import json
from pathlib import Path

from svg import GREEN, Picture


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "mtp_acceptance.json"
TEXTS = {"python": "Python", "c++": "C++"}
# Of the stages.
COLORS = "#aeb6be", "#6e7781", GREEN
LEFT, WIDEST = 264, 290


def main() -> None:
    stages = json.loads(RESULTS.read_text(encoding="utf-8"))["stages"]
    picture = Picture(
        84 + 62 * len(TEXTS) + 42 * len(TEXTS) * len(stages),
        "First drafts that the model accepts on held-out text: fewer after fine-tuning without the head, more after training it",
    )
    detail = "First drafts of a small model, after each training stage"
    picture.caption("Accepted drafts of multi-token prediction", detail)
    y = 74
    for text, title in TEXTS.items():
        y += 48
        picture.text(24, y, f"Held-out {title}", 21, font_weight="600")
        y += 14
        for stage, color in zip(stages, COLORS, strict=True):
            share = stage["held_out"][text]["accepted"][0]
            # "trunk alone on C++": what trained, and on what.
            picture.text(24, y + 24, f"{'then ' * (stage is not stages[0])}{stage['stage']}", 19)
            picture.rect(LEFT, y, share * WIDEST, 32, color, 3)
            last = stage is stages[-1]
            picture.text(
                LEFT + share * WIDEST + 10, y + 24, f"{100 * share:.0f} %", 21, font_weight="600" if last else "400"
            )
            y += 42
    picture.write(__file__)


if __name__ == "__main__":
    main()
