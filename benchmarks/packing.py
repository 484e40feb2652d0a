"""Measure the planning of packed rows (time, memory, fill, balance and order) and compare it with other packers.

Arms:

* `plan_packing`;
* `trl.pack_dataset(strategy="bfd")` on token lists of the same lengths. Tokens take one byte each, which minimizes the
  data to copy;
* plain best-fit decreasing, one document at a time;
* `binpacking` on windows of 1,000 lengths, with the last bin carried over, as in ms-swift and Twinkle.

A packer that is not installed is skipped and recorded in the result.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from bisect import bisect_left, insort
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from cpu_step import cpu_model

from transformers_packed import PackingCost, PackingPlan, __version__, plan_packing
from transformers_packed.cli.demo_arms import peak_memory


MAX_LENGTH = 4096
BARS = {
    "seconds, 1,000,000 lengths": 0.5,
    "times as fast as TRL": 20,
    "fill, lognormal short": 0.999,
    "imbalance": 0.07,
    "correlation of a step's mean length with its index": 0.05,
    "variance of that mean against rows in random order, difference from 1": 0.1,
    "seconds, 100,000,000 lengths": 60,
    "GiB, 100,000,000 lengths": 4,
}
# Qwen3.5 sizes. The share of attention in the cost, and with it the imbalance, is largest in the smallest model.
MODELS = {
    "0.8B": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8},
    "9B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16},
}
HEADS = {"0.8B": (2, 16), "9B": (4, 32)}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. The exit status is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use a tenth of the lengths; missed bars do not fail")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of plan_packing; the best one counts")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "packing.json")
    parser.add_argument("--huge", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.huge:
        print(json.dumps(plan_huge(args.huge)))
        return 0

    load_before = os.getloadavg()[0]
    samples = 100_000 if args.quick else 1_000_000
    lengths = lognormal(samples)
    result = {
        "benchmark": "planning packed rows over a whole dataset, on one core",
        "command": f"python benchmarks/packing.py --repeats {args.repeats}{' --quick' if args.quick else ''}",
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "load_average_before": round(load_before, 2)},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "transformers_packed": __version__},
        "lengths": f"{samples:,} lognormal, sigma 0.8, mean {lengths.mean():.1f}, from 8 to {lengths.max()}",
        "max_length": MAX_LENGTH,
    }
    result["speed"] = compare_speed(lengths, args.repeats, result["versions"])
    result["fill"] = compare_fill(samples // 10)
    result["balance"] = compare_balance(lengths, result["speed"])
    result["huge"] = in_new_process(samples * 100)
    result["bars"] = check(result)
    for speed in result["speed"].values():
        speed.pop("rows_in_order", None)
    report(result)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    missed = [name for name, bar in result["bars"].items() if not bar["passed"]]
    if missed:
        print(f"MISSED: {'; '.join(missed)}", file=sys.stderr)
    return 1 if missed and not args.quick else 0


def lognormal(samples: int, mean: float = 400, sigma: float = 0.8, seed: int = 0) -> np.ndarray:
    """Draw lengths that resemble instruction data, int32 `[samples]`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, samples)
    return drawn.clip(8, MAX_LENGTH).astype(np.int32)


def distributions(samples: int) -> dict[str, np.ndarray]:
    """Return the six sets of lengths for the comparison of fill."""
    rng = np.random.default_rng(1)
    short, long = rng.normal(200, 40, samples), rng.normal(3000, 300, samples)
    sets = {
        "lognormal short": lognormal(samples),
        "lognormal long": lognormal(samples, mean=1600),
        "uniform": rng.integers(1, MAX_LENGTH + 1, samples),
        "bimodal": np.where(rng.random(samples) < 0.7, short, long).clip(1, MAX_LENGTH),
        "nearly the cap": rng.integers(MAX_LENGTH - 200, MAX_LENGTH + 1, samples),
        "all equal": np.full(samples, 700),
    }
    return {name: lengths.astype(np.int32) for name, lengths in sets.items()}


def compare_speed(lengths: np.ndarray, repeats: int, versions: dict[str, str]) -> dict[str, dict]:
    """Return the seconds and the fill of each packer on the same lengths."""
    arms = {}
    for name, world_size in (("plan_packing", 1), ("plan_packing, 64 ranks", 64)):
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            plan = plan_packing(lengths, MAX_LENGTH, world_size=world_size)
            seconds.append(time.perf_counter() - start)
        arms[name] = {
            "seconds": round(min(seconds), 3),
            "seconds_of_each_run": [round(value, 3) for value in seconds],
            "fill": plan.fill,
        }
    for name, package, pack in (
        ("trl.pack_dataset, bfd", "trl", pack_with_trl),
        ("binpacking, windows of 1,000", "binpacking", pack_with_binpacking),
        ("plain best-fit decreasing", None, pack_plainly),
    ):
        try:
            if package:
                versions[package] = version(package)
        except PackageNotFoundError:
            arms[name] = {"left_out": f"{package} is not installed"}
            continue
        print(f"{name} ...", file=sys.stderr)
        taken, rows = pack(lengths)
        documents = np.concatenate(rows)
        assert np.array_equal(np.bincount(documents), np.bincount(lengths)), f"{name} lost or repeated documents"
        fill = int(documents.sum()) / (len(rows) * MAX_LENGTH)
        arms[name] = {"seconds": round(taken, 3), "fill": fill, "rows_in_order": rows}
    return arms


def pack_with_trl(lengths: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """Return the seconds of `pack_dataset` and the lengths in each row."""
    import datasets
    import pyarrow
    from trl import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = pyarrow.array(np.zeros(offsets[-1], np.int8))
    column = pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets), tokens)
    dataset = datasets.Dataset(pyarrow.table({"input_ids": column}))
    start = time.perf_counter()
    packed = pack_dataset(dataset, MAX_LENGTH, strategy="bfd")
    seconds = time.perf_counter() - start
    return seconds, [np.asarray(row) for row in packed["seq_lengths"]]


def pack_with_binpacking(lengths: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """Return the seconds of `to_constant_volume` and the rows. Each window starts with the previous one's last bin."""
    from binpacking import to_constant_volume

    start = time.perf_counter()
    rows, carried = [], []
    for first in range(0, len(lengths), 1000):
        window = carried + [(int(length),) for length in lengths[first : first + 1000]]
        bins = to_constant_volume(window, MAX_LENGTH, weight_pos=0)
        carried = bins.pop() if first + 1000 < len(lengths) else []
        rows += bins
    return time.perf_counter() - start, [np.array(row)[:, 0] for row in rows]


def pack_plainly(lengths: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """Return the seconds of best-fit decreasing, one document at a time, and the rows."""
    start = time.perf_counter()
    rooms: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    for length in np.sort(lengths)[::-1].tolist():
        place = bisect_left(rooms, (length, 0))
        if place == len(rooms):
            room, row = MAX_LENGTH, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(place)
        rows[row].append(length)
        if room > length:
            insort(rooms, (room - length, row))
    return time.perf_counter() - start, [np.array(row) for row in rows]


def compare_fill(samples: int) -> dict[str, dict[str, float]]:
    """Return the fill of the plan and of plain best-fit decreasing on six sets of lengths."""
    fills = {}
    for name, lengths in distributions(samples).items():
        tokens = int(lengths.sum())
        rows = len(pack_plainly(lengths)[1])
        fills[name] = {
            "plan_packing": plan_packing(lengths, MAX_LENGTH).fill,
            "plain best-fit decreasing": tokens / (rows * MAX_LENGTH),
        }
    return fills


def compare_balance(lengths: np.ndarray, speed: dict[str, dict]) -> dict[str, dict]:
    """Return the imbalance between ranks and the statistics of steps: the plan, its rows without balance, TRL's rows.

    TRL's rows are measured in the returned order and in random order, as `Trainer` reads them. Rows that do not fill
    the last step are left out.
    """
    trl = speed["trl.pack_dataset, bfd"].get("rows_in_order")
    rng = np.random.default_rng(0)
    shuffled = None if trl is None else [trl[index] for index in rng.permutation(len(trl))]
    results = {}
    for model, sizes in MODELS.items():
        cost = PackingCost.from_config(model_config(model, sizes))
        for world_size in (8, 64):
            plan = plan_packing(lengths, MAX_LENGTH, world_size=world_size, balance=cost)
            chance = replace(plan_packing(lengths, MAX_LENGTH, world_size=world_size, balance=False), cost=cost)
            results[f"{model}, {world_size} ranks"] = {
                "fill": plan.fill,
                "imbalance": plan.imbalance,
                "imbalance without balance": chance.imbalance,
                "imbalance of TRL's rows as returned": trl and imbalance_of_rows(trl, cost, world_size),
                "imbalance of TRL's rows in random order": trl and imbalance_of_rows(shuffled, cost, world_size),
                **order_statistics(plan, lengths, rng),
                "variance of TRL's rows against samples in random order": trl
                and step_variance(shuffled, world_size) / variance_of_samples(lengths, world_size, rng),
            }
    return results


def model_config(name: str, sizes: dict[str, int]):
    """Return the configuration of a Qwen3.5 model."""
    from transformers import Qwen3_5TextConfig

    key_value_heads, value_heads = HEADS[name]
    return Qwen3_5TextConfig(**sizes, num_key_value_heads=key_value_heads, linear_num_value_heads=value_heads)


def imbalance_of_rows(rows: list[np.ndarray], cost: PackingCost, world_size: int) -> float:
    """Return the cost of the slowest rank over the mean, minus 1. Rank `i` gets every `world_size`-th row."""
    whole = rows[: len(rows) // world_size * world_size]
    begins = np.cumsum([0] + [len(row) for row in whole[:-1]])
    steps = np.add.reduceat(cost.documents(np.concatenate(whole)), begins).reshape(-1, world_size)
    return float((steps.max(1) / steps.mean(1)).mean() - 1)


def order_statistics(plan: PackingPlan, lengths: np.ndarray, rng: np.random.Generator) -> dict[str, float]:
    """Return statistics of the mean document length per step: correlation with the index, variance ratios."""
    tokens, documents = plan.row_tokens, plan.documents_per_row

    def means(order):
        return tokens[order].reshape(plan.steps, -1).sum(1) / documents[order].reshape(plan.steps, -1).sum(1)

    found = means(np.arange(len(plan)))
    rows = np.mean([means(rng.permutation(len(plan))).var() for _ in range(50)])
    return {
        "correlation with the index": float(np.corrcoef(found, np.arange(plan.steps))[0, 1]),
        "variance against rows in random order": float(found.var() / rows),
        "variance against samples in random order": float(
            found.var() / variance_of_samples(lengths, plan.world_size, rng)
        ),
    }


def step_variance(rows: list[np.ndarray], world_size: int) -> float:
    """Return the variance of the mean document length over steps of `world_size` rows."""
    whole = rows[: len(rows) // world_size * world_size]
    sums = np.array([(row.sum(), len(row)) for row in whole]).reshape(-1, world_size, 2).sum(1)
    return float((sums[:, 0] / sums[:, 1]).var())


def variance_of_samples(lengths: np.ndarray, world_size: int, rng: np.random.Generator) -> float:
    """Return the same for samples in random order. A step ends after `world_size * MAX_LENGTH` tokens."""
    variances = []
    for _ in range(10):
        shuffled = rng.permutation(lengths)
        step = (np.cumsum(shuffled, dtype=np.int64) - 1) // (world_size * MAX_LENGTH)
        variances.append((np.bincount(step, weights=shuffled) / np.bincount(step))[:-1].var())
    return float(np.mean(variances))


def in_new_process(samples: int) -> dict[str, float]:
    """Plan `samples` lengths in a separate process and return its seconds and peak memory."""
    command = [sys.executable, __file__, "--huge", str(samples)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def plan_huge(samples: int) -> dict[str, float]:
    """Plan `samples` lengths: the body of `in_new_process`."""
    lengths = np.empty(samples, np.int32)
    for first in range(0, samples, 1_000_000):
        part = lengths[first : first + 1_000_000]
        part[:] = lognormal(len(part), seed=first)
    before = peak_memory()
    start = time.perf_counter()
    plan = plan_packing(lengths, MAX_LENGTH)
    seconds = time.perf_counter() - start
    return {
        "samples": samples,
        "seconds": round(seconds, 2),
        "peak_GiB": round(peak_memory() / 2**30, 2),
        "GiB_before": round(before / 2**30, 2),
        "rows": len(plan),
        "fill": plan.fill,
    }


def check(result: dict) -> dict[str, dict]:
    """Compare each bar with its measurement, or with the worst of several."""
    speed, fill, balance = result["speed"], result["fill"], result["balance"].values()
    ours, trl = speed["plan_packing"]["seconds"], speed["trl.pack_dataset, bfd"].get("seconds")
    measured = {
        "seconds, 1,000,000 lengths": ours,
        "times as fast as TRL": None if trl is None else round(trl / ours, 1),
        "fill, lognormal short": speed["plan_packing"]["fill"],
        "imbalance": max(row["imbalance"] for row in balance),
        "correlation of a step's mean length with its index": max(
            abs(row["correlation with the index"]) for row in balance
        ),
        "variance of that mean against rows in random order, difference from 1": max(
            abs(row["variance against rows in random order"] - 1) for row in balance
        ),
        "seconds, 100,000,000 lengths": result["huge"]["seconds"],
        "GiB, 100,000,000 lengths": result["huge"]["peak_GiB"],
    }
    bars = {}
    for name, bar in BARS.items():
        value, higher = measured[name], name.startswith(("times", "fill"))
        passed = value is not None and (value >= bar if higher else value <= bar)
        bars[name] = {"bar": f"{'at least' if higher else 'at most'} {bar}", "measured": value, "passed": bool(passed)}
    below = [name for name, row in fill.items() if row["plan_packing"] < row["plain best-fit decreasing"]]
    bars["fill, six distributions"] = {
        "bar": "never below plain best-fit decreasing",
        "measured": f"below on {', '.join(below)}" if below else "never",
        "passed": not below,
    }
    return bars


def report(result: dict) -> None:
    """Print the figures as tables."""
    print(f"\n{result['lengths']}, rows of {MAX_LENGTH} tokens\n")
    print(f"{'packer':<32}{'seconds':>9}{'samples/s':>13}{'fill':>10}")
    samples = result["huge"]["samples"] // 100
    for name, row in result["speed"].items():
        if "left_out" in row:
            print(f"{name:<32}  {row['left_out']}")
        else:
            print(f"{name:<32}{row['seconds']:>9.2f}{samples / row['seconds']:>13,.0f}{row['fill']:>10.3%}")
    huge = result["huge"]
    print(
        f"{huge['samples']:,} lengths: {huge['seconds']} s, {huge['peak_GiB']} GiB at most (lengths: {huge['GiB_before']})"
    )
    print(f"\n{'fill':<32}{'plan_packing':>16}{'plain':>12}")
    for name, row in result["fill"].items():
        print(f"{name:<32}{row['plan_packing']:>16.4%}{row['plain best-fit decreasing']:>12.4%}")
    print(f"\n{'slowest rank over mean':<24}{'ours':>8}{'unbalanced':>12}{'TRL':>8}{'TRL, random':>13}{'fill':>9}")
    for name, row in result["balance"].items():
        others = [row[f"imbalance of TRL's rows {order}"] for order in ("as returned", "in random order")]
        trl = [f"{'-' if value is None else f'{value:.2%}'}" for value in others]
        print(
            f"{name:<24}{row['imbalance']:>8.2%}{row['imbalance without balance']:>12.2%}{trl[0]:>8}{trl[1]:>13}"
            f"{row['fill']:>9.2%}"
        )
    print(
        f"\n{'mean length of a step':<24}{'correlation':>12}{'variance / rows':>17}{'/ samples':>11}{'TRL / samples':>15}"
    )
    for name, row in result["balance"].items():
        trl = row["variance of TRL's rows against samples in random order"]
        print(
            f"{name:<24}{row['correlation with the index']:>12.3f}{row['variance against rows in random order']:>17.2f}"
            f"{row['variance against samples in random order']:>11.2f}{'-' if trl is None else f'{trl:.2f}':>15}"
        )
    print()
    for name, bar in result["bars"].items():
        print(f"{'passed' if bar['passed'] else 'MISSED':<8}{name}: {bar['measured']} ({bar['bar']})")


if __name__ == "__main__":
    sys.exit(main())
