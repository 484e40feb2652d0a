"""Reasons why a Trainer cannot be packed. The checks run before its first step and do not change it.

Each reason is an error that the caller raises or, in auto mode, prints. The audit results (`models/verdict.py`) decide
whether a model keeps documents apart. For models with classes of ours, the verifiers of the ops decide.
"""

import os
from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from tqdm.auto import tqdm
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import is_flash_attention_requested

from ..data.collator import DataCollatorWithFlattening
from ..data.dataset import PackingDataset, find_tree, find_unusable
from ..data.documents import first_sample, is_packed
from ..data.samples import ANSWERS, PREFIX, TOKEN_TYPES, TURNS, VISION_COLUMNS, is_tree, present
from ..data.tables import columns_of
from ..data.trees import nodes_of
from ..errors import Rule, input_error
from ..foreign import attention_of
from ..models.adapters import adapter_per_row
from ..models.families import LANGUAGE_MODELS, families_of, family_of, titles
from ..models.family import INDEXER_UNDER_ZERO_3, PATCHED, Mixers, Own, Unpacked
from ..models.host_experts import names_in_host_memory
from ..models.registry import check_patch, inner_model, transformers_model
from ..models.releases import MAKE_SAMPLER, has_images
from ..models.shards import split_adapters, summed_per_backward
from ..models.sizes import sizes_for_ops
from ..models.stored_weights import in_fewer_bits
from ..models.verdict import (
    SEPARATE,
    cache_setting,
    first_label_error,
    judge,
    measured,
    text_config,
)
from ..models.versions import averages_experts
from ..ops.dispatch import Setting, availability
from .facts import Facts, package_of
from .restore import without_autocast
from .trainers import CREATE_LABELS, KNOWN_COLLATORS, ONLY_PAD
from .typed import Trainer


_VISION = {*VISION_COLUMNS, TOKEN_TYPES}
_TEXT = {"input_ids", "attention_mask", "labels", "seq_lengths"}
_PADDED = "Train on padded batches."
_MODEL = "a causal language model of Transformers"
_PACKS = f"a model that packs padded batches ({titles()})"
_SDPA = 'attn_implementation="sdpa"'
# What planned rows need, and what to do otherwise.
ROWS = "a sampler of packed rows"
KEEPS_SAMPLERS = 'Pass packing="padding_free", whose batches have the samples of any sampler.'
_EVERYTHING: dict[str, Any] = {"return_flash_attn_kwargs": True, "return_seq_idx": True}


def reasons_against(facts: Facts) -> Iterator[Rule]:
    """Reasons not to pack. In `"auto"` mode also those that make packing unsafe or useless.

    Only the first reason is valid: each check relies on the checks before it.
    """
    trainer, model, options = facts.trainer, facts.model, facts.options
    yield from _of_mode(facts)
    yield from of_devices(facts)
    if model is None:
        name = type(trainer.model).__name__
        yield facts.padded, _PACKS, name, ""
        yield True, _MODEL, f"{name}, which is not a Transformers model", _PADDED
        return
    if facts.padded:
        yield from _of_padded_batches(facts, model)
    else:
        yield from _of_model(trainer, model)
        yield from _of_collator(trainer)
        yield from _of_samples(trainer)
        yield from _of_columns(facts, model)
    yield from of_settings(trainer, facts.padded)
    got = attention_of(text_config(model))
    expected, fix = "an attention implementation that supports shared prompts", f"Load the model with {_SDPA}."
    yield options.share_prompts and got == "flex_attention", expected, got, fix
    yield from _of_patch(facts)
    if not facts.padded:
        yield isolation(trainer.model, facts.options.mode == "auto")[1]
    if facts.options.mode == "auto":
        got = f"a custom {facts.named(facts.custom)}, which may count samples or read the mask"
        alone = trainer.args.per_device_train_batch_size == 1 and not facts.packed_rows
        alone = alone and not facts.padded and not options.shares_rows
        one = "per_device_train_batch_size=1, which has no padding to avoid"
        works = f'Pass packing="padding_free" if it works on tokens{_or_batches(model)}.'
        yield facts.custom, "methods of known trainers", got, works
        yield alone, "more than one sample per batch", one, "Raise it, or pass packing=True with max_length."


def of_settings(trainer: Trainer, padded: str = "") -> Iterator[Rule]:
    """Reasons in settings of the model, which may change in training too. `padded` is why batches stay padded, if so."""
    per_row = adapter_per_row(trainer.model)
    yield per_row, "adapters that act per document", per_row, "" if padded else _PADDED
    if not padded:
        yield check_cache(inner_model(trainer.model))
    yield way_of_isolation(trainer)[1]


def _or_batches(model: transformers.PreTrainedModel | None) -> str:
    """The mode in which any Trainer packs, if the model has it."""
    return ', or pass packing="batches"' if model is not None and families_of(model, Own) else ""


def _of_mode(facts: Facts) -> Iterator[Rule]:
    switch, on = "TRANSFORMERS_PACKED_DISABLE_AUTO", 'Unset it, or pass packing="padding_free".'
    mode = facts.options.mode
    fix = 'Pass packing="padding_free". The model then packs each batch.'
    sampler = facts.plans_rows and MAKE_SAMPLER in facts.replaced
    samples = f"a custom {MAKE_SAMPLER}, which numbers samples"
    yield mode == "auto" and os.environ.get(switch) == "1", f"no {switch}", f"{switch} is set", on
    yield mode == "pack" and facts.padded, f"whole batches of {facts.padded}", "packing=True", fix
    yield mode == "pack" and facts.trainer.train_dataset is None, "a train_dataset to pack", "none", ""
    yield sampler, ROWS, samples, KEEPS_SAMPLERS


def _brings(trainer: Trainer, part: Any) -> bool:
    """Whether a part of a Trainer comes from the package of its class, so that the user did not pass it.

    Transformers' Trainer brings only parts that are known, and so do some of TRL.
    """
    package = package_of(part)
    homes = [(c.__module__.partition(".")[0], c.__name__) for c in type(trainer).__mro__]
    name = next((name for home, name in homes if home == package), None)
    return name not in (None, *ONLY_PAD) and package not in ("transformers", "__main__")


def _of_patch(facts: Facts) -> Iterator[Rule]:
    """Reasons why a model cannot get classes that keep documents apart."""
    with without_autocast(facts.trainer, facts.models[:-1]):
        for model in facts.models:
            try:
                check_patch(model)
            except (ValueError, ImportError) as error:
                got = f"a model that cannot be patched ({str(error).rstrip('.')})"
                yield True, "a model that can be packed", got, "Use padded batches."


def isolation(model: torch.nn.Module, automatic: bool) -> tuple[dict[str, Any], ValueError | None, str | None]:
    """The boundaries with which a patched model keeps documents apart; a reason if there are none; or a doubt."""
    leak = doubt = None
    # Our classes keep documents apart. Others do if the audit found so, with all boundaries or with position_ids alone.
    for options in () if check_patch(model) else (_EVERYTHING, {}):
        collator = DataCollatorWithFlattening(**options, on_leak="ignore")
        leak, doubt = judge(model, **collator.given())
        if leak is None and doubt is None:
            return options, None, None
    if leak is not None:
        leak = input_error(SEPARATE, f"a model that leaks ({leak})", "Use padded batches.")
    elif automatic and doubt is not None:
        fix = "Measure it with transformers_packed.audit_model(model)."
        leak = input_error(SEPARATE, f"a model that has not been audited: {doubt}", fix)
    return _EVERYTHING, leak, doubt


def way_of_isolation(trainer: Trainer) -> tuple[str, ValueError | None]:
    """The isolation mechanism of this Trainer's model after patching, and an error if there is none."""
    model = inner_model(trainer.model)
    config = text_config(model)
    if families_of(model, Unpacked):
        return "running the model on each document alone", None
    attention = attention_of(config)
    planned = availability(Setting(trainer.args.device, compute_dtype(trainer), **sizes_for_ops(config)))
    flash = is_flash_attention_requested(requested_attention_implementation=attention)
    unknown = None, [(attention, "is not known to keep packed rows apart")]
    name, refused = (attention, []) if flash else planned.get(f"attention {attention}", unknown)
    if name is None:
        got = f'attn_implementation="{attention}" ({"; ".join(" ".join(words) for words in refused)})'
        fix = f"Load the model with {_SDPA}."
        return "", input_error("an attention implementation that keeps documents apart", got, fix)
    if own := families_of(model, Own):
        # The reference of the fused convolution to heads is the convolution itself.
        to_heads = planned["causal_conv1d_qkv"][0]
        convolution = planned["causal_conv1d"][0] if to_heads == "reference" else to_heads
        rules = ", ".join(f"{planned[op][0]} ({op.replace('_', ' ')})" for op in sorted({f.rule for f in own}))
        return f"{rules}, {convolution} (causal convolution), {name} (attention)", None
    mixed = families_of(model, Mixers)
    if any(family.rows for family in mixed):
        return f"computing recurrent modules on the row with boundaries, {attention} attention", None
    way = f"{attention} attention with {'cumulative lengths' if flash else 'a mask made from position_ids'}"
    return f"running recurrent modules on each document alone, {way}" if mixed else way, None


def compute_dtype(trainer: Trainer) -> torch.dtype:
    """The dtype of matrix products: that of autocast, or of the weights. It says nothing of products in 8 bits."""
    if trainer.args.bf16:
        return torch.bfloat16
    return torch.float16 if trainer.args.fp16 else inner_model(trainer.model).dtype


def of_devices(facts: Facts) -> Iterator[Rule]:
    """Reasons that depend on how the processes and devices share the work."""
    trainer, gpus = facts.trainer, facts.trainer.args.n_gpu
    got = f"one process with {gpus} GPUs, over which DataParallel would scatter the boundaries"
    fix = f"Launch with torchrun --nproc_per_node={gpus}, or set CUDA_VISIBLE_DEVICES to one GPU."
    yield gpus > 1, "one process per GPU", got, fix
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        size = getattr(parallel, name, 1)
        got = f"ParallelismConfig({name}={size}), which cuts rows without their boundaries"
        here = f" Pass sequence_parallel_size={size} to configure_packing or PackedTrainingArguments instead."
        yield size > 1, "whole rows", got, f"Set {name}=1.{'' if facts.padded else here}"
    yield from _of_shards(facts)
    shards = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    on_host = shards and any(map(names_in_host_memory, facts.record.models(trainer)))
    got, fix = "weights in host memory, of which each process has all", "Train with DDP, or leave them on the GPUs."
    yield on_host, "weights on the GPUs for FSDP and DeepSpeed", got, fix
    stored = next(iter(in_fewer_bits(trainer.model)), None)
    got = f"{stored} in fewer bits, which FSDP and DeepSpeed cast without its scales, or cannot shard"
    fix = "Train with DDP, or dequantize the model when it is loaded."
    yield stored and shards, "weights that can be cast and sharded", got, fix
    indexed = any(family.has_indexer for family in families_of(trainer.model, Own))
    zero_3 = trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3
    yield indexed and zero_3, *INDEXER_UNDER_ZERO_3


def _of_shards(facts: Facts) -> Iterator[Rule]:
    """Reasons that depend on how Transformers' `DistributedConfig` splits the model."""
    trainer, model = facts.trainer, facts.model
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if model is None or config is None:
        return
    processes, own = dist.get_world_size() if dist.is_initialized() else 1, trainer.args.world_size
    got, fix = f"{own}, each of which would read all rows", "On a CPU, set ACCELERATE_USE_CPU=true."
    yield processes != own, f"a Trainer with the model's {processes} processes", got, fix
    stages = getattr(config, "pp_size", 1)
    yield stages > 1, "whole models", f"pp_size={stages}, which gives a process some of the layers", "Set pp_size=1."
    spread = getattr(config, "ep_size", 1)
    got = f"{transformers.__version__}, whose gradients of experts are too small"
    fix = "Update it, or pass fsdp_size alone."
    yield spread > 1 and not averages_experts(), f"transformers >= 5.23 for ep_size={spread}", got, fix
    steps, tensors = trainer.args.gradient_accumulation_steps, trainer.get_tp_size()
    norm = next(iter(summed_per_backward(model)), None) if tensors > 1 and steps > 1 else None
    got = f"gradient_accumulation_steps={steps}, and Transformers sums the gradient of {norm} once per backward"
    fix = "Set it to 1, with longer rows, or use fsdp_size instead of tp_size."
    yield norm, f"one backward per step with tp_size={tensors}", got, fix
    layer, mesh = next(iter(split_adapters(trainer.model)), (None, ""))
    got = f"adapters on {layer}, which is split over {mesh}"
    fix = "Leave the layer out of target_modules and target_parameters, or pass fsdp_size alone."
    yield layer, "adapters on layers that fsdp_size alone shards", got, fix


def _of_model(trainer: Trainer, model: transformers.PreTrainedModel) -> Iterator[Rule]:
    name = type(model).__name__
    predicts = name.endswith(LANGUAGE_MODELS)
    # Trainer decides by the name of the class.
    unshifted = predicts and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    smoothing = f"label_smoothing_factor with {name}, whose labels Trainer does not shift"
    smooths = trainer.args.label_smoothing_factor and unshifted
    yield smooths, "labels shifted by one token", smoothing, "Set label_smoothing_factor=0."
    classifies = f"sequence classification ({name}), which needs one label per sample instead of one per token"
    yield name.endswith("ForSequenceClassification"), _MODEL, classifies, _PADDED
    other = not predicts or getattr(model.config, "is_encoder_decoder", False)
    yield other, _MODEL, f"{name}, which is not a causal language model", _PADDED
    # `check_patch` raises its own errors for unsupported models.
    patched = ((measured(model)[1] or {}).get("ours") or {}).get("all") or {}
    yield patched.get("verdict") == "leaks", SEPARATE, f"{name}, which leaks in {patched.get('module')}", _PADDED
    yield first_label_error(model)


def _of_padded_batches(facts: Facts, model: transformers.PreTrainedModel) -> Iterator[Rule]:
    """Reasons why a model cannot pack the padded batches of its Trainer."""
    args, config = facts.trainer.args, text_config(model)
    yield not families_of(model, Own), _PACKS, type(model).__name__, ""
    fix = 'Pass packing="padding_free".' if facts.options.mode == "batches" else ""
    yield facts.packed_by, "padded batches", facts.packed_by, fix
    noise = "neftune_noise_alpha, whose noise depends on the padded length"
    yield args.neftune_noise_alpha is not None, "padded batches without NEFTune", noise, "Set it to None."
    expected = "padded batches that return only the last hidden state"
    for name in ("output_hidden_states", "output_attentions"):
        got = f"{name}=True in the configuration, with which the model computes padding"
        yield getattr(config, name), expected, got, "Set it to False."
    packs = getattr(model, "packs_padding", True)
    yield not packs, "a model that packs padded batches", "packs_padding=False", "Set it to True."


def check_cache(model: transformers.PreTrainedModel) -> Rule:
    """An unpatched model uses no cache, also in evaluation. Our models use none on packed rows."""
    setting = None if families_of(model, *PATCHED) else cache_setting(model)
    got = f"{type(model).__name__} with {setting}=True, and with a cache its attention mask ignores documents"
    return setting, SEPARATE, got, f"Set model.{setting} = False."


def _of_collator(trainer: Trainer) -> Iterator[Rule]:
    collator, kind = trainer.data_collator, type(trainer.data_collator)
    got, fix = f"a collator that processes images ({kind.__name__})", "Process them in the dataset, and pass "
    yield has_images(trainer), "processed samples", got, f"{fix}DataCollatorWithFlattening."
    if collator is transformers.default_data_collator or isinstance(collator, DataCollatorWithFlattening):
        return
    known = kind.__module__.startswith(("transformers.", "trl.trainer.sft")) and kind.__name__ in KNOWN_COLLATORS
    name = getattr(collator, "__name__", kind.__name__)
    got = f"a custom data collator ({name}), which may do more"
    fix = "Do not pass data_collator, or pass transformers_packed.DataCollatorWithFlattening."
    if _brings(trainer, collator):
        got = f"a {type(trainer).__name__}, whose own data collator ({name}) may do more"
        fix = f"Train it as it is{_or_batches(transformers_model(trainer.model))}."
    yield not known or getattr(collator, "mlm", False), "a collator that only pads", got, fix


def datasets_of(trainer: Trainer, train: bool = True) -> list[Any]:
    """The datasets of a Trainer for evaluation, and for training."""
    given = trainer.eval_dataset
    datasets = [*(given.values() if isinstance(given, dict) else [given]), *([trainer.train_dataset] if train else [])]
    return [dataset for dataset in datasets if dataset is not None]


def has_trees(trainer: Trainer) -> bool:
    """Whether a dataset of a Trainer has trees of samples or groups of answers."""
    return any(find_tree(dataset) is not None for dataset in datasets_of(trainer))


def against_removal(facts: Facts) -> Iterator[Rule]:
    """The rule that Trainer keeps the columns which divide rows and trees. Without them it would train on other samples.

    It removes no column of planned rows, which are lists of samples.
    """
    if not facts.trainer.args.remove_unused_columns or facts.record.prepares:
        return
    for dataset in datasets_of(facts.trainer, train=facts.options.mode != "pack" or facts.packed_rows):
        # Rows that are lists keep their columns, and so does a stream that is trained on.
        if isinstance(dataset, PackingDataset) or not isinstance(first_sample(dataset), Mapping):
            continue
        tree = find_tree(dataset) or {}
        name = next((name for name in (TURNS, ANSWERS) if tree.get(name) is not None), None)
        name = "seq_lengths" if is_packed(dataset) else name
        got = f"remove_unused_columns=True, which removes the column {name}"
        yield name, "a Trainer that keeps the columns of rows and trees", got, "Set remove_unused_columns=False."


def _of_samples(trainer: Trainer) -> Iterator[Rule]:
    args, sample = trainer.args, first_sample(trainer.train_dataset)
    wrapped = getattr(args, "packing", False) and getattr(args, "packing_strategy", None) == "wrapped"
    discards = 'packing_strategy="wrapped", which discards the document boundaries'
    yield wrapped, "rows of whole documents", discards, 'Set packing_strategy="bfd".'
    cuts = "accelerator_config with dispatch_batches=True, which would cut rows into pieces"
    dispatches = trainer.accelerator.dataloader_config.dispatch_batches
    yield dispatches, "processes that read their own rows", cuts, "Do not set dispatch_batches."
    if sample is None:
        return
    if not isinstance(sample, Mapping) or not ("input_ids" in sample or is_tree(sample)):
        got = f"columns {sorted(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
        fix = "Tokenize the dataset first. TRL's SFTTrainer does."
        yield True, "a train_dataset of tokenized samples", f"samples without input_ids: {got}", fix
    given = [sample[name] for name in ("labels", "label", "label_ids") if sample.get(name) is not None]
    one = any(np.ndim(labels) == 0 for labels in given)
    yield one, "labels per token", "samples with one label each (sequence classification)", _PADDED
    none = not _is_labelled(sample) and not type(trainer.data_collator).__name__.endswith(CREATE_LABELS)
    fix = "Add a labels column, or pass DataCollatorForLanguageModeling(tokenizer, mlm=False)."
    yield none, "labels", "samples without labels, and a collator that creates none", fix
    yield find_unusable(trainer.train_dataset)


def _is_labelled(sample: Mapping[str, Any]) -> bool:
    try:
        return all("labels" in node for node in nodes_of([sample])[0])
    except ValueError:  # which `find_unusable` finds
        return True


def _of_columns(facts: Facts, model: transformers.PreTrainedModel) -> Iterator[Rule]:
    """The columns that a padded batch would pass to the model, but a packed row does not."""
    trainer = facts.trainer
    sample = first_sample(trainer.train_dataset)
    if sample is None or facts.record.prepares or isinstance(trainer.data_collator, DataCollatorWithFlattening):
        return
    columns = set(columns_of(trainer.train_dataset) or present(sample))
    if find_tree(trainer.train_dataset) is not None:
        columns -= {TURNS, ANSWERS, PREFIX}
    read = set(signature(model.forward).parameters) if trainer.args.remove_unused_columns else columns
    takes_images = hasattr(model.config, "vision_config") and family_of(model.config).takes_images
    left_out = sorted((columns & read) - _TEXT - (_VISION if takes_images else set()))
    whose = "a processor's" if any(name.startswith(("pixel", "image", "video")) for name in left_out) else "the"
    got = f"{whose} columns {', '.join(left_out)}, which packed rows of {type(model).__name__} do not support"
    yield left_out, "samples of tokens", got, "Remove the columns, or train on padded batches."


def excludes_graphs(trainer: Trainer, padded: bool = False) -> str | None:
    """What of a Trainer's set-up excludes CUDA graphs, if anything does. `padded` is whether its batches stay padded."""
    inner = transformers_model(trainer.model) or trainer.model
    has_graphs = any(family.has_graphs for family in families_of(inner, Own))
    args, shared = trainer.args, getattr(trainer, "sequence_parallel", None) is not None
    sharded = any(hasattr(parameter, "device_mesh") for parameter in trainer.model.parameters())
    callbacks = trainer.callback_handler.callbacks
    released = any(getattr(callback, "releases_gradients", False) for callback in callbacks)
    reasons = (
        (padded, f"a {type(trainer).__name__}, whose batches are padded"),
        (released, "gradient release, because a graph computes all gradients at once"),
        (trainer.is_fsdp_enabled, "FSDP, which gathers weights in each step"),
        (trainer.is_deepspeed_enabled, "DeepSpeed, which gathers weights in each step"),
        (sharded, "weights that several processes share"),
        (shared, "rows that several processes share"),
        (find_tree(trainer.train_dataset) is not None, "trees or groups, whose rows run without graphs"),
        (args.auto_find_batch_size, "auto_find_batch_size=True, which changes the length of rows"),
        (not has_graphs, f"a {type(inner).__name__}"),
        (
            names_in_host_memory(trainer.model),
            "weights in host memory, whose copies have other addresses in each step",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)


def say(trainer: Trainer, line: str) -> Trainer:
    """Print a line once, in the main process, and return the trainer."""
    if trainer.is_world_process_zero():
        tqdm.write(line)
    return trainer
