"""Before the first step of a Trainer: compile every kernel, and choose between CUDA graphs and none."""

from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerState
from transformers.utils import logging

from ...audit.model_state import as_before
from ...data.dataset import PackingDataset, sampled_lengths
from ...data.usual_rows import Rows, rows_of
from ...errors import described
from ...models.cuda_graphs import documents_of_graphs, find_text_models, reason_of_layers, remove_graphs
from ...models.releases import prepare_inputs, rows_per_batch
from ..checks import compute_dtype, excludes_graphs, has_trees, say
from ..graphs import choose_graphs
from ..kernels import Needs, split, start_for
from ..restore import against_other_rows, inside_ddp, same_data
from ..trainers import record_of
from ..typed import Trainer
from ..warm_up import compile_kernels, compiles_kernels, make_row, only_loss
from .expert_load import ExpertLoad


logger = logging.get_logger(__name__)

# Tokens of a row if samples come from a stream.
_SHORT_ROW = 1024
# Tokens of a row that tells the host's time: as many as layers in float8 need, and few for the GPU.
_HOST_ROW = 2048
# The largest row of a Trainer's data, and whether it has trees, by its datasets.
_OF_DATA: WeakKeyDictionary[Any, tuple] = WeakKeyDictionary()


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

    # Of the rows, and the argument without which they do not run.
    purpose, option = "compile kernels", "compile_before_training=False"

    def __init__(self, trainer: transformers.Trainer, progress: bool | None = None):
        self.trainer = cast(Trainer, trainer)
        self.progress = not trainer.args.disable_tqdm if progress is None else progress

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        if not compiles_kernels(args.device) or state.global_step >= state.max_steps:
            return
        # Stock arguments of a collator that packs have no such option.
        why = against_other_rows(trainer) if getattr(args, "padding_free", True) else "batches are padded"
        if why is not None:
            logger.info(f"No row runs before training to {self.purpose}, because {why}.")
            start_threads(trainer)
            return
        model = inside_ddp(trainer.model_wrapped)
        compared = getattr(trainer, "_compared_rows", None)
        try:
            self._prepare(model, state)
        except Exception as error:
            # Other processes may wait for this one, and a sharded model cannot leave a forward in the middle.
            if args.world_size > 1:
                error.add_note(f"This row was made to {self.purpose}. Pass {self.option} to skip it.")
                raise
            logger.warning(
                f"A row that was made to {self.purpose} stopped with {described(error)}. Training goes on without it."
            )
        if compared is not None:
            # Only rows of the dataset show whether the processes read the same ones.
            trainer._compared_rows = compared

    def _prepare(self, model: torch.nn.Module, state: TrainerState) -> None:
        trainer = self.trainer
        compile_kernels(
            model,
            needs_of_trainer(trainer),
            collator=trainer.data_collator,
            loss=self._loss,
            dtype=compute_dtype(trainer),
            evaluation=evaluates(trainer),
            progress=self.progress and state.is_local_process_zero,
        )

    def _loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        trainer, batch = self.trainer, prepare_inputs(self.trainer, batch)
        with trainer.compute_loss_context_manager():
            if "labels" not in batch:
                return model(**batch)[0].float().sum()
            # Other methods may need columns that only the dataset has, and a loss of the user may count its calls.
            if type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None:
                return model(**batch).loss
            targets = (batch["labels"] != -100).sum()
            return only_loss(trainer.compute_loss(model, batch, num_items_in_batch=targets))


class GraphsCallback(WarmUpCallback):
    """Measures a row when training starts, and turns CUDA graphs on until its end if they make it faster.

    [`choose_graphs`] decides. With several processes, graphs are on if all of them measured a gain. A choice of the user
    by [`use_cuda_graphs`] stays. [`configure_packing`] adds this callback.
    """

    purpose, option = "measure CUDA graphs", "cuda_graphs=False"

    def on_train_begin(self, args, state, control, **kwargs):
        # An interrupted training leaves its choice, and this one may have other rows.
        self._release()
        super().on_train_begin(args, state, control, **kwargs)

    def _prepare(self, model: torch.nn.Module, state: TrainerState) -> None:
        trainer = self.trainer
        start_threads(trainer)
        texts = find_text_models(model)
        if not texts or excludes_graphs(trainer) or any(text.layer_graphs is not None for text in texts):
            return
        with same_data(trainer):
            rows = usual_rows(trainer, trainer.train_dataset, bool(trainer.args.packing))
        if rows is None:
            return
        device = trainer.args.device
        # Where layers cannot run as graphs, no option turns them on.
        reasons = *(reason_of_layers(text, device) for text in texts), _reason_of_determinism()
        reason = next(filter(None, reasons), "")
        on, reason = (False, reason) if reason else self._measure(model, rows)
        # Each step waits for the slowest process.
        everywhere = trainer.accelerator.gather(torch.tensor([int(on)], device=device)).all()
        if on and not everywhere:
            reason = "another process measured no gain"
        if everywhere:
            say(trainer, f"CUDA graphs on, because {reason} ({self.option} or --no-cuda-graphs turns them off).")
        else:
            say(trainer, f"CUDA graphs off, because {reason}.")
            self._release()

    def _measure(self, model: torch.nn.Module, rows: Rows) -> tuple[bool, str]:
        """Return whether graphs are on in this process, and the reason."""
        trainer, device = self.trainer, self.trainer.args.device
        # Routers count their tokens in these tensors, which are part of the graphs.
        ExpertLoad(model, device)

        def make(tokens: int, documents: int) -> dict[str, Any]:
            return make_row(model, split(tokens, documents), trainer.data_collator, device)

        def run(row: dict[str, Any]) -> None:
            self._loss(model, row).backward()
            model.zero_grad()

        def run_new(tokens: int, documents: int) -> None:
            run(make(tokens, documents))

        with as_before(model):
            typical = partial(run, make(rows.tokens, rows.documents))
            few = max(_HOST_ROW, 2 * rows.documents)
            short = partial(run, make(few, rows.documents)) if rows.tokens > few else None
            # A row that is bound by the GPU needs none of these, so they are made when they run.
            longest = partial(run_new, rows.longest, rows.documents) if rows.longest > rows.tokens else None
            others = [partial(run_new, rows.tokens, number) for number in documents_of_graphs(rows.fewest, rows.most)]
            accumulated = trainer.args.gradient_accumulation_steps
            some_without = rows.longest > rows.max_length or evaluates(trainer)
            options = others, accumulated, some_without, record_of(trainer).waits
            return choose_graphs(model, rows.max_length, typical, short, longest, *options)

    def on_train_end(self, args, state, control, **kwargs):
        self._release()

    def _release(self) -> None:
        remove_graphs(inside_ddp(self.trainer.model_wrapped), unasked_only=True)


def _reason_of_determinism() -> str:
    """Return why two runs may not choose by time, or an empty string. Graphs round gradients in another way."""
    if not torch.are_deterministic_algorithms_enabled():
        return ""
    return "two runs under deterministic algorithms could choose differently. cuda_graphs=True turns them on"


def needs_of_trainer(trainer: Trainer) -> Needs:
    """Return what the training of a Trainer needs, beside what its model tells."""
    parallel = getattr(trainer, "sequence_parallel", None)
    shared = {} if parallel is None else {"processes": parallel.size, "method": parallel.gated_delta_rule}
    # Samples may take long to make, and several callbacks ask.
    datasets = trainer.train_dataset, trainer.eval_dataset
    key = *map(id, datasets), rows_per_batch(trainer)
    known = _OF_DATA.get(trainer)
    if known is None or known[0] != key:
        with same_data(trainer):
            known = _OF_DATA[trainer] = key, datasets, Needs(*largest_row(trainer), trees=has_trees(trainer))
    return replace(known[2], **shared)


def start_threads(trainer: Trainer) -> None:
    """Start threads that compile what the training of a Trainer needs, where no row has started them."""
    if not compiles_kernels(trainer.args.device):
        return
    try:
        start_for(trainer.model, trainer.args.device, compute_dtype(trainer), needs_of_trainer(trainer))
    except Exception as error:
        # The first forward starts them, too.
        logger.info(f"No kernel is compiled before the first row: {described(error)}.")


def largest_row(trainer: Trainer) -> tuple[int, int | None]:
    """Return the most tokens of a row, and the most documents if a plan of the rows tells."""
    dataset, rows = trainer.train_dataset, rows_per_batch(trainer)
    if isinstance(dataset, PackingDataset):
        documents = int(np.sort(np.diff(dataset.plan.row_offsets))[-rows:].sum())
        return dataset.plan.max_length * rows, max(documents, trainer.args.eval_batch_size * evaluates(trainer))
    if isinstance(dataset, IterableDataset):
        tokens = getattr(dataset, "max_length", None)
        return _SHORT_ROW if tokens is None else tokens * rows, None
    return max(int(np.sort(sampled_lengths(dataset))[-rows:].sum()), 2), None


def usual_rows(trainer: Trainer, dataset: Any, packed: bool) -> Rows | None:
    """Return the rows that a Trainer makes of a dataset of samples or of packed rows, or `None` if their length is unknown."""
    args = trainer.args
    order = getattr(args, "train_sampling_strategy", "random")
    return rows_of(dataset, rows_per_batch(trainer), packed, getattr(args, "max_length", None), order)


def evaluates(trainer: Trainer) -> bool:
    return trainer.args.eval_strategy != "no" or trainer.args.eval_on_start
