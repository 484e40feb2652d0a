"""Fine-tune a supported model with the stock Trainer, with one packed row per batch of samples.

All data, the model and the settings are checked before the output directory is created. `run_folder.py` describes its
content. Stock classes load the saved model.
"""

import os
import time
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
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
from ..models.cuda_graphs import graph_length, use_cuda_graphs
from ..models.families import EXPERT_WEIGHTS, OWN, SIZED, family_of, sizes_of, titles
from ..models.float8 import use_float8
from ..models.host_experts import bytes_in_host_memory, keep_experts_in_host_memory, shared_bytes
from ..models.host_layers import keep_layers_in_host_memory
from ..models.host_parameters import loading_to_host
from ..models.lora import adapted_layers
from ..models.losses import DivergenceLoss
from ..models.memory import NF4
from ..models.mtp import find_head
from ..models.mtp_head import check_declared
from ..models.optimizers import OPTIMIZERS, check_optimizer, dtype_of_weights
from ..models.quantization import initialize_in_4bit, nf4
from ..models.registry import inner_model, registered
from ..models.releases import builds, use_one_gpu
from ..models.versions import check_checkpointing, checkpointing_argument
from ..ops.float8 import MULTIPLE, verify
from ..ops.moe import MAX_RANK
from ..training.callbacks.gradient_release import GradientReleaseCallback
from ..training.callbacks.warm_up import WarmUpCallback
from ..training.configure import configure_packing
from ..training.kernels import start_compiling
from ..training.optimizers import arguments_for, class_and_kwargs
from ..training.warm_up import compiles_kernels
from .checkpoint import check_same_ids, has_own_code, load_tokenizer, load_weights, reading
from .early import check_packages
from .folder_trainer import RunFolderTrainer
from .lines import duration, say
from .process import raise_on_interrupt
from .run_folder import SETTINGS_FILE, check_same_settings, left, write_settings
from .segments import chosen_segments, needs_of


KEPT_CHECKPOINTS = 2
# Settings that a resumed run must share, and that are stored only if they are set.
_UNSET_BY_DEFAULT = "row_length", "experts", "load_in_4bit", "mtp", "mtp_only"
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
    start_compiling(config, device_of_this_process(), dtype, needs_of(samples, settings))
    model = load_model(source, settings, dtype)
    for trains, option in ((settings.mtp, "--mtp"), (settings.mtp_only, "--mtp-only")):
        if trains:
            check_head(config, option)
    check_vocabulary(model, samples)
    settings.segment_tokens = chosen_segments(model, samples, settings, dtype, device_of_this_process())
    if settings.teacher:
        settings.options["teacher"] = load_teacher(settings, tokenizer, model)
    trainer = make_trainer(model, tokenizer, samples, settings, dtype)
    base = model.get_base_model() if settings.lora else model
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
    said = (" with LoRA", "on experts too" if settings.experts else "", f"in {stored.title}" if stored else "")
    said = ", ".join(filter(None, said))
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


def check_adapters(settings: Namespace) -> None:
    """Raise an `ImportError` for a missing package, or a `ValueError` for a rank that the op for experts cannot compute."""
    check_packages(settings)
    # PEFT would copy all experts in each forward.
    if settings.experts and settings.lora_rank > MAX_RANK:
        expected = f"a rank of at most {MAX_RANK} with --experts"
        raise input_error(expected, settings.lora_rank, "Lower it.", option="--lora-rank")


def trains_in_bfloat16(settings: Namespace) -> bool:
    """Whether all weights are trained in bfloat16. Adapters, and weights with other optimizers, are trained in float32."""
    return not settings.lora and dtype_of_weights(settings.optim, False) == "bfloat16"


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
    for option in ("offload", "every_n_layers", "keep_attention", "segment_tokens"):
        if getattr(settings, option):
            check_checkpointing(option, f"--{option.replace('_', '-')}")


def check_head(config: PreTrainedConfig, option: str) -> None:
    """Raise a `ValueError` unless a checkpoint has a head of multi-token prediction that can train.

    Call it after the weights are loaded: before, those of a model on the Hub may not be in the cache.
    """
    if not find_head(config):
        expected, fix = "a head of multi-token prediction (mtp.*)", "Choose a checkpoint with a head."
        raise input_error(expected, f"none in {config.name_or_path}", fix, option=option)
    check_declared(config, True, option)


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


def supported_config(source: str, settings: Namespace | None = None, option: str = "--model") -> PreTrainedConfig:
    """The configuration of a checkpoint that our causal language models support, with the options in `settings`."""
    with reading(option, source, "checkpoint"):
        config = _supported_config(source, option)
    able = [family for family in OWN if family.has_float8]
    hosts = [family for family in SIZED if family.has_host_layers]
    has_experts = bool(sizes_of(config).mixtures)
    for name, possible, expected in (
        ("experts", has_experts, "a mixture of experts"),
        ("experts_in_host_memory", has_experts, "a mixture of experts"),
        ("layers_in_host_memory", family_of(config) in hosts, f"a checkpoint of {titles(hosts)}"),
        ("float8", family_of(config) in able, f"a checkpoint of {titles(able)}"),
    ):
        if getattr(settings, name, False) and not possible:
            option = f"--{name.replace('_', '-')}"
            got = f"{source}, a {config.model_type}"
            raise input_error(f"{expected} as --model", got, f"Remove {option}.", option=option)
    stored = stored_as(config)
    expected, got = "a checkpoint in 16 or 32 bit", f"{source}, whose weights are in {stored and stored.title}"
    if getattr(settings, "load_in_4bit", False) and stored not in (None, NF4):
        expected, fix = f"{expected} with --load-in-4bit", "Remove --load-in-4bit: they stay as they are."
        raise input_error(expected, got, fix, option="--load-in-4bit")
    if stored and not getattr(settings, "lora", True) and not getattr(settings, "mtp_only", False):
        raise input_error(expected, got, "Add --lora: they stay as they are.", option=option)
    return config


def _supported_config(source: str, option: str) -> PreTrainedConfig:
    try:
        # Our classes need no code of the checkpoint.
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        found = f"{type(config).__name__} ({config.model_type})"
    except ValueError as error:  # a model type that Transformers does not know
        config, found = None, "its own code" if has_own_code(error) else " ".join(str(error).split()).rstrip(".")
    # The commands plan rows by the sizes of layers.
    if config is None or family_of(config) not in SIZED or not builds(AutoModelForCausalLM, config):
        fix = "Train other models with a Trainer and configure_packing."
        if getattr(config, "is_encoder_decoder", False):
            fix = "Models with an encoder have no packed rows here: train them with padded batches."
        raise input_error(f"a checkpoint of {titles(SIZED)}", f"{source}: {found}", fix, option=option)
    return config


def device_of_this_process() -> torch.device:
    """The device on which the Trainer will train."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % number) if number else torch.device("cpu")


def compute_dtype(name: str) -> torch.dtype:
    """The dtype of matrix products that `--dtype` names, under autocast in training."""
    if name != "auto":
        return getattr(torch, name)
    has_bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def check_float8(dtype: torch.dtype) -> None:
    """Raise a `ValueError` if products in float8 cannot run on this device, or in this dtype."""
    weight = torch.empty(MULTIPLE, MULTIPLE, device="cuda" if torch.cuda.is_available() else "cpu")
    if reason := verify(weight, weight, dtype):
        expected, got = "a device and a dtype with products in float8", f"others: it {reason}"
        raise input_error(expected, got, "Remove --float8.", option="--float8")


def config_and_dtype(args: Namespace) -> tuple[PreTrainedConfig, torch.dtype]:
    """The configuration of `--model` and the dtype of products, for commands that run it with random weights.

    Raises the errors of options that this machine or the model does not support.
    """
    check_adapters(args)
    dtype = compute_dtype(args.dtype)
    if args.float8:
        check_float8(dtype)
    config = supported_config(args.model, args)
    if stored := stored_as(config):
        expected, got = (
            "a checkpoint in 16 or 32 bit, whose weights are drawn here",
            f"{args.model}, in {stored.title}",
        )
        raise input_error(expected, got, "Pass the checkpoint that it was made from.", option="--model")
    return config.get_text_config(), dtype


def load_model(source: str, settings: Namespace, dtype: torch.dtype) -> PreTrainedModel:
    """Our causal language model of the checkpoint, with LoRA adapters, and in 4 bit, if requested."""
    # Small updates vanish in bfloat16 weights, so trained weights are float32 unless the optimizer keeps them.
    if not settings.lora:
        dtype = torch.bfloat16 if trains_in_bfloat16(settings) else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": settings.attn, "trust_remote_code": False}
    if settings.load_in_4bit:
        # Each weight is quantized on the device where it stays.
        options |= {"quantization_config": nf4(dtype), "device_map": {"": device_of_this_process()}}
    layers = getattr(settings, "layers_in_host_memory", False)
    on_host = layers or getattr(settings, "experts_in_host_memory", False)
    with registered(), loading_to_host(layers) if on_host else nullcontext():
        model = load_weights("--model", source, AutoModelForCausalLM, **options)
    model = with_adapters(model, settings) if settings.lora else model
    if on_host:
        form_group(settings)
        keep_layers_in_host_memory(model) if layers else keep_experts_in_host_memory(model)
        if getattr(inner_model(model), "is_loaded_in_4bit", False):
            # PEFT puts adapters beside the weights.
            model.to(device_of_this_process())
        say(f"{'Layers' if layers else 'Experts'} in host memory: {_size_on_host(model)}.")
    return model


def form_group(settings: Namespace) -> None:
    """Let the processes of a launcher find each other, as the arguments of the Trainer do later."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        TrainingArguments(str(settings.output), use_cpu=not torch.cuda.is_available(), report_to="none")


def _size_on_host(model: PreTrainedModel) -> str:
    size, shared = bytes_in_host_memory(model), shared_bytes(model)
    once = "" if not shared else ", once for all processes of a machine"
    if 0 < shared < size:
        once = f", of which {shared / 2**30:,.1f} GiB are there once for all processes of a machine"
    return f"{size / 2**30:,.1f} GiB{once}"


def load_teacher(settings: Namespace, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> PreTrainedModel:
    """Our causal language model of `--teacher` for a model, with all of its weights, in the compute dtype."""
    option, source = "--teacher", settings.teacher
    config = supported_config(source, option=option)
    if settings.teacher_in_host_memory and not family_of(config).has_host_layers:
        able = titles([family for family in SIZED if family.has_host_layers])
        fix = "Remove --teacher-in-host-memory."
        raise input_error(f"a teacher of {able}", config.model_type, fix, option="--teacher-in-host-memory")
    if (why := check_same_ids(option, source, settings.trust_remote_code, tokenizer)) is not None:
        say(f"The ids of tokens are not compared with those of the teacher: {why}")
    options = {
        "dtype": compute_dtype(settings.dtype),
        "attn_implementation": settings.attn,
        "trust_remote_code": False,
    }
    say(f"Loading {source} ...")
    with registered(), loading_to_host(True) if settings.teacher_in_host_memory else nullcontext():
        teacher = load_weights(option, source, AutoModelForCausalLM, **options)
    DivergenceLoss(teacher).check(inner_model(model))
    if settings.teacher_in_host_memory:
        form_group(settings)
        keep_layers_in_host_memory(teacher.requires_grad_(False))
        say(f"The teacher's layers in host memory: {_size_on_host(teacher)}.")
    say(f"Distilling from {type(teacher).__name__} of {source}, {teacher.num_parameters():,} parameters.")
    return teacher


def untrained_model(
    config: PreTrainedConfig,
    settings: Namespace,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int,
    ours: bool = True,
) -> PreTrainedModel:
    """A causal language model with random weights, with our classes and their options or with Transformers'."""
    dtype = dtype if settings.lora else getattr(torch, settings.weights)
    with registered() if ours else nullcontext(), torch.device("meta") if settings.load_in_4bit else device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=settings.attn)
    if settings.load_in_4bit:
        initialize_in_4bit(model, nf4(dtype), device)
    model = with_adapters(model, settings) if settings.lora else model
    if settings.gradient_checkpointing:
        segment = getattr(settings, "segment_tokens", None)
        options = {"segment_tokens": segment} if segment and ours else {}
        getattr(model, f"{checkpointing_argument()}_enable")({"use_reentrant": False, **options})
    if ours and settings.float8:
        use_float8(model)
    if ours and settings.cuda_graphs:
        use_cuda_graphs(model, graph_length(max_length))
    return model


def with_adapters(model: PreTrainedModel, settings: Namespace) -> PreTrainedModel:
    """Add LoRA adapters to all linear layers, and to the experts if requested."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=2 * settings.lora_rank,
        target_modules=sorted({name.rpartition(".")[2] for name in adapted_layers(model)}),
        target_parameters=list(EXPERT_WEIGHTS) if settings.experts else None,
    )
    return get_peft_model(model, adapters)


def check_vocabulary(model: PreTrainedModel, samples: Samples) -> None:
    """Raise a `ValueError` if the tokenizer produced ids outside the model's vocabulary."""
    size = model.get_input_embeddings().weight.shape[0]
    if samples.largest >= size:
        expected = f"a tokenizer with ids below {size}, the size of the model's vocabulary"
        got, fix = f"the id {samples.largest}", "Save the model's own tokenizer with it."
        raise input_error(expected, got, fix, option="--model")


def make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Samples,
    settings: Namespace,
    dtype: torch.dtype,
) -> RunFolderTrainer:
    """The stock Trainer without padding. Its loss is the mean over all targets of a step."""
    checkpointing, options = checkpointing_argument(), {"use_reentrant": False}
    if settings.every_n_layers:
        options["every_n_layers"] = settings.every_n_layers
    if settings.offload is not None:
        options["offload"] = settings.offload
    if settings.keep_attention is not None:
        options["keep_attention"] = settings.keep_attention
    if settings.segment_tokens:
        options["segment_tokens"] = settings.segment_tokens
    arguments = TrainingArguments(
        output_dir=str(settings.output),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        **{checkpointing: settings.gradient_checkpointing, f"{checkpointing}_kwargs": options},
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
        if "divergence" in logs:
            line += f", divergence {logs['divergence']:.4f}"
        if "mtp_loss" in logs:
            line += f", mtp loss {logs['mtp_loss']:.4f}"
        if "mtp_acceptance" in logs:
            line += f", {logs['mtp_acceptance']:.1%} accepted"
        if "tokens_per_second" in logs:
            line += f", {logs['tokens_per_second']:,.0f} tokens/s"
        done, left = state.global_step - self.after, state.max_steps - state.global_step
        if done and left:
            line += f", {duration(max(1, (time.monotonic() - self.since) / done * left))} left"
        say(line)
