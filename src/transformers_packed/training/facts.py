"""What a Trainer is before anything changes: read once, for all who decide how it trains."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.utils.data import IterableDataset

from ..data.collator import DataCollatorWithFlattening
from ..data.documents import is_packed
from ..data.samples import has_items
from ..models.families import CLASSIFIERS, families_of
from ..models.family import Own
from ..models.losses import LOSSES, OWN, added, own_with
from ..models.losses.loss import Loss
from ..models.registry import transformers_model
from .options import Options
from .trainers import TrainerRecord, record_of
from .typed import Trainer


# Packages whose Trainers are known to train packed rows correctly, and one whose decorators they use.
_KNOWN = ("transformers", "trl", "sentence_transformers", "transformers_packed", "contextlib")
# What no row depends on: how parameters are updated, what is logged and saved, and the samples of a batch. Evaluation
# reads batches of the user wherever it needs more than the loss of known methods.
_APART = tuple(
    "create_ get_optimizer get_decay get_learning log save load store_flos push init_hf prediction_step get_eval_dataloader "
    "get_test_dataloader get_train_sampler get_eval_sampler add_callback pop_callback remove_callback is_ maybe_log "
    "call_model hyperparameter hp_".split()
)
LOSS_FUNCTION = "compute_loss_func"


@dataclass(frozen=True)
class Facts:
    """What is known of a Trainer.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer.
        options ([`Options`]):
            How the user wants it to train.
        record ([`TrainerRecord`]):
            That of its class.
        model (`PreTrainedModel`, *optional*):
            The Transformers model inside of its model.
        replaced (`tuple[str, ...]`):
            The methods that a user replaced, on the class or on the instance, and `compute_loss_func`.
        packed_rows (`bool`):
            Whether the dataset for training has packed rows.
        plans_rows (`bool`):
            Whether it becomes planned rows. Everything that numbers samples would number rows then.
        losses (`tuple[Loss, ...]`):
            What a step trains: the losses of the model, and those that the options ask for.
    """

    trainer: Trainer
    options: Options
    record: TrainerRecord
    model: "transformers.PreTrainedModel | None"
    replaced: tuple[str, ...]
    packed_rows: bool
    plans_rows: bool
    losses: tuple[Loss, ...]

    @classmethod
    def of(cls, trainer: Trainer, options: Options) -> "Facts":
        record, dataset = record_of(trainer), trainer.train_dataset
        # Only the arguments tell of a stream that TRL packs.
        streams = record.prepares and isinstance(dataset, IterableDataset) and bool(trainer.args.packing)
        packed = is_packed(dataset)
        plans = options.mode == "pack" and has_items(dataset) and not packed
        model, replaced = transformers_model(trainer.model), tuple(replaced_in(trainer))
        losses = _losses(model, options)
        return cls(trainer, options, record, model, replaced, packed or streams, plans, losses)

    @property
    def name(self) -> str:
        """The name of the Trainer's class."""
        return type(self.trainer).__name__

    @property
    def padded(self) -> str:
        """Why batches stay padded, and the model packs each; empty if they become packed rows."""
        if self.record.pads:
            return f"{self.name}, whose rows belong together"
        if self.options.mode == "batches":
            return 'packing="batches"'
        name = type(self.model).__name__
        # Their labels are not those of a packed row.
        if self.model is not None and name.endswith(CLASSIFIERS) and families_of(self.model, Own):
            return f"a classifier ({name}), which packs each batch itself"
        return ""

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """The models that compute its batches. The one that trains is the last one."""
        return self.record.models(self.trainer) if self.padded else (self.trainer.model,)

    @property
    def added(self) -> list[Loss]:
        """The losses that the stock model does not compute."""
        return added(self.losses)

    @property
    def custom(self) -> list[str]:
        """The replaced methods that may depend on the form of a batch."""
        return [name for name in self.replaced if not name.lstrip("_").startswith(_APART)]

    @property
    def has_custom_loss(self) -> bool:
        return not {"compute_loss", LOSS_FUNCTION}.isdisjoint(self.replaced)

    @property
    def packed_by(self) -> str | None:
        """What packs the batches of the Trainer as the user has built it."""
        collator, dataset = self.trainer.data_collator, self.trainer.train_dataset
        if self.packed_rows:
            return f"packed rows of the train_dataset ({type(dataset).__name__})"
        # Also Transformers' collator of this name.
        flattens = type(collator).__name__ == DataCollatorWithFlattening.__name__
        packs = flattens or getattr(collator, "padding_free", False)
        return f"packed rows of the data_collator ({type(collator).__name__})" if packs else None

    def named(self, names: Iterable[str]) -> str:
        """Methods with the classes that replaced them, which may be those of a library."""
        return ", ".join(_owned(self.trainer, name) for name in names)


def replaced_in(trainer: Trainer) -> list[str]:
    """The methods of `Trainer` that a user replaced, on the class or on the instance, and a `compute_loss_func`."""
    every = (name for name in dir(Trainer) if not name.startswith("__") and callable(getattr(Trainer, name)))
    found = [name for name in every if package_of(getattr(trainer, name)) not in _KNOWN]
    loss = trainer.compute_loss_func
    return found + [LOSS_FUNCTION] * (loss is not None and package_of(loss) not in _KNOWN)


def package_of(part: Any) -> str:
    """The package with the code of a method or a callable object, whatever it is wrapped to look like."""
    function = getattr(part, "__func__", part)
    home = getattr(function, "__globals__", {"__name__": type(part).__module__})["__name__"]
    return home.partition(".")[0]


def _losses(model: "transformers.PreTrainedModel | None", options: Options) -> tuple[Loss, ...]:
    asked = tuple(loss for kind in LOSSES if (loss := kind.of_options(options)) is not None)
    if any(loss.alone for loss in asked):
        return asked
    # A stock model has no list, unless it was set before the model gets our classes.
    listed = OWN if model is None else vars(model).get("losses", OWN)
    if options.teacher is not None:
        listed = (*own_with(options.own_weight), *added(listed))
    # An option counts more than what the list says of the same loss.
    return (*(x for x in listed if not any(type(x) is type(loss) for loss in asked)), *asked)


def _owned(trainer: Trainer, name: str) -> str:
    owners = (c for c in type(trainer).__mro__ if name in vars(c) and name not in vars(trainer))
    owner = next(owners, None)
    return name if owner is None else f"{owner.__name__}.{name}"
