"""How a Trainer computes rows over several processes.

Two hooks: the processes of a group read the same batches, cut to their parts by the collator, and the batch learns who
has the other parts. Trainer's own arithmetic is then exact: it counts the targets of all processes, each process's loss
is its part of one sum over them, and the gradients are summed by the mean over processes times their number.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_pt_utils import BatchRebalanceSampler

from ..data.collator import DataCollatorWithFlattening
from ..errors import input_error
from ..models.registry import transformers_model
from ..parallel import RowShard, SequenceParallel, shard_batch
from .callbacks.metrics import PackingMetricsCallback
from .checks import check_devices


def collate_part(collator: DataCollatorWithFlattening, rank: int, size: int, minimum: int, features: list) -> dict:
    """One rank's part, of at least `minimum` tokens, of the row that `collator` makes."""
    pad, columns = collator.pad_token_id or 0, collator.token_columns
    return shard_batch(collator(features), rank, size, minimum=minimum, pad_token_id=pad, token_columns=columns)


class SequenceParallelMixin:
    """For a Trainer whose collator makes packed rows; changes nothing before `make_sequence_parallel` is called."""

    sequence_parallel: SequenceParallel | None = None
    _compared_rows = False

    def make_sequence_parallel(self: Trainer, size: int, **methods: Any) -> None:
        """Form the groups of processes; `methods` are those of [`SequenceParallel`].

        Raises:
            `ValueError`: something that would not be exact, with the reason.
        """
        check_sequence_parallel(self)
        self.sequence_parallel = SequenceParallel(size, device_type=self.args.device.type, **methods)
        self.sequence_parallel.check_config(transformers_model(self.model).config)

    def cut_rows(self: Trainer) -> None:
        """Cut the rows of all dataloaders from now on; to be called when the collator is the one of packed rows."""
        parallel = self.sequence_parallel
        config = transformers_model(self.model).config
        window = config.get_text_config().linear_conv_kernel_dim
        if self.data_collator.config is None and hasattr(config, "vision_config"):
            # The positions of images can only be counted on the whole row.
            self.data_collator.config = config
        part = (parallel.rank, parallel.size, max(window - 1, 1))
        self.data_collator = partial(collate_part, self.data_collator, *part)
        # Its figures are of whole rows.
        self.remove_callback(PackingMetricsCallback)

    def _get_dataloader(self, *args, **kwargs) -> DataLoader:
        dataloader = super()._get_dataloader(*args, **kwargs)
        parallel = self.sequence_parallel
        if parallel is not None:
            if isinstance(dataloader.dataset, IterableDataset):
                got = "a stream, of which each process would read its own part"
                raise input_error("a dataset with a length", got)
            sampler = dataloader.batch_sampler
            dealt = isinstance(sampler, BatchSamplerShard)
            inner = sampler.batch_sampler if dealt else sampler
            if not dealt or isinstance(inner, BatchRebalanceSampler):
                got = f"a sampler that does so itself ({type(inner).__name__})"
                fix = 'Leave train_sampling_strategy at "random", or set "sequential".'
                raise input_error("batches that accelerate deals out to the processes", got, fix)
            sampler.num_processes, sampler.process_index = parallel.data_parallel_size, parallel.data_parallel_rank
            # Nothing has to be filled up for a single reader.
            sampler.even_batches = parallel.data_parallel_size > 1
            self._compared_rows = False
        return dataloader

    def predict(self, *args, **kwargs):
        if self.sequence_parallel is not None:
            raise input_error("an evaluation by its loss", "predict, which wants whole documents", "Call evaluate.")
        return super().predict(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        # There are no whole documents to hand back.
        alone = prediction_loss_only or self.sequence_parallel is not None
        return super().prediction_step(model, inputs, alone, ignore_keys)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        if self.sequence_parallel is not None:
            shard = replace(inputs["boundaries"], parallel=self.sequence_parallel)
            if not self._compared_rows:
                # Once for each dataloader: it waits for the others.
                _check_same_row(shard)
                self._compared_rows = True
            inputs["boundaries"] = shard
        return inputs


def _check_same_row(shard: RowShard) -> None:
    """Raise a `ValueError` if the ranks hold parts of different rows, of which they would make a plausible loss."""
    found = [None] * shard.size
    dist.all_gather_object(found, shard.checksum, group=shard.parallel.group)
    if len(set(found)) > 1:
        fix = "Shuffle with the same seed on all processes, and give all of them the whole dataset."
        raise input_error(f"the same rows on {shard.size} neighbouring processes", "parts of different ones", fix)


def check_sequence_parallel(trainer: Trainer) -> None:
    """Raise a `ValueError` for what a Trainer is asked to do and would not do exactly on parts of rows."""
    args, config = trainer.args, trainer.args.accelerator_config
    check_devices(trainer)
    own_loss, whole = "the model's own loss, which sums over parts of a row", "processes that read whole rows"
    average = "average_tokens_across_devices=True, as each process has a part of a row's targets"
    for is_so, expected, got in (
        (getattr(args, "packing_mode", "auto") == "off", "packed rows, which can be cut", "padding_free=False"),
        (not args.average_tokens_across_devices, average, "average_tokens_across_devices=False"),
        (config.dispatch_batches, whole, "dispatch_batches=True"),
        (config.split_batches, whole, "split_batches=True"),
        (args.label_smoothing_factor, own_loss, "label_smoothing_factor"),
        (trainer.compute_loss_func is not None, own_loss, "compute_loss_func"),
        (args.torch_compile, "one loss of the routers for all parts of a row", "torch_compile=True"),
        (trainer.compute_metrics is not None, "an evaluation by its loss", "compute_metrics, which wants documents"),
    ):
        if is_so:
            raise input_error(expected, got, "Leave it out.")
