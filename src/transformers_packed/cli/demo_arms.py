"""The processes of the demo. `main` trains one arm."""

import json
import re
import sys
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
from .audit import hide_gpu_packages
from .demo import MAX_LENGTH


LEARNING_RATE = 1e-3


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
    trainer = Trainer(model, arguments, data_collator=counted, train_dataset=data, callbacks=[Progress(arm)])
    trainer.remove_callback(PrinterCallback)
    before = peak_memory()
    metrics = trainer.train().metrics

    # The data loader collates one batch ahead, so more batches than steps are possible.
    samples, real_tokens, computed_tokens = map(sum, zip(*batches[: settings["steps"]], strict=True))
    result = {
        "samples": samples,
        "real_tokens": real_tokens,
        "computed_tokens": computed_tokens,
        "seconds": metrics["train_runtime"],
        "memory_before": before,
        "peak_memory": peak_memory(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "implementations": implementations_used(isolating=True),
    }
    (work / f"{arm}.json").write_text(json.dumps(result), encoding="utf-8")


class Progress(TrainerCallback):
    """A progress bar with the loss, or a line per ten steps where no terminal shows it."""

    def __init__(self, arm: str):
        self.name = f"training, {arm}"
        self.bar = tqdm(desc=self.name, unit="step", disable=None)

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
