"""`transformers-packed bench`: time training steps of a model on this machine, padded and packed.

Time whole training steps of --model, with random weights: padded batches with Transformers' class, and a packed row with
ours. A step is forward, backward, clipping and AdamW.

    transformers-packed bench --model Qwen/Qwen3.5-0.8B
    transformers-packed bench --model Qwen/Qwen3.5-4B --data chats.jsonl --row-length 8192 --lora --plot bench.png

Both arms have random weights of the same seed and compute the same documents. Each runs in a process of its own
(`bench_arm.py`), for its peak memory and because kernels stay in a process.
"""

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import count, input_error
from .arms import ARMS, COLORS, print_table, run_arms
from .options import Parser, positive_float
from .process import raise_on_interrupt


# Standard deviation of the logarithms of generated lengths: many documents are short, and few are long.
_SPREAD = 1.0
_LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


def add_options(parser: Parser) -> None:
    """Declare the options of the command."""
    add, add_count, shared = parser.add_argument, parser.add_count, parser.add_shared
    shared("--model")
    shared("--row-length", default=4096, help="tokens per step, in one packed row")
    add_count("--batch-size", "documents per padded batch", 8)
    data = "file or dataset with the lengths of documents (default: generated)"
    shared("--data", required=False, help=data)
    shared("--tokenizer", "--split", "--subset", "--format")
    add_count("--mean-length", "mean length of generated documents", 480)
    parser.add_lora()
    shared("--float8", help="in the packed arm, linear layers in float8")
    shared("--cuda-graphs", action="store_true", help="in the packed arm, CUDA graphs")
    shared("--gradient-checkpointing", "--attn", "--dtype", "--weights")
    add("--seconds", type=positive_float, default=10, metavar="S", help="timed seconds per arm")
    limit = "seconds after which an arm is left out, with the time to load it"
    add("--time-limit", type=positive_float, default=300, metavar="S", help=limit)
    shared("--plot", help="plot speed and memory (needs matplotlib)")
    shared("--seed", "--trust-remote-code")


def run(args: argparse.Namespace) -> int:
    """Print the table, and plot it if requested. The exit status is 1 if the losses of the two arms differ.

    Raises:
        `ChildProcessError`: an arm failed for another reason than its memory.
        `ImportError`: matplotlib, peft or bitsandbytes is needed and missing.
        `OSError`: the model or the data cannot be read.
        `ValueError`: the model is not supported, or the data is malformed.
    """
    import torch

    from .models import config_and_dtype

    if args.plot and find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")
    config, dtype = config_and_dtype(args)
    lengths = choose_lengths(args)
    names = ("batch_size", "lora", "lora_rank", "experts", "load_in_4bit", "float8", "cuda_graphs", "attn", "weights")
    settings = {name: getattr(args, name) for name in (*names, "gradient_checkpointing", "seconds", "seed")}
    settings |= {"lengths": lengths, "dtype": str(dtype).removeprefix("torch.")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{config.model_type} on {device}: {count(len(lengths), 'document')} of {min(lengths):,} to {max(lengths):,} tokens, "
        f"{sum(lengths):,} in a step."
    )
    raise_on_interrupt()
    with tempfile.TemporaryDirectory(prefix="transformers_packed_bench_") as directory:
        work = Path(directory)
        config.save_pretrained(work)
        results = run_arms("bench_arm", work, settings, args.time_limit)
    status = print_report(results, settings["dtype"])
    if args.plot:
        draw(results, f"{config.model_type}, {sum(lengths):,} tokens a step, {device}", args.plot)
        print(f"Wrote {args.plot}")
    return status


def choose_lengths(args: argparse.Namespace) -> list[int]:
    """The lengths of the documents of a step, `--row-length` tokens together, in random order.

    Raises:
        `ValueError`: the documents of `--data` have fewer tokens.
    """
    from .plan import find_tokenizer, read_samples

    random = np.random.default_rng(args.seed)
    if args.data:
        tokenizer = find_tokenizer(args) if args.tokenizer else None
        lengths = random.permutation([len(sample["input_ids"]) for sample in read_samples(args, tokenizer)])
    else:
        # Each has at least two tokens, so this number always suffices.
        median = args.mean_length / np.exp(_SPREAD**2 / 2)
        lengths = random.lognormal(np.log(median), _SPREAD, args.row_length)
    lengths = np.clip(lengths, 2, args.row_length).astype(int)
    ends = lengths.cumsum()
    if ends[-1] < args.row_length:
        fix = "Pass more data or a lower --row-length."
        raise input_error(f"documents with {args.row_length:,} tokens", f"{ends[-1]:,}", fix, option="--data")
    chosen = lengths[: np.searchsorted(ends, args.row_length) + 1]
    chosen[-1] -= chosen.sum() - args.row_length
    # A document of one token has no target.
    if chosen[-1] == 1 and len(chosen) > 1:
        chosen[-2] += 1
        chosen = chosen[:-1]
    return chosen.tolist()


def print_report(results: dict[str, dict[str, Any]], dtype: str) -> int:
    """Print the table and the ratios. Returns 1 if the losses differ, else 0."""
    table = [["arm", "tokens/s", "ms per step", "peak memory", "padding", "first step"]]
    for arm, result in results.items():
        if "error" in result:
            table.append([ARMS[arm], result["error"], *[""] * 4])
            continue
        padding = 1 - result["tokens"] / result["computed_tokens"]
        row = [ARMS[arm], f"{result['tokens'] / result['seconds']:,.0f}", f"{1000 * result['seconds']:,.0f}"]
        row += [f"{result['peak_memory'] / 2**30:.1f} GiB", f"{padding:.0%}", f"{result['first_step']:.0f} s"]
        table.append(row)
    print()
    print_table(table)
    if results["padded"].get("compiled_for_packed"):
        print(
            "\nThe padded arm also compiled FlashQLA's kernels for the packed arm, whose first step only loads them."
        )
    if any("error" in result for result in results.values()):
        return 0
    padded, packed = results["padded"], results["packed"]
    print(f"\nSpeed, packed / padded: {padded['seconds'] / packed['seconds']:.2f}x")
    print(f"Memory, packed / padded: {packed['peak_memory'] / padded['peak_memory']:.2f}x")
    difference, tolerance = abs(packed["loss"] / padded["loss"] - 1), _LOSS_TOLERANCE[dtype]
    print(f"Relative loss difference of the first step: {difference:.1e} (must be below {tolerance:g})")
    return int(not difference < tolerance)


def draw(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Plot the tokens per second and the peak memory of both arms."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(9, 4.4), layout="constrained", dpi=150)
    panels = {
        "Training speed, tokens per second": lambda result: result["tokens"] / result["seconds"],
        "Peak memory, GiB": lambda result: result["peak_memory"] / 2**30,
    }
    for axes, (name, value) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        values = [0 if "error" in result else value(result) for result in results.values()]
        bars = axes.bar(list(results), values, color=[COLORS[arm] for arm in results], width=0.6)
        texts = [f"{x:,.0f}" if x >= 100 else f"{x:.1f}" for x in values]
        labels = [result.get("error", text) for result, text in zip(results.values(), texts, strict=True)]
        axes.bar_label(bars, labels, padding=2)
        axes.set(title=name, ylim=(0, 1.12 * max(values) or 1))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, weight="bold")
    figure.savefig(path)
