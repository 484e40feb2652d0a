"""What this package knows of the classes of Trainers: a record for each kind, and a rule for those without one.

Nobody else asks for the class of a Trainer. Another trainer is another record here. If the check before the first step
has to look at something new, it is a function in `padded_steps.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..models.trl_head import distills_with_our_products
from .compare import Measured
from .padded_steps import (
    logged_rewards,
    logged_scores,
    made_answers,
    made_batch,
    own_loss,
    own_step,
    token_scores,
)
from .typed import Trainer


@dataclass(frozen=True)
class TrainerRecord:
    """A kind of Trainer. The defaults are the rule for those without a record.

    Args:
        names (`tuple[str, ...]`):
            The classes of TRL and of sentence-transformers that the record serves, with their subclasses.
        pads (`bool`):
            Whether batches stay padded because their rows belong together, such as pairs and groups. The model then packs
            each batch, as it does with `packing="batches"`. Batches of other trainers become packed rows.
        prepares (`bool`):
            Whether the trainer tokenizes, cuts and packs its datasets, as its arguments `packing`, `eval_packing` and
            `max_length` say, and keeps the columns that this needs.
        scores_tokens (`bool`):
            Whether its loss is computed from the scores that TRL's forward returns, and not by the model.
        waits (`bool`):
            Whether the host waits for the GPU between forward and backward, to read metrics.
        batch (`Callable`, *optional*):
            Makes the batch of the check before the first step from the Trainer and its model. By default the check takes
            samples of its data loader.
        methods (`Callable`, *optional*):
            Returns the methods of the trainer that change, by name, where the model alone cannot say what is computed.
        measure (`Callable`):
            Returns what the check compares of a step on that batch, from the Trainer, its model and the batch.
    """

    names: tuple[str, ...] = ()
    pads: bool = False
    prepares: bool = False
    scores_tokens: bool = False
    waits: bool = False
    batch: Callable[[Trainer, torch.nn.Module], Any] | None = None
    methods: Callable[[Trainer], dict[str, Callable]] = lambda _: {}
    measure: Callable[[Trainer, torch.nn.Module, Any], Measured] = own_step

    def models(self, trainer: Trainer) -> tuple[torch.nn.Module, ...]:
        """The models that compute padded batches. The one that trains is the last one."""
        found = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
        return (*(model for model in found if isinstance(model, torch.nn.Module)), trainer.model)


_SFT = TrainerRecord(("SFTTrainer",), prepares=True, scores_tokens=True, waits=True)
# Their first loss is a constant, so the check compares log-probabilities.
_PAIRS = TrainerRecord(("DPOTrainer", "KTOTrainer"), pads=True, measure=logged_scores)
# Rewards that are all off by the same amount give the same loss.
_REWARDS = TrainerRecord(("RewardTrainer",), pads=True, measure=logged_rewards)
# Only a generation makes their batches.
_GROUPS = TrainerRecord(("GRPOTrainer", "RLOOTrainer"), pads=True, batch=made_batch, measure=token_scores)
_TEACHER = TrainerRecord(
    ("DistillationTrainer",), pads=True, batch=made_answers, methods=distills_with_our_products, measure=own_loss
)
# Every row is compared with the others of its batch. Losses call the model once for each column.
_EMBEDDINGS = TrainerRecord(("SentenceTransformerTrainer", "CrossEncoderTrainer"), pads=True)
_LIBRARIES = "trl.", "sentence_transformers."
RECORDS = _SFT, _PAIRS, _REWARDS, _GROUPS, _TEACHER, _EMBEDDINGS
_RULE = TrainerRecord()
# Trainers whose rows belong together.
WHOLE_BATCHES = tuple(name for record in RECORDS if record.pads for name in record.names)
# Trainers of TRL whose own collators only pad.
ONLY_PAD = _SFT.names
# The classes of collators that create labels, that pad labels, and all that only pad or concatenate samples.
CREATE_LABELS = "DataCollatorForLanguageModeling", "DataCollatorWithFlattening"
PAD_LABELS = "DataCollatorForSeq2Seq", "DataCollatorForLanguageModeling"
KNOWN_COLLATORS = "DefaultDataCollator", "DataCollatorWithPadding", *CREATE_LABELS, *PAD_LABELS


def record_of(trainer: Trainer) -> TrainerRecord:
    """Return the record of the first of its classes that has one, so that of a derived class comes before its bases'."""
    names = (cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith(_LIBRARIES))
    return next((record for name in names for record in RECORDS if name in record.names), _RULE)
