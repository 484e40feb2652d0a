"""Seconds of the check of a set-up before the first step, with cold and warm kernel caches.

`PackedTrainer` trains two steps of a stock model in bfloat16 on 64 samples of lognormal lengths. Each arm trains in a
process of its own, because a process keeps its kernels. `cold` starts without kernels on disk, `warm` with those that
`cold` left there. The arms with `unchecked` set `verify=False`. What the check costs in all is the difference between the
arms in seconds until the end of the first step: without the check, that step compiles the kernels.

    python benchmarks/verify.py --models 0.8B --output benchmarks/results/verify.json
    python benchmarks/verify.py --models 0.8B --arms "cold unchecked" "warm unchecked" --lora
    python benchmarks/verify.py --models tiny --evaluate
"""

import argparse
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from arms import make_model, with_lora
from first_steps import CACHES, synchronize
from shapes import MODELS, with_layers
from step import earlier_report, machine_name
from transformers import TrainerCallback

from transformers_packed import PackedTrainer, PackedTrainingArguments
from transformers_packed.ops import implementations_used
from transformers_packed.training.callbacks.verify import VerifyCallback


ARMS = ("cold", "warm", "warm unchecked", "cold unchecked")


class Clock(TrainerCallback):
    """Records when training and its steps start and end."""

    def __init__(self, device: str):
        self.device = device
        self.ends: list[float] = []

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.ends:
            self.ends.append(self.now())

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(self.now())


def make_samples(count: int, vocab: int, shortest: int, longest: int) -> list[dict]:
    """Samples whose targets are their tokens, of lognormal lengths as in `shapes.sample_lengths`."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(count, generator=generator) * 0.8 + 5.85).exp().long().clamp(shortest, longest).tolist()
    documents = [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in documents]


def train(arm: str, config: dict, args) -> dict:
    """The figures of one arm, as JSON."""
    model = make_model(config, "padded", args.device)
    if args.lora:
        model = with_lora(model, False)
    samples = make_samples(args.samples, config["vocab_size"], args.shortest, args.longest)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        options = PackedTrainingArguments(
            folder,
            padding_free=True if args.packing == "padding_free" else None,
            verify="unchecked" not in arm,
            # It would compile the kernels before the check.
            compile_before_training=False,
            max_steps=2,
            per_device_train_batch_size=args.batch,
            per_device_eval_batch_size=args.batch,
            learning_rate=1e-6,
            bf16=True,
            use_cpu=args.device == "cpu",
            # The check evaluates, training is shorter.
            eval_strategy="steps" if args.evaluate else "no",
            eval_steps=100,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = PackedTrainer(
            model,
            options,
            train_dataset=samples,
            # Few and short, because Trainer also evaluates after the last step.
            eval_dataset=sorted(samples, key=lambda sample: len(sample["input_ids"]))[:5] if args.evaluate else None,
            compute_metrics=(lambda prediction: {}) if args.evaluate else None,
        )
        clock = Clock(args.device)
        trainer.add_callback(clock)
        checks, peaks = watch_checks(trainer, clock)
        start = clock.now()
        trainer.train()
    begin, first, second = clock.ends
    return {
        "arm": arm,
        "lora": args.lora,
        "evaluation": args.evaluate,
        "packing": args.packing,
        "samples": len(samples),
        "tokens": sum(len(sample["input_ids"]) for sample in samples),
        "batch": args.batch,
        "verify_seconds": round(sum(checks), 3) if checks else None,
        "verify_peak_gib": round(max(peaks), 2) if peaks else None,
        "seconds_until_first_step": round(begin - start, 3),
        "first_step_seconds": round(first - begin, 3),
        "second_step_seconds": round(second - first, 3),
        "padding_free": trainer.args.padding_free,
        # Trainer prints its own log as dictionaries.
        "said": [line for line in said.getvalue().splitlines() if line and not line.startswith("{")],
        "implementations": implementations_used(),
    }


def watch_checks(trainer: PackedTrainer, clock: Clock) -> tuple[list[float], list[float]]:
    """Lists that get the seconds of each check of this Trainer, and its peak of memory on a GPU in GiB."""
    found: list[float] = []
    peaks: list[float] = []
    on_gpu = clock.device == "cuda"
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, VerifyCallback):

            def timed(*args, check=callback.on_train_begin, **kwargs):
                start = clock.now()
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                try:
                    return check(*args, **kwargs)
                finally:
                    found.append(clock.now() - start)
                    peaks.extend([torch.cuda.max_memory_allocated() / 2**30] if on_gpu else [])

            callback.on_train_begin = timed
    return found, peaks


def alone(model: str, arm: str, caches: Path, args) -> dict:
    """Run one arm in a process of its own, with its kernels in the folder `caches`."""
    target = caches / "run.json"
    given = {"layers": args.layers, "samples": args.samples, "longest": args.longest, "batch": args.batch}
    given["shortest"] = args.shortest
    given |= {"packing": args.packing, "device": args.device}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    options += ["--lora"] * args.lora + ["--evaluate"] * args.evaluate
    command = [sys.executable, __file__, "--models", model, "--arms", arm, *options, "--alone", str(target)]
    environment = os.environ | {name: str(caches / name) for name in CACHES}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        return {"model": model, "arm": arm, "error": result.stderr[-2000:]}
    warnings = [
        line for line in result.stderr.splitlines() if "transformers_packed" in line or "verif" in line.lower()
    ]
    return {"model": model} | json.loads(target.read_text()) | {"warnings": warnings[:20]}


def show(run: dict) -> None:
    what = run["model"] + ", LoRA" * run["lora"] + ", with evaluation" * run["evaluation"]
    check = "no check" if run["verify_seconds"] is None else f"check {run['verify_seconds']:.1f} s"
    print(
        f"{what}, {run['arm']}: {check}; {run['seconds_until_first_step']:.1f} s before the first step, which took "
        f"{run['first_step_seconds']:.1f} s, the second {run['second_step_seconds']:.2f} s"
    )
    print("\n".join(f"  {line}" for line in run["said"] + run["warnings"]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.8B"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["cold", "warm", "warm unchecked"])
    parser.add_argument("--layers", type=int, help="layers of each model, instead of its own number")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all linear layers")
    parser.add_argument("--evaluate", action="store_true", help="check the evaluation as well")
    parser.add_argument("--packing", choices=("auto", "padding_free"), default="auto")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=8, help="fewest tokens of a sample")
    parser.add_argument("--longest", type=int, default=4096, help="most tokens of a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples of a batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        run = train(args.arms[0], with_layers(MODELS[args.models[0]], args.layers), args)
        args.alone.write_text(json.dumps(run))
        return 0
    if not args.arms[0].startswith("cold"):
        parser.error("the first arm fills the caches, so it has to be a cold one")
    report, failed = earlier_report(args.output, machine_name(args.device), parser), False
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            for number, arm in enumerate(args.arms):
                if arm.startswith("cold"):
                    caches = Path(folder, str(number))
                    caches.mkdir()
                run = {"command": shlex.join(["python", *sys.argv])} | alone(model, arm, caches, args)
                if "error" in run:
                    failed = True
                    print(f"{model}, {arm}: failed\n{run['error']}", flush=True)
                else:
                    show(run)
                report["runs"].append(run)
                if args.output:
                    args.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
