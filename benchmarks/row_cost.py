"""Milliseconds of rows with the same number of tokens in documents of other lengths, for the weight of long documents.

Rows with long documents take longer than the number of operations says, because those of attention are slower than other
products. A linear fit gives the milliseconds of a row without long documents, and of a million squared tokens. `weight` is
the ratio of the two over that of the counted operations, the default `quadratic_weight` of `PackingCost.from_config`.

    python benchmarks/row_cost.py --models 0.8B 4B --output benchmarks/results/row_cost.json
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from shapes import MODELS, sample_lengths
from step import timed, versions
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from transformers_packed import DataCollatorWithFlattening, PackingCost, patch_model


MILLION = 1e6


def rows_of(tokens: int) -> dict[str, list[int]]:
    """Lengths of the documents of each row, by the name of the row."""

    def beside(longest: int) -> list[int]:
        rest, short = tokens - longest, tokens // 32
        return [longest, *[short] * (rest // short), *[rest % short] * (rest % short > 0)]

    found = {"32 equal": [tokens // 32] * 32, "128 equal": [tokens // 128] * 128, "4 equal": [tokens // 4] * 4}
    found |= {f"1/{part} in one": beside(tokens // part) for part in (8, 4, 2)} | {"one": [tokens]}
    return found | {f"lognormal {seed}": sample_lengths("lognormal", tokens, seed) for seed in range(5)}


def milliseconds(model, batch: dict, repeats: int) -> float:
    """Of forward and backward, without waits between them."""

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        model.zero_grad()

    def steps(number: int):
        for _ in range(number):
            step()

    steps(3)
    return 1e3 * timed(lambda: steps(repeats), "cuda") / repeats


def fit(rows: list[dict], cost: PackingCost, tokens: int) -> dict:
    """The milliseconds of a row without long documents and of a million squares, and the weight of a square."""
    squares = np.array([row["squares"] for row in rows]) / MILLION
    inputs = np.stack([np.ones(len(rows)), squares], axis=1)
    base, slope = np.linalg.lstsq(inputs, np.array([row["ms"] for row in rows]), rcond=None)[0].tolist()
    counted = MILLION * cost.quadratic / (tokens * (cost.linear + cost.chunked))
    return {"base_ms": round(base, 2), "ms_per_million": round(slope, 4), "weight": round(slope / base / counted, 2)}


def measure(name: str, args) -> dict:
    set_seed(0)
    config = AutoConfig.for_model(**MODELS[name])
    with torch.device("cuda"):
        model = patch_model(AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.weights)))
    model.train()
    collator = DataCollatorWithFlattening(return_cu_seqlens=True, return_boundaries=True, on_leak="ignore")
    rows = []
    for row, lengths in rows_of(args.tokens).items():
        batch = collator([{"input_ids": [1] * n, "labels": [2] * n} for n in lengths])
        batch = {key: x.to("cuda") if hasattr(x, "to") else x for key, x in batch.items()}
        found = {"row": row, "longest": max(lengths), "squares": sum(n * n for n in lengths)}
        rows.append(found | {"ms": round(milliseconds(model, batch, args.repeats), 2)})
        print(name, rows[-1], flush=True)
    return {"model": name, "weights": args.weights, "tokens": args.tokens, "rows": rows} | fit(
        rows, PackingCost.from_config(config, quadratic_weight=1), args.tokens
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.8B"])
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    args = parser.parse_args()
    report = {"command": shlex.join(["python", *sys.argv]), "machine": torch.cuda.get_device_name()}
    report |= {"versions": versions(), "runs": [measure(name, args) for name in args.models]}
    print(json.dumps([{key: x for key, x in run.items() if key != "rows"} for run in report["runs"]]))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
