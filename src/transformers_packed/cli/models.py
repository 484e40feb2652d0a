"""The models of commands, from a checkpoint or with random weights, and what they must be able to do."""

import os
from argparse import Namespace
from contextlib import nullcontext
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from ..data.records.samples import Samples
from ..errors import input_error
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
from ..models.optimizers import dtype_of_weights
from ..models.quantization import initialize_in_4bit, nf4
from ..models.registry import inner_model, registered
from ..models.releases import builds
from ..models.versions import checkpointing_argument
from ..ops.float8 import MULTIPLE, verify
from ..ops.moe import MAX_RANK
from .checkpoint import check_directory, check_same_ids, has_own_code, load_weights, reading
from .early import check_packages
from .lines import say


def supported_config(source: str, settings: Namespace | None = None, option: str = "--model") -> PreTrainedConfig:
    """The configuration of a checkpoint that our causal language models support, with the options in `settings`."""
    with reading(option, source, "checkpoint"):
        config = _supported_config(source, option)
    able = [family for family in OWN if family.has_float8]
    hosts = [family for family in SIZED if family.has_host_layers]
    in_host_memory = "layers_in_host_memory" if option == "--model" else "teacher_in_host_memory"
    has_experts = bool(sizes_of(config).mixtures)
    for name, possible, expected in (
        ("experts", has_experts, "a mixture of experts"),
        ("experts_in_host_memory", has_experts, "a mixture of experts"),
        (in_host_memory, family_of(config) in hosts, f"a checkpoint of {titles(hosts)}"),
        ("float8", family_of(config) in able, f"a checkpoint of {titles(able)}"),
    ):
        if getattr(settings, name, False) and not possible:
            asked = f"--{name.replace('_', '-')}"
            got = f"{source}, a {config.model_type}"
            raise input_error(f"{expected} as {option}", got, f"Remove {asked}.", option=asked)
    stored = stored_as(config)
    expected, got = "a checkpoint in 16 or 32 bit", f"{source}, whose weights are in {stored and stored.title}"
    if getattr(settings, "load_in_4bit", False) and stored not in (None, NF4):
        expected, fix = f"{expected} with --load-in-4bit", "Remove --load-in-4bit: they stay as they are."
        raise input_error(expected, got, fix, option="--load-in-4bit")
    if stored and not getattr(settings, "lora", True) and not getattr(settings, "mtp_only", False):
        raise input_error(expected, got, "Add --lora: they stay as they are.", option=option)
    return config


def _supported_config(source: str, option: str) -> PreTrainedConfig:
    check_directory(source)
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


def check_adapters(settings: Namespace) -> None:
    """Raise an `ImportError` for a missing package, or a `ValueError` for a rank that the op for experts cannot compute."""
    check_packages(settings)
    # PEFT would copy all experts in each forward.
    if settings.experts and settings.lora_rank > MAX_RANK:
        expected = f"a rank of at most {MAX_RANK} with --experts"
        raise input_error(expected, settings.lora_rank, "Lower it.", option="--lora-rank")


def check_float8(dtype: torch.dtype) -> None:
    """Raise a `ValueError` if products in float8 cannot run on this device, or in this dtype."""
    weight = torch.empty(MULTIPLE, MULTIPLE, device=device_of_this_process())
    if reason := verify(weight, weight, dtype):
        expected, got = "a device and a dtype with products in float8", f"others: it {reason}"
        raise input_error(expected, got, "Remove --float8.", option="--float8")


def compute_dtype(name: str) -> torch.dtype:
    """The dtype of matrix products that `--dtype` names, under autocast in training."""
    if name != "auto":
        return getattr(torch, name)
    has_bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def trains_in_bfloat16(settings: Namespace) -> bool:
    """Whether all weights are trained in bfloat16. Adapters, and weights with other optimizers, are trained in float32."""
    return not settings.lora and dtype_of_weights(settings.optim, False) == "bfloat16"


def device_of_this_process() -> torch.device:
    """The device on which the Trainer will train."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % number) if number else torch.device("cpu")


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
        expected, fix = (
            "a checkpoint in 16 or 32 bit, whose weights are drawn here",
            "Pass the one that it was made from.",
        )
        raise input_error(expected, f"{args.model}, in {stored.title}", fix, option="--model")
    return config.get_text_config(), dtype


def load(option: str, source: str, attn: str | None, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Our causal language model of a checkpoint."""
    options |= {"dtype": dtype, "attn_implementation": attn, "trust_remote_code": False}
    with registered():
        return load_weights(option, source, AutoModelForCausalLM, **options)


def load_model(source: str, settings: Namespace, dtype: torch.dtype) -> PreTrainedModel:
    """Our causal language model of the checkpoint, with LoRA adapters, and in 4 bit, if requested."""
    # Small updates vanish in bfloat16 weights, so trained weights are float32 unless the optimizer keeps them.
    if not settings.lora:
        dtype = torch.bfloat16 if trains_in_bfloat16(settings) else torch.float32
    options: dict[str, Any] = {}
    if settings.load_in_4bit:
        # Each weight is quantized on the device where it stays.
        options = {"quantization_config": nf4(dtype), "device_map": {"": device_of_this_process()}}
    layers = getattr(settings, "layers_in_host_memory", False)
    on_host = layers or getattr(settings, "experts_in_host_memory", False)
    with loading_to_host(layers) if on_host else nullcontext():
        model = load("--model", source, settings.attn, dtype, **options)
    model = with_adapters(model, settings) if settings.lora else model
    if on_host:
        form_group(settings)
        keep_layers_in_host_memory(model) if layers else keep_experts_in_host_memory(model)
        if getattr(inner_model(model), "is_loaded_in_4bit", False):
            # PEFT puts adapters beside the weights.
            torch.nn.Module.to(model, device_of_this_process())
        say(f"{'Layers' if layers else 'Experts'} in host memory: {_size_on_host(model)}.")
    return model


def form_group(settings: Namespace) -> None:
    """Let the processes of a launcher find each other, as the arguments of the Trainer do later."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        TrainingArguments(str(settings.output), use_cpu=not torch.cuda.is_available(), report_to="none")


def _size_on_host(model: torch.nn.Module) -> str:
    size, shared = bytes_in_host_memory(model), shared_bytes(model)
    once = "" if not shared else ", once for all processes of a machine"
    if 0 < shared < size:
        once = f", of which {shared / 2**30:,.1f} GiB are there once for all processes of a machine"
    return f"{size / 2**30:,.1f} GiB{once}"


def load_teacher(settings: Namespace, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> PreTrainedModel:
    """Our causal language model of `--teacher` for a model, with all of its weights, in the compute dtype."""
    option, source = "--teacher", settings.teacher
    supported_config(source, Namespace(teacher_in_host_memory=settings.teacher_in_host_memory), option)
    if (why := check_same_ids(option, source, settings.trust_remote_code, tokenizer)) is not None:
        say(f"The ids of tokens are not compared with those of the teacher: {why}")
    say(f"Loading {source} ...")
    with loading_to_host(True) if settings.teacher_in_host_memory else nullcontext():
        teacher = load(option, source, settings.attn, compute_dtype(settings.dtype))
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


def with_adapters(model: PreTrainedModel, settings: Namespace) -> Any:
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


def check_head(config: PreTrainedConfig, option: str) -> None:
    """Raise a `ValueError` unless a checkpoint has a head of multi-token prediction that can train.

    Call it after the weights are loaded: before, those of a model on the Hub may not be in the cache.
    """
    if not find_head(config):
        expected, fix = "a head of multi-token prediction (mtp.*)", "Choose a checkpoint with a head."
        raise input_error(expected, f"none in {config.name_or_path}", fix, option=option)
    check_declared(config, True, option)


def check_vocabulary(model: PreTrainedModel, samples: Samples) -> None:
    """Raise a `ValueError` if the records, or what the tokenizer made of them, have ids outside the model's vocabulary."""
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    if samples.largest >= size:
        tokenized = samples.format == "tokens"
        whose = "records" if tokenized else "a tokenizer"
        fix = "Tokenize with the model's own tokenizer." if tokenized else "Save the model's own tokenizer with it."
        expected = f"{whose} with ids below {size}, the size of the model's vocabulary"
        raise input_error(expected, f"the id {samples.largest}", fix, option="--data" if tokenized else "--model")
