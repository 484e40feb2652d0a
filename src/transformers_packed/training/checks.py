"""Why a Trainer cannot be packed: everything that can be known before its first step, without changing it.

Each check looks at the Trainer and answers with a [`Reason`] or `None`. Whether a model keeps documents apart is decided
by what the audit measured (`guard.judge`) or, for models that have classes of ours, by the ops' own verifiers.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.utils.generic import is_flash_attention_requested

from ..audit.model_state import text_config
from ..data.collator import DataCollatorWithFlattening
from ..data.dataset import PackingDataset
from ..data.streaming import IterablePackingDataset
from ..errors import input_error
from ..models.auto import FAMILIES
from ..models.base import transformers_model
from ..models.families import MIXERS, UNPACKED
from ..models.mixers import families_of, family_of
from ..ops.availability import availability
from .callbacks.guard import (
    LANGUAGE_MODELS,
    SEPARATE,
    adapter_per_row,
    audited,
    cache_complaint,
    cache_setting,
    unshifted_smoothing,
)


CALL = "configure_packing"
_VISION = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "mm_token_type_ids"}
_TEXT = {"input_ids", "attention_mask", "labels", "seq_lengths"}
# Collators that lay samples into a padded batch and do nothing else to them. The second list makes the labels, too.
_PADDING = ("DefaultDataCollator", "DataCollatorWithPadding", "DataCollatorForSeq2Seq")
_LABELLING = ("DataCollatorForLanguageModeling", "DataCollatorWithFlattening")


@dataclass(frozen=True)
class Reason:
    """What was expected of a Trainer, what it has, and what to do: an error, or the one line of auto mode."""

    expected: str
    got: str
    fix: str

    def error(self) -> ValueError:
        return input_error(self.expected, self.got, self.fix)

    def line(self) -> str:
        return f"Packing off, training stays as it was: {self.got}. {self.fix}"


def reason_against(trainer: Trainer, mode: str) -> Reason | None:
    """The first reason not to pack, in `"auto"` mode also one that only makes it unsafe or useless."""
    checks = _ALWAYS
    if mode == "auto":
        checks = (_check_switched_off, *_ALWAYS, _check_loss, _check_batch_size)
    elif mode == "packing":
        checks = (_check_dataset, *_ALWAYS)
    return next((reason for check in checks if (reason := check(trainer)) is not None), None)


def is_sft_trainer(trainer: Trainer) -> bool:
    """Whether TRL's SFTTrainer or a class derived from it."""
    return any(c.__name__ == "SFTTrainer" and c.__module__.startswith("trl.") for c in type(trainer).__mro__)


def is_packed(dataset: Any) -> bool:
    """Whether the dataset gives rows of several documents already: ours, or those that TRL writes."""
    if isinstance(dataset, PackingDataset | IterablePackingDataset):
        return True
    sample = first_sample(dataset)
    return sample is not None and "seq_lengths" in sample


def first_sample(dataset: Any) -> Mapping[str, Any] | None:
    """A sample of a dataset that can be read more than once, else `None`."""
    if isinstance(dataset, PackingDataset):
        dataset = dataset.dataset
    if type(dataset).__module__.startswith("datasets."):
        return next(iter(dataset), None)
    # Other streams may be at their end after a look.
    return dataset[0] if has_items(dataset) and len(dataset) else None


def has_items(dataset: Any) -> bool:
    """Whether samples can be asked for by number. torch's base class of streams says so too."""
    return hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)


def way_of_isolation(trainer: Trainer) -> tuple[str, Reason | None]:
    """How the documents of this Trainer's model will be kept apart once it is patched, and what is in the way."""
    model = transformers_model(trainer.model)
    config = text_config(model)
    attention = config._attn_implementation
    flash = is_flash_attention_requested(requested_attention_implementation=attention)
    families = families_of(model)
    if families & set(UNPACKED):
        return "running the model on each document alone", None
    hybrid = families & set(FAMILIES)
    delta, heads = getattr(config, "linear_key_head_dim", None) or 128, getattr(config, "head_dim", None) or 128
    planned = availability(trainer.args.device, _compute_dtype(trainer), delta, heads)
    unknown = None, [(attention, "is not known to keep packed rows apart")]
    name, refused = (attention, []) if flash else planned.get(f"attention {attention}", unknown)
    if name is None:
        return "", Reason(
            expected="an attention implementation that keeps documents apart",
            got=f'attn_implementation="{attention}" ({"; ".join(" ".join(words) for words in refused)})',
            fix='Load the model with attn_implementation="sdpa".',
        )
    if hybrid:
        # The reference of the convolution to heads is the convolution itself.
        to_heads = planned["causal_conv1d_qkv"][0]
        convolution = planned["causal_conv1d"][0] if to_heads == "reference" else to_heads
        rule = planned["gated_delta_rule"][0]
        return f"{rule} (gated delta rule), {convolution} (causal convolution), {name} (attention)", None
    lengths = "cumulative lengths" if flash else "a mask made from position_ids"
    if families & set(MIXERS):
        return f"running recurrent modules on each document alone, {attention} attention with {lengths}", None
    return f"{attention} attention with {lengths}", None


def _compute_dtype(trainer: Trainer) -> torch.dtype:
    if trainer.args.bf16:
        return torch.bfloat16
    return torch.float16 if trainer.args.fp16 else transformers_model(trainer.model).dtype


def check_devices(trainer: Trainer) -> Reason | None:
    if trainer.args.n_gpu > 1:
        return Reason(
            expected="one process per GPU",
            got=f"one process that sees {trainer.args.n_gpu} GPUs, over which DataParallel would scatter the boundaries",
            fix=f"Launch with torchrun --nproc_per_node={trainer.args.n_gpu} or accelerate launch, or set "
            "CUDA_VISIBLE_DEVICES to one GPU.",
        )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("cp", "sp"):
        if getattr(parallel, f"{name}_size", 1) > 1:
            return Reason(
                expected="rows that stay whole",
                got=f"{name}_size={getattr(parallel, f'{name}_size')}, which cuts rows into pieces",
                fix=f"Set {name}_size=1 in the ParallelismConfig.",
            )
    return None


def _check_model(trainer: Trainer) -> Reason | None:
    model = transformers_model(trainer.model)
    name = type(trainer.model if model is None else model).__name__
    expected = "a causal language model of Transformers"
    if model is None:
        return Reason(expected, f"{name}, which is not of Transformers", "Train it on padded batches.")
    per_row = adapter_per_row(trainer.model)
    if per_row is not None:
        return Reason("adapters that look at documents", per_row, "Train it on padded batches.")
    unshifted = unshifted_smoothing(trainer.args, model)
    if unshifted is not None:
        return Reason("targets that stand one token later", unshifted, "Set label_smoothing_factor=0.")
    if name.endswith("ForSequenceClassification"):
        got = f"sequence classification ({name}), which needs one label per sample where a row has one per token"
        return Reason(expected, got, "Train it on padded batches.")
    if not name.endswith(LANGUAGE_MODELS) or getattr(model.config, "is_encoder_decoder", False):
        return Reason(expected, f"{name}, which is not a causal language model", "Train it on padded batches.")
    family = next((UNPACKED[f] for f in map(family_of, type(model).__mro__) if f in UNPACKED), None)
    if family is not None and not family.shifts_labels:
        got = f"{name}, whose loss does not shift labels, so that the first token of a document would be lost"
        return Reason(expected, got, "Train it on padded batches.")
    return None


def _check_measured(trainer: Trainer) -> Reason | None:
    """What the audit measured of the type with `patch_model`; `patch_model` itself knows what it was not made for."""
    model = transformers_model(trainer.model)
    _, entry = audited(model)
    if entry is None or "ours" not in entry or entry["ours"]["all"]["verdict"] != "leaks":
        return None
    where = entry["ours"]["all"]["module"]
    return Reason(SEPARATE, f"{type(model).__name__}, which leaks in {where}", "Use padded batches.")


def _check_cache(trainer: Trainer) -> Reason | None:
    return check_cache(transformers_model(trainer.model))


def check_cache(model: torch.nn.Module) -> Reason | None:
    """Whether a model that stays as it is makes a cache, at least in evaluation. Those of ours make none on packed rows."""
    if families_of(model) & {*FAMILIES, *MIXERS, *UNPACKED}:
        return None
    setting = cache_setting(model)
    return None if setting is None else Reason(SEPARATE, *cache_complaint(model, setting))


def _check_attention(trainer: Trainer) -> Reason | None:
    return way_of_isolation(trainer)[1]


def _check_collator(trainer: Trainer) -> Reason | None:
    collator = trainer.data_collator
    if getattr(trainer, "_is_vision_dataset", False):
        return Reason(
            expected="samples that a collator need not process",
            got=f"a processor that makes the model's inputs from images in the collator ({type(collator).__name__})",
            fix="Process the dataset beforehand, and pass DataCollatorWithFlattening to Trainer.",
        )
    kind, name = type(collator), getattr(collator, "__name__", type(collator).__name__)
    if collator is transformers.default_data_collator or isinstance(collator, DataCollatorWithFlattening):
        return None
    known = kind.__module__.startswith(("transformers.", "trl.trainer.sft")) and kind.__name__ in _PADDING + _LABELLING
    if not known or getattr(collator, "mlm", False):
        return Reason(
            expected="a collator that only pads",
            got=f"a custom data collator ({name}), which may do more than pad",
            fix="Leave data_collator out, or pass transformers_packed.DataCollatorWithFlattening.",
        )
    return None


def _check_samples(trainer: Trainer) -> Reason | None:
    dataset, args = trainer.train_dataset, trainer.args
    if getattr(args, "packing", False) and getattr(args, "packing_strategy", None) == "wrapped":
        return Reason(
            expected="rows of whole documents",
            got='packing_strategy="wrapped", which has lost where documents begin',
            fix='Set packing_strategy="bfd".',
        )
    if isinstance(dataset, IterableDataset) and trainer.accelerator.dataloader_config.dispatch_batches:
        return Reason(
            expected="processes that read their own rows",
            got="accelerator_config with dispatch_batches=True, which would cut rows in pieces",
            fix="Leave dispatch_batches out.",
        )
    sample = first_sample(dataset)
    if sample is None:
        return None
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        got = f"columns {sorted(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
        return Reason("a train_dataset of tokenized samples", f"samples without input_ids: {got}", "Tokenize them.")
    if any(name in sample and np.ndim(sample[name]) == 0 for name in ("labels", "label", "label_ids")):
        got = "samples with one label each (sequence classification)"
        return Reason("labels per token", got, "Train on padded batches.")
    if "labels" not in sample and not type(trainer.data_collator).__name__.endswith(_LABELLING):
        fix = "Add a labels column, or pass DataCollatorForLanguageModeling(tokenizer, mlm=False)."
        return Reason("labels", "samples without labels, and a collator that makes none", fix)
    if "seq_lengths" in sample and args.remove_unused_columns and not is_sft_trainer(trainer):
        got = "rows with seq_lengths, a column that remove_unused_columns=True takes away"
        return Reason("rows that say where documents are", got, "Set remove_unused_columns=False.")
    return _check_columns(trainer, sample)


def _check_columns(trainer: Trainer, sample: Mapping[str, Any]) -> Reason | None:
    """A column that the model would get from a padded batch, and not from a packed row."""
    model = transformers_model(trainer.model)
    known = _TEXT | (_VISION if family_of_ours(model) else set())
    if not isinstance(trainer.data_collator, DataCollatorWithFlattening):
        taken = set(sample)
        if is_sft_trainer(trainer):
            taken = set()
        elif trainer.args.remove_unused_columns:
            taken &= set(signature(model.forward).parameters)
        left_out = sorted(taken - known)
        if left_out:
            what = "a processor's" if any(name.startswith(("pixel", "image", "video")) for name in left_out) else "the"
            return Reason(
                expected="samples of tokens",
                got=f"{what} columns {', '.join(left_out)}, for which a packed row of {type(model).__name__} has no place",
                fix="Remove the columns, or train on padded batches.",
            )
    return None


def family_of_ours(model: torch.nn.Module) -> bool:
    """Whether a vision-language model whose packed rows may hold images."""
    return hasattr(model.config, "vision_config") and model.config.model_type in ("qwen3_5", "qwen3_5_moe")


def _check_metrics(trainer: Trainer) -> Reason | None:
    wants_logits = trainer.compute_metrics is not None and not trainer.args.prediction_loss_only
    if wants_logits and not getattr(trainer, "restores_documents", False):
        return Reason(
            expected="an evaluation that needs the loss alone",
            got="compute_metrics, which needs the logits of each sample where a packed row returns those of all",
            fix="Use transformers_packed.PackedTrainer, which takes rows apart again, or set prediction_loss_only=True.",
        )
    return None


def _check_switched_off(trainer: Trainer) -> Reason | None:
    if os.environ.get("TRANSFORMERS_PACKED_DISABLE_AUTO") == "1":
        return Reason("no TRANSFORMERS_PACKED_DISABLE_AUTO", "TRANSFORMERS_PACKED_DISABLE_AUTO is set", "Unset it.")
    return None


def _check_loss(trainer: Trainer) -> Reason | None:
    own = type(trainer).compute_loss.__module__.split(".")[0] not in ("transformers", "trl", "transformers_packed")
    if own or trainer.compute_loss_func is not None:
        return Reason(
            expected="the loss of the model",
            got=f"a {'compute_loss' if own else 'compute_loss_func'} of its own, which may count samples or read the mask",
            fix='Pass packing="padding_free" if it works on tokens.',
        )
    return None


def _check_batch_size(trainer: Trainer) -> Reason | None:
    if trainer.args.per_device_train_batch_size == 1 and not is_packed(trainer.train_dataset):
        return Reason(
            expected="more than one sample per batch",
            got="per_device_train_batch_size=1, which has no padding to avoid",
            fix='Raise it, or pass packing="packing" with max_length.',
        )
    return None


def _check_dataset(trainer: Trainer) -> Reason | None:
    if trainer.train_dataset is None:
        return Reason("a train_dataset to pack", "none", 'Pass one to the Trainer, or packing="padding_free".')
    return None


_ALWAYS: tuple[Callable[[Trainer], Reason | None], ...] = (
    check_devices,
    _check_model,
    _check_collator,
    _check_samples,
    _check_measured,
    _check_cache,
    _check_attention,
    _check_metrics,
)
