"""The batches that a packed Trainer evaluates.

Packed rows serve training, and evaluation if only a loss is read. Everything else in evaluation, such as predictions and
generation, expects a row per sample. It gets the padded batches of the user's own collator.
"""

from collections.abc import Callable
from typing import Any

from ..data.documents import PaddedSamples, unpacked
from ..foreign import swapped
from .facts import LOSS_FUNCTION, replaced_in
from .trainers import PAD_LABELS
from .typed import Trainer


_READ = {"prediction_step", "evaluate", "evaluation_loop", "predict", "compute_loss", LOSS_FUNCTION}


def padded_batches_of(trainer: Trainer) -> Callable[[list], dict[str, Any]]:
    """The Trainer's own collator if it pads samples with labels, else [`PaddedSamples`]."""
    collator = trainer.data_collator
    if type(collator).__name__ in PAD_LABELS and not getattr(collator, "padding_free", False):
        return collator
    tokenizer = trainer.processing_class or getattr(collator, "tokenizer", None)
    return PaddedSamples(getattr(collator, "token_columns", ()), getattr(tokenizer, "pad_token_id", None))


class SampleBatches:
    """In place of a Trainer's `get_eval_dataloader` or `get_test_dataloader`: batches with a row for each sample.

    Rows stay packed if only their loss is read, by methods that are known. Otherwise packed rows become their documents,
    so that Trainer counts and gathers samples on all processes.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer.
        method (`Callable`):
            Its method.
        packed (`Callable`):
            The collator of packed rows, which it has in training.
        padded (`Callable`):
            The collator of padded batches.
    """

    def __init__(self, trainer: Trainer, method: Callable, packed: Callable, padded: Callable):
        self.trainer, self.method, self.packed, self.padded = trainer, method, packed, padded

    def __call__(self, dataset: Any = None, **kwargs: Any) -> Any:
        trainer, given = self.trainer, self.trainer.eval_dataset
        if trainer.data_collator is not self.packed or self._reads_only_the_loss():
            return self.method(dataset, **kwargs)
        if isinstance(dataset, str):
            given = {**given, dataset: unpacked(given[dataset])}
        elif dataset is None:
            given = unpacked(given)
        else:
            dataset = unpacked(dataset)
        with swapped(vars(trainer), data_collator=self.padded, eval_dataset=given):
            return self.method(dataset, **kwargs)

    def _reads_only_the_loss(self) -> bool:
        trainer = self.trainer
        args, evaluates = trainer.args, self.method.__name__ == "get_eval_dataloader"
        if not evaluates or _READ & {*replaced_in(trainer)} or getattr(args, "predict_with_generate", False):
            return False
        return args.prediction_loss_only or trainer.compute_metrics is None
