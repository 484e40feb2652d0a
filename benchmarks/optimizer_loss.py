"""Loss of training from random weights on real text with each optimizer, beside the spread of seeds of AdamW in float32.

Each call trains one optimizer of `models/optimizers.py` in `PackedTrainer`, as `transformers-packed train` does, once for
each seed of the weights, and adds the runs to a JSON file. Rows and their order are the same in all runs. Gradient release
cannot clip, so it has to be compared with AdamW without clipping (`--clip 0`).

    python benchmarks/float8_corpus.py --output corpus.npz
    for clip in 1 0; do
        python benchmarks/optimizer_loss.py --corpus corpus.npz --seeds 0 1 2 --clip $clip --output optimizer_loss.json
    done
    for optim in adamw_torch_8bit adamw_torch_4bit adamw_8bit flash_adamw; do
        python benchmarks/optimizer_loss.py --corpus corpus.npz --optim $optim --output optimizer_loss.json
    done
    python benchmarks/optimizer_loss.py --corpus corpus.npz --weights bfloat16 --output optimizer_loss.json
    python benchmarks/optimizer_loss.py --corpus corpus.npz --optim flash_adamw_release --clip 0 --output optimizer_loss.json
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from float8_loss import load, make_model
from shapes import MODELS
from step import earlier_report, machine_name

from transformers_packed import GradientReleaseCallback, PackedTrainer, PackedTrainingArguments
from transformers_packed.models.optimizers import DEFAULT, OPTIMIZERS
from transformers_packed.training.optimizers import arguments_for, class_and_kwargs


LAST_STEPS = 20
HELD_OUT_DOCUMENTS = 64


def train(args, seed: int) -> dict:
    """One run, with the weights of this seed."""
    documents, vocab_size = load(args.corpus)
    parts = [ids[at : at + args.tokens].tolist() for ids in documents for at in range(0, len(ids), args.tokens)]
    samples = [{"input_ids": part, "labels": part} for part in parts]
    held_out = min(HELD_OUT_DOCUMENTS, len(samples) // 10)
    optimizer, weights = OPTIMIZERS[args.optim], args.weights or OPTIMIZERS[args.optim].weights
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(MODELS[args.model] | {"vocab_size": vocab_size}, device, seed, getattr(torch, weights))
    options = {"max_grad_norm": args.clip} | arguments_for(args.optim)
    settings = PackedTrainingArguments(
        args.scratch,
        packing=True,
        max_length=args.tokens,
        per_device_train_batch_size=1,
        max_steps=args.steps,
        learning_rate=args.lr,
        warmup_steps=args.steps // 10,
        lr_scheduler_type="cosine",
        adam_beta2=0.95,
        weight_decay=0.1,
        bf16=weights == "float32" and device == "cuda",
        use_cpu=device == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = PackedTrainer(
        model,
        settings,
        train_dataset=samples[:-held_out],
        eval_dataset=samples[-held_out:],
        optimizer_cls_and_kwargs=class_and_kwargs(args.optim, settings),
    )
    if optimizer.releases:
        trainer.add_callback(GradientReleaseCallback(trainer))
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    losses = [round(line["loss"], 5) for line in trainer.state.log_history if "loss" in line]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "optim": args.optim,
        "weights": weights,
        "seed": seed,
        "clip": settings.max_grad_norm,
        "model": args.model,
        "vocab_size": vocab_size,
        "steps": args.steps,
        "tokens": args.tokens,
        "lr": args.lr,
        "seconds": round(seconds, 1),
        "mean_loss_of_last_steps": round(statistics.fmean(losses[-LAST_STEPS:]), 5),
        "held_out_loss": round(trainer.evaluate()["eval_loss"], 5),
        "loss": losses,
    }


def summary(runs: list[dict]) -> list[str]:
    """A line for each run, and its distance from the mean of AdamW in float32 with the same clipping beside their spread."""
    lines = []
    for run in runs:
        line = f"{run['optim']}, {run['weights']}, clip {run['clip']:g}, seed {run['seed']}"
        line += f": {run['mean_loss_of_last_steps']:.4f}, held out {run['held_out_loss']:.4f}"
        same = [x for x in runs if (x["optim"], x["weights"], x["clip"]) == (DEFAULT, "float32", run["clip"])]
        found = [x["mean_loss_of_last_steps"] for x in same]
        if len(found) > 1 and run not in same:
            apart = run["mean_loss_of_last_steps"] - statistics.fmean(found)
            line += (
                f", {apart:+.4f} from AdamW in float32, whose {len(found)} seeds span {max(found) - min(found):.4f}"
            )
        lines.append(line)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="the file of float8_corpus.py")
    parser.add_argument("--optim", choices=OPTIMIZERS, default=DEFAULT)
    parser.add_argument("--weights", choices=("float32", "bfloat16"), help="default: those of --optim")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the weights")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of the gradients, or 0 not to clip")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each row, which is a step")
    parser.add_argument("--model", choices=MODELS, default="0.8B", help="the shape, with the corpus' vocabulary")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--scratch", default="/tmp/optimizer_loss", help="folder of the trainer's files")
    parser.add_argument("--output", type=Path, required=True, help="add the runs to this JSON file")
    args = parser.parse_args()
    if OPTIMIZERS[args.optim].releases and args.clip:
        parser.error(f"--optim {args.optim} needs --clip 0")
    report = earlier_report(args.output, machine_name("cuda" if torch.cuda.is_available() else "cpu"), parser)
    for seed in args.seeds:
        report["runs"].append(train(args, seed))
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(*summary(report["runs"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
