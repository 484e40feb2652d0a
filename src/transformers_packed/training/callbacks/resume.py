"""Resume packed runs: at the position of a stream, or with the plan of the checkpoint.

For a stream, Trainer saves no data loader state: it reads from the beginning of the epoch and skips batches. The state
of a stream is ahead of training by the prefetched batches, and with workers it is in other processes. It therefore
travels with the batches. In the process that packed the batch, the collator adds the state of the dataset after the
batch's last row. The main process removes it and saves it after training on the batch.

Workers take turns, and a data loader always starts with the first worker. A resumed run restores the order of the
interrupted run: batches of the workers whose turn it was come before those of the other workers.

For packed rows, Trainer skips as many batches as the checkpoint has steps. These are the batches that the run has
trained on only if it had the same rows, and as many per step.
"""

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard, IterableDatasetShard
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from ...data.dataset import sampler_of, shuffles
from ...data.streaming import IterablePackingDataset
from ...errors import input_error
from ..checks import KEEPS_SAMPLERS, ROWS


logger = logging.get_logger(__name__)

_KEY = "packing_state"


class _Saved(TrainerCallback, ExportableState):
    """A callback with a state that Trainer writes to `trainer_state.json`."""

    saved: dict | None = None

    def state(self) -> dict:
        return {"args": {}, "attributes": {"saved": self.saved}}


class PackingPlanCallback(_Saved):
    """Refuses other rows than those of the plan, or of the checkpoint to resume. [`configure_packing`] adds it.

    Rows are the same for another number of processes if a step has as many rows as before. The fingerprint of the
    [`PackingDataset`]'s plan is part of `trainer_state.json`. Of an [`IterablePackingDataset`], only the length of its
    rows is. With `ignore_data_skip=True`, which reads the data from the beginning, nothing is compared.

    Args:
        planned (`bool`, *optional*, defaults to `False`):
            Whether the rows were planned after the Trainer was built. Its sampler may then number samples.

    Raises:
        `ValueError`: raised in `train()` if rows would be trained on twice or never.
    """

    def __init__(self, planned: bool = False):
        self.planned = planned

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        sampler = sampler_of(train_dataloader) if self.planned else None
        source = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
        if sampler is not None and source is not train_dataloader.dataset:
            raise input_error(ROWS, f"{type(sampler).__name__}, which numbers samples", KEEPS_SAMPLERS)
        self.saved = self._rows(args, train_dataloader)
        # Trainer fails to save a state that the checkpoint lacks.
        found = state.stateful_callbacks.setdefault(type(self).__name__, {"args": {}, "attributes": {"saved": None}})
        if state.global_step and not args.ignore_data_skip:
            self._compare(found["attributes"]["saved"], _rows_of(train_dataloader) is not None)
        # Also where the check before the first step has removed this callback.
        found["attributes"]["saved"] = self.saved

    def _compare(self, saved: dict | None, has_rows: bool) -> None:
        """Raise the error of rows that are not those of the checkpoint, or warn if these are unknown."""
        # A data loader of the user's own does not tell which rows it reads.
        if saved == self.saved or (has_rows and self.saved is None):
            return
        fix = "Resume with the same data, max_length, seed and options. With ignore_data_skip=True, the epoch is read again."
        if saved is None:
            logger.warning(
                "The checkpoint does not tell its packed rows: resume it with the data and options of its run."
            )
            return
        if self.saved is None:
            raise input_error("the packed rows of the checkpoint", "batches of samples", fix)
        if saved["rows_per_step"] != self.saved["rows_per_step"]:
            steps = "Change per_device_train_batch_size or gradient_accumulation_steps: a step has their product on each process."
            expected = f"{saved['rows_per_step']} rows per step, as in the checkpoint"
            raise input_error(expected, self.saved["rows_per_step"], steps)
        raise input_error("the packed rows of the checkpoint", "other rows", fix)

    def _rows(self, args, loader: Any) -> dict | None:
        """What identifies the rows of each step, or `None` if a batch has samples."""
        rows = _rows_of(loader)
        try:
            rows_per_step = loader.total_batch_size * args.gradient_accumulation_steps
        except (AttributeError, TypeError):  # a data loader of the user's own
            return None
        if rows is None:
            return None
        if isinstance(rows, IterablePackingDataset):
            # The batch size of a loader of a stream is that of a process.
            rows_per_step *= getattr(loader.dataset, "num_processes", 1)
            return {"rows_per_step": rows_per_step, "plan": f"stream of {rows.max_length} tokens", "order": None}
        order: list | None = None
        if (shuffled := shuffles(loader)) or rows_per_step != rows.rows_per_step:
            # Then the order of the rows within a planned step matters.
            order = [shuffled, args.seed, args.data_seed, rows.world_size, rows.gradient_accumulation_steps]
        return {"rows_per_step": rows_per_step, "plan": rows.fingerprint, "order": order}


def _rows_of(loader: Any) -> Any:
    """The plan of a data loader's rows or the stream that makes them, `None` for samples."""
    dataset = _dataset_of(loader)
    return dataset if isinstance(dataset, IterablePackingDataset) else getattr(dataset, "plan", None)


def _dataset_of(loader: Any) -> Any:
    dataset = getattr(loader, "dataset", None)
    return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset


class PackingStateCallback(_Saved):
    """Lets Trainer resume an [`IterablePackingDataset`] at the position of a checkpoint, without reading it again.

    Set `ignore_data_skip=True`, so that Trainer does not skip batches itself. The state is part of
    `trainer_state.json`. Without this callback and with `ignore_data_skip=False`, Trainer reads the stream again and
    skips the samples that it has trained on. This is also exact, but only in the first pass over the data.

    Resume a run with the same numbers of processes and workers.

    Raises:
        `ValueError`: raised in `train()` if `ignore_data_skip` is not set, the dataset has another type, accelerate
            dispatches batches, or the checkpoint holds no state of the stream or the state of other workers.

    Example:

    ```python
    >>> from transformers import TrainingArguments
    >>> from transformers_packed import PackingStateCallback
    >>> args = TrainingArguments(
    ...     "tuned", max_steps=1000, ignore_data_skip=True, accelerator_config={"dispatch_batches": False}
    ... )
    >>> callbacks = [PackingStateCallback()]  # pass to Trainer(args=args, callbacks=callbacks, ...)

    ```
    """

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        dataset, self.saved = self._check(args, train_dataloader), None
        if state.global_step:
            saved = (state.stateful_callbacks or {}).get(type(self).__name__)
            saved = saved["attributes"]["saved"] if isinstance(saved, dict) else None
            if saved is None or "next_worker" not in saved:
                fix = "Resume it without the callback and with ignore_data_skip=False."
                raise input_error("a checkpoint saved with this callback", "a checkpoint without its state", fix)
            if saved["workers"] != args.dataloader_num_workers:
                raise input_error(f"dataloader_num_workers={saved['workers']}, as before", args.dataloader_num_workers)
            dataset.resume(saved["epoch"], saved["readers"])
            self.saved = saved
        loader = train_dataloader.base_dataloader
        loader.collate_fn = _StatesPutIn(loader.collate_fn, dataset)
        self._batches = train_dataloader.base_dataloader = _StatesTakenOut(loader, self.saved)
        self._workers = args.dataloader_num_workers

    def on_step_end(self, args, state, control, **kwargs):
        batches = self._batches
        reader = batches.waiting.popleft()
        number = reader["shard"][0]
        batches.readers[str(number)] = reader
        over = batches.finished and not batches.waiting
        self.saved = {
            "workers": self._workers,
            "epoch": reader["epoch"] + over,
            "readers": {} if over else dict(batches.readers),
            "next_worker": 0 if over else (number + 1) % max(self._workers, 1),
        }

    on_substep_end = on_step_end

    def _check(self, args, loader: Any) -> IterablePackingDataset:
        if not args.ignore_data_skip:
            got = "False: Trainer would skip rows that the callback already skips"
            raise input_error("ignore_data_skip=True", got, "Set it in TrainingArguments, or remove the callback.")
        dataset = _dataset_of(loader)
        if not isinstance(dataset, IterablePackingDataset):
            fix = "Remove the callback; Trainer resumes a PackingDataset by itself."
            raise input_error("an IterablePackingDataset as train_dataset", type(dataset).__name__, fix)
        if type(loader) is not DataLoaderShard:
            fix = 'Set accelerator_config={"dispatch_batches": False} in TrainingArguments.'
            raise input_error("processes that read their own batches", type(loader).__name__, fix)
        if dataset.rank is not None and args.world_size > 1:
            got = f"rank={dataset.rank}, world_size={dataset.world_size}"
            raise input_error("a dataset without rank and world_size, because accelerate distributes its rows", got)
        return dataset


class _StatesPutIn:
    """A collator that adds the state of the dataset right after the batch."""

    def __init__(self, collate_fn: Any, dataset: IterablePackingDataset):
        self.collate_fn, self.dataset = collate_fn, dataset

    def __call__(self, rows: list) -> dict:
        return {**self.collate_fn(rows), _KEY: json.dumps(self.dataset.state_dict())}


def _turns(loader: Any, next_worker: int) -> Iterator[tuple[dict, dict]]:
    """Batches and their states. Each round of the workers starts with `next_worker`."""
    later: list[tuple[dict, dict]] = []
    last = -1
    for batch in loader:
        state = json.loads(batch.pop(_KEY))
        worker = state["shard"][0] % max(loader.num_workers, 1)
        if worker <= last:  # a new round
            yield from later
            later.clear()
        last = worker
        if worker < next_worker:
            later.append((batch, state))
        else:
            yield batch, state
    yield from later


class _StatesTakenOut(DataLoader):
    """A data loader that removes the states from its batches and keeps them until training on the batch is done."""

    def __init__(self, loader: DataLoader, saved: dict | None):
        # accelerate reads attributes of a loader; this one has those of the wrapped loader.
        vars(self).update(vars(loader))
        self.loader = loader
        self.waiting: deque[dict] = deque()
        # After a resume, the state of a worker is the saved one until training on one of its batches is done.
        self.resumed: dict[str, dict] = saved["readers"] if saved else {}
        self.next_worker: int = saved["next_worker"] if saved else 0
        self.readers: dict[str, dict] = {}
        self.finished = False

    def __iter__(self) -> Iterator[dict]:  # type: ignore[override]  # torch annotates its own iterators
        self.waiting.clear()
        self.readers, self.resumed, self.finished = dict(self.resumed), {}, False
        next_worker, self.next_worker = self.next_worker, 0
        for batch, state in _turns(self.loader, next_worker):
            self.waiting.append(state)
            yield batch
        self.finished = True

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # For loaders with additional attributes, such as torchdata's. Not `self.loader`, which a copy lacks at first.
        return getattr(self.__getattribute__("loader"), name)
