"""TRL's trainers of preferences and of reinforcement learning: DPO, KTO, GRPO and RLOO.

These trainers build padded batches of pairs or groups, and score the tokens of whole batches. Models of this package
gather the real tokens of a padded batch into one packed row ([`PaddedBatch`]), in the policy and in the reference
model. So these trainers need no change: their losses, metrics and columns stay as they are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType

import torch
from transformers import Trainer


@contextmanager
def without_autocast(trainer: Trainer, references: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Give reference models their own forward meanwhile. TRL has prepared them, and the policy only in `train`."""
    prepared = [(model, own) for model in references if (own := _own_forward(model)) is not None]
    for model, own in prepared:
        del vars(model)["_original_forward"]
        model.forward = own
        if own == MethodType(type(model).forward, model):
            del model.forward
    try:
        yield
    finally:
        for model, _ in prepared:
            # With this mark, accelerate would leave it as it is. It would also save a model that it lists twice again.
            vars(model).pop("_is_accelerate_prepared", None)
            listed = trainer.accelerator._models
            listed[:] = [other for other in listed if other is not model]
            trainer.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)


def _own_forward(model: torch.nn.Module) -> object | None:
    """The forward inside that of accelerate. A wrapper of the user around it stays, and `patch_model` refuses it."""
    is_prepared = getattr(vars(model).get("forward"), "__module__", "").startswith("accelerate.")
    return vars(model).get("_original_forward") if is_prepared else None
