"""`configure_packing`: padding-free or packed training for a Trainer that exists already, in one line.

Everything that may stand in the way is looked for first (`checks.py`). Then the model is patched, which changes all of it
or nothing, and only then the Trainer itself.
"""

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import Trainer
from transformers.utils import logging

from ..data.collator import DataCollatorWithFlattening
from ..data.dataset import PackingDataset, arrow_lengths
from ..data.neftune import DocumentNoise
from ..data.planning.rows import mean_of_longest
from ..data.streaming import IterablePackingDataset
from ..errors import input_error
from ..models.families import LANGUAGE_MODELS
from ..models.registry import REPLACEMENTS, has_our_classes, patch_model, transformers_model
from ..models.verdict import SEPARATE, judge
from .callbacks.metrics import PackingMetricsCallback, known_cost
from .checks import check_cache, has_items, is_packed, is_sft_trainer, reason_against, way_of_isolation


logger = logging.get_logger(__name__)

_MODES = ("auto", "padding_free", "pack", "off")
_EVERYTHING = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
# Options of Liger, and how the names of the classes end whose work they take over.
_LIGER = {"fused_linear_cross_entropy": LANGUAGE_MODELS, "rms_norm": "RMSNorm", "swiglu": "MLP"}
# Samples that are read for an estimate of the padding where lengths do not stand in a table.
_ESTIMATED_FROM = 128


def configure_packing(
    trainer: Trainer, packing: str | bool = "auto", max_length: int | None = None, **plan_options: Any
) -> Trainer:
    """Train without padding: patch the model where its family needs it, and swap the collator and the dataset.

    To be called between building a Trainer and `trainer.train()`. One line says what is on, or why nothing is. From then
    on `trainer.args.packing` and `trainer.args.padding_free` tell what is active, and the log has figures on it
    ([`PackingMetricsCallback`]). Models that the Trainer's `model_init` makes later are patched too.

    * `"padding_free"`: the samples of a batch are laid end to end in one row. Batches, steps and learning rate stay what
      they were; only the padding is not computed.
    * `True` or `"pack"`: rows of up to `max_length` tokens are planned over the whole dataset ([`PackingDataset`], or
      [`IterablePackingDataset`] for a stream). `per_device_train_batch_size` counts rows then. Rows are read in the
      order of the plan (`train_sampling_strategy="sequential"`), and their number makes all batches full.
    * `"auto"`: padding-free if that is safe and of use, by what the audit measured of the model. Otherwise the Trainer is
      left as it was. Rows that are packed already (TRL's `packing=True`, [`PackingDataset`]) stay packed.
    * `False` or `"off"`: nothing.

    With `TRANSFORMERS_PACKED_DISABLE_AUTO=1` in the environment `"auto"` does nothing.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer, or TRL's `SFTTrainer`, before training.
        packing (`str` or `bool`, *optional*, defaults to `"auto"`):
            `"auto"`, `"padding_free"`, `True` (`"pack"`) or `False` (`"off"`).
        max_length (`int`, *optional*):
            Tokens of a row for `packing=True`; by default `trainer.args.max_length`.
        plan_options:
            Further arguments of [`PackingDataset`] or [`IterablePackingDataset`] for `packing=True`, such as `overlong`.

    Returns:
        `transformers.Trainer`: the same object.

    Raises:
        `ValueError`: `True` or `"padding_free"` cannot be honoured, with the reason and the argument to change; bad
        arguments. The Trainer is as it was then.

    Example:

    ```python
    >>> import tempfile
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Trainer, TrainingArguments
    >>> from transformers_packed import configure_packing
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> samples = [{"input_ids": [n] * n, "labels": [n] * n} for n in range(2, 10)]
    >>> args = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, use_cpu=True, report_to="none")
    >>> trainer = Trainer(Qwen3_5ForCausalLM(config), args, train_dataset=samples)
    >>> trainer = configure_packing(trainer)
    Padding-free on: about 1.4 x fewer tokens computed than in padded batches; isolation by reference (gated delta rule), \
reference (causal convolution), per_document(sdpa) (attention)
    >>> trainer.args.padding_free, trainer.args.packing
    (True, False)

    ```
    """
    if not isinstance(trainer, Trainer):
        raise input_error("a transformers.Trainer", type(trainer).__name__)
    if packing == "packing":
        warnings.warn('packing="packing" is now packing=True', DeprecationWarning, stacklevel=2)
    mode = packing
    if isinstance(packing, bool) or packing == "packing":
        mode = "pack" if packing else "off"
    if mode not in _MODES:
        raise input_error(f"packing to be True, False or one of {_MODES}", repr(packing))
    if mode != "pack" and (max_length is not None or plan_options):
        given = ["max_length"] * (max_length is not None) + sorted(plan_options)
        raise input_error(f"packing=True beside {', '.join(given)}", f"packing={packing!r}")
    if mode == "off":
        return _leave(trainer, f"packing={packing!r}")
    reason = reason_against(trainer, mode)
    if reason is None:
        dataset, packed = trainer.train_dataset, is_packed(trainer.train_dataset)
        if mode == "pack":
            dataset, packed = _packed_dataset(trainer, packed, max_length, plan_options), True
        line = _line(trainer, dataset, packed)
        collator, reason = _isolate(trainer, automatic=mode == "auto")
    if reason is None:
        _apply(trainer, dataset, collator, packed)
        return _say(trainer, line + _keep_from_liger(trainer))
    if mode != "auto":
        raise reason
    return _leave(trainer, str(reason))


class CausalLabelsCollator(DataCollatorWithFlattening):
    """Our collator with the labels of `DataCollatorForLanguageModeling(mlm=False)`: the tokens, save those of padding.

    Args:
        ignored_token (`int`, *optional*):
            The padding token. It is no target anywhere, even where it stands for something else.
        kwargs:
            Arguments of [`DataCollatorWithFlattening`].
    """

    def __init__(self, ignored_token: int | None, **kwargs):
        super().__init__(**kwargs)
        self.ignored_token = ignored_token

    def __call__(self, features: list, return_tensors: str | None = None, separator_id: int | None = None) -> dict:
        batch = super().__call__(features, return_tensors, separator_id)
        not_targets = batch["position_ids"] == 0
        if self.ignored_token is not None:
            not_targets = not_targets | (batch["input_ids"] == self.ignored_token)
        batch["labels"] = torch.where(not_targets, -100, batch["input_ids"])
        return batch


def _isolate(trainer: Trainer, automatic: bool) -> tuple[DataCollatorWithFlattening | None, ValueError | None]:
    """Patch the model. The collator that tells it enough, or why its documents would not be kept apart."""
    model = trainer.model
    try:
        patch_model(model)
    except (ValueError, ImportError) as error:
        got = f"one that cannot be patched ({str(error).rstrip('.')})"
        return None, input_error("a model that can be packed", got, "Use padded batches.")
    # Ours keep documents apart; others do by themselves if the audits found so, with more or with less of what they are told.
    for options in (_EVERYTHING, {}):
        collator = _collator(trainer, **options)
        leak, doubt = judge(model, **collator.given())
        if leak is None and doubt is None:
            return collator, None
    if leak is not None:
        return None, input_error(SEPARATE, f"one that leaks ({leak})", "Use padded batches.")
    if automatic:
        fix = "Measure it with transformers_packed.audit_model(model)."
        return None, input_error(SEPARATE, f"one of which nobody knows: {doubt}", fix)
    logger.warning(f"configure_packing: nothing is known of whether the model keeps documents apart: {doubt}.")
    return _collator(trainer, **_EVERYTHING), None


def _collator(trainer: Trainer, **options: Any) -> DataCollatorWithFlattening:
    """Ours in the place of the Trainer's. `on_leak="ignore"`, as the model is judged here."""
    current, kind = trainer.data_collator, type(trainer.data_collator)
    if isinstance(current, DataCollatorWithFlattening):
        return current
    options |= {"model": transformers_model(trainer.model), "on_leak": "ignore"}
    if kind.__name__ == "DataCollatorForLanguageModeling" and kind.__module__.startswith("transformers."):
        return CausalLabelsCollator(current.tokenizer.pad_token_id, **options)
    return DataCollatorWithFlattening(**options)


def _packed_dataset(trainer: Trainer, rows: bool, max_length: int | None, options: dict[str, Any]) -> Any:
    dataset, args = trainer.train_dataset, trainer.args
    if rows:
        if max_length is not None or options:
            got = f"one of packed rows ({type(dataset).__name__})"
            raise input_error("a dataset still to be packed beside max_length and other options", got)
        return dataset
    max_length = getattr(args, "max_length", None) if max_length is None else max_length
    if max_length is None:
        raise input_error("max_length, the tokens of a row", "none", "Pass max_length=8192, for example.")
    if not has_items(dataset):
        return IterablePackingDataset(dataset, max_length, **options)
    defaults = {
        "world_size": _readers(trainer),
        # Every batch of every process is full then.
        "gradient_accumulation_steps": args.gradient_accumulation_steps * args.per_device_train_batch_size,
        "balance": known_cost(trainer.model) or True,
        "seed": args.seed if args.data_seed is None else args.data_seed,
    }
    return PackingDataset(dataset, max_length, **(defaults | options))


def _readers(trainer: Trainer) -> int:
    """How many processes read rows of their own."""
    parallel = getattr(trainer, "sequence_parallel", None)
    return trainer.args.world_size if parallel is None else parallel.data_parallel_size


def _apply(trainer: Trainer, dataset: Any, collator: DataCollatorWithFlattening, packed: bool) -> None:
    args = trainer.args
    # The last one is of the rows that TRL made.
    holders = [dataset, getattr(dataset, "plan", None), args if is_sft_trainer(trainer) and args.packing else None]
    row_tokens = next((x.max_length for x in holders if getattr(x, "max_length", None)), None) if packed else None
    trainer.data_collator = collator
    after_model_init(trainer, partial(_prepare, args.use_cache))
    if dataset is not trainer.train_dataset:
        trainer.train_dataset = dataset
        if isinstance(dataset, PackingDataset):
            args.train_sampling_strategy = "sequential"
    if isinstance(dataset, IterableDataset):
        # accelerate would read rows in one process and cut them at their batch dimension, which is 1.
        args.accelerator_config.dispatch_batches = False
        trainer.accelerator.dataloader_config.dispatch_batches = False
    if is_sft_trainer(trainer):
        trainer.padding_free = True
        if args.eval_packing is None:
            args.eval_packing = args.packing
    args.packing, args.padding_free = packed, True
    callbacks, ours = trainer.callback_handler.callbacks, (PackingMetricsCallback, DocumentNoise)
    others = [callback for callback in callbacks if type(callback) not in ours]
    # First the figures, so that the callbacks that report find them in the log.
    callbacks[:] = [PackingMetricsCallback(trainer, row_tokens=row_tokens), *others, DocumentNoise()]


def _prepare(use_cache: bool, model: torch.nn.Module) -> None:
    """What was done to the Trainer's first model, by it and by us, done to another one of its `model_init`."""
    patch_model(model)
    inner = transformers_model(model)
    inner.config.use_cache = use_cache
    if (reason := check_cache(inner)) is not None:
        raise reason


def after_model_init(trainer: Trainer, change: Callable[[torch.nn.Module], Any]) -> None:
    """Have `change` called on each model that the Trainer's `model_init` makes: another one when training starts."""
    make = trainer.model_init
    if make is None:
        return

    @wraps(make)
    def changed(*args):
        model = make(*args)
        change(model)
        return model

    trainer.model_init = changed


def _keep_from_liger(trainer: Trainer) -> str:
    """Turn off the options of Liger for what our classes do themselves, and say so. Trainer applies them when it trains."""
    args, model = trainer.args, transformers_model(trainer.model)
    if not args.use_liger_kernel or not has_our_classes(model):
        return ""
    ours = tuple(REPLACEMENTS.values())
    names = [type(module).__name__ for module in model.modules() if isinstance(module, ours)]
    kept = [option for option, ends in _LIGER.items() if any(name.endswith(ends) for name in names)]
    args.liger_kernel_config = {**(args.liger_kernel_config or {}), **dict.fromkeys(kept, False)}
    return f"; Liger leaves {', '.join(kept)} to this package" if kept else ""


def _line(trainer: Trainer, dataset: Any, packed: bool) -> str:
    isolation = f"isolation by {way_of_isolation(trainer)[0]}"
    if not packed:
        saved = _estimated_saving(dataset, trainer.args.per_device_train_batch_size)
        known = "" if saved is None else f"about {saved:.1f} x fewer tokens computed than in padded batches; "
        return f"Padding-free on: {known}{isolation}"
    if isinstance(dataset, PackingDataset):
        plan, args = dataset.plan, trainer.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * _readers(trainer)
        return (
            f"Packing on: fill {plan.fill:.1%}, about {1 / (1 - plan.padding_avoided):.1f} x fewer tokens computed than in "
            f"padded batches of 8; {len(plan):,} rows of at most {plan.max_length:,} tokens, {-(-len(plan) // rows):,} steps "
            f"per epoch; {isolation}"
        )
    return f"Packing on: {isolation}"


def _estimated_saving(dataset: Any, batch_size: int) -> float | None:
    """Tokens of padded batches in random order over those without padding; `None` for a stream."""
    if not has_items(dataset) or not len(dataset):
        return None
    lengths = arrow_lengths(dataset, "input_ids")
    if lengths is None:
        numbers = np.unique(np.linspace(0, len(dataset) - 1, _ESTIMATED_FROM).astype(int))
        lengths = np.array([len(dataset[number]["input_ids"]) for number in numbers.tolist()])
    return mean_of_longest(lengths, batch_size) / float(lengths.mean())


def _leave(trainer: Trainer, why: str) -> Trainer:
    """Say why; of the Trainer only the two arguments that tell what is active may be new."""
    for name in ("packing", "padding_free"):
        if getattr(trainer.args, name, None) is None:
            setattr(trainer.args, name, False)
    return _say(trainer, f"Packing off, training stays as it was: {why}")


def _say(trainer: Trainer, line: str) -> Trainer:
    if trainer.is_world_process_zero():
        tqdm.write(line)
    return trainer
