"""`PackedTrainer`: a Trainer that trains without padding and evaluates each document."""

from collections.abc import Sized
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import reduce
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ..errors import input_error
from ..foreign import swapped
from ..models.releases import COUNT_ITEMS, shifts_labels
from . import typed
from .callbacks.warm_up import WarmUpCallback
from .configure import configure_packing
from .losses import SampleMean, documents_with_targets
from .options import Mode, TrainingOptions, option


@dataclass
class PackedTrainingArguments(TrainingOptions, TrainingArguments):
    """`TrainingArguments` with the options of [`PackedTrainer`].

    After the Trainer is built, `packing` and `padding_free` hold the active mode.

    Args:
        packing (`bool` or `str`, *optional*):
            Pack the dataset into rows of up to `max_length` tokens. `per_device_train_batch_size` then counts rows.
            `"batches"` keeps padded batches, which the model packs, as in [`configure_packing`].
        padding_free (`bool`, *optional*):
            Concatenate the samples of a batch. By default this is done if it is safe. `False` keeps padded batches.
        max_length (`int`, *optional*):
            Maximum number of tokens per packed row.
        float8, batch_invariant, cuda_graphs, verify, mtp_loss_weight, mtp_only:
            As in [`configure_packing`].
        distill_weight, distill_beta, distill_temperature:
            As in [`configure_packing`]. The teacher is an argument of [`PackedTrainer`].
        sequence_parallel_size, sequence_parallel_gated_delta_rule, sequence_parallel_attention:
            As in [`configure_packing`].
        compile_before_training (`bool`, *optional*, defaults to `True`):
            On a GPU, compile all kernels before the first step ([`warm_up`]), so that no step waits for one.

    Raises:
        `ValueError`: `packing=True` with `padding_free=False` or without `max_length`, or `max_length` without it.
    """

    packing: bool | None = option(None, "Pack the dataset into rows of max_length tokens.")
    padding_free: bool | None = option(None, "Concatenate the samples of a batch.")
    compile_before_training: bool = option(True, "Compile all kernels before the first step.")

    def __post_init__(self):
        super().__post_init__()
        if self.packing is True and self.max_length is None:
            raise input_error(
                "max_length, the tokens of a row, with packing=True", "none", "Set it, such as to 16384."
            )
        if self.packing is True and self.padding_free is False:
            raise input_error("padding_free=True or None with packing=True", "False", "Rows have no padding.")
        if self.packing is None and self.max_length is not None:
            fix = "Set packing=True, or remove max_length: padding-free batches cut no sample."
            raise input_error("packing=True with max_length", "none", fix)

    @property
    def packing_mode(self) -> Mode:
        """The `packing` argument of [`configure_packing`] that corresponds to these arguments."""
        if self.packing:
            # The command line takes no other words than those of a `bool`.
            return "batches" if self.packing == "batches" else "pack"
        if self.padding_free is None:
            return "auto"
        return "padding_free" if self.padding_free else "off"


class PackedTrainer(typed.Trainer):
    """`Trainer` with [`configure_packing`] and [`warm_up`] built in.

    Takes the arguments of `Trainer`. [`PackedTrainingArguments`] select the mode; plain `TrainingArguments` use
    `packing="auto"`. Evaluation averages the loss over all target tokens of the dataset, while `Trainer` averages the
    means of batches. `compute_metrics` and `predict` receive one row per document, padded with -100.

    Args:
        sequence_parallel_size (`int`, *optional*):
            As in [`configure_packing`], for use with arguments that do not have it.
        teacher (`PreTrainedModel`, *optional*):
            As in [`configure_packing`].

    Raises:
        `ValueError`: the requested mode is not possible, or the model does not support `float8=True`.

    Example:

    ```python
    >>> import tempfile
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    >>> from transformers_packed import PackedTrainer, PackedTrainingArguments
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> samples = [{"input_ids": [n] * n, "labels": [n] * n} for n in range(2, 10)]
    >>> options = {"per_device_train_batch_size": 1, "use_cpu": True, "report_to": "none"}
    >>> args = PackedTrainingArguments(tempfile.mkdtemp(), packing=True, max_length=16, **options)
    >>> trainer = PackedTrainer(Qwen3_5ForCausalLM(config), args, train_dataset=samples)  # doctest: +ELLIPSIS
    Packing on: fill 91.7%, ...
    >>> len(trainer.train_dataset)
    3

    ```
    """

    def __init__(self, *args: Any, sequence_parallel_size: int | None = None, teacher: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._evaluated: list[torch.Tensor] = []
        self._full: tuple[int, int] | None = None
        packing: Mode = getattr(self.args, "packing_mode", "auto")
        options: dict[str, Any] = {x.name: getattr(self.args, x.name, x.default) for x in fields(TrainingOptions)}
        if packing != "pack":
            options["max_length"] = None
        if sequence_parallel_size is not None:
            options["sequence_parallel_size"] = sequence_parallel_size
        configure_packing(self, packing, teacher=teacher, **options)
        if getattr(self.args, "compile_before_training", True):
            self.callback_handler.callbacks.insert(0, WarmUpCallback(self))

    def get_eval_dataloader(self, *args, **kwargs) -> DataLoader:
        dataloader = super().get_eval_dataloader(*args, **kwargs)
        sampler = getattr(dataloader, "batch_sampler", None)
        # Trainer removes the samples that fill the last batches for `compute_metrics`, but not for the loss.
        fills_up = isinstance(sampler, BatchSamplerShard) and not sampler.split_batches
        if fills_up and self.compute_metrics is None and not hasattr(dataloader, "own_batches"):
            dataloader.own_batches = _in_rounds(sampler)
        return dataloader

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss, and logits `[B, T, vocab]` and labels `[B, T]` with -100 at padding."""
        if self._full is not None and len(self._evaluated) == self._full[0] and inputs.get("labels") is not None:
            inputs["labels"][self._full[1] :] = -100
        targets, mask = self._count_targets(inputs), inputs.get("attention_mask")
        # The loss would become part of a sum over processes, but evaluation weights each loss by its own targets.
        ours = self.compute_loss_func is None or isinstance(self.compute_loss_func, SampleMean)
        counts = {COUNT_ITEMS: lambda *_: None} if self.args.world_size > 1 and ours else {}
        with swapped(vars(self), **counts):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None and targets is not None:
            targets = targets.to(loss)
            # The loss of a batch without targets is NaN.
            self._evaluated.append(torch.stack([torch.where(targets > 0, loss * targets, 0), targets]).float())
        if mask is not None and not prediction_loss_only:
            logits, labels = _without_padding(logits, mask), _without_padding(labels, mask)
            if "inputs" in self.args.include_for_metrics:
                # Trainer reads the inputs from the batch after this method.
                inputs.update({name: _without_padding(x, mask) for name, x in inputs.items()})
        return loss, logits, labels

    def _count_targets(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """The number of what the loss of a batch is the mean of."""
        labels = inputs.get("labels")
        if labels is not None:
            if isinstance(self.compute_loss_func, SampleMean):
                return documents_with_targets(inputs).sum()
            labels = labels[..., 1:] if shifts_labels(self) else labels
        targets = inputs.get("shift_labels", labels)
        return None if targets is None else (targets != -100).sum()

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        self._evaluated, self._full = [], _samples_of_last_batch(dataloader)
        options = prediction_loss_only, ignore_keys, metric_key_prefix
        output = super().evaluation_loop(dataloader, description, *options)
        name = f"{metric_key_prefix}_loss"
        if self._evaluated and output.metrics is not None and name in output.metrics:
            # Batches that only fill the last round come last.
            own = torch.stack(self._evaluated)[: getattr(dataloader, "own_batches", None)]
            total, targets = reduce(own.sum(0), "sum").tolist()
            output.metrics[name] = total / targets if targets else float("nan")
        self._evaluated, self._full = [], None
        return output


def _in_rounds(sampler: BatchSamplerShard) -> int:
    """Give each reader the same number of batches by repeating whole batches at the end. Returns this reader's own
    count.

    accelerate would fill the last batches with samples that have already been evaluated.
    """
    batches, readers = list(sampler.batch_sampler), sampler.num_processes
    own = len(batches[sampler.process_index :: readers])
    batches += batches[:1] * (-len(batches) % readers)
    sampler.batch_sampler, sampler.batch_size, sampler.even_batches = batches, None, False
    return own


def _samples_of_last_batch(dataloader: DataLoader) -> tuple[int, int] | None:
    """This reader's last batch, and how many of its samples no reader has evaluated before."""
    sampler = getattr(dataloader, "batch_sampler", None)
    if not isinstance(sampler, BatchSamplerShard) or sampler.split_batches or not sampler.even_batches:
        return None
    last, size = len(dataloader) - 1, sampler.batch_size
    before = (last * sampler.num_processes + sampler.process_index) * size
    return last, min(max(len(cast(Sized, dataloader.dataset)) - before, 0), size)


def _without_padding(states: Any, mask: torch.Tensor) -> Any:
    """Tensors `[B, T, ...]` with -100 at padding. Maps over tuples of tensors, and returns anything else unchanged."""
    if isinstance(states, tuple | list):
        return type(states)(_without_padding(x, mask) for x in states)
    if not isinstance(states, torch.Tensor) or states.shape[:2] != mask.shape or states is mask:
        return states
    padding = (mask == 0).to(states.device)
    return states.masked_fill(padding.view(*padding.shape, *[1] * (states.ndim - 2)), -100)
