"""What users of `fuzz.py` override in a Trainer, on its class or on the instance, and what they keep between calls.

Every entry of `OWN` runs on padded batches. `PER_TOKEN` ones have the same results on packed rows, the others do not.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each token, 0 where it is no target."""
    shifted = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none"
    )
    return shifted.view(labels.shape[0], -1)


def _mean(losses: torch.Tensor, labels: torch.Tensor, count: Any, per_sample: bool) -> torch.Tensor:
    """The mean over targets, `count` of them if given, or the mean over samples of the mean over their targets."""
    targets = (labels[:, 1:] != -100).sum(1)
    if per_sample:
        return (losses.sum(1) / targets.clamp(min=1)).mean()
    return losses.sum() / (targets.sum() if count is None else count)


def _loss(per_sample: bool):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        losses = _losses(outputs.logits, inputs["labels"])
        loss = _mean(losses, inputs["labels"], num_items_in_batch, per_sample)
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def _loss_func(per_sample: bool):
    def compute_loss(outputs, labels, num_items_in_batch=None):
        return _mean(_losses(outputs.logits, labels), labels, num_items_in_batch, per_sample)

    return compute_loss


def _scaled_loss(self, model, inputs, return_outputs=False, **kwargs):
    loss, outputs = type(self).compute_loss(self, model, inputs, return_outputs=True, **kwargs)
    return (1.1 * loss, outputs) if return_outputs else 1.1 * loss


def _noisy_loss(per_sample: bool):
    """Its noise of 2 % is the user's own, so both arms draw the same numbers if nothing else draws any."""

    def compute_loss(self, model, inputs, **kwargs):
        loss = _loss(per_sample)(self, model, inputs, **kwargs)
        if not model.training:
            return loss
        return loss * (1 + 0.02 * torch.randn((), generator=self.generator))

    return compute_loss


def _spread_loss(self, model, inputs, return_outputs=False, **kwargs):
    """Adds the standard deviation over samples, which is NaN for a row."""
    outputs = model(**inputs)
    losses = _losses(outputs.logits, inputs["labels"])
    loss = _mean(losses, inputs["labels"], None, False) + losses.sum(1).std()
    return (loss, outputs) if return_outputs else loss


class _Sampler:
    """Reads the samples backwards."""

    def _get_train_sampler(self, dataset=None):
        return range(len(self.train_dataset))[::-1]


class _Step:
    """Reads the mask, which packed rows do not have."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
        return super().training_step(model, inputs, num_items_in_batch)


class _Prediction:
    """Keeps the number of samples and their mean losses."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        losses, labels = _losses(outputs.logits, inputs["labels"]), inputs["labels"][:, 1:]
        self.own += (losses.sum(1) / (labels != -100).sum(1)).tolist()
        return outputs.loss.detach(), None, None


class _Evaluation:
    """Counts the rows of the batches."""

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        self.own += [1.0 for batch in self.get_eval_dataloader() for _ in batch["input_ids"]]
        return metrics


# Bases of the user's class, methods of the instance, and arguments of Trainer.
OWN: dict[str, tuple[tuple, dict, dict]] = {
    "loss": ((type("_Loss", (), {"compute_loss": _loss(False)}),), {}, {}),
    "loss_of_instance": ((), {"compute_loss": _loss(False)}, {}),
    "scaled_loss_of_instance": ((), {"compute_loss": _scaled_loss}, {}),
    "loss_func": ((), {}, {"compute_loss_func": _loss_func(False)}),
    "sample_loss": ((type("_SampleLoss", (), {"compute_loss": _loss(True)}),), {}, {}),
    "sample_loss_of_instance": ((), {"compute_loss": _loss(True)}, {}),
    "sample_loss_func": ((), {}, {"compute_loss_func": _loss_func(True)}),
    "noisy_loss": ((type("_NoisyLoss", (), {"compute_loss": _noisy_loss(False)}),), {}, {}),
    "noisy_sample_loss": ((), {"compute_loss": _noisy_loss(True)}, {}),
    "spread_loss": ((), {"compute_loss": _spread_loss}, {}),
    "sampler": ((_Sampler,), {}, {}),
    "step": ((_Step,), {}, {}),
    "prediction": ((_Prediction,), {}, {}),
    "evaluation": ((_Evaluation,), {}, {}),
}
PER_TOKEN = ("loss", "loss_of_instance", "scaled_loss_of_instance", "loss_func", "noisy_loss", "sampler")
PER_SAMPLE = ("sample_loss", "sample_loss_of_instance", "sample_loss_func", "noisy_sample_loss", "spread_loss")
EVALUATED = ("prediction", "evaluation")


# Endings of figures that are numbers of samples or tokens.
COUNTS = ("targets", "predictions", "labels", "own figures")


def make_trainer(own: str, base: type[Trainer], *args: Any, **kwargs: Any) -> Trainer:
    """Build the Trainer of a user."""
    bases, methods, arguments = OWN[own] if own else ((), {}, {})
    kind = type("OwnTrainer", (*bases, base), {}) if bases else base
    trainer = kind(*args, **kwargs, **arguments)
    trainer.own = []  # what the user's methods keep
    trainer.generator = torch.Generator().manual_seed(7)
    for name, method in methods.items():
        setattr(trainer, name, MethodType(method, trainer))
    return trainer


def _count(numbers: list) -> float:
    numbers.append(0.01 * len(numbers))
    return numbers[-1]


def _add(numbers: np.ndarray) -> float:
    numbers += 0.01
    return float(numbers[0])


# What a user keeps, and the next value that it gives.
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "list": (list, _count),
    "array": (lambda: np.zeros(1), _add),
    "generator": (lambda: torch.Generator().manual_seed(5), lambda x: 0.1 * torch.rand((), generator=x).item()),
    "generator_of_numpy": (lambda: np.random.default_rng(5), lambda x: 0.1 * x.random()),
    "attribute": (lambda: None, lambda x: 0.0),
}


def keep(kind: str, trainer: Trainer, embeddings: nn.Module) -> None:
    """Let the embeddings in training depend on what the user keeps, which each forward changes.

    It is an attribute of the Trainer, and a number on the module.
    """
    make, use = KEPT[kind]
    trainer.kept, embeddings.calls = make(), 0

    def scale(module, inputs, output):
        if not module.training:
            return output
        module.calls += 1
        return output * (1 + use(trainer.kept) + 0.01 * module.calls)

    embeddings.register_forward_hook(scale)


def metrics(prediction: Any) -> dict[str, float]:
    """Figures of an evaluation's outputs at the targets."""
    outputs = prediction.predictions if isinstance(prediction.predictions, tuple) else (prediction.predictions,)
    logits = next(x for x in outputs if x.ndim == 3)  # mixtures of experts have more outputs
    targets = prediction.label_ids[:, 1:] != -100
    figures = {"targets": float(targets.sum()), "logits": float(abs(logits[:, :-1][targets]).mean())}
    figures |= {"predictions": float(len(logits)), "labels": float(len(targets))}
    if getattr(prediction, "inputs", None) is not None:
        figures["inputs"] = float(prediction.inputs[:, 1:][targets].sum())
    return figures
