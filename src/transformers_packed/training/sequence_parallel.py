"""How a Trainer computes rows over several processes.

Two hooks: the processes of a group read the same batches, cut to their parts by the collator, and the batch learns who
has the other parts. Trainer's own arithmetic is then exact: it counts the targets of all processes, each process's loss
is its part of one sum over them, and the gradients are summed by the mean over processes times their number.
"""

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_pt_utils import BatchRebalanceSampler

from ..errors import input_error
from ..models.registry import transformers_model
from ..parallel import RowShard, SequenceParallel, shard_batch
from .callbacks.metrics import PackingMetricsCallback
from .checks import check_devices


_CALL = "PackedTrainer(sequence_parallel_size=...)"


class ShardCollator:
    """The batches of `collator`, cut to one rank's part.

    Args:
        collator ([`DataCollatorWithFlattening`]):
            Makes whole rows.
        rank, size (`int`):
            Which of how many parts.
        minimum (`int`):
            How many tokens a part has at least.
    """

    def __init__(self, collator: Any, rank: int, size: int, minimum: int):
        self.collator, self.rank, self.size, self.minimum = collator, rank, size, minimum

    def __call__(self, features: list) -> dict[str, Any]:
        return shard_batch(
            self.collator(features),
            self.rank,
            self.size,
            minimum=self.minimum,
            pad_token_id=self.collator.pad_token_id or 0,
            token_columns=self.collator.token_columns,
        )


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
        self.data_collator = ShardCollator(self.data_collator, parallel.rank, parallel.size, max(window - 1, 1))
        # Its figures are of whole rows.
        self.remove_callback(PackingMetricsCallback)

    def _get_dataloader(self, *args, **kwargs) -> DataLoader:
        dataloader = super()._get_dataloader(*args, **kwargs)
        parallel = self.sequence_parallel
        if parallel is not None:
            if isinstance(dataloader.dataset, IterableDataset):
                raise _refusal(
                    "a dataset with a length",
                    "a stream, of which each process would read its own part",
                    "Use PackingDataset or a dataset with a length.",
                )
            sampler = dataloader.batch_sampler
            dealt = isinstance(sampler, BatchSamplerShard)
            inner = sampler.batch_sampler if dealt else sampler
            if not dealt or isinstance(inner, BatchRebalanceSampler):
                raise _refusal(
                    "batches that accelerate deals out to the processes",
                    f"a sampler that does so itself ({type(inner).__name__})",
                    'Leave train_sampling_strategy at "random", or set "sequential".',
                )
            sampler.num_processes, sampler.process_index = parallel.data_parallel_size, parallel.data_parallel_rank
            # Nothing has to be filled up for a single reader.
            sampler.even_batches = parallel.data_parallel_size > 1
            self._compared_rows = False
        return dataloader

    def predict(self, *args, **kwargs):
        if self.sequence_parallel is not None:
            raise _refusal("an evaluation by its loss", "predict, which wants whole documents", "Call evaluate.")
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
        raise _refusal(
            f"{shard.size} neighbouring processes that read the same rows",
            "parts of different ones",
            "Shuffle with the same seed on all processes, and give all of them the whole dataset.",
        )


def check_sequence_parallel(trainer: Trainer) -> None:
    """Raise a `ValueError` for what a Trainer is asked to do and would not do exactly on parts of rows."""
    args = trainer.args
    reason = check_devices(trainer)
    if reason is not None:
        raise reason.error()
    if getattr(args, "packing_mode", "auto") == "off":
        raise _refusal("packed rows, which can be cut", "padding_free=False", "Leave it out.")
    if not args.average_tokens_across_devices:
        raise _refusal(
            "average_tokens_across_devices=True, as each process has a part of a row's targets",
            "average_tokens_across_devices=False",
            "Leave it out.",
        )
    for name in ("dispatch_batches", "split_batches"):
        if getattr(args.accelerator_config, name):
            raise _refusal("processes that read whole rows", f"{name}=True", f"Set {name}=False.")
    if trainer.compute_loss_func is not None or args.label_smoothing_factor:
        raise _refusal(
            "the model's own loss, whose sum over parts of a row is that of the row",
            "label_smoothing_factor" if args.label_smoothing_factor else "compute_loss_func",
            "Leave it out, or compute the loss from transformers_packed.parallel.gather_loss_tensors.",
        )
    if args.torch_compile:
        raise _refusal(
            "a model that is not compiled",
            "torch_compile=True, which would count the loss of routers once for each part",
            "Leave it out.",
        )
    if trainer.compute_metrics is not None:
        raise _refusal(
            "an evaluation by its loss", "compute_metrics, which wants whole documents", "Evaluate without it."
        )


def _refusal(expected: str, got: str, fix: str) -> ValueError:
    return input_error(expected, got, fix)
