"""Fine-tune a supported model with the stock Trainer, with one packed row per batch of samples.

All data, the model and the settings are checked before the output directory is created. `run_folder.py` describes its
content. Stock classes load the saved model.
"""

import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ..data.records.samples import Samples, make_samples, read_records
from ..errors import count, input_error
from ..models.checkpoint_kinds import stored_as
from ..models.optimizers import OPTIMIZERS, check_optimizer
from ..models.registry import inner_model
from ..models.releases import use_one_gpu
from ..models.versions import check_checkpointing, checkpointing_argument
from ..training.callbacks.gradient_release import GradientReleaseCallback
from ..training.callbacks.warm_up import WarmUpCallback
from ..training.configure import configure_packing
from ..training.kernels import start_compiling
from ..training.optimizers import arguments_for, class_and_kwargs
from ..training.warm_up import compiles_kernels
from .checkpoint import load_tokenizer
from .folder_trainer import RunFolderTrainer
from .lines import duration, say
from .models import (
    check_adapters,
    check_float8,
    check_head,
    check_vocabulary,
    compute_dtype,
    device_of_this_process,
    load_model,
    load_teacher,
    supported_config,
    trains_in_bfloat16,
)
from .needs import chosen_checkpoints, needs_of_samples
from .process import raise_on_interrupt
from .run_folder import SETTINGS_FILE, check_same_settings, left, write_settings


KEPT_CHECKPOINTS = 2
# Settings that a resumed run must share, and that are stored only if they are set.
_UNSET_BY_DEFAULT = "row_length", "experts", "load_in_4bit", "mtp", "mtp_only"
_OF_CHECKPOINTS = "offload", "every_n_layers", "keep_attention", "segment_tokens"
_OF_TEACHER = "teacher", "distill_weight", "distill_beta", "distill_temperature"


def finetune(settings: Namespace, checkpoint: Path | None, damaged: list[str]) -> None:
    """Check everything, train, and save the model and its tokenizer in `settings.output`.

    `settings` holds the options of the `train` command, `checkpoint` and `damaged` what [`find_checkpoint`] returned.

    Raises:
        `ImportError`: a required optional package is missing.
        `OSError`: the model, the data or the output directory cannot be read or written. No incomplete output is left.
        `ValueError`: the data, the model or the settings are not valid together. Nothing has been written.
        `KeyboardInterrupt`: Ctrl-C while the model is trained or saved. The message names the step and the checkpoint to continue from.
    """
    settings.learning_rate = settings.learning_rate or (2e-4 if settings.lora else 2e-5)
    check_adapters(settings)
    _check_optimizer(settings)
    _check_checkpoints(settings)
    # An adapter stores the path of its base model, so the path must be absolute.
    source, settings.teacher = map(_absolute, (settings.model, settings.teacher))
    config = supported_config(source, settings)
    say(f"Reading {settings.data} ...")
    tokenizer = load_tokenizer("--model", source, settings.trust_remote_code)
    samples = make_samples(
        read_records(settings.data, settings.split, settings.subset),
        tokenizer,
        settings.max_length,
        settings.format,
        settings.every_turn,
        settings.row_length,
    )
    say(
        f"{count(len(samples.data), 'sample')} ({samples.format}) with {count(samples.tokens, 'token')}, "
        f"{samples.targets:,} of them targets; {samples.truncated:,} truncated to {count(settings.max_length, 'token')}, "
        f"{samples.dropped:,} without a target dropped."
    )
    kept = settings_to_keep(settings, source, samples)
    if (other := check_same_settings(settings.output, kept, settings.resume)) and checkpoint is not None:
        say(f"The run goes on with {other}. The learning rate follows the new number of steps.")
    set_seed(settings.seed)
    dtype = torch.bfloat16 if trains_in_bfloat16(settings) else compute_dtype(settings.dtype)
    if settings.float8:
        check_float8(dtype)
    say(f"Loading {settings.model} ...")
    # The compiler works while the weights are loaded.
    start_compiling(config, device_of_this_process(), dtype, needs_of_samples(samples, settings))
    model = load_model(source, settings, dtype)
    for trains, option in ((settings.mtp, "--mtp"), (settings.mtp_only, "--mtp-only")):
        if trains:
            check_head(config, option)
    check_vocabulary(model, samples)
    chosen = chosen_checkpoints(model, samples, settings, dtype, device_of_this_process())
    settings.every_n_layers, settings.segment_tokens = chosen
    settings.gradient_checkpointing &= settings.every_n_layers != 0
    if settings.teacher:
        settings.options["teacher"] = load_teacher(settings, tokenizer, model)
    trainer = make_trainer(model, tokenizer, samples, settings, dtype)
    base = inner_model(model)
    part = "" if config.get_text_config() is config else ", only its language model"
    say(
        f"{type(base).__name__}{_adapters(settings, base.config)} from {type(config).__name__}{part}: "
        f"{model.num_parameters(only_trainable=True):,} of {model.num_parameters():,} parameters trained, "
        f"{str(dtype).removeprefix('torch.')} on {trainer.args.device}."
    )
    _say_start(settings, checkpoint, damaged)
    raise_on_interrupt()
    if trainer.is_world_process_zero():
        write_settings(settings.output, kept)
    try:
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except _NothingLeftError:
            say("No steps left to train.")
        trainer.save_to_folder()
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"at step {trainer.state.global_step}; {left(settings.output)}") from error
    _say_saved(settings)


def _absolute(source: str) -> str:
    return str(Path(source).resolve()) if source and Path(source).is_dir() else source


def _adapters(settings: Namespace, config: PreTrainedConfig) -> str:
    if not settings.lora:
        return ""
    stored = stored_as(config)
    parts = (" with LoRA", "on experts too" if settings.experts else "", f"in {stored.title}" if stored else "")
    said = ", ".join(filter(None, parts))
    return f"{said}," if settings.experts or stored else said


def _say_saved(settings: Namespace) -> None:
    saved, head = "adapter" if settings.lora else "model", ", the head" if settings.mtp or settings.mtp_only else ""
    say(f"Saved the {saved}{head} and the tokenizer in {settings.output}")


def _say_start(settings: Namespace, checkpoint: Path | None, damaged: list[str]) -> None:
    for wrong in damaged:
        say(f"Skipped {wrong}.")
    if checkpoint is not None:
        say(f"Resuming from {checkpoint}.")
    elif settings.resume:
        say(f"No checkpoint in {settings.output} yet: starting from the beginning.")
    elif (settings.output / SETTINGS_FILE).is_file():
        say(f"The earlier run in {settings.output} wrote no checkpoint: starting over.")


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _check_optimizer(settings: Namespace) -> None:
    """Raise a `ValueError` for what an optimizer cannot train."""
    name, optimizer = settings.optim, OPTIMIZERS[settings.optim]
    processes, flash = int(os.environ.get("WORLD_SIZE", 1)), optimizer.package == "flashoptim"
    weights, rows = "float32" if settings.lora else optimizer.weights, settings.gradient_accumulation_steps
    check_optimizer(name, weights, rows, "--optim", settings.lora)
    in_float32 = trains_in_bfloat16(settings) and settings.dtype == "float32"
    releases, graphs = optimizer.releases, "A graph computes all gradients at once."
    rules = (
        (flash and not _has_gpu(), "a GPU", "none", "Choose another one."),
        (in_float32, "weights in bfloat16", "--dtype float32", "Remove it."),
        (releases and processes > 1, "one process", f"{processes}", "Choose flash_adamw."),
        (releases and settings.cuda_graphs, "no --cuda-graphs", "it", graphs),
    )
    for wrong, expected, got, fix in rules:
        if wrong:
            raise input_error(f"{expected} with {name}", got, fix, option="--optim")


def _check_checkpoints(settings: Namespace) -> None:
    """Raise a `ValueError` for options of checkpoints that this release of Transformers does not have."""
    for option in _OF_CHECKPOINTS:
        if getattr(settings, option):
            check_checkpointing(option, f"--{option.replace('_', '-')}")


def settings_to_keep(settings: Namespace, source: str, samples: Samples) -> dict[str, Any]:
    """The settings that a resumed run must share with the earlier run, and the length of training."""
    names = ("batch_size", "gradient_accumulation_steps", "learning_rate", "optim", "seed", "epochs", "max_steps")
    return {
        "model": source,
        "samples": samples.fingerprint(),
        "lora_rank": settings.lora_rank if settings.lora else None,
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        **{name: value for name in _UNSET_BY_DEFAULT if (value := getattr(settings, name))},
        **{name: getattr(settings, name) for name in _OF_TEACHER if settings.teacher},
        **({"sequence_parallel_size": size} if (size := settings.sequence_parallel_size) > 1 else {}),
        **{name: getattr(settings, name) for name in names},
    }


def make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Samples,
    settings: Namespace,
    dtype: torch.dtype,
) -> RunFolderTrainer:
    """The stock Trainer without padding. Its loss is the mean over all targets of a step."""
    checkpointing, given = checkpointing_argument(), {name: getattr(settings, name) for name in _OF_CHECKPOINTS}
    options = {"use_reentrant": False, **{name: x for name, x in given.items() if x is not None}}
    on = settings.gradient_checkpointing
    arguments = TrainingArguments(
        output_dir=str(settings.output),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        **{checkpointing: on, f"{checkpointing}_kwargs": options if on else None},
        # FSDP2 would copy trained weights in bfloat16 to float32 for it.
        bf16=dtype == torch.bfloat16 and not trains_in_bfloat16(settings),
        use_cpu=not torch.cuda.is_available(),
        # The packed forward makes no cache. This keeps the checkpoint's setting for generation.
        use_cache=model.config.use_cache,
        seed=settings.seed,
        data_seed=settings.seed,
        save_strategy="steps" if settings.save_steps else "no",
        save_steps=settings.save_steps or 1,
        save_total_limit=KEPT_CHECKPOINTS,
        logging_steps=settings.logging_steps,
        logging_first_step=True,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        **arguments_for(settings.optim),
    )
    if arguments.n_gpu > 1:
        # The Trainer would split each row over the devices.
        use_one_gpu(arguments)
        say("Using only one GPU; start the command with torchrun --no-python to use more.")
    trainer = RunFolderTrainer(
        model,
        arguments,
        train_dataset=samples.data,
        processing_class=tokenizer,
        callbacks=[_Progress(settings)],
        optimizer_cls_and_kwargs=class_and_kwargs(settings.optim, arguments),
    )
    trainer.remove_callback(PrinterCallback)
    configure_packing(trainer, **settings.options)
    trainer.callback_handler.callbacks[:0] = [_Preparation(), WarmUpCallback(trainer, progress=True)]
    if OPTIMIZERS[settings.optim].releases:
        trainer.add_callback(GradientReleaseCallback(trainer))
    return trainer


# What lines of steps tell beside the loss.
_LOGGED = {
    "divergence": "divergence {:.4f}",
    "mtp_loss": "mtp loss {:.4f}",
    "mtp_acceptance": "{:.1%} accepted",
    "tokens_per_second": "{:,.0f} tokens/s",
}


class _NothingLeftError(Exception):
    """The loaded checkpoint is that of the last step."""


class _Preparation(TrainerCallback):
    """Prints what the callbacks after it do before the first step."""

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step < state.max_steps:
            say(f"{'Compiling kernels and verifying' if compiles_kernels(args.device) else 'Verifying'} packing ...")


class _Progress(TrainerCallback):
    """Prints a line with the schedule, and a line per logged loss with the speed and the time that is left."""

    def __init__(self, settings: Namespace):
        self.settings = settings

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            raise _NothingLeftError  # the Trainer would run one more step
        length, optim = self.settings.row_length, self.settings.optim
        rows = args.gradient_accumulation_steps * args.world_size // self.settings.sequence_parallel_size
        most = (length, "token") if length else (args.per_device_train_batch_size, "sample")
        say(
            f"{count(state.max_steps, 'step')}, rows of up to {count(*most)}, {rows:,} per step, learning rate up to "
            f"{args.learning_rate:g}."
        )
        if OPTIMIZERS[optim].package == "torchao":
            say(f"The first step compiles {optim} for each shape of a weight, which takes a minute or more.")
        self.since, self.after = 0.0, None

    def on_step_end(self, args, state, control, **kwargs):
        if self.after is None:
            # The first step is slower than the others.
            self.since, self.after = time.monotonic(), state.global_step
        if state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs:
            return
        line = f"step {state.global_step}/{state.max_steps}, epoch {state.epoch:.2f}: loss {logs['loss']:.4f}"
        line += "".join(f", {told.format(logs[name])}" for name, told in _LOGGED.items() if name in logs)
        done, left = state.global_step - self.after, state.max_steps - state.global_step
        if done and left:
            line += f", {duration(max(1, (time.monotonic() - self.since) / done * left))} left"
        say(line)
