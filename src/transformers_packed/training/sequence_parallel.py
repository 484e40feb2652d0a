"""Sequence parallelism in a Trainer: several processes compute each row.

Two hooks implement it. The processes of a group read the same batches, which the collator cuts to their parts, and
each batch gets the group with the other parts. Trainer's own normalization is then exact: it counts the targets of all
processes, each process computes its part of one sum, and the gradients are averaged over processes and multiplied by
their number.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader, IterableDataset

from ..data.collator import DataCollatorWithFlattening
from ..errors import input_error
from ..models.families import sizes_of
from ..models.registry import inner_model
from ..models.releases import is_rebalancing
from ..parallel import RowShard, SequenceParallel, shard_batch
from .callbacks.metrics import PackingMetricsCallback
from .checks import check_devices
from .typed import Trainer


def collate_part(collator: DataCollatorWithFlattening, rank: int, size: int, minimum: int, features: list) -> dict:
    """One rank's part of the packed row from `collator`, with at least `minimum` tokens."""
    pad, columns = collator.pad_token_id or 0, collator.token_columns
    return shard_batch(collator(features), rank, size, minimum=minimum, pad_token_id=pad, token_columns=columns)


class SequenceParallelMixin(Trainer):
    """For a Trainer with packed rows. Has no effect before `make_sequence_parallel` is called."""

    sequence_parallel: SequenceParallel | None = None
    _compared_rows = False

    def make_sequence_parallel(self, size: int, **methods: Any) -> None:
        """Form the process groups. `methods` are arguments of [`SequenceParallel`].

        Raises:
            `ValueError`: a setting with which the result would not be exact. The message names the reason.
        """
        check_sequence_parallel(self)
        self.sequence_parallel = SequenceParallel(size, device_type=self.args.device.type, **methods)
        sizes = sizes_of(inner_model(self.model).config, "Train this model without sequence parallelism.")
        self.sequence_parallel.check_heads(sizes.heads, sizes.linear_heads)

    def cut_rows(self) -> None:
        """Cut the rows of all dataloaders from now on; to be called when the collator is the one of packed rows."""
        parallel = self.sequence_parallel
        assert parallel is not None
        config = inner_model(self.model).config
        window = sizes_of(config).delta_rule.window
        if self.data_collator.config is None and hasattr(config, "vision_config"):
            # Image positions can only be computed on the whole row.
            self.data_collator.config = config
        part = (parallel.rank, parallel.size, max(window - 1, 1))
        self.data_collator = partial(collate_part, self.data_collator, *part)
        # Its metrics assume whole rows.
        self.remove_callback(PackingMetricsCallback)

    def _get_dataloader(self, *args, **kwargs) -> DataLoader:
        dataloader = super()._get_dataloader(*args, **kwargs)
        parallel = self.sequence_parallel
        if parallel is not None:
            if isinstance(dataloader.dataset, IterableDataset):
                got = "a stream, from which each process would read different samples"
                raise input_error("a dataset with a length", got)
            sampler = dataloader.batch_sampler
            inner = sampler.batch_sampler if isinstance(sampler, BatchSamplerShard) else sampler
            if not isinstance(sampler, BatchSamplerShard) or is_rebalancing(inner):
                got = f"a sampler that distributes them itself ({type(inner).__name__})"
                fix = 'Keep train_sampling_strategy="random", or set "sequential".'
                raise input_error("batches that accelerate distributes to the processes", got, fix)
            sampler.num_processes, sampler.process_index = parallel.data_parallel_size, parallel.data_parallel_rank
            # A single reader needs no additional batches.
            sampler.even_batches = parallel.data_parallel_size > 1
            self._compared_rows = False
        return dataloader

    def predict(self, *args, **kwargs):
        if self.sequence_parallel is not None:
            raise input_error("an evaluation by loss", "predict, which needs whole documents", "Call evaluate.")
        return super().predict(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        # No process has whole documents to return.
        alone = prediction_loss_only or self.sequence_parallel is not None
        return super().prediction_step(model, inputs, alone, ignore_keys)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        if self.sequence_parallel is not None:
            shard = replace(inputs["boundaries"], parallel=self.sequence_parallel)
            if not self._compared_rows:
                # Only once per dataloader, because it synchronizes the processes.
                _check_same_row(shard)
                self._compared_rows = True
            inputs["boundaries"] = shard
        return inputs


def _check_same_row(shard: RowShard) -> None:
    """Raise a `ValueError` if the ranks hold parts of different rows. Their loss would look plausible."""
    found = [None] * shard.size
    assert shard.parallel is not None
    dist.all_gather_object(found, shard.checksum, group=shard.parallel.group)
    if len(set(found)) > 1:
        fix = "Shuffle with the same seed on all processes, and pass the whole dataset to all of them."
        raise input_error(f"the same rows on {shard.size} neighboring processes", "parts of different rows", fix)


def check_sequence_parallel(trainer: Trainer) -> None:
    """Raise a `ValueError` for settings with which a Trainer would not be exact on parts of rows."""
    args, config = trainer.args, trainer.args.accelerator_config
    check_devices(trainer)
    own_loss, whole = "the model's own loss, which sums over parts of a row", "processes that read whole rows"
    average = "average_tokens_across_devices=True, because each process has a part of a row's targets"
    for is_so, expected, got in (
        (getattr(args, "packing_mode", "auto") == "off", "packed rows, which can be cut", "padding_free=False"),
        (not args.average_tokens_across_devices, average, "average_tokens_across_devices=False"),
        (config.dispatch_batches, whole, "dispatch_batches=True"),
        (config.split_batches, whole, "split_batches=True"),
        (args.label_smoothing_factor, own_loss, "label_smoothing_factor"),
        (trainer.compute_loss_func is not None, own_loss, "compute_loss_func"),
        (args.torch_compile, "one router loss for all parts of a row", "torch_compile=True"),
        (trainer.compute_metrics is not None, "an evaluation by loss", "compute_metrics, which needs documents"),
    ):
        if is_so:
            raise input_error(expected, got, "Remove it.")
