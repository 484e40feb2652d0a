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
import transformers
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import Trainer
from transformers.utils.generic import is_flash_attention_requested

from ..data.collator import DataCollatorWithFlattening
from ..data.dataset import PackingDataset
from ..data.guard import unshifted_smoothing
from ..data.samples import TOKEN_TYPES, VISION_COLUMNS
from ..data.streaming import IterablePackingDataset
from ..errors import input_error
from ..models.families import FAMILIES, LANGUAGE_MODELS, MIXERS, UNPACKED, families_of
from ..models.registry import transformers_model
from ..models.verdict import (
    SEPARATE,
    adapter_per_row,
    cache_error,
    cache_setting,
    first_label_error,
    measured,
    text_config,
)
from ..ops.availability import availability


_VISION = {*VISION_COLUMNS, TOKEN_TYPES}
_TEXT = {"input_ids", "attention_mask", "labels", "seq_lengths"}
# Collators that only pad samples. Those in the second list also create the labels.
_PADDING = ("DefaultDataCollator", "DataCollatorWithPadding", "DataCollatorForSeq2Seq")
_LABELLING = ("DataCollatorForLanguageModeling", "DataCollatorWithFlattening")
_PADDED = "Train on padded batches."


def reason_against(trainer: Trainer, mode: str) -> ValueError | None:
    """The first reason not to pack. In `"auto"` mode also reasons that make packing unsafe or useless."""
    return next(_reasons(trainer, mode), None)


def _reasons(trainer: Trainer, mode: str) -> Iterator[ValueError]:
    """Only the first reason is valid: each check relies on the checks before it."""
    model = transformers_model(trainer.model)
    yield from of_switch(mode)
    if mode == "pack" and trainer.train_dataset is None:
        yield input_error("a train_dataset to pack", "none")
    yield from of_devices(trainer)
    yield from _of_model(trainer, model)
    yield from _of_collator(trainer)
    yield from _of_samples(trainer, model)
    # `patch_model` raises its own errors for unsupported models.
    patched = ((measured(model)[1] or {}).get("ours") or {}).get("all")
    if patched is not None and patched["verdict"] == "leaks":
        yield input_error(SEPARATE, f"{type(model).__name__}, which leaks in {patched['module']}", _PADDED)
    yield from filter(None, (check_cache(model), way_of_isolation(trainer)[1]))
    wants_logits = trainer.compute_metrics is not None and not trainer.args.prediction_loss_only
    if wants_logits and not getattr(trainer, "restores_documents", False):
        got = "compute_metrics, which needs the logits of each sample, while a packed row has those of all its samples"
        fix = "Use transformers_packed.PackedTrainer, which splits rows, or set prediction_loss_only=True."
        yield input_error("an evaluation that needs only the loss", got, fix)
    if mode != "auto":
        return
    if (own := has_own_loss(trainer)) or trainer.compute_loss_func is not None:
        got = f"a custom {'compute_loss' if own else 'compute_loss_func'}, which may count samples or read the mask"
        yield input_error("the loss of the model", got, 'Pass packing="padding_free" if it works on tokens.')
    if trainer.args.per_device_train_batch_size == 1 and not is_packed(trainer.train_dataset):
        got = "per_device_train_batch_size=1, which has no padding to avoid"
        yield input_error("more than one sample per batch", got, "Raise it, or pass packing=True with max_length.")


def of_switch(mode: str) -> Iterator[ValueError]:
    """The reason if an environment variable turns `"auto"` off."""
    switch = "TRANSFORMERS_PACKED_DISABLE_AUTO"
    if mode == "auto" and os.environ.get(switch) == "1":
        yield input_error(f"no {switch}", f"{switch} is set")


def is_sft_trainer(trainer: Trainer) -> bool:
    """Whether the Trainer is TRL's SFTTrainer or a subclass."""
    return is_trl_trainer(trainer, "SFTTrainer")


def is_trl_trainer(trainer: Trainer, *names: str) -> bool:
    """Whether the Trainer is one of these classes of TRL, or a subclass."""
    return any(c.__name__ in names and c.__module__.startswith("trl.") for c in type(trainer).__mro__)


def is_packed(dataset: Any) -> bool:
    """Whether the dataset already has packed rows: from our datasets, or written by TRL."""
    if isinstance(dataset, PackingDataset | IterablePackingDataset):
        return True
    sample = first_sample(dataset)
    return sample is not None and "seq_lengths" in sample


def first_sample(dataset: Any) -> Mapping[str, Any] | None:
    """The first sample of a dataset, or `None` if the dataset can only be read once."""
    if isinstance(dataset, PackingDataset):
        dataset = dataset.dataset
    if type(dataset).__module__.startswith("datasets."):
        return next(iter(dataset), None)
    # Reading from other streams may consume them.
    return dataset[0] if has_items(dataset) and len(dataset) else None


def has_items(dataset: Any) -> bool:
    """Whether samples have indices. torch's `IterableDataset` also defines `__getitem__`."""
    return hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)


def way_of_isolation(trainer: Trainer) -> tuple[str, ValueError | None]:
    """The isolation mechanism of this Trainer's model after patching, and an error if there is none."""
    model = transformers_model(trainer.model)
    config, families = text_config(model), families_of(model)
    if families & set(UNPACKED):
        return "running the model on each document alone", None
    attention = config._attn_implementation
    delta, heads = getattr(config, "linear_key_head_dim", None) or 128, getattr(config, "head_dim", None) or 128
    planned = availability(trainer.args.device, _compute_dtype(trainer), delta, heads)
    flash = is_flash_attention_requested(requested_attention_implementation=attention)
    unknown = None, [(attention, "is not known to keep packed rows apart")]
    name, refused = (attention, []) if flash else planned.get(f"attention {attention}", unknown)
    if name is None:
        got = f'attn_implementation="{attention}" ({"; ".join(" ".join(words) for words in refused)})'
        fix = 'Load the model with attn_implementation="sdpa".'
        return "", input_error("an attention implementation that keeps documents apart", got, fix)
    if families & set(FAMILIES):
        # The reference of the fused convolution to heads is the convolution itself.
        to_heads = planned["causal_conv1d_qkv"][0]
        convolution = planned["causal_conv1d"][0] if to_heads == "reference" else to_heads
        rule = planned["gated_delta_rule"][0]
        return f"{rule} (gated delta rule), {convolution} (causal convolution), {name} (attention)", None
    way = f"{attention} attention with {'cumulative lengths' if flash else 'a mask made from position_ids'}"
    return f"running recurrent modules on each document alone, {way}" if families & set(MIXERS) else way, None


def _compute_dtype(trainer: Trainer) -> torch.dtype:
    if trainer.args.bf16:
        return torch.bfloat16
    return torch.float16 if trainer.args.fp16 else transformers_model(trainer.model).dtype


def check_devices(trainer: Trainer) -> None:
    """Raise a `ValueError` if DataParallel or other parallelism would cut the rows."""
    for reason in of_devices(trainer):
        raise reason


def of_devices(trainer: Trainer) -> Iterator[ValueError]:
    """Reasons that depend on how the processes and devices share the work."""
    if trainer.args.n_gpu > 1:
        got = f"one process with {trainer.args.n_gpu} GPUs, over which DataParallel would scatter the boundaries"
        fix = f"Launch with torchrun --nproc_per_node={trainer.args.n_gpu}, or set CUDA_VISIBLE_DEVICES to one GPU."
        yield input_error("one process per GPU", got, fix)
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            yield input_error("whole rows", f"{name}={size}, which cuts rows", f"Set {name}=1.")


def _of_model(trainer: Trainer, model: torch.nn.Module | None) -> Iterator[ValueError]:
    expected, name = (
        "a causal language model of Transformers",
        type(trainer.model if model is None else model).__name__,
    )
    if model is None:
        yield input_error(expected, f"{name}, which is not a Transformers model", _PADDED)
    if (per_row := adapter_per_row(trainer.model)) is not None:
        yield input_error("adapters that act per document", per_row, _PADDED)
    if (unshifted := unshifted_smoothing(trainer.args, model)) is not None:
        yield unshifted
    if name.endswith("ForSequenceClassification"):
        got = f"sequence classification ({name}), which needs one label per sample instead of one per token"
        yield input_error(expected, got, _PADDED)
    if not name.endswith(LANGUAGE_MODELS) or getattr(model.config, "is_encoder_decoder", False):
        yield input_error(expected, f"{name}, which is not a causal language model", _PADDED)
    if (unshifted := first_label_error(model)) is not None:
        yield unshifted


def check_cache(model: torch.nn.Module) -> ValueError | None:
    """The error if an unpatched model uses a cache, at least in evaluation. Our models use none on packed rows."""
    ours = families_of(model) & {*FAMILIES, *MIXERS, *UNPACKED}
    return cache_error(model, setting) if not ours and (setting := cache_setting(model)) else None


def _of_collator(trainer: Trainer) -> Iterator[ValueError]:
    collator, kind = trainer.data_collator, type(trainer.data_collator)
    if getattr(trainer, "_is_vision_dataset", False):
        got = f"a collator that processes images ({kind.__name__})"
        yield input_error(
            "processed samples", got, "Process them in the dataset, and pass DataCollatorWithFlattening."
        )
    if collator is transformers.default_data_collator or isinstance(collator, DataCollatorWithFlattening):
        return
    known = kind.__module__.startswith(("transformers.", "trl.trainer.sft")) and kind.__name__ in _PADDING + _LABELLING
    if not known or getattr(collator, "mlm", False):
        got = f"a custom data collator ({getattr(collator, '__name__', kind.__name__)}), which may do more"
        fix = "Do not pass data_collator, or pass transformers_packed.DataCollatorWithFlattening."
        yield input_error("a collator that only pads", got, fix)


def _of_samples(trainer: Trainer, model: torch.nn.Module) -> Iterator[ValueError]:
    dataset, args, sft = trainer.train_dataset, trainer.args, is_sft_trainer(trainer)
    if getattr(args, "packing", False) and getattr(args, "packing_strategy", None) == "wrapped":
        got = 'packing_strategy="wrapped", which discards the document boundaries'
        yield input_error("rows of whole documents", got, 'Set packing_strategy="bfd".')
    if trainer.accelerator.dataloader_config.dispatch_batches:
        got = "accelerator_config with dispatch_batches=True, which would cut rows into pieces"
        yield input_error("processes that read their own rows", got, "Do not set dispatch_batches.")
    sample = first_sample(dataset)
    if sample is None:
        return
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        got = f"columns {sorted(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
        yield input_error("a train_dataset of tokenized samples", f"samples without input_ids: {got}")
    if any(name in sample and np.ndim(sample[name]) == 0 for name in ("labels", "label", "label_ids")):
        yield input_error("labels per token", "samples with one label each (sequence classification)", _PADDED)
    if "labels" not in sample and not type(trainer.data_collator).__name__.endswith(_LABELLING):
        fix = "Add a labels column, or pass DataCollatorForLanguageModeling(tokenizer, mlm=False)."
        yield input_error("labels", "samples without labels, and a collator that creates none", fix)
    if "seq_lengths" in sample and args.remove_unused_columns and not sft:
        got = "rows with the column seq_lengths, which remove_unused_columns=True removes"
        yield input_error("rows with document boundaries", got, "Set remove_unused_columns=False.")
    if sft or isinstance(trainer.data_collator, DataCollatorWithFlattening):
        return
    # Columns that a padded batch would pass to the model, but a packed row does not.
    taken = set(sample) & set(signature(model.forward).parameters) if args.remove_unused_columns else set(sample)
    left_out = sorted(taken - _TEXT - (_VISION if _takes_images(model) else set()))
    if left_out:
        whose = "a processor's" if any(name.startswith(("pixel", "image", "video")) for name in left_out) else "the"
        got = f"{whose} columns {', '.join(left_out)}, which packed rows of {type(model).__name__} do not support"
        yield input_error("samples of tokens", got, "Remove the columns, or train on padded batches.")


def _takes_images(model: torch.nn.Module) -> bool:
    """Whether the packed rows of a vision-language model may hold images."""
    return hasattr(model.config, "vision_config") and model.config.model_type in ("qwen3_5", "qwen3_5_moe")


def has_own_loss(trainer: Trainer) -> bool:
    """Whether the class of the Trainer has a `compute_loss` of the user."""
    return type(trainer).compute_loss.__module__.split(".")[0] not in ("transformers", "trl", "transformers_packed")


def excludes_graphs(trainer: Trainer) -> str | None:
    """What of a Trainer's set-up excludes CUDA graphs, if anything does."""
    if trainer.args.torch_compile:
        return "torch_compile=True"
    if trainer.is_fsdp_enabled:
        return "FSDP, which gathers weights in each step"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed, which gathers weights in each step"
    if any(hasattr(parameter, "device_mesh") for parameter in trainer.model.parameters()):
        return "weights that several processes share"
    if getattr(trainer, "sequence_parallel", None) is not None:
        return "rows that several processes share"
    if trainer.args.auto_find_batch_size:
        return "auto_find_batch_size=True, which changes the length of rows"
    return None


def say(trainer: Trainer, line: str) -> Trainer:
    """Print a line once, in the main process, and return the trainer."""
    if trainer.is_world_process_zero():
        tqdm.write(line)
    return trainer
