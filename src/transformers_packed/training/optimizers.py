"""How a Trainer gets the optimizers of `models/optimizers.py`."""

from typing import Any

from transformers import TrainingArguments

from ..models.optimizers import optimizer_named
from .muon import muon_for


def arguments_for(name: str) -> dict[str, Any]:
    """Return the `TrainingArguments` with which a Trainer trains with this optimizer.

    Muon and those of flashoptim have no name there: pass [`class_and_kwargs`] to the Trainer too, and for gradient release
    add [`GradientReleaseCallback`].
    """
    optimizer = optimizer_named(name)
    arguments: dict[str, Any] = {"max_grad_norm": 0.0} if optimizer.releases else {}
    if optimizer.package == "flashoptim" or optimizer.orthogonalizes:
        return arguments
    return arguments | {"optim": name, "optim_args": optimizer.options}


def class_and_kwargs(name: str, args: TrainingArguments) -> tuple[Any, dict[str, Any]] | None:
    """Return the `optimizer_cls_and_kwargs` of a Trainer, or `None` for an optimizer that its arguments name."""
    optimizer = optimizer_named(name)
    if optimizer.orthogonalizes:
        # A Trainer calls what is no class for the function that makes the optimizer of a model.
        return lambda: muon_for, {"args": args}
    if optimizer.package != "flashoptim":
        return None
    from flashoptim import FlashAdamW

    betas = args.adam_beta1, args.adam_beta2
    return FlashAdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of those of accelerate."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
