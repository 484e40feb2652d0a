"""Steps of a Trainer on a padded batch of its own, with a model that packs the batch and with one that does not."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.distributed.tensor import DTensor
from transformers import set_seed

from ..audit.isolation import Seen, UnseenError, watch
from ..data.documents import PaddedSamples
from ..models.releases import prepare_inputs, token_logps, training_metrics
from .compare import GRADIENT, LOSS, Measured, Side
from .restore import not_packing
from .typed import Trainer
from .warm_up import make_row, only_loss


SCORES, REWARD = "log-probabilities", "reward"
_IDS = "input_ids"
# Samples to choose from, and the most of a batch.
_LOOKED_AT, _MOST = 16, 4
# Tokens of a made prompt.
_PROMPT = 8
# Elements of a gradient in a row, whatever its shape. Numbers for each element of a long vector would be larger than it.
_WIDTH = 4096


def real_batch(trainer: Trainer, loader: Any) -> Any:
    """What the loader's collator makes of a few short samples, of different lengths if there are some."""
    dataset = loader.dataset
    samples = sorted((dataset[at] for at in range(min(_LOOKED_AT, len(dataset)))), key=_size)
    lengths = list(map(_size, samples))
    first = [samples[lengths.index(length)] for length in dict.fromkeys(lengths)]
    most = max(2, min(trainer.args.per_device_train_batch_size, _MOST))
    return loader.collate_fn((first if len(first) > 1 else samples)[:most])


def _size(sample: Any) -> int:
    values = sample.values() if isinstance(sample, Mapping) else [sample]
    return sum(len(x) for x in values if hasattr(x, "__len__"))


def made_batch(trainer: Trainer, model: torch.nn.Module) -> dict[str, Any]:
    """A batch without samples, for trainers whose batches only a generation makes. Its first two rows begin alike."""
    row = make_row(model, [40, 24, 40, 32], PaddedSamples(), trainer.args.device)
    ids, mask = row["input_ids"].clone(), row["attention_mask"]
    for tokens, length in zip(ids[2:], mask[2:].sum(1).tolist(), strict=True):
        tokens[:length] = tokens[:length].flip(0)
    return {"input_ids": ids, "attention_mask": mask}


def made_answers(trainer: Trainer, model: torch.nn.Module) -> dict[str, Any]:
    """The same, and its tokens as prompts and answers, for trainers whose models answer."""
    batch = made_batch(trainer, model)
    parts = {"prompt": slice(_PROMPT), "completion": slice(_PROMPT, None)}
    columns = {"ids": batch["input_ids"], "mask": batch["attention_mask"]}
    return batch | {f"{part}_{name}": x[:, half] for part, half in parts.items() for name, x in columns.items()}


def own_loss(trainer: Trainer, model: torch.nn.Module, batch: dict[str, Any]) -> Measured:
    """The loss that the Trainer computes of a batch as it trains on it, and sums of the gradients of the weights."""
    with trainer.compute_loss_context_manager():
        loss = only_loss(trainer.compute_loss(model, batch))
    trainer.accelerator.backward(loss)
    return _shown(model, loss)


def own_step(trainer: Trainer, model: torch.nn.Module, batch: Any) -> Measured:
    """The loss of the Trainer's own step, and sums of the gradients of the weights."""
    batch, items = items_of(trainer, batch)
    return _shown(model, trainer.training_step(model, batch, items))


def _shown(model: torch.nn.Module, loss: torch.Tensor) -> Measured:
    sums = [_sums_of(x.grad, loss.device) for x in model.parameters()]
    shown = {LOSS: loss.detach(), "gradient of the weights": torch.cat(sums)}
    model.zero_grad()
    return shown


def token_scores(trainer: Trainer, model: torch.nn.Module, batch: dict[str, Any]) -> Measured:
    """The log-probability of each token, as GRPO and RLOO compute it."""
    ids, mask, compute = batch["input_ids"], batch["attention_mask"], token_logps(trainer)
    assert compute is not None
    with trainer.compute_loss_context_manager(), torch.no_grad():
        scores = compute(model, ids, mask, ids.shape[1] - 1)[0]
    return {SCORES: scores.float()[mask[:, 1:] == 1]}


def logged_scores(trainer: Trainer, model: torch.nn.Module, batch: dict[str, Any]) -> Measured:
    """The loss and the mean log-probabilities that DPO and KTO log."""
    training_metrics(trainer).clear()
    with trainer.compute_loss_context_manager(), torch.no_grad():
        loss = only_loss(trainer.compute_loss(model, prepare_inputs(trainer, batch)))
    logged = training_metrics(trainer)
    return {SCORES: torch.tensor([loss, *(logged[name][-1] for name in sorted(logged) if name.startswith("logps"))])}


def logged_rewards(trainer: Trainer, model: torch.nn.Module, batch: Any) -> Measured:
    """What every Trainer's own step shows, and the rewards and margins that RewardTrainer logs."""
    training_metrics(trainer).clear()
    shown, logged = own_step(trainer, model, batch), training_metrics(trainer)
    names = sorted(name for name in logged if name.endswith(("reward", "margin")))
    return shown | {REWARD: torch.tensor([logged[name][-1] for name in names])}


def columns_of(batch: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and mask `[B, T]` of a batch, or of each of its columns, by the prefix of their names."""
    names = [name for name in batch if name.endswith(_IDS)] if isinstance(batch, Mapping) else []
    prefixes = [""] if _IDS in names else [name.removesuffix(_IDS) for name in names]
    columns = {prefix: (batch[prefix + _IDS], batch.get(f"{prefix}attention_mask")) for prefix in prefixes}
    return {prefix: pair for prefix, pair in columns.items() if all(getattr(x, "ndim", 0) == 2 for x in pair)}


def items_of(trainer: Trainer, batch: Any) -> tuple[Any, Any]:
    """A batch on the device, as the Trainer gets it from its loader, and its number of items."""
    batches, device = iter([send_to_device(batch, trainer.args.device)]), trainer.args.device
    (batch,), items = trainer.get_batch_samples(batches, 1, device)
    trainer.current_gradient_accumulation_steps = 1
    return batch, items


def _sums_of(gradient: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Sums `[8]` of the gradient of a weight with fixed numbers, 0 without one. A copy of the gradient would take its memory."""
    if gradient is None:
        return torch.zeros(8, device=device)
    if gradient.is_sparse:
        # Its values have an order of their own.
        return only_finite(_local(gradient)).expand(8).float().to(device)
    values = _local(gradient)
    if not values.is_contiguous():
        return _sums_of_rows(torch.atleast_2d(values).flatten(0, -2)).to(device)
    # A process may have nothing of a small parameter that FSDP shards. FSDP1 flattens all of them.
    values = values.view(-1)
    whole = len(values) // _WIDTH * _WIDTH
    return (_sums_of_rows(values[:whole].view(-1, _WIDTH)) + _sums_of_rows(values[whole:][None])).to(device)


def _sums_of_rows(values: torch.Tensor) -> torch.Tensor:
    left, right = (_numbers(size, values.device) for size in values.shape)
    return ((left.to(values.dtype) @ values).float() * right).sum(1)


def _numbers(size: int, device: torch.device) -> torch.Tensor:
    """Numbers `[8, size]` of about the same size and both signs."""
    return (
        torch.outer(torch.arange(1.0, 9.0, device=device), torch.arange(1.0, size + 1, device=device)).mul(2.4).cos()
    )


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a gradient that this process has."""
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def only_finite(values: torch.Tensor) -> torch.Tensor:
    """0 for finite values, and NaN for others: what is compared of values that have no bar."""
    return (values * 0).sum()


class PaddedStep:
    """The step of a Trainer on a padded batch, which its models pack or do not pack.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer.
        model (`torch.nn.Module`):
            The model that trains, as it is wrapped.
        models (`tuple[torch.nn.Module, ...]`):
            All models that compute the batch.
        measure (`Callable`):
            That of its [`TrainerRecord`].
        batch (`Any`):
            The batch.
    """

    def __init__(self, trainer: Trainer, model, models: tuple[torch.nn.Module, ...], measure: Callable, batch: Any):
        self.trainer, self.model, self.models, self.measure, self.batch = trainer, model, models, measure, batch
        # With packing and without: the tokens of a step, and the runs.
        self.tokens, self._runs = {True: 0, False: 0}, {True: count(), False: count()}

    def check(self, padded: Side) -> None:
        """Raise the error of a comparison that says nothing, after both sides have run."""
        if self.tokens[True] == self.tokens[False]:
            raise UnseenError(f"the model computes all {self.tokens[True]} tokens of a batch")
        if LOSS in padded.runs[0] and not (GRADIENT in padded.runs[0] and padded.all(GRADIENT).any()):
            raise UnseenError("the loss depends on no token of a batch")

    def run(self, packs: bool) -> Measured:
        # Both sides draw the same random numbers, and each run draws others.
        set_seed(next(self._runs[packs]))
        with ExitStack() as stack:
            for model in () if packs else self.models:
                stack.enter_context(not_packing(model))
            seen = stack.enter_context(watch(self.model))
            shown = self.measure(self.trainer, self.model, self.batch)
        self.tokens[packs] = seen.tokens
        gradient = _gradient(seen)
        return shown if gradient is None else shown | {GRADIENT: gradient}


def _gradient(seen: Seen) -> torch.Tensor | None:
    """Sums `[8, hidden]` of the gradients of all embeddings, with weights that the ids choose, whatever the layout is."""
    sums = None
    for (ids, *_), embeddings in seen.embedded:
        if embeddings.grad is not None:
            weights = torch.outer(torch.arange(1.0, 9.0, device=ids.device), ids.flatten() + 1.0).mul(2.4).cos()
            own = weights @ embeddings.grad.flatten(0, -2).float()
            sums = own if sums is None else sums + own
    return sums
