"""Write a page for each measurement: `docs/measured/*.md` from `benchmarks/results/*.json`.

The numbers of a page come from the JSON. The few that no JSON holds are named so on the page. `--check` writes nothing
and fails when a page differs from its JSON.

Usage: python utils/cards/write.py [--check] [--results FOLDER] [--output FOLDER]
"""

import argparse
import json
import sys
from pathlib import Path

from card import table
from data_parallel import data_parallel
from first_steps import first_steps
from float8 import float8
from gpu_tests import audit_gpu, gpu_tests, sequence_parallel, tried
from launches import launches
from lora import lora
from moe import moe
from on_cpu import balance, cpu_step, dataset_cost, planning
from peers import peers
from preference import preference
from steps import equal_documents, long_rows, memory_4b, profile, short_rows, step_time
from whole_steps import whole_steps


ROOT = Path(__file__).parents[2]

CARDS = {
    "step_time": step_time,
    "equal_documents": equal_documents,
    "short_rows": short_rows,
    "lora": lora,
    "peers": peers,
    "moe": moe,
    "preference": preference,
    "float8": float8,
    "first_steps": first_steps,
    "memory_4b": memory_4b,
    "long_rows": long_rows,
    "profile": profile,
    "sequence_parallel": sequence_parallel,
    "data_parallel": data_parallel,
    "launches": launches,
    "whole_steps": whole_steps,
    "cpu_step": cpu_step,
    "planning": planning,
    "balance": balance,
    "dataset_cost": dataset_cost,
    "gpu_tests": gpu_tests,
    "audit_gpu": audit_gpu,
    "tried": tried,
}
INTRODUCTION = """Each page shows one measurement with its table, command, commit, machine and versions. `utils/cards/write.py` writes the pages
from the JSON in `benchmarks/results/`."""
REPEAT = """`make bench` measures the CPU figures on your machine, `python benchmarks/step.py` those of one GPU, and
`torchrun --nproc_per_node 2 benchmarks/sequence_parallel.py` those of several."""


def pages(results_folder: Path) -> dict[str, str]:
    """The text of each page by its file name."""
    results = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in results_folder.glob("*.json")}
    links = {"results": "../../benchmarks/results"}
    cards = {name: make(results) for name, make in CARDS.items()}
    rows = [(f"[{card.title}]({name}.md)", card.number, card.machine.split(" (")[0]) for name, card in cards.items()]
    index = ["# Figures", INTRODUCTION, table(("Measurement", "Result", "Machine"), rows), REPEAT]
    texts = {"index.md": "\n\n".join(index)} | {f"{name}.md": card.page(links) for name, card in cards.items()}
    return {name: f"{text}\n" for name, text in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when a page differs, and write nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "measured")
    args = parser.parse_args()
    made = pages(args.results)
    if args.check:
        there = {path.name: path.read_text(encoding="utf-8") for path in args.output.glob("*.md")}
        stale = sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))
        if stale:
            sys.exit(f"{', '.join(stale)}: differs from benchmarks/results. Run python utils/cards/write.py")
        return
    args.output.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (args.output / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
