"""TRL's trainers of preferences and of reinforcement learning: DPO, KTO, GRPO and RLOO.

These trainers build padded batches of pairs or groups, and score the tokens of whole batches. Models of this package
gather the real tokens of a padded batch into one packed row ([`PaddedBatch`]), in the policy and in the reference
model. So these trainers need no change: their losses, metrics and columns stay as they are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..models.releases import prepare_again, undo_prepare
from .typed import Trainer


@contextmanager
def without_autocast(trainer: Trainer, references: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Give reference models their own forward meanwhile. TRL has prepared them, and the policy only in `train`."""
    prepared = [model for model in references if undo_prepare(model)]
    try:
        yield
    finally:
        for model in prepared:
            prepare_again(trainer.accelerator, model)
