"""Sequence parallelism in a Trainer: several processes compute each row.

The processes of a group read the same batches, which the collator cuts to their parts, and each batch gets the group
with the other parts. Trainer's own normalization is then exact: it counts the targets of all processes, each process
computes its part of one sum, and the gradients are averaged over processes and multiplied by their number. This also
holds for the loss that TRL's `SFTTrainer` computes from the scores of tokens.

[`decide`] lists all of it as changes: the collator, and methods of the Trainer in whose place those of [`SharedRows`] run.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader, IterableDataset

from ..data.collator import DataCollatorWithFlattening
from ..data.samples import has_items
from ..errors import Rule, input_error
from ..foreign import swapped
from ..models.families import sizes_of
from ..models.registry import inner_model
from ..models.releases import COUNT_ITEMS, MAKE_LOADER, PREPARE
from ..models.versions import is_rebalancing
from ..parallel import RowShard, shard_batch
from ..parallel.groups import check_methods, check_size
from .checks import datasets_of, has_trees, of_devices
from .facts import Facts
from .typed import Trainer


_ALONE = "Train this model without sequence parallelism."
_STREAM = "a dataset with a length", "a stream, from which each process would read different samples", ""


class PartCollator:
    """Makes one rank's part of the packed rows of another collator.

    Args:
        rows ([`DataCollatorWithFlattening`]):
            The collator of whole rows.
        rank (`int`):
            Index of the part.
        size (`int`):
            Number of parts.
        minimum (`int`):
            Minimum number of tokens per part.
    """

    def __init__(self, rows: DataCollatorWithFlattening, rank: int, size: int, minimum: int):
        self.rows, self.rank, self.size, self.minimum = rows, rank, size, minimum

    @property
    def token_columns(self) -> tuple[str, ...]:
        return tuple(self.rows.token_columns)

    def __call__(self, features: list) -> dict[str, Any]:
        pad = self.rows.pad_token_id or 0
        options: dict[str, Any] = {"minimum": self.minimum, "pad_token_id": pad, "token_columns": self.token_columns}
        return shard_batch(self.rows(features), self.rank, self.size, **options)


class GatherOfRows:
    """In place of accelerate's `gather_for_metrics`, for which every process has samples of its own.

    A number of each process is part of a sum over all of them. Of other tensors, each group of processes gives one, and
    the samples that filled the last batch are left out.
    """

    def __init__(self, accelerator: Any, size: int):
        self.accelerator, self.size = accelerator, size

    def __call__(self, input_data: Any, use_gather_object: bool = False) -> Any:
        accelerator, state = self.accelerator, self.accelerator.gradient_state
        if not isinstance(input_data, torch.Tensor):
            return type(accelerator).gather_for_metrics(accelerator, input_data, use_gather_object)
        gathered = accelerator.gather(input_data)
        if input_data.ndim == 0:
            return gathered
        rows = gathered.unflatten(0, (-1, self.size, len(input_data)))[:, 0].flatten(0, 1)
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows


class SharedRows:
    """In place of some methods of a Trainer whose processes share rows, which is that of its `sequence_parallel`.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.originals = {name: getattr(trainer, name) for name in self.methods}

    @property
    def methods(self) -> dict[str, Any]:
        """The methods by name, to be set on the Trainer."""
        parts = {MAKE_LOADER: self.make_loader, PREPARE: self.prepare}
        return parts | {"prediction_step": self.prediction_step, "predict": self.predict}

    def make_loader(self, *args, **kwargs) -> DataLoader:
        dataloader, parallel = self.originals[MAKE_LOADER](*args, **kwargs), self.trainer.sequence_parallel
        if isinstance(dataloader.dataset, IterableDataset):
            raise input_error(*_STREAM)
        sampler = dataloader.batch_sampler
        inner = sampler.batch_sampler if isinstance(sampler, BatchSamplerShard) else sampler
        if not isinstance(sampler, BatchSamplerShard) or is_rebalancing(inner):
            raise input_error(*_of_sampler(type(inner).__name__))
        sampler.num_processes, sampler.process_index = parallel.data_parallel_size, parallel.data_parallel_rank
        # A single reader needs no additional batches.
        sampler.even_batches = parallel.data_parallel_size > 1
        self.trainer._compared_rows = False
        return dataloader

    def predict(self, *args, **kwargs):
        raise input_error("an evaluation by loss", "predict, which needs whole documents", "Call evaluate.")

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss of the whole row. No process has whole documents to return."""
        trainer, targets = self.trainer, inputs.get("shift_labels")
        # The mean over the targets of this part, not a share of the sum over all processes.
        with swapped(vars(trainer), **{COUNT_ITEMS: lambda *_: None}):
            loss, _, _ = self.originals["prediction_step"](model, inputs, True, ignore_keys)
        if loss is None or targets is None:
            return loss, None, None
        number = (targets != -100).sum().to(loss)
        # The loss of a part without targets may be NaN.
        sums = torch.stack([torch.where(number > 0, loss * number, 0), number])
        dist.all_reduce(sums, group=trainer.sequence_parallel.group)
        return sums[0] / sums[1], None, None

    def prepare(self, inputs: dict[str, Any]) -> dict[str, Any]:
        trainer, inputs = self.trainer, self.originals[PREPARE](inputs)
        boundaries = inputs.get("boundaries")
        if not isinstance(boundaries, RowShard):
            fix = "Keep the Trainer's own dataloaders and the collator that configure_packing sets."
            raise input_error("a part of a row", "a batch that is not cut", fix)
        shard = replace(boundaries, parallel=trainer.sequence_parallel)
        if not trainer._compared_rows:
            # Only once per dataloader, because it synchronizes the processes.
            _check_same_row(shard)
            trainer._compared_rows = True
        inputs["boundaries"] = shard
        return inputs


def part_collator(trainer: Trainer, collator: DataCollatorWithFlattening, size: int) -> PartCollator:
    """The collator of this process's parts of the rows of `collator`."""
    window = sizes_of(inner_model(trainer.model).config).delta_rule.window
    return PartCollator(collator, dist.get_rank() % size, size, max(window - 1, 1))


def _check_same_row(shard: RowShard) -> None:
    """Raise a `ValueError` if the ranks hold parts of different rows. Their loss would look plausible."""
    found = [None] * shard.size
    assert shard.parallel is not None
    dist.all_gather_object(found, shard.checksum, group=shard.parallel.group)
    if len(set(found)) > 1:
        fix = "Shuffle with the same seed on all processes, and pass the whole dataset to all of them."
        raise input_error(f"the same rows on {shard.size} neighboring processes", "parts of different rows", fix)


def against_sharing(facts: Facts) -> Iterator[Rule]:
    """Reasons why processes cannot share a row of a Trainer, if they are to. The loss of most would look plausible."""
    trainer, model, options = facts.trainer, facts.model, facts.options
    size = options.sequence_parallel_size
    if not options.shares_rows:
        return
    args, config = trainer.args, trainer.args.accelerator_config
    answers = f"sequence_parallel_size={size} with {facts.name}, whose losses need whole answers"
    fix = "Leave it out. gradient_checkpointing=True, FSDP2 and share_prompts=True save memory too."
    yield facts.record.pads, "a Trainer or an SFTTrainer", answers, fix
    yield facts.padded, "packed rows for sequence_parallel_size", facts.padded, "Leave one of them out."
    yield from of_devices(facts)
    try:
        check_size(size)
        # The teacher of a loss computes the same parts.
        others: Iterator[Any] = (other for loss in facts.added for other in loss.models)
        for one in () if model is None else (model, *others):
            sizes = sizes_of(one.config, _ALONE)
            check_methods(size, **options.methods, heads=sizes.heads, linear_heads=sizes.linear_heads)
    except ValueError as error:
        yield error
        return
    world, alone = dist.get_world_size(), "processes that train alone"
    cpu = "Set use_cpu=True in the arguments if they are to train on a CPU."
    yield args.world_size != world, f"a Trainer of all {world} processes", alone, cpu
    own_loss, whole = "the model's own loss, which sums over parts of a row", "processes that read whole rows"
    average = "average_tokens_across_devices=True, because each process has a part of a row's targets"
    tensors = trainer.get_tp_size()
    for is_so, expected, got in (
        (not args.average_tokens_across_devices, average, "average_tokens_across_devices=False"),
        (config.dispatch_batches, whole, "dispatch_batches=True"),
        (config.split_batches, whole, "split_batches=True"),
        (args.label_smoothing_factor, own_loss, "label_smoothing_factor"),
        (trainer.compute_loss_func is not None, own_loss, "compute_loss_func"),
        (trainer.compute_metrics is not None, "an evaluation by loss", "compute_metrics, which needs documents"),
        (tensors > 1, "whole layers on each process", f"tp_size={tensors}"),
    ):
        yield is_so, expected, got, "Remove it."
    got, fix = "trees or groups, which processes cannot share", "Leave out sequence_parallel_size."
    yield has_trees(trainer), "samples of one document each", got, fix
    # The processes of a group would read different rows.
    yield not all(map(has_items, datasets_of(trainer))), *_STREAM
    rebalances = getattr(args, "train_sampling_strategy", "random") == "batch_rebalance" and not facts.plans_rows
    yield rebalances, *_of_sampler('train_sampling_strategy="batch_rebalance"')


def _of_sampler(which: str) -> tuple[str, str, str]:
    fix = 'Keep train_sampling_strategy="random", or set "sequential".'
    got = f"a sampler that distributes them itself ({which})"
    return "batches that accelerate distributes to the processes", got, fix
