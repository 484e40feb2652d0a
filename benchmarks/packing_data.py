"""Measure the overhead of packing during reading: rows of `PackingDataset` against their samples, and a packed stream.

The reading arm requests the samples of the same rows, in the same order and by the same call. The arms alternate on
blocks of rows, and the best of several runs counts for each block. The bar on the share of packing applies to a
`datasets.Dataset`, which decodes its samples. A list in memory only hands out references, so its figures show the cost
of a row itself.
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import torch
from cpu_step import cpu_model

import transformers_packed


MAX_SHARE = 0.05
MIN_SAMPLES_PER_SECOND = 300_000
MAX_LENGTH = 4096
BLOCK = 100
SAMPLES = {"dataset": 20_000, "stream": 200_000}
LENGTHS = {"distribution": "lognormal", "mean": 400, "sigma": 0.8, "min": 1, "max": MAX_LENGTH, "seed": 0}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. The exit status is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10, help="runs per arm and block (default: 10)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "packing_data.json")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"argument --repeats: expected at least 1, got {args.repeats}")

    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    samples = draw_samples(SAMPLES["dataset"])
    results = {
        "datasets.Dataset": measure_rows(datasets.Dataset.from_list(samples), args.repeats),
        "list": measure_rows(samples, args.repeats),
        "stream over a list": measure_stream(draw_samples(SAMPLES["stream"]), args.repeats),
    }
    passed = (
        results["datasets.Dataset"]["share_of_packing"] < MAX_SHARE
        and results["stream over a list"]["samples_per_second"] >= MIN_SAMPLES_PER_SECOND
    )
    for arm, figures in results.items():
        print(f"{arm:<20}" + "  ".join(f"{name} {value}" for name, value in figures.items()))

    result = {
        "benchmark": "PackingDataset against reading its samples, and IterablePackingDataset over a list in memory",
        "command": f"python benchmarks/packing_data.py --repeats {args.repeats}",
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "load_average_before": round(load_before, 2)},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "datasets": datasets.__version__,
            "numpy": np.__version__,
            "transformers_packed": transformers_packed.__version__,
        },
        "max_length": MAX_LENGTH,
        "samples": SAMPLES,
        "lengths": LENGTHS,
        "results": results,
        "bars": {"share_of_packing": MAX_SHARE, "samples_per_second": MIN_SAMPLES_PER_SECOND, "passed": passed},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"Wrote {args.output}")
    return 0 if passed else 1


def draw_samples(number: int) -> list[dict]:
    """Draw samples of lognormal lengths, with token ids and labels."""
    mu = np.log(LENGTHS["mean"]) - LENGTHS["sigma"] ** 2 / 2
    lengths = np.random.default_rng(LENGTHS["seed"]).lognormal(mu, LENGTHS["sigma"], number)
    tokens = list(range(MAX_LENGTH))
    lengths = np.clip(lengths, LENGTHS["min"], LENGTHS["max"]).astype(int).tolist()
    if number > SAMPLES["dataset"]:  # one shared list per length saves memory
        of_length = {length: tokens[:length] for length in set(lengths)}
        return [{"input_ids": of_length[length], "labels": of_length[length]} for length in lengths]
    return [{"input_ids": tokens[:length], "labels": tokens[:length]} for length in lengths]


def measure_rows(dataset, repeats: int) -> dict:
    """Time the reading of all rows and of their samples alone."""
    rows = transformers_packed.PackingDataset(dataset, MAX_LENGTH)
    rows.set_epoch(1)
    rows[0]  # computes the order of the epoch outside the timed part
    order = rows.plan.epoch_order(1).tolist()
    many = getattr(dataset, "__getitems__", None)
    seconds = {"reading": 0.0, "rows": 0.0}
    for begin in range(0, len(rows), BLOCK):
        block = range(begin, min(begin + BLOCK, len(rows)))
        numbers = [rows.plan.row(order[index])[0].tolist() for index in block]

        def read(numbers=numbers):
            for row in numbers:
                _ = many(row) if many else [dataset[number] for number in row]

        def pack(block=block):
            for index in block:
                rows[index]

        for name, least in best({"reading": read, "rows": pack}, repeats).items():
            seconds[name] += least
    return {
        "reading_seconds": round(seconds["reading"], 4),
        "rows_seconds": round(seconds["rows"], 4),
        "share_of_packing": round(seconds["rows"] / seconds["reading"] - 1, 4),
        "microseconds_per_row": round((seconds["rows"] - seconds["reading"]) / len(rows) * 1e6, 2),
    }


def measure_stream(samples: list[dict], repeats: int) -> dict:
    """Return the samples per second and the fill of the rows."""
    dataset = transformers_packed.IterablePackingDataset(samples, MAX_LENGTH)

    def stream():
        for _ in dataset:
            pass

    seconds = best({"stream": stream}, repeats)["stream"]
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    return {
        "samples_per_second": round(len(samples) / seconds),
        "fill": round(tokens / MAX_LENGTH / sum(1 for _ in dataset), 4),
        "buffer_size": dataset.buffer_size,
    }


def best(arms: dict, repeats: int) -> dict[str, float]:
    """Run the arms in turn and return the shortest time of each."""
    seconds = dict.fromkeys(arms, float("inf"))
    for _ in range(repeats):
        for name, run in arms.items():
            start = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
