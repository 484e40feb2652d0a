"""The processes of the demo. `main` trains one arm."""

import json
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Qwen3_5TextConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from ..data.collator import DataCollatorWithFlattening
from ..errors import count
from ..models.registry import registered
from ..ops import implementations_used
from .arms import ARMS, pipe_of
from .audit import hide_gpu_packages
from .demo import MAX_LENGTH


LEARNING_RATE = 1e-3
# Of one arm, before the other one goes on.
STEPS_PER_TURN = 2


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """The initial model, with the same weights in both arms."""
    set_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
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
    return AutoModelForCausalLM.from_config(config)


def train_arm(arm: str, work: Path, settings: dict[str, int]) -> None:
    """Train one arm in this process and write its results to `<arm>.json` in `work`."""
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    with registered() if arm == "packed" else nullcontext():
        model = make_model(tokenizer, settings["seed"])
    if arm == "packed":
        collator = DataCollatorWithFlattening(return_cu_seqlens=True, return_seq_idx=True, model=model)
    else:
        collator = DataCollatorForSeq2Seq(tokenizer, padding=True)
        print(
            f"Qwen3_5ForCausalLM with {model.num_parameters() / 1e6:.1f} M parameters, float32; "
            f"{count(settings['steps'], 'step')} of {count(settings['batch_size'], 'sample')} per arm.",
            flush=True,
        )
    batches = []

    def counted(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collator(features)
        real = sum(len(feature["input_ids"]) for feature in features)
        batches.append((len(features), real, batch["input_ids"].numel()))
        return batch

    arguments = TrainingArguments(
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
    )
    data = json.loads((work / "samples.json").read_text(encoding="utf-8"))
    turns = Turns(arm, work)
    trainer = Trainer(model, arguments, data_collator=counted, train_dataset=data, callbacks=[turns, Progress(arm)])
    trainer.remove_callback(PrinterCallback)
    before = peak_memory()
    trainer.train()

    # The data loader collates one batch ahead, so more batches than steps are possible.
    samples, real_tokens, computed_tokens = map(sum, zip(*batches[: settings["steps"]], strict=True))
    result = {
        "samples": samples,
        "real_tokens": real_tokens,
        "computed_tokens": computed_tokens,
        "seconds": turns.seconds,
        "memory_before": before,
        "peak_memory": peak_memory(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "implementations": implementations_used(isolating=True),
    }
    (work / f"{arm}.json").write_text(json.dumps(result), encoding="utf-8")


class Turns(TrainerCallback):
    """Trains a few steps while the process of the other arm waits, then waits itself, and counts its own `seconds`.

    The first arm begins when both are ready, and ends when both are, so nothing else of them runs during a turn.
    """

    def __init__(self, arm: str, work: Path):
        self.arm, self.work, self.is_first, self.seconds = arm, work, arm == next(iter(ARMS)), 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        # An end of a pipe opens when the other arm opens the other end.
        ends = {arm: pipe_of(self.work, arm).open("rb" if arm == self.arm else "wb", buffering=0) for arm in ARMS}
        self.own = ends.pop(self.arm)
        (self.other,) = ends.values()
        if not self.is_first:
            self.own.read(1)
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % STEPS_PER_TURN == 0 and state.global_step < state.max_steps:
            self._give()
            self.own.read(1)
            self.start = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        self._give()
        if self.is_first:
            self.own.read(1)

    def _give(self) -> None:
        self.seconds += time.perf_counter() - self.start
        self.other.write(b".")


class Progress(TrainerCallback):
    """A progress bar with the loss, or a line per ten steps where no terminal shows it."""

    def __init__(self, arm: str):
        self.name = f"training, {arm}"
        # Without the time of a step, in which the other arm has its turns. Bars that stay would overwrite each other.
        form, place = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}", list(ARMS).index(arm)
        self.bar = tqdm(desc=self.name, unit="step", disable=None, bar_format=form, position=place, leave=False)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs:
            self.bar.close()
            return
        self.bar.total = state.max_steps
        self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)
        self.bar.update()
        if self.bar.disable and (state.global_step % 10 == 0 or state.global_step == state.max_steps):
            step = f"step {state.global_step}/{state.max_steps}"
            print(f"{self.name}: {step}, loss {logs['loss']:.3f}", flush=True)


def peak_memory() -> int:
    """The largest resident size of this process so far, in bytes."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        # Linux: the value of getrusage starts at the peak of the parent process.
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
    except (OSError, TypeError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def main(arm: str, work: Path) -> None:
    """Train one arm with the torch implementations of all ops."""
    # Before importing a modeling file, which selects the kernels if they can be imported.
    hide_gpu_packages()
    logging.disable_progress_bar()
    train_arm(arm, work, json.loads((work / "settings.json").read_text(encoding="utf-8")))
