"""Losses beside those of the model in a Trainer: their targets in a step, what they log, and what trains with them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate.utils import fsdp2_prepare_model, reduce
from transformers import TrainerCallback

from ..errors import Rule, input_error
from ..foreign import swapped
from ..models.host_experts import names_in_host_memory
from ..models.losses import added, losses_of, own_weight
from ..models.losses.head import sum_of
from ..models.losses.loss import Loss
from ..models.registry import inner_model, patch_model
from ..models.releases import whole_layers
from .facts import Facts
from .typed import Trainer


def titles_of(losses: Iterable[Loss]) -> str:
    """Name these losses in an error."""
    return " and ".join(loss.title for loss in losses)


def trained_by(losses: Iterable[Loss]) -> str:
    """Say what trains, of losses of which some are added."""
    ours, own = added(losses), own_weight(losses)
    if not any(loss.is_own for loss in losses):
        return f"only {titles_of(ours)}"
    weighted = " and ".join(f"{loss.weight:g} x the loss of {loss.title}" for loss in ours)
    return f"{'' if own == 1 else f'{own:g} x its own loss '}with {weighted}"


def against_losses(facts: Facts) -> Iterator[Rule]:
    """The rules of added losses, which the forward of the model computes."""
    if not facts.added:
        return
    trainer, args, names = facts.trainer, facts.trainer.args, titles_of(facts.added)
    loss, remove = f"the model's own loss for {names}", f"or train without {names}."
    fix = "Train it in supervised fine-tuning."
    yield facts.record.pads, loss, f"that of {facts.name}, which the model does not compute", fix
    yield facts.padded, loss, facts.padded, 'Pass packing="padding_free".'
    yield "compute_loss" in facts.replaced, loss, "a custom compute_loss", f"Remove compute_loss, {remove}"
    yield trainer.compute_loss_func is not None, loss, "compute_loss_func", f"Remove it, {remove}"
    smooth = args.label_smoothing_factor
    yield smooth, loss, f"label_smoothing_factor={smooth}", f"Set it to 0, {remove}"
    if any(loss.models for loss in facts.added):
        yield from _against_other_models(facts, names)


def _against_other_models(facts: Facts, names: str) -> Iterator[Rule]:
    """The rules of losses that read other models, of which each process needs its own or a shard."""
    trainer, fix = facts.trainer, "Use FSDP2, or copies of the model (DDP)."
    yield trainer.is_deepspeed_enabled, f"{names} without DeepSpeed", "DeepSpeed", fix
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    yield plugin is not None and plugin.fsdp_version != 2, f"FSDP2 for {names}", "FSDP1", "Set fsdp_version to 2."
    on_host = any(names_in_host_memory(model) for loss in facts.added for model in loss.models)
    sharded = trainer.is_fsdp_enabled and on_host
    yield sharded, "a teacher that FSDP2 can shard", "one in host memory", "Leave it on the GPUs, or train with DDP."
    split = getattr(getattr(facts.model, "config", None), "distributed_config", None) is not None
    got = "tensor parallelism" if trainer.get_tp_size() > 1 else "a DistributedConfig"
    yield split, f"{names} with a model that is whole, or sharded by accelerate", got, fix


def train_losses(
    trainer: Trainer, losses: tuple[Loss, ...], dtype: torch.dtype | None, model: torch.nn.Module
) -> None:
    """Let a model train these losses. If none of them is its own, only what they have added trains."""
    inner: Any = inner_model(patch_model(model))
    if not hasattr(type(inner), "losses"):
        raise input_error(f"a language model of this package for {titles_of(losses)}", type(inner).__name__)
    for loss in losses:
        for other in loss.models:
            patch_model(other)
        loss.check(inner)
        loss.prepare(model, dtype)
        for other in loss.models:
            _place(trainer, other)
    if all(loss.alone for loss in losses):
        modules = [module for loss in losses if (module := loss.trained_in(model)) is not None]
        trained = {x for module in modules for x in module.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in trained and parameter.requires_grad)
    inner.losses = losses


def _place(trainer: Trainer, model: Any) -> None:
    """Put a model that losses read where the one that trains will be: on its device, or sharded as that is."""
    accelerator = trainer.accelerator
    if not trainer.is_fsdp_enabled:
        # A quantized model, or one over several devices, is where it was loaded.
        if getattr(model, "hf_device_map", None) is None:
            model.to(trainer.args.device)
        here, device = torch.empty(0, device=trainer.args.device).device, model.get_output_embeddings().weight.device
        if device != here:
            raise input_error(f"a teacher on {here}", f"its head on {device}", "Load it there, by its device_map.")
        return
    # The plugin keeps the classes of layers that it has found, and those of this model are others.
    plugin = accelerator.state.fsdp_plugin
    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)
    # A layer that waits for its backward would stay whole.
    changed = {
        "auto_wrap_policy": policy,
        "transformer_cls_names_to_wrap": whole_layers(model),
        "reshard_after_forward": True,
    }
    with swapped(vars(plugin), **changed):
        fsdp2_prepare_model(accelerator, model)


class ItemCounts:
    """Counts the targets of added losses in a step of all processes, and adds the numbers to its batches.

    It takes the place of the method of a Trainer that counts the targets of the model.
    """

    def __init__(self, count_items: Callable, losses: list[Loss]):
        self.count_items, self.losses = count_items, losses

    def __call__(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        for loss in self.losses:
            targets = [loss.targets_of(batch) for batch in batch_samples]
            found = self.count_items([{"labels": x, "shift_labels": x} for x in targets if x is not None], device)
            for batch, one in zip(batch_samples, targets, strict=True):
                if found is not None and one is not None:
                    batch[loss.items] = found
        return self.count_items(batch_samples, device)


class BesideScores:
    """Adds losses to that which TRL's `SFTTrainer` computes from the scores of tokens.

    It takes the place of the trainer's `compute_loss`. In other trainers, the loss of the model has them already.
    """

    def __init__(self, trainer: Trainer, compute_loss: Callable):
        self.trainer, self.compute_loss = trainer, compute_loss

    def __call__(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = self.compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        args, inner = self.trainer.args, inner_model(model)
        value, inner.pending_loss = inner.pending_loss, None
        if value is None:
            return result
        if args.average_tokens_across_devices and num_items_in_batch is not None:
            # Gradients are averaged over the processes, and targets are those of all of them, once per row.
            value = value * (args.world_size // self.trainer.get_tp_size())
        if any(loss.is_own for loss in inner.losses):
            value = sum_of([own_weight(inner.losses) * (result[0] if return_outputs else result), value])
        return (value, result[1]) if return_outputs else value


class LossesCallback(TrainerCallback):
    """Logs the figures of added losses. Those that take longer are of the steps that log."""

    losses: tuple[Loss, ...] = ()
    ran = False

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if not self.losses:
            # Not before the first step, because kernels are compiled with rows that do not count.
            self.losses = tuple(loss for loss in losses_of(model) if loss.num_sums)
            for loss in self.losses:
                loss.record = []
        every = max(1, int(state.logging_steps))
        for loss in self.losses:
            loss.is_detailed = args.logging_strategy == "steps" and (state.global_step + 1) % every == 0

    def on_step_end(self, args, state, control, **kwargs):
        for loss in self.losses:
            if not self.ran and not loss.record:
                fix = "Remove what replaces the forward or the loss of the model, or train without it."
                raise input_error(f"a loss of the model with that of {loss.title}", "another, which left it out", fix)
        self.ran = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or "loss" not in logs:
            return
        for loss in self.losses:
            # All processes exchange their sums, also one without a target since the last log.
            kept = [torch.zeros(loss.num_sums, device=args.device), *(x.to(args.device) for x in loss.record or ())]
            figures = loss.figures(*reduce(torch.stack(kept).sum(0), "sum").tolist())
            loss.record = []
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)

    def on_train_end(self, args, state, control, **kwargs):
        for loss in self.losses:
            loss.record, loss.is_detailed = None, False
        self.losses, self.ran = (), False
