"""TRL's trainers of preferences and of reinforcement learning: DPO, KTO, GRPO and RLOO.

These trainers build padded batches of pairs or groups, and score the tokens of whole batches. Models of this package
gather the real tokens of a padded batch into one packed row ([`PaddedBatch`]), in the policy and in the reference
model. So these trainers need no change: their losses, metrics and columns stay as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from transformers import Trainer

from ..errors import input_error
from ..models.families import FAMILIES, families_of
from ..models.registry import has_our_classes, patch_model, transformers_model, unpatch_model
from ..models.verdict import adapter_per_row, text_config
from .checks import is_trl_trainer, of_devices, of_switch, way_of_isolation


_TRAINERS = ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")


def is_preference_trainer(trainer: Trainer) -> bool:
    """Whether the Trainer is one of TRL's that this module supports, or a subclass."""
    return is_trl_trainer(trainer, *_TRAINERS)


def check_shares_prompts(trainer: Trainer, mode: str) -> None:
    """Raise a `ValueError` if the batches of the Trainer are not padded pairs or groups, or do not run packed."""
    if mode == "off":
        raise input_error('share_prompts=True with packing="auto" or "padding_free"', "packing=False")
    if not is_preference_trainer(trainer):
        fix = "Set model.shares_prompts = True if your own padded batches repeat prompts."
        raise input_error(f"share_prompts with {', '.join(_TRAINERS)}", type(trainer).__name__, fix)


def reason_against_packed_batches(trainer: Trainer, mode: str, share_prompts: bool) -> ValueError | None:
    """The first reason why the padded batches of the Trainer cannot run packed, or cannot share prompts."""
    return next(_reasons(trainer, mode, share_prompts), None)


def _reasons(trainer: Trainer, mode: str, share_prompts: bool) -> Iterator[ValueError]:
    name, model = type(trainer).__name__, transformers_model(trainer.model)
    yield from of_switch(mode)
    if mode == "pack":
        fix = 'Pass packing="padding_free". The model then packs each batch.'
        yield input_error(f"whole batches of {name}, whose rows belong together", "packing=True", fix)
    yield from of_devices(trainer)
    if model is None or not families_of(model) & set(FAMILIES):
        got = type(trainer.model if model is None else model).__name__
        yield input_error("a model that packs padded batches (Qwen3-Next, Qwen3.5 or Qwen3.5-MoE)", got)
    if (per_row := adapter_per_row(trainer.model)) is not None:
        yield input_error("adapters that act per document", per_row)
    if trainer.args.neftune_noise_alpha is not None:
        got = "neftune_noise_alpha, whose noise depends on the padded length"
        yield input_error("padded batches without NEFTune", got, "Set it to None.")
    if trainer.args.torch_compile:
        got = "torch_compile=True, with which the model computes padding"
        yield input_error("padded batches without torch.compile", got, "Set it to False.")
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(text_config(model), name):
            got = f"{name}=True in the configuration, with which the model computes padding"
            yield input_error("padded batches that return only the last hidden state", got, "Set it to False.")
    if not getattr(model, "packs_padding", True):
        yield input_error("a model that packs padded batches", "packs_padding=False", "Set it to True.")
    if (refused := way_of_isolation(trainer)[1]) is not None:
        yield refused
    if share_prompts and text_config(model)._attn_implementation == "flex_attention":
        fix = 'Load the model with attn_implementation="sdpa".'
        yield input_error("an attention implementation that supports shared prompts", "flex_attention", fix)


def pack_batches(trainer: Trainer, share_prompts: bool) -> ValueError | None:
    """Patch the policy and the reference model, both or none. Returns the reason if one cannot be patched."""
    reference = getattr(trainer, "ref_model", None)
    models = [model for model in (reference, trainer.model) if model is not None]
    patched: list[torch.nn.Module] = []
    with _without_autocast(trainer, reference):
        for model in models:
            before = has_our_classes(model)
            try:
                patch_model(model)
            except (ValueError, ImportError) as error:
                for other in patched:
                    unpatch_model(other)
                got = f"one that cannot be patched ({str(error).rstrip('.')})"
                return input_error("a model that can be packed", got)
            patched += [] if before else [model]
    for model in models if share_prompts else ():
        transformers_model(model).shares_prompts = True
    return None


@contextmanager
def _without_autocast(trainer: Trainer, reference: torch.nn.Module | None) -> Iterator[None]:
    """Give the reference model its own forward meanwhile. TRL has prepared it, and the policy only in `train`."""
    forward = None if reference is None else vars(reference).get("forward")
    # A wrapper of the user around it stays, and `patch_model` refuses such a model.
    prepared = getattr(forward, "__module__", "").startswith("accelerate.")
    own = vars(reference).pop("_original_forward", None) if prepared else None
    if own is not None:
        reference.forward = own
        if own == MethodType(type(reference).forward, reference):
            del reference.forward
    try:
        yield
    finally:
        if own is not None:
            # With this mark, accelerate would leave it as it is. It would also save a model that it lists twice again.
            vars(reference).pop("_is_accelerate_prepared", None)
            listed = trainer.accelerator._models
            listed[:] = [model for model in listed if model is not reference]
            trainer.accelerator.prepare_model(reference, device_placement=False, evaluation_mode=True)


def is_sharing_prompts(trainer: Trainer) -> bool:
    """Whether the policy shares prompts, which users may also set on the model."""
    return getattr(transformers_model(trainer.model), "shares_prompts", False)
