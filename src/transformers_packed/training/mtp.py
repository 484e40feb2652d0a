"""The head of multi-token prediction in a Trainer: its targets in a step, what it logs, and what trains beside it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback

from ..errors import input_error
from ..models.mtp_head import add_mtp, head_of, language_model, mtp_targets_of_batch
from ..models.registry import patch_model
from .facts import Facts
from .typed import Trainer


def against_mtp(facts: Facts) -> Iterator[tuple[Any, str, Any, str]]:
    """The rules of a head of multi-token prediction, whose loss is a part of the model's own."""
    trainer, args, loss = facts.trainer, facts.trainer.args, "the model's own loss for multi-token prediction (mtp)"
    name, fix = facts.name, "Train the head in supervised fine-tuning."
    yield facts.record.pads, loss, f"that of {name}, which also trains on rejected answers", fix
    yield facts.padded, loss, f'packing="batches" in a {name}', 'Pass packing="padding_free".'
    own, remove = "a custom compute_loss", "Remove compute_loss, or train without the head."
    yield "compute_loss" in facts.replaced, loss, own, remove
    yield trainer.compute_loss_func is not None, loss, "compute_loss_func", "Remove it, or train without the head."
    smooth = args.label_smoothing_factor
    yield smooth, loss, f"label_smoothing_factor={smooth}", "Set it to 0, or train without the head."
    yield (
        args.torch_compile,
        "multi-token prediction (mtp) without torch.compile",
        "torch_compile=True",
        "Set it to False.",
    )


def train_mtp(weight: float, only: bool, dtype: torch.dtype | None, model: torch.nn.Module) -> None:
    """Let the head of a model train with this weight of its loss, or alone. A model without its head gets it first."""
    inner = language_model(patch_model(model))
    head = head_of(inner) or add_mtp(inner, dtype=dtype)
    if any(hasattr(module, "base_layer") for module in head.modules()):
        fix = 'Add the head after the adapters, or pass exclude_modules=r".*mtp\\..*" to PEFT.'
        raise input_error("a head of multi-token prediction without adapters, which no server reads", "some", fix)
    if not any(x.requires_grad for x in head.parameters()):
        # PEFT freezes everything but its adapters.
        head.requires_grad_(True)
    if only:
        own = set(head.parameters())
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in own and parameter.requires_grad)
    inner.mtp_loss_weight, inner.mtp_only = weight, only


class MtpItems:
    """Counts the targets of the head in a step of all processes, and adds their number to its batches.

    It takes the place of the method of a Trainer that counts the targets of the model.
    """

    def __init__(self, count_items: Callable):
        self.count_items = count_items

    def __call__(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        targets = [mtp_targets_of_batch(batch) for batch in batch_samples]
        found = self.count_items([{"labels": x, "shift_labels": x} for x in targets if x is not None], device)
        for batch, one in zip(batch_samples, targets, strict=True):
            if found is not None and one is not None:
                batch["num_mtp_items_in_batch"] = found
        return self.count_items(batch_samples, device)


class MtpLoss:
    """Adds the loss of the head to that which TRL's `SFTTrainer` computes from the scores of tokens.

    It takes the place of the trainer's `compute_loss`. In other trainers, the loss of the model has it already.
    """

    def __init__(self, trainer: Trainer, compute_loss: Callable):
        self.trainer, self.compute_loss = trainer, compute_loss

    def __call__(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = self.compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        inner, loss = language_model(model), result[0] if return_outputs else result
        added, inner.mtp.pending = inner.mtp.pending, None
        if added is None:
            return result
        args = self.trainer.args
        if args.average_tokens_across_devices and num_items_in_batch is not None:
            # DDP averages over the processes, and targets are those of all of them.
            added = added * args.world_size
        loss = added if inner.mtp_only else loss + inner.mtp_loss_weight * added.to(loss.device)
        return (loss, result[1]) if return_outputs else loss


class MtpCallback(TrainerCallback):
    """Logs `mtp_loss`, the mean over the targets of the head, and `mtp_acceptance`.

    The second is the share of targets where the first choice of the head is the first choice of the model, in the steps
    that log.
    """

    head: Any = None
    ran = False

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.head is None:
            # Not before the first step, because kernels are compiled with rows that do not count.
            self.head = head_of(model)
            self.head.record = []
        every = max(1, int(state.logging_steps))
        self.head.compares = args.logging_strategy == "steps" and (state.global_step + 1) % every == 0

    def on_step_end(self, args, state, control, **kwargs):
        if self.head is not None and not self.ran and not self.head.record:
            fix = "Remove what replaces the forward or the loss of the model, or train without the head."
            raise input_error("a loss of the model with that of its head", "another, which left it out", fix)
        self.ran = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.head is None or logs is None or "loss" not in logs:
            return
        # All processes exchange their sums, also one without a target since the last log.
        sums = torch.stack([torch.zeros(4, device=args.device), *(x.to(args.device) for x in self.head.record)]).sum(0)
        loss, targets, same, compared = reduce(sums, "sum").tolist()
        self.head.record = []
        figures = {"mtp_loss": round(loss / targets, 4)} if targets else {}
        figures |= {"mtp_acceptance": round(same / compared, 4)} if compared else {}
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args, state, control, **kwargs):
        if self.head is not None:
            self.head.record, self.head.compares, self.head, self.ran = None, False, None, False
