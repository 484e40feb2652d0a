"""Save where a packed stream stands with every checkpoint of Trainer, and go on from there.

Trainer itself keeps no state of its data loader: it reads again from the beginning of the epoch and skips. The state of
a stream is ahead of training by what the loader has prefetched, and with workers it is in other processes. So it
travels with the batches: the collator adds the state that the dataset has right after a batch's last row, in the
process that packed it; it is taken out again in the main process, and counts once the batch has been trained on.

Workers take turns, and a data loader always begins with the first one. Batches of a resumed run are put back into the
order of the interrupted one: those of the workers whose turn it was come before those of the others.
"""

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard, IterableDatasetShard
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ...data.streaming import IterablePackingDataset
from ...errors import input_error


_KEY = "packing_state"


class PackingStateCallback(TrainerCallback, ExportableState):
    """Lets Trainer resume an [`IterablePackingDataset`] where a checkpoint was saved, without reading it again.

    Needs `ignore_data_skip=True`, so that Trainer does not skip as well. The state is part of `trainer_state.json`.
    Without this callback and with `ignore_data_skip=False`, Trainer reads the stream again and skips what was trained
    on. That also resumes exactly, but only in the first pass over the data: later ones it does not know of.

    A run is resumed with as many processes and workers as it had.

    Raises:
        `ValueError`: in `train()`, if `ignore_data_skip` is not set, the dataset is another one, accelerate dispatches
        batches, or the checkpoint holds no state of the stream or one of other workers.

    Example:

    ```python
    >>> from transformers import TrainingArguments
    >>> from transformers_packed import PackingStateCallback
    >>> args = TrainingArguments(
    ...     "tuned", max_steps=1000, ignore_data_skip=True, accelerator_config={"dispatch_batches": False}
    ... )
    >>> callbacks = [PackingStateCallback()]  # for Trainer(args=args, callbacks=callbacks, ...)

    ```
    """

    def __init__(self):
        self.saved: dict | None = None
        self._batches: _StatesTakenOut | None = None

    def state(self) -> dict:
        """What Trainer writes into `trainer_state.json`."""
        return {"args": {}, "attributes": {"saved": self.saved}}

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        dataset, self.saved = self._check(args, train_dataloader), None
        if state.global_step:
            saved = (state.stateful_callbacks or {}).get(type(self).__name__)
            saved = saved["attributes"]["saved"] if isinstance(saved, dict) else None
            if saved is None or "next_worker" not in saved:
                fix = "Resume it without the callback and with ignore_data_skip=False."
                raise input_error("a checkpoint that was saved with this callback", "one without its state", fix)
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
            got = "False, with which Trainer would skip rows that the callback has skipped already"
            raise input_error("ignore_data_skip=True", got, "Set it in TrainingArguments, or leave the callback out.")
        dataset = loader.dataset.dataset if isinstance(loader.dataset, IterableDatasetShard) else loader.dataset
        if not isinstance(dataset, IterablePackingDataset):
            fix = "Leave the callback out; Trainer resumes a PackingDataset by itself."
            raise input_error("an IterablePackingDataset as train_dataset", type(dataset).__name__, fix)
        if type(loader) is not DataLoaderShard:
            fix = 'Set accelerator_config={"dispatch_batches": False} in TrainingArguments.'
            raise input_error("processes that read their own batches", type(loader).__name__, fix)
        if dataset.rank is not None and args.world_size > 1:
            got = f"rank={dataset.rank}, world_size={dataset.world_size}"
            raise input_error("a dataset without rank and world_size: accelerate shares out its rows", got)
        return dataset


class _StatesPutIn:
    """A collator that adds the state of the dataset, which stands right after the batch when this runs."""

    def __init__(self, collate: Any, dataset: IterablePackingDataset):
        self.collate, self.dataset = collate, dataset

    def __call__(self, rows: list) -> dict:
        return {**self.collate(rows), _KEY: json.dumps(self.dataset.state_dict())}


def _turns(loader: Any, next_worker: int) -> Iterator[tuple[dict, dict]]:
    """Batches and their states, with the turn of `next_worker` first in each round of the workers."""
    later, last = [], -1
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
    """A data loader without the states in its batches, which wait here until the batches have been trained on."""

    def __init__(self, loader: DataLoader, saved: dict | None):
        # What accelerate asks of a loader, this one answers as the other does.
        vars(self).update(vars(loader))
        self.loader = loader
        self.waiting: deque[dict] = deque()
        # After a resume a worker stands where it stood until a batch of it has been trained on.
        self.resumed, self.next_worker = (saved["readers"], saved["next_worker"]) if saved else ({}, 0)
        self.readers: dict[str, dict] = {}
        self.finished = False

    def __iter__(self) -> Iterator[dict]:
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
        # Of a kind of loader that has more, as torchdata's. Not `self.loader`: a copy asks before it has one.
        return getattr(self.__getattribute__("loader"), name)
