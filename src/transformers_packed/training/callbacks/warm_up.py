"""Compile every kernel before the first step of a Trainer."""

from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from ...data.dataset import PackingDataset, arrow_lengths
from ..warm_up import compiles_kernels, warm_up


logger = logging.get_logger(__name__)

# Tokens of a row if samples come from a stream, and samples to read if there is no table of their lengths.
_SHORT_ROW, _SAMPLES = 1024, 128


class WarmUpCallback(TrainerCallback):
    """Runs [`warm_up`] when training starts or is resumed, with the Trainer's own collator, loss and autocast.

    It runs before other callbacks, so that their hooks and clocks do not see it. At this time the model is sharded, and
    the checkpoint to resume is loaded. All processes run the same rows, so a sharded model (FSDP) exchanges the same
    weights on all of them. DDP would synchronize gradients that are not needed, so its inner model runs.
    """

    def __init__(self, trainer: Trainer, progress: bool | None = None):
        self.trainer, self.progress = trainer, not trainer.args.disable_tqdm if progress is None else progress

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        if not compiles_kernels(args.device) or state.global_step >= state.max_steps:
            return
        # Stock arguments of a collator that packs have no such option.
        padded = not getattr(args, "padding_free", True)
        if padded or trainer.is_deepspeed_enabled or args.n_gpu > 1:
            what = "batches are padded" if padded else "DeepSpeed or DataParallel runs the model"
            logger.info(f"warm_up: skipped, because {what}. Kernels are compiled in the first steps.")
            return
        wrapped = trainer.model_wrapped
        model = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        compared = getattr(trainer, "_compared_rows", None)
        tokens, documents = largest_row(trainer)
        try:
            warm_up(
                model,
                tokens,
                max_documents=documents,
                collator=trainer.data_collator,
                loss=self._loss,
                evaluation=_evaluates(trainer),
                progress=self.progress and state.is_local_process_zero,
            )
        except Exception as error:
            # Other processes may wait for this one, and a sharded model cannot leave a forward in the middle.
            if args.world_size > 1:
                error.add_note("This row was made to compile kernels. Pass compile_before_training=False to skip it.")
                raise
            reason = f"{type(error).__name__}: {error}"
            logger.warning(f"warm_up: stopped by {reason}. Other kernels are compiled in the first steps.")
        if compared is not None:
            # Only rows of the dataset show whether the processes read the same ones.
            trainer._compared_rows = compared

    def _loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        trainer, batch = self.trainer, self.trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            if "labels" not in batch:
                return model(**batch)[0].float().sum()
            # Other methods may need columns that only the dataset has.
            if type(trainer).compute_loss is not Trainer.compute_loss:
                return model(**batch).loss
            targets = (batch["labels"] != -100).sum()
            return trainer.compute_loss(model, batch, num_items_in_batch=targets)


def largest_row(trainer: Trainer) -> tuple[int, int | None]:
    """Return the most tokens of a row, and the most documents if a plan of the rows tells."""
    dataset, rows = trainer.train_dataset, trainer._train_batch_size
    if isinstance(dataset, PackingDataset):
        documents = int(np.sort(np.diff(dataset.plan.row_offsets))[-rows:].sum())
        return dataset.plan.max_length * rows, max(documents, trainer.args.eval_batch_size * _evaluates(trainer))
    if isinstance(dataset, IterableDataset):
        tokens = getattr(dataset, "max_length", None)
        return _SHORT_ROW if tokens is None else tokens * rows, None
    lengths = arrow_lengths(dataset, "input_ids")
    if lengths is None:
        numbers = np.unique(np.linspace(0, len(dataset) - 1, _SAMPLES).astype(int))
        lengths = np.array([len(dataset[number]["input_ids"]) for number in numbers.tolist()])
    return max(int(np.sort(lengths)[-rows:].sum()), 2), None


def _evaluates(trainer: Trainer) -> bool:
    return trainer.args.eval_strategy != "no" or trainer.args.eval_on_start
