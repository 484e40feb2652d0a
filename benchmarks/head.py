"""Forward and backward of the head alone: log-probabilities against the cross entropy, with a frozen and a trained head.

`logps` gets a random gradient for each token. `logps+entropy` also returns entropies, without gradients for them, as TRL
logs them. Memory is the peak above the weights, the hidden states and their targets.

With `--teacher`, the divergence of the head from that of a larger model, forward (`beta` 0), reverse (1) and of their
mixture, with entropies as TRL logs them: this package against the function of TRL's `DistillationTrainer`.

    python benchmarks/head.py --models 0.8B 4B --output benchmarks/results/head.json
    python benchmarks/head.py --models 4B --teacher 9B --output benchmarks/results/divergence.json
"""

import argparse
import json
import shlex
import statistics
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from shapes import MODELS
from step import earlier_report, machine_name, seconds_of_steps

from transformers_packed.ops import implementations_used, linear_cross_entropy, linear_divergence, linear_logps


BETAS = (0.0, 0.5, 1.0)


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

    arms = {"cross_entropy": cross_entropy, "logps": logps, "logps+entropy": lambda: logps(True)}
    if args.teacher:
        arms = divergences(hidden, weight, leaves, options, args)
    return timed(arms, args)


def divergences(hidden, weight, leaves, options: dict, args) -> dict:
    """The arms with a teacher. TRL first, which the others are compared with."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    config = MODELS[args.teacher]
    teacher_weight = torch.randn(config["vocab_size"], config["hidden_size"], **options).mul_(0.02).bfloat16()
    taught = torch.randn(args.tokens, config["hidden_size"], **options).bfloat16()
    mask = torch.ones(args.tokens, dtype=torch.bool, device=args.device)

    def trl(beta):
        loss, *_ = _chunked_divergence_loss(hidden, taught, weight, teacher_weight, mask, beta, args.tokens)
        torch.autograd.grad(loss, leaves)

    def ours(beta):
        kwargs = {"beta": beta, "num_items_in_batch": args.tokens, "return_entropies": True}
        loss, _ = linear_divergence(hidden, weight, taught, teacher_weight, mask, **kwargs)
        torch.autograd.grad(loss, leaves)

    return {
        f"{name} beta={beta:g}": partial(arm, beta) for beta in BETAS for name, arm in (("trl", trl), ("ours", ours))
    }


def timed(arms: dict, args) -> dict:
    """Time each arm, and compare it with the first one, or with TRL's of the same divergence."""
    found = {}
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
        base = name.replace("ours", "trl") if args.teacher else "cross_entropy"
        ratio = f"over_{base.split()[0]}"
        entry[ratio] = round(entry["median_ms"] / found.get(base, entry)["median_ms"], 3)
        found[name] = entry
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.8B", "4B"])
    parser.add_argument(
        "--teacher", choices=MODELS, help="the divergence from the head of this model, in place of the rest"
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    report = earlier_report(args.output, machine_name(args.device), parser)
    for model in args.models:
        for trained in (False, True):
            run = {"command": shlex.join(["python", *sys.argv]), "model": model, "tokens": args.tokens}
            run |= {"teacher": args.teacher} if args.teacher else {}
            run |= {"trained": trained, "arms": measure(MODELS[model], trained, args)}
            report["runs"].append(run | {"implementations": implementations_used()})
            for name, entry in run["arms"].items():
                print(f"{model} trained={trained} {name}: {entry}", flush=True)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
