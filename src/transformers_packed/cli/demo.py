"""`transformers-packed demo`: one small Qwen3.5, fine-tuned twice on the CPU with the stock Trainer.

The padded arm is Transformers as it comes: its own class, its own collator, right padding. The packed arm is our class
and our collator. Both start from the same weights, see the same samples in the same steps, and must log the same
losses. Each arm runs in a process of its own, so that each has its own peak of memory.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Qwen3_5TextConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from ..data.collator import DataCollatorWithFlattening
from ..errors import input_error
from ..models.registry import registered
from ..ops import implementations_used
from .demo_data import choose_pairs, read_pairs, tokenize, train_tokenizer


ARMS = ("padded", "packed")
VOCAB_SIZE = 4096
MAX_LENGTH = 512
LEARNING_RATE = 1e-3
LOSS_TOLERANCE = 1e-3
_KERNEL_PACKAGES = ("fla", "causal_conv1d")


def run_demo(
    output: Path = Path("."), *, samples: int = 4000, steps: int = 50, batch_size: int = 8, seed: int = 0
) -> int:
    """Run the demo: print the comparison and write `demo.png`.

    Args:
        output (`Path`, *optional*, defaults to the current directory):
            The directory of `demo.png`. Everything else goes to a temporary directory.
        samples (`int`, *optional*, defaults to 4000):
            How many docstring-function pairs to train on.
        steps (`int`, *optional*, defaults to 50):
            Training steps of each arm.
        batch_size (`int`, *optional*, defaults to 8):
            Samples per step.
        seed (`int`, *optional*, defaults to 0):
            Seed of the weights and of the samples' order.

    Returns:
        `int`: the exit status, 1 when the losses of the two arms differ.

    Raises:
        `ImportError`: matplotlib or psutil is missing.
        `ValueError`: fewer samples than one batch takes.
    """
    missing = [package for package in ("matplotlib", "psutil") if find_spec(package) is None]
    if missing:
        raise ImportError(f"the demo needs {' and '.join(missing)}: pip install transformers_packed[demo]")
    output.mkdir(parents=True, exist_ok=True)
    hidden = [package for package in _KERNEL_PACKAGES if find_spec(package)]
    if hidden:
        print(f"Hiding {' and '.join(hidden)}: Transformers' class would call the GPU kernels for CPU tensors.")

    with tempfile.TemporaryDirectory(prefix="transformers_packed_demo_") as directory:
        work = Path(directory)
        settings = {"steps": steps, "batch_size": batch_size, "seed": seed}
        (work / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        prepare_samples(work, samples, batch_size, seed)
        _in_new_process("model", work)
        for arm in ARMS:
            _in_new_process(arm, work)
        results = {arm: json.loads((work / f"{arm}.json").read_text(encoding="utf-8")) for arm in ARMS}

    difference = loss_difference(results)
    print_report(results, difference)
    picture = output / "demo.png"
    draw(results, picture)
    print(f"\nWrote {picture}")
    if not difference < LOSS_TOLERANCE:
        print(f"FAILED: the losses of the two arms differ by more than {LOSS_TOLERANCE:g}.", file=sys.stderr)
        return 1
    return 0


def prepare_samples(work: Path, samples: int, batch_size: int, seed: int) -> None:
    """Write the tokenizer and the samples of both arms to `work`."""
    pairs, broken = read_pairs()
    chosen = choose_pairs(pairs, samples, seed)
    tokenizer = train_tokenizer(chosen, work / "tokenizer", VOCAB_SIZE)
    data, truncated = tokenize(chosen, tokenizer, MAX_LENGTH)
    if len(data) < batch_size:
        raise input_error(
            f"at least one batch of {batch_size} samples", f"{len(data)}", "Raise --samples or lower --batch-size."
        )
    (work / "samples.json").write_text(json.dumps(data), encoding="utf-8")
    print(
        f"{len(pairs)} docstring-function pairs ({broken} files did not parse); {len(data)} samples, of which "
        f"{truncated} were cut at {MAX_LENGTH} tokens; {len(chosen) - len(data)} with longer docstrings left out."
    )


def _in_new_process(task: str, work: Path) -> None:
    """Make the model or train an arm in a process of its own."""
    command = [sys.executable, "-m", __name__, task, str(work)]
    # In a session of its own Ctrl-C does not reach the process; `run` ends it when it is interrupted itself.
    status = subprocess.run(command, start_new_session=True).returncode
    if status:
        raise ChildProcessError(f"the process for {task!r} ended with status {status}")


def make_model(work: Path) -> None:
    """Write the untrained model, from which both arms start, to `work`."""
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    settings = json.loads((work / "settings.json").read_text(encoding="utf-8"))
    set_seed(settings["seed"])
    model = AutoModelForCausalLM.from_config(
        Qwen3_5TextConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(work / "model")
    print(
        f"Qwen3_5ForCausalLM with {model.num_parameters() / 1e6:.1f} M parameters, float32; "
        f"{settings['steps']} steps of {settings['batch_size']} samples per arm.",
        flush=True,
    )


def train_arm(arm: str, work: Path) -> None:
    """Train one arm, in this process, and write its figures to `<arm>.json` in `work`."""
    import psutil

    settings = json.loads((work / "settings.json").read_text(encoding="utf-8"))
    data = json.loads((work / "samples.json").read_text(encoding="utf-8"))
    if arm == "packed":
        with registered():
            model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
        collator = DataCollatorWithFlattening(return_cu_seqlens=True, return_seq_idx=True, model=model)
    else:
        model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
        collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(work / "tokenizer"), padding=True)
    counting = _CountingCollator(collator)
    recorder = _Recorder(arm)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(work / arm),
            use_cpu=True,
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["batch_size"],
            dataloader_drop_last=True,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            seed=settings["seed"],
            data_seed=settings["seed"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        data_collator=counting,
        train_dataset=data,
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    before = psutil.Process().memory_info().rss
    trainer.train()

    # The data loader collates one batch ahead, so there may be more batches than steps.
    batches = counting.batches[: settings["steps"]]
    result = {
        "model": f"{type(model).__module__}.{type(model).__name__}",
        "samples": sum(batch["samples"] for batch in batches),
        "real_tokens": sum(batch["real_tokens"] for batch in batches),
        "computed_tokens": sum(batch["computed_tokens"] for batch in batches),
        "seconds": recorder.seconds,
        "memory_before": before,
        "peak_memory": peak_memory(),
        "losses": recorder.losses,
        "implementations": implementations_used(isolating=True),
    }
    (work / f"{arm}.json").write_text(json.dumps(result), encoding="utf-8")


class _CountingCollator:
    """A collator that counts the tokens of the batches it makes."""

    def __init__(self, collator):
        self.collator = collator
        self.batches = []

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(features)
        self.batches.append(
            {
                "samples": len(features),
                "real_tokens": sum(len(feature["input_ids"]) for feature in features),
                "computed_tokens": batch["input_ids"].numel(),
            }
        )
        return batch


class _Recorder(TrainerCallback):
    """Keeps the losses and the time of a training, and shows a progress bar."""

    def __init__(self, arm: str):
        self.arm = arm
        self.losses: list[float] = []
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(total=state.max_steps, desc=f"training, {self.arm}", unit="step")
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}")

    def on_train_end(self, args, state, control, **kwargs):
        self.seconds = time.perf_counter() - self.start
        self.bar.close()


def peak_memory() -> int:
    """The largest resident size of this process so far, in bytes."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        # Linux: what getrusage tells starts at the peak of the process that started this one.
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
    except (OSError, TypeError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def loss_difference(results: dict[str, dict[str, Any]]) -> float:
    """The largest relative difference of the arms' losses in a step: NaN if one is, infinite for other steps."""
    padded, packed = (results[arm]["losses"] for arm in ARMS)
    if not padded or len(padded) != len(packed):
        return float("inf")
    # numpy's maximum is NaN as soon as one difference is.
    return float(np.max(np.abs(np.subtract(packed, padded)) / np.abs(padded)))


def print_report(results: dict[str, dict[str, Any]], difference: float) -> None:
    """Print the table, the difference of the losses, and which implementation of each op ran."""
    header = ["arm", "samples", "real tokens", "padding", "seconds", "real tokens/s", "peak memory", "final loss"]
    rows = [
        [
            arm,
            f"{result['samples']}",
            f"{result['real_tokens']}",
            f"{1 - result['real_tokens'] / result['computed_tokens']:.1%}",
            f"{result['seconds']:.1f}",
            f"{tokens_per_second(result):.0f}",
            f"{result['peak_memory'] / 2**20:.0f} MiB",
            f"{result['losses'][-1]:.4f}",
        ]
        for arm, result in results.items()
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print()
    for arm, *cells in [header, *rows]:
        print("  ".join([arm.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]))
    before = " and ".join(f"{results[arm]['memory_before'] / 2**20:.0f}" for arm in ARMS)
    print(f"Peak memory is the largest resident size of the arm's process, {before} MiB of it before the first step.")

    speed_up = tokens_per_second(results["packed"]) / tokens_per_second(results["padded"])
    print(f"\nSpeed, packed / padded: {speed_up:.2f}x real tokens per second")
    print(f"Largest relative loss difference of a step: {difference:.1e} (must be below {LOSS_TOLERANCE:g})")
    print("Implementations that ran in the packed arm:")
    implementations = results["packed"]["implementations"]
    for op, names in implementations.items():
        print(f"  {op:<{max(map(len, implementations))}}  {', '.join(names)}")


def tokens_per_second(result: dict[str, Any]) -> float:
    """An arm's real tokens per second of training."""
    return result["real_tokens"] / result["seconds"]


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the losses of both arms over each other, and their speed."""
    from matplotlib.figure import Figure

    colors = {"padded": "#d1605e", "packed": "#1f4e79"}
    styles = {"padded": {"linewidth": 6, "alpha": 0.5}, "packed": {"linewidth": 1.8, "linestyle": (0, (3, 1.5))}}
    names = {"padded": "padded, Transformers", "packed": "packed, transformers_packed"}
    figure = Figure(figsize=(11, 4.8), layout="constrained", dpi=150)
    losses, speed = figure.subplots(1, 2, width_ratios=[2, 1])
    for arm in ARMS:
        values = results[arm]["losses"]
        losses.plot(range(1, len(values) + 1), values, label=names[arm], color=colors[arm], **styles[arm])
    difference = loss_difference(results)
    losses.set(xlabel="step", ylabel="loss", title=f"Loss: at most {difference:.0e} apart (relative) in any step")
    losses.legend(handlelength=3)
    losses.grid(alpha=0.3)

    speeds = [tokens_per_second(results[arm]) for arm in ARMS]
    bars = speed.bar(ARMS, speeds, color=[colors[arm] for arm in ARMS], width=0.65)
    speed.bar_label(bars, [f"{value:.0f}" for value in speeds], padding=2, fontsize=11)
    middle = bars[1].get_x() + bars[1].get_width() / 2
    ratio = f"{speeds[1] / speeds[0]:.2f}x"
    speed.text(middle, speeds[1] / 2, ratio, color="white", fontsize=20, weight="bold", ha="center", va="center")
    speed.set(ylabel="real tokens per second", title="Training speed", ylim=(0, 1.1 * max(speeds)))
    for axes in (losses, speed):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A small Qwen3.5 fine-tuned on the CPU: padded against packed batches", weight="bold")
    figure.savefig(path)


def _child(task: str, work: Path) -> None:
    """What the processes that `_in_new_process` starts do."""
    # Before any modeling file is imported: those take the kernels whenever they can be imported.
    for package in _KERNEL_PACKAGES:
        sys.modules[package] = None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if task == "model":
        make_model(work)
    else:
        train_arm(task, work)


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]))
