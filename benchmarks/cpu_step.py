"""Compare the real tokens per second of packed and padded training steps on the CPU.

The same samples go through the same weights twice: as a right-padded batch through the stock class, and as one packed
row through the packed class. A step is forward and backward in float32. The optimizer step costs the same in both arms
and is left out. The arms alternate, so that drift in the machine's speed affects both. Each batch counts with its
median time.

The ideal ratio is padded tokens / real tokens: the cost per token of the padded step, paid for real tokens only. The
benchmark fails below `SHARE_OF_IDEAL` of this ratio. The measured ratio can exceed the ideal. The strong decays of a
newly initialized model produce denormal numbers in the stock torch gated delta rule, which slow down a CPU. The torch
gated delta rule of this package avoids them.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path


# Stock classes use these packages whenever they can be imported, even for CPU tensors, where they crash.
for package in ("fla", "causal_conv1d"):
    sys.modules[package] = None

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig  # noqa: E402

import transformers_packed  # noqa: E402


SHARE_OF_IDEAL = 0.9
LOSS_TOLERANCE = 1e-5
BATCH_SIZE = 8
BATCHES = 3
LENGTHS = {"distribution": "lognormal", "mean": 400, "sigma": 0.8, "min": 8, "max": 2048, "seed": 0}
CONFIG = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "tie_word_embeddings": True,
    "use_cache": False,
}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. The exit status is 1 if the ratio is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="timed steps per batch and arm (default: 3)")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="torch threads; with more than 1, other load on the machine disturbs the figures (default: 1)",
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu_step.json")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"argument --repeats: expected at least 1, got {args.repeats}")

    torch.set_num_threads(args.threads)
    load_before = os.getloadavg()[0]
    lengths = draw_lengths()
    report = measure(lengths, args.repeats)
    padded_tokens = sum(BATCH_SIZE * max(batch) for batch in lengths)
    real_tokens = sum(map(sum, lengths))
    ideal = padded_tokens / real_tokens
    seconds = {arm: sum(map(statistics.median, zip(*runs, strict=True))) for arm, runs in report["seconds"].items()}
    ratio = seconds["padded"] / seconds["packed"]
    passed = ratio >= SHARE_OF_IDEAL * ideal and report["loss_difference"] < LOSS_TOLERANCE

    print(f"{'arm':<8}{'computed tokens':>17}{'seconds':>9}{'real tokens/s':>15}")
    for arm, tokens in (("padded", padded_tokens), ("packed", real_tokens)):
        print(f"{arm:<8}{tokens:>17}{seconds[arm]:>9.2f}{real_tokens / seconds[arm]:>15.0f}")
    print(
        f"packed / padded: {ratio:.2f}x, padded tokens / real tokens: {ideal:.2f}, bar: {SHARE_OF_IDEAL * ideal:.2f}x"
    )
    print(f"largest relative difference of a loss: {report['loss_difference']:.1e}")

    result = {
        "benchmark": "forward and backward of one training step, packed against padded, float32 on the CPU",
        "command": f"python benchmarks/cpu_step.py --repeats {args.repeats}",
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "load_average_before": round(load_before, 2),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "transformers_packed": transformers_packed.__version__,
        },
        "model": {"class": "Qwen3_5ForCausalLM", "parameters": report["parameters"], "config": CONFIG},
        "implementations": {
            "padded": "transformers.models.qwen3_5, torch path",
            "packed": transformers_packed.ops.implementations_used(),
        },
        "lengths": {**LENGTHS, "batch_size": BATCH_SIZE, "batches": lengths},
        "tokens": {"real": real_tokens, "padded": padded_tokens, "padding_share": round(1 - 1 / ideal, 4)},
        "results": {
            "median_seconds": {arm: round(value, 4) for arm, value in seconds.items()},
            "real_tokens_per_second": {arm: round(real_tokens / value, 1) for arm, value in seconds.items()},
            "ratio": round(ratio, 3),
            "share_of_ideal": round(ratio / ideal, 3),
            "ratio_in_each_repeat": [
                round(sum(padded) / sum(packed), 3)
                for padded, packed in zip(report["seconds"]["padded"], report["seconds"]["packed"], strict=True)
            ],
            "largest_relative_loss_difference": report["loss_difference"],
        },
        "bar": {
            "rule": f"ratio >= {SHARE_OF_IDEAL} * padded tokens / real tokens",
            "ratio": round(SHARE_OF_IDEAL * ideal, 3),
            "passed": passed,
        },
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not passed:
        print("FAILED: below the bar, or the losses differ.", file=sys.stderr)
    return 0 if passed else 1


def draw_lengths() -> list[list[int]]:
    """Return the sample lengths of each batch, in tokens."""
    mu = np.log(LENGTHS["mean"]) - LENGTHS["sigma"] ** 2 / 2
    drawn = np.random.default_rng(LENGTHS["seed"]).lognormal(mu, LENGTHS["sigma"], (BATCHES, BATCH_SIZE))
    return drawn.astype(int).clip(LENGTHS["min"], LENGTHS["max"]).tolist()


def measure(lengths: list[list[int]], repeats: int) -> dict:
    """Return the seconds `{arm: [repeat][batch]}`, the largest relative loss difference and the parameter count."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    config = Qwen3_5TextConfig(**CONFIG)
    padded_model = AutoModelForCausalLM.from_config(config).train()
    with transformers_packed.registered():
        packed_model = AutoModelForCausalLM.from_config(config).train()
    packed_model.load_state_dict(padded_model.state_dict())

    pack = transformers_packed.DataCollatorWithFlattening(
        return_cu_seqlens=True, return_seq_idx=True, model=packed_model
    )
    steps = []
    for batch in lengths:
        samples = [{"input_ids": torch.randint(CONFIG["vocab_size"], (length,))} for length in batch]
        steps.append({"padded": (padded_model, pad(samples)), "packed": (packed_model, pack(samples))})

    # The first pass warms up and compares the losses.
    differences = []
    for step in steps:
        padded, packed = (train_step(*step[arm])[1] for arm in ("padded", "packed"))
        differences.append(abs(packed - padded) / padded)
    seconds = {"padded": [], "packed": []}
    for repeat in range(repeats):
        print(f"repeat {repeat + 1}/{repeats}", end="\r", file=sys.stderr, flush=True)
        timed = [{arm: train_step(*step[arm])[0] for arm in seconds} for step in steps]
        for arm in seconds:
            seconds[arm].append([times[arm] for times in timed])
    print(file=sys.stderr)
    parameters = sum(parameter.numel() for parameter in padded_model.parameters())
    return {"seconds": seconds, "loss_difference": max(differences), "parameters": parameters}


def pad(samples: list[dict]) -> dict:
    """Pad the samples on the right. As in a packed row, the first label of each sample is ignored."""
    width = max(len(sample["input_ids"]) for sample in samples)
    batch = {
        "input_ids": torch.zeros(len(samples), width, dtype=torch.long),
        "attention_mask": torch.zeros(len(samples), width, dtype=torch.long),
        "labels": torch.full((len(samples), width), -100),
    }
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        batch["input_ids"][row, :length] = sample["input_ids"]
        batch["attention_mask"][row, :length] = 1
        batch["labels"][row, 1:length] = sample["input_ids"][1:]
    return batch


def train_step(model: torch.nn.Module, batch: dict) -> tuple[float, float]:
    """Run one forward and backward pass and return its seconds and its loss."""
    model.zero_grad()
    start = time.perf_counter()
    loss = model(**batch).loss
    loss.backward()
    return time.perf_counter() - start, loss.item()


def cpu_model() -> str:
    """Return the name of the processor as reported by the system."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
