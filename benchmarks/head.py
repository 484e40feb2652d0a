"""Forward and backward of the head alone: log-probabilities against the cross entropy, with a frozen and a trained head.

`logps` gets a random gradient for each token. `logps+entropy` also returns entropies, without gradients for them, as TRL
logs them. Memory is the peak above the weights, the hidden states and their targets.

    python benchmarks/head.py --models 0.8B 4B --output benchmarks/results/head.json
"""

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from shapes import MODELS
from step import earlier_report, seconds_of_steps

from transformers_packed.ops import implementations_used, linear_cross_entropy, linear_logps


def measure(config: dict, trained: bool, args) -> dict:
    generator = torch.Generator(args.device).manual_seed(0)
    options = {"generator": generator, "device": args.device}
    weight = torch.randn(config["vocab_size"], config["hidden_size"], **options).mul_(0.02).bfloat16()
    hidden = torch.randn(args.tokens, config["hidden_size"], **options).bfloat16().requires_grad_()
    weight.requires_grad_(trained)
    targets = torch.randint(config["vocab_size"], (args.tokens,), **options)
    upstream = torch.rand(args.tokens, **options)
    leaves = [hidden, weight] if trained else [hidden]

    def cross_entropy():
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), leaves)

    def logps(entropy=False):
        found = linear_logps(hidden, weight, targets, entropy=entropy)
        torch.autograd.grad(found[0] if entropy else found, leaves, upstream)

    found = {}
    arms = {"cross_entropy": cross_entropy, "logps": logps, "logps+entropy": lambda: logps(True)}
    for name, run in arms.items():
        for _ in range(3):
            run()
        entry = {}
        if args.device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of_steps(SimpleNamespace(run=run), args.repeats, args.device)
        if args.device == "cuda":
            entry["peak_above_GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
        entry["median_ms"] = round(1000 * statistics.median(seconds), 2)
        entry["over_cross_entropy"] = round(entry["median_ms"] / found.get("cross_entropy", entry)["median_ms"], 3)
        found[name] = entry
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.8B", "4B"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    report = earlier_report(args.output, machine, parser)
    for model in args.models:
        for trained in (False, True):
            run = {"command": shlex.join(["python", *sys.argv]), "model": model, "tokens": args.tokens}
            run |= {"trained": trained, "arms": measure(MODELS[model], trained, args)}
            report["runs"].append(run | {"implementations": implementations_used()})
            for name, entry in run["arms"].items():
                print(f"{model} trained={trained} {name}: {entry}", flush=True)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
