"""Before the first step of a Trainer: compile every kernel, and choose between CUDA graphs and none."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.utils import logging

from ...data.dataset import PackingDataset, sampled_lengths
from ...models.cuda_graphs import graph_length, use_cuda_graphs
from ..checks import excludes_graphs, say
from ..graphs import choose_graphs
from ..warm_up import as_before, compiles_kernels, drop_gradients, make_row, split, warm_up


logger = logging.get_logger(__name__)

# Tokens of a row if samples come from a stream.
_SHORT_ROW = 1024
_TYPICAL_DOCUMENT = 512
# Random batches, and the share of them that graphs serve.
_BATCHES, _SERVED = 256, 0.95


class WarmUpCallback(TrainerCallback):
    """Runs [`warm_up`] when training starts or is resumed, with the Trainer's own collator, loss and autocast.

    It runs before other callbacks, so that their hooks and clocks do not see it. At this time the model is sharded, and
    the checkpoint to resume is loaded. All processes run the same rows, so a sharded model (FSDP) exchanges the same
    weights on all of them. DDP would synchronize gradients that are not needed, so its inner model runs.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer.
        progress (`bool`, *optional*):
            Whether to show a progress bar. Defaults to that of the Trainer.
    """

    purpose = "compile kernels. Pass compile_before_training=False"
    otherwise = "Kernels are compiled in the first steps."

    def __init__(self, trainer: Trainer, progress: bool | None = None):
        self.trainer = trainer
        self.progress = not trainer.args.disable_tqdm if progress is None else progress

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        if not compiles_kernels(args.device) or state.global_step >= state.max_steps:
            return
        # Stock arguments of a collator that packs have no such option.
        padded = not getattr(args, "padding_free", True)
        if padded or trainer.is_deepspeed_enabled or args.n_gpu > 1:
            what = "batches are padded" if padded else "DeepSpeed or DataParallel runs the model"
            logger.info(f"warm_up: skipped, because {what}. {self.otherwise}")
            return
        wrapped = trainer.model_wrapped
        model = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        compared = getattr(trainer, "_compared_rows", None)
        try:
            self._prepare(model, state)
        except Exception as error:
            # Other processes may wait for this one, and a sharded model cannot leave a forward in the middle.
            if args.world_size > 1:
                error.add_note(f"This row was made to {self.purpose} to skip it.")
                raise
            logger.warning(f"warm_up: stopped by {type(error).__name__}: {error}. {self.otherwise}")
        if compared is not None:
            # Only rows of the dataset show whether the processes read the same ones.
            trainer._compared_rows = compared

    def _prepare(self, model: torch.nn.Module, state: TrainerState) -> None:
        tokens, documents = largest_row(self.trainer)
        warm_up(
            model,
            tokens,
            max_documents=documents,
            collator=self.trainer.data_collator,
            loss=self._loss,
            evaluation=_evaluates(self.trainer),
            progress=self.progress and state.is_local_process_zero,
        )

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


class GraphsCallback(WarmUpCallback):
    """Measures a row when training starts, and turns CUDA graphs on if they make it faster ([`choose_graphs`]).

    With several processes, graphs are on if all of them measured a gain. Records a graph for each number of documents
    that needs one. [`configure_packing`] adds this callback.
    """

    purpose = "measure CUDA graphs. Pass cuda_graphs=False"
    otherwise = "No row runs as a CUDA graph."

    def _prepare(self, model: torch.nn.Module, state: TrainerState) -> None:
        trainer, device = self.trainer, self.trainer.args.device
        texts = [module for module in model.modules() if getattr(module, "runs_in_graphs", False)]
        # The user, or an earlier call of `train`, may have made the choice.
        if not texts or excludes_graphs(trainer) or any(vars(text).get("_layer_graphs") for text in texts):
            return
        rows = usual_rows(trainer, trainer.train_dataset, bool(trainer.args.packing))
        if rows is None:
            return
        with as_before(model, device):
            row = make_row(model, split(rows.tokens, rows.documents), trainer.data_collator, device)

            def run() -> None:
                self._loss(model, row).backward()
                drop_gradients(model)

            decision = choose_graphs(model, rows.longest, run)
        on = decision.startswith("on")
        # Each step waits for the slowest process.
        everywhere = trainer.accelerator.gather(torch.tensor([int(on)], device=device)).all()
        if on and not everywhere:
            use_cuda_graphs(model, 0)
            on, decision = False, "off, because another process measured no gain"
        if on and rows.packed:
            super()._prepare(model, state)
        say(trainer, f"CUDA graphs {decision}.")


def largest_row(trainer: Trainer) -> tuple[int, int | None]:
    """Return the most tokens of a row, and the most documents if a plan of the rows tells."""
    dataset, rows = trainer.train_dataset, trainer._train_batch_size
    if isinstance(dataset, PackingDataset):
        documents = int(np.sort(np.diff(dataset.plan.row_offsets))[-rows:].sum())
        return dataset.plan.max_length * rows, max(documents, trainer.args.eval_batch_size * _evaluates(trainer))
    if isinstance(dataset, IterableDataset):
        tokens = getattr(dataset, "max_length", None)
        return _SHORT_ROW if tokens is None else tokens * rows, None
    return max(int(np.sort(sampled_lengths(dataset))[-rows:].sum()), 2), None


class Rows(NamedTuple):
    """The rows that a model gets in training.

    `longest` is the most tokens of a row that a graph serves, a multiple of 64. A typical row has `tokens` in `documents`.
    `packed` rows have other numbers of documents.
    """

    longest: int
    tokens: int
    documents: int
    packed: bool


def usual_rows(trainer: Trainer, dataset: Any, packed: bool) -> Rows | None:
    """Return the rows that a Trainer makes of a dataset of samples or of packed rows, or `None` if their length is unknown.

    Packed rows are full. Their documents are the median of the plan, or one per 512 tokens. Batches of single samples are
    as long as random batches.
    """
    batch, stream = trainer._train_batch_size, isinstance(dataset, IterableDataset)
    plan = getattr(dataset, "plan", None)
    if not stream and not (dataset and len(dataset)):
        return None
    if packed:
        if plan is not None:
            length = plan.max_length
        elif stream:
            length = getattr(dataset, "max_length", None) or getattr(trainer.args, "max_length", None)
        else:
            length = int(sampled_lengths(dataset).max())
        if length is None:
            return None
        documents = max(length // _TYPICAL_DOCUMENT, 1) if plan is None else int(np.median(np.diff(plan.row_offsets)))
        return Rows(graph_length(length * batch), length * batch, documents * batch, packed)
    if stream:
        return None
    sums = np.random.default_rng(0).choice(sampled_lengths(dataset), (_BATCHES, batch)).sum(1)
    served, typical = np.quantile(sums, [_SERVED, 0.5], method="higher").tolist()
    return Rows(graph_length(served), typical, batch, packed)


def _evaluates(trainer: Trainer) -> bool:
    return trainer.args.eval_strategy != "no" or trainer.args.eval_on_start
