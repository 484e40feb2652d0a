"""`transformers-packed demo`: compare padded and packed training of a small model on the CPU.

Train a small Qwen3.5 on the CPU, on padded batches with Transformers' class and on packed rows with ours. Prints a
comparison, and writes demo.png if matplotlib is installed.

    transformers-packed demo

The padded arm is stock Transformers: its class, its collator, right padding. The packed arm uses our class and our
collator. Both start from the same weights, train on the same samples in the same steps, and must log the same losses.
Each arm runs in a separate process (`demo_arms.py`) to measure its peak memory. They take turns of a few steps, so that
other load on the machine slows both alike.
"""

import argparse
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .arms import ARMS, COLORS, print_table, run_in_turns
from .audit import GPU_ONLY
from .options import Parser
from .process import raise_on_interrupt


VOCAB_SIZE = 4096
MAX_LENGTH = 512
LOSS_TOLERANCE = 1e-3


def add_options(parser: Parser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--output", type=Path, default=Path("."), metavar="DIR", help="directory for demo.png")
    parser.add_count("--samples", "samples to train on", 4000)
    parser.add_count("--steps", "training steps per arm", 50)
    parser.add_count("--batch-size", "samples per step", 8)
    parser.add_shared("--seed")


def run(args: argparse.Namespace) -> int:
    """Print the comparison and draw it. The exit status is 1 if the losses of the two arms differ.

    Raises:
        `ValueError`: fewer samples than one batch needs.
    """
    args.output.mkdir(parents=True, exist_ok=True)
    hidden = [package for package in GPU_ONLY if find_spec(package)]
    if hidden:
        print(f"Hiding {' and '.join(hidden)}: Transformers' class would call these GPU kernels for CPU tensors.")

    raise_on_interrupt()
    with tempfile.TemporaryDirectory(prefix="transformers_packed_demo_") as directory:
        work = Path(directory)
        prepare_samples(work, args.samples, args.batch_size, args.seed)
        settings = {name: getattr(args, name) for name in ("steps", "batch_size", "seed")}
        results = run_in_turns("demo_arms", work, settings)

    difference = loss_difference(results)
    print_report(results, difference)
    if find_spec("matplotlib"):
        draw(results, difference, args.output / "demo.png")
        print(f"\nWrote {args.output / 'demo.png'}")
    else:
        print("\nWithout matplotlib, the demo draws no picture: pip install matplotlib")
    if not difference < LOSS_TOLERANCE:
        print(f"FAILED: the losses of the two arms differ by more than {LOSS_TOLERANCE:g}.", file=sys.stderr)
        return 1
    return 0


def prepare_samples(work: Path, samples: int, batch_size: int, seed: int) -> None:
    """Write the tokenizer and the samples of both arms to `work`."""
    from ..errors import count, input_error
    from .demo_data import choose_pairs, read_pairs, tokenize, train_tokenizer

    pairs, broken = read_pairs()
    chosen = choose_pairs(pairs, samples, seed)
    tokenizer = train_tokenizer(chosen, work / "tokenizer", VOCAB_SIZE)
    data, truncated = tokenize(chosen, tokenizer, MAX_LENGTH)
    if len(data) < batch_size:
        raise input_error(f"a batch of {batch_size} samples", len(data), "Raise --samples or lower --batch-size.")
    (work / "samples.json").write_text(json.dumps(data), encoding="utf-8")
    print(
        f"{count(len(pairs), 'docstring-function pair')} ({count(broken, 'file')} did not parse); "
        f"{count(len(data), 'sample')}, {truncated:,} of them truncated to {MAX_LENGTH} tokens; {len(chosen) - len(data)} with longer docstrings dropped."
    )


def loss_difference(results: dict[str, dict[str, Any]]) -> float:
    """The largest relative loss difference in a step. NaN if a loss is NaN, infinite if the step counts differ."""
    padded, packed = (results[arm]["losses"] for arm in ARMS)
    if not padded or len(padded) != len(packed):
        return float("inf")
    differences = [abs(one - other) / abs(other) for one, other in zip(packed, padded, strict=True)]
    return max(differences, key=lambda x: (x != x, x))


def print_report(results: dict[str, dict[str, Any]], difference: float) -> None:
    """Print the table, the loss difference, and the implementations that ran."""
    table = [["arm", "samples", "real tokens", "padding", "seconds", "real tokens/s", "peak memory", "final loss"]]
    for arm, result in results.items():
        padding = 1 - result["real_tokens"] / result["computed_tokens"]
        memory = f"{result['peak_memory'] / 2**20:.0f} MiB"
        row = [arm, result["samples"], result["real_tokens"], f"{padding:.1%}", f"{result['seconds']:.1f}"]
        table.append([*map(str, row), f"{tokens_per_second(result):.0f}", memory, f"{result['losses'][-1]:.4f}"])
    print()
    print_table(table)
    before = " and ".join(f"{results[arm]['memory_before'] / 2**20:.0f}" for arm in ARMS)
    print(f"Peak memory is the largest resident size of each process, including {before} MiB before the first step.")

    speed_up = tokens_per_second(results["packed"]) / tokens_per_second(results["padded"])
    print(f"\nSpeed, packed / padded: {speed_up:.2f}x real tokens per second")
    print(f"Largest relative loss difference of a step: {difference:.1e} (must be below {LOSS_TOLERANCE:g})")
    print("Implementations that ran in the packed arm:")
    implementations = results["packed"]["implementations"]
    for op, names in implementations.items():
        print(f"  {op:<{max(map(len, implementations))}}  {', '.join(names)}")


def tokens_per_second(result: dict[str, Any]) -> float:
    """The real tokens per second of an arm."""
    return result["real_tokens"] / result["seconds"]


def draw(results: dict[str, dict[str, Any]], difference: float, path: Path) -> None:
    """Plot the losses and the speed of both arms."""
    from matplotlib.figure import Figure

    styles: dict[str, dict[str, Any]] = {
        "padded": {"linewidth": 6, "alpha": 0.5},
        "packed": {"linewidth": 1.8, "linestyle": (0, (3, 1.5))},
    }
    figure = Figure(figsize=(11, 4.8), layout="constrained", dpi=150)
    losses, speed = figure.subplots(1, 2, width_ratios=[2, 1])
    for arm in ARMS:
        values = results[arm]["losses"]
        losses.plot(range(1, len(values) + 1), values, label=ARMS[arm], color=COLORS[arm], **styles[arm])
    losses.set(xlabel="step", ylabel="loss", title=f"Loss: at most {difference:.0e} apart (relative) in any step")
    losses.legend(handlelength=3)
    losses.grid(alpha=0.3)

    speeds = [tokens_per_second(results[arm]) for arm in ARMS]
    bars = speed.bar(list(ARMS), speeds, color=[COLORS[arm] for arm in ARMS], width=0.65)
    speed.bar_label(bars, [f"{value:.0f}" for value in speeds], padding=2, fontsize=11)
    middle, ratio = bars[1].get_x() + bars[1].get_width() / 2, f"{speeds[1] / speeds[0]:.2f}x"
    speed.text(middle, speeds[1] / 2, ratio, color="white", fontsize=20, weight="bold", ha="center", va="center")
    speed.set(ylabel="real tokens per second", title="Training speed", ylim=(0, 1.1 * max(speeds)))
    for axes in (losses, speed):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A small Qwen3.5 fine-tuned on the CPU: padded against packed batches", weight="bold")
    figure.savefig(path)
