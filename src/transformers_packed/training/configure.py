"""`configure_packing`: padding-free or packed training for an existing Trainer, in one line.

`checks.py` first looks for reasons not to pack. Then the model is patched, completely or not at all. The Trainer
itself is changed last.
"""

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from ..data.collator import DataCollatorWithFlattening
from ..data.dataset import PackingDataset, sampled_lengths
from ..data.neftune import DocumentNoise
from ..data.planning.rows import mean_of_longest
from ..data.streaming import IterablePackingDataset
from ..errors import input_error
from ..models.cuda_graphs import remove_graphs, use_cuda_graphs
from ..models.families import FAMILIES, LANGUAGE_MODELS, families_of
from ..models.float8 import use_float8
from ..models.registry import REPLACEMENTS, has_our_classes, patch_model, transformers_model
from ..models.verdict import SEPARATE, judge
from .callbacks.metrics import PackingMetricsCallback, known_cost
from .callbacks.resume import PackingPlanCallback
from .callbacks.warm_up import GraphsCallback, Rows, WarmUpCallback, usual_rows
from .checks import (
    check_cache,
    excludes_graphs,
    has_items,
    has_own_loss,
    is_packed,
    is_sft_trainer,
    reason_against,
    say,
    way_of_isolation,
)
from .preference import (
    check_shares_prompts,
    is_preference_trainer,
    is_sharing_prompts,
    pack_batches,
    reason_against_packed_batches,
)
from .run_ahead import RunAheadCallback


logger = logging.get_logger(__name__)

_MODES = ("auto", "padding_free", "pack", "off")
_EVERYTHING = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
# Options of Liger, and the class name suffixes of the modules that they replace.
_LIGER = {"fused_linear_cross_entropy": LANGUAGE_MODELS, "rms_norm": "RMSNorm", "swiglu": "MLP"}
# DDP sums gradients in buckets of 25 MB by default. A few large sums disturb the kernels beside them less.
_BUCKET_MB = 100


def configure_packing(
    trainer: Trainer,
    packing: str | bool = "auto",
    max_length: int | None = None,
    *,
    float8: bool = False,
    share_prompts: bool = False,
    cuda_graphs: bool | None = None,
    **plan_options: Any,
) -> Trainer:
    """Train without padding: patch the model if its family needs it, and replace the collator and the dataset.

    Call this function after building a Trainer and before `trainer.train()`. It prints one line with the active mode,
    or with the reason why packing is off. Afterwards, `trainer.args.packing` and `trainer.args.padding_free` hold the
    active mode, and the log has packing metrics ([`PackingMetricsCallback`]). Models that the Trainer's `model_init`
    creates later are patched as well. Trainer no longer waits for the GPU in each step: batches are copied with
    `non_blocking=True`, and losses that are not finite are left out of the log on the GPU. DDP keeps the gradients in its
    buckets, of 100 MB unless `ddp_bucket_cap_mb` is set. It does not search for parameters without a gradient in language
    models of Qwen3-Next and Qwen3.5 with at most one adapter and without a loss of the user, unless
    `ddp_find_unused_parameters` is set. A step that leaves one out is then an error.

    * `"padding_free"`: concatenates the samples of a batch into one packed row. Batches, steps and learning rate are
      unchanged; only the padding is not computed.
    * `True` or `"pack"`: plans rows of up to `max_length` tokens over the whole dataset ([`PackingDataset`], or
      [`IterablePackingDataset`] for a stream). `per_device_train_batch_size` counts rows. Rows are read in the order
      of the plan (`train_sampling_strategy="sequential"`), and the plan fills all batches.
    * `"auto"`: trains padding-free if it is safe according to the audit of the model, and useful. Otherwise the
      Trainer is unchanged. Rows that are already packed (TRL's `packing=True`, [`PackingDataset`]) stay packed.
    * `False` or `"off"`: does nothing.

    The environment variable `TRANSFORMERS_PACKED_DISABLE_AUTO=1` turns `"auto"` off.

    TRL's `DPOTrainer`, `KTOTrainer`, `GRPOTrainer` and `RLOOTrainer` keep their padded batches, which the policy and the
    reference model then run as packed rows. `packing=True` is not possible.

    `float8=True` is independent of the mode. Without packing, it patches the model as well, and the batches stay
    padded.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer, or a trainer of TRL, before training.
        packing (`str` or `bool`, *optional*, defaults to `"auto"`):
            `"auto"`, `"padding_free"`, `True` (`"pack"`) or `False` (`"off"`).
        max_length (`int`, *optional*):
            Maximum number of tokens per row for `packing=True`. Defaults to `trainer.args.max_length`.
        float8 (`bool`, *optional*, defaults to `False`):
            Train linear layers with products in float8 ([`use_float8`]).
        share_prompts (`bool`, *optional*, defaults to `False`):
            For TRL's trainers of preferences and of reinforcement learning: compute a prompt once for all answers of a
            batch that start with it.
        cuda_graphs (`bool`, *optional*):
            Run the layers of rows as CUDA graphs ([`use_cuda_graphs`]). By default, a row is measured before the first
            step on a GPU. Graphs stay on until the end of training if they make it faster and their memory is free, and a
            line says so. Rows of batches that are not packed differ in length: graphs then serve 95 % of them.
        plan_options (`Any`, *optional*):
            Additional arguments of [`PackingDataset`] or [`IterablePackingDataset`] for `packing=True`, such as
            `overlong`.

    Returns:
        `transformers.Trainer`: the same object.

    Raises:
        `ValueError`: bad arguments, or `True`, `"padding_free"` or `float8=True` is not possible. The message names the
            reason and the argument to change. The Trainer is then unchanged.

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
        warnings.warn('packing="packing" is deprecated; pass packing=True', DeprecationWarning, stacklevel=2)
    mode = packing
    if isinstance(packing, bool) or packing == "packing":
        mode = "pack" if packing else "off"
    if mode not in _MODES:
        raise input_error(f"packing as True, False or one of {_MODES}", repr(packing))
    if mode != "pack" and (max_length is not None or plan_options):
        given = ["max_length"] * (max_length is not None) + sorted(plan_options)
        raise input_error(f"packing=True with {', '.join(given)}", f"packing={packing!r}")
    if float8 and trainer.args.torch_compile:
        got = "torch_compile=True, which compiles linear layers in the dtype of the model"
        raise input_error("float8=True without torch_compile", got, "Set one of them to False.")
    if share_prompts:
        check_shares_prompts(trainer, mode)
    if cuda_graphs and (reason := _reason_against_graphs(trainer, mode)) is not None:
        raise reason
    if mode == "off":
        return _leave(trainer, f"packing={packing!r}", float8)
    if is_preference_trainer(trainer):
        reason = reason_against_packed_batches(trainer, mode, share_prompts) or pack_batches(trainer, share_prompts)
        if reason is None:
            return _say_batches_are_packed(trainer, float8)
    elif (reason := reason_against(trainer, mode)) is None:
        dataset, packed = trainer.train_dataset, is_packed(trainer.train_dataset)
        if mode == "pack":
            dataset, packed = _packed_dataset(trainer, packed, max_length, plan_options), True
        line, rows = _line(trainer, dataset, packed), None
        if cuda_graphs:
            rows = _rows_of_graphs(trainer, dataset, packed)
        collator, reason = _isolate(trainer, automatic=mode == "auto")
        if reason is None:
            line += _train_in_float8(trainer) if float8 else ""
            _apply(trainer, dataset, collator, packed, measures=cuda_graphs is None)
            if cuda_graphs is not None:
                graph = partial(use_cuda_graphs, row_length=rows.row_length) if rows else remove_graphs
                graph(trainer.model)
                after_model_init(trainer, graph)
            return say(trainer, line + _keep_from_liger(trainer))
    if mode != "auto":
        raise reason
    why = f"{str(reason).rstrip('.')}, so no row runs as a CUDA graph" if cuda_graphs else str(reason)
    return _leave(trainer, why, float8)


class CausalLabelsCollator(DataCollatorWithFlattening):
    """Our collator with the labels of `DataCollatorForLanguageModeling(mlm=False)`: all tokens except padding tokens.

    Args:
        ignored_token (`int`, *optional*):
            The padding token. It is never a target, even where it has another meaning.
        kwargs (`Any`, *optional*):
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
    """Patch the model. Returns a collator that isolates its documents, or the reason why none does."""
    model = trainer.model
    try:
        patch_model(model)
    except (ValueError, ImportError) as error:
        got = f"a model that cannot be patched ({str(error).rstrip('.')})"
        return None, input_error("a model that can be packed", got, "Use padded batches.")
    # Our classes keep documents apart. Others do if the audit found so, with all boundaries or with position_ids
    # alone.
    for options in (_EVERYTHING, {}):
        collator = _collator(trainer, **options)
        leak, doubt = judge(model, **collator.given())
        if leak is None and doubt is None:
            return collator, None
    if leak is not None:
        return None, input_error(SEPARATE, f"a model that leaks ({leak})", "Use padded batches.")
    if automatic:
        fix = "Measure it with transformers_packed.audit_model(model)."
        return None, input_error(SEPARATE, f"a model that has not been audited: {doubt}", fix)
    logger.warning(f"configure_packing: it is unknown whether the model keeps documents apart: {doubt}.")
    return _collator(trainer, **_EVERYTHING), None


def _collator(trainer: Trainer, **options: Any) -> DataCollatorWithFlattening:
    """Our replacement of the Trainer's collator. `on_leak="ignore"`, because the model is checked here."""
    current, kind = trainer.data_collator, type(trainer.data_collator)
    if isinstance(current, DataCollatorWithFlattening):
        return current
    model = transformers_model(trainer.model)
    options |= {"model": model, "on_leak": "ignore"}
    # Compiled models read no lengths on the host, and a loss of the user may cut the row.
    ours = hasattr(model, "forward_with_boundaries")
    options["return_boundaries"] = ours and not trainer.args.torch_compile and not has_own_loss(trainer)
    if kind.__name__ == "DataCollatorForLanguageModeling" and kind.__module__.startswith("transformers."):
        return CausalLabelsCollator(current.tokenizer.pad_token_id, **options)
    return DataCollatorWithFlattening(**options)


def _packed_dataset(trainer: Trainer, rows: bool, max_length: int | None, options: dict[str, Any]) -> Any:
    dataset, args = trainer.train_dataset, trainer.args
    if rows:
        if max_length is not None or options:
            got = f"packed rows ({type(dataset).__name__})"
            raise input_error("an unpacked dataset with max_length and other options", got)
        return dataset
    max_length = getattr(args, "max_length", None) if max_length is None else max_length
    if max_length is None:
        raise input_error("max_length, the tokens per row", "none", "Pass max_length=8192, for example.")
    if not has_items(dataset):
        return IterablePackingDataset(dataset, max_length, **options)
    defaults = {
        "world_size": _readers(trainer),
        # Fills every batch of every process.
        "gradient_accumulation_steps": args.gradient_accumulation_steps * args.per_device_train_batch_size,
        "balance": known_cost(trainer.model) or True,
        "seed": args.seed if args.data_seed is None else args.data_seed,
    }
    return PackingDataset(dataset, max_length, **(defaults | options))


def _readers(trainer: Trainer) -> int:
    """The number of processes that read their own rows."""
    parallel = getattr(trainer, "sequence_parallel", None)
    return trainer.args.world_size if parallel is None else parallel.data_parallel_size


def _apply(trainer: Trainer, dataset: Any, collator: DataCollatorWithFlattening, packed: bool, measures: bool) -> None:
    args = trainer.args
    # The last one holds the row length of rows that TRL packed.
    holders = [dataset, getattr(dataset, "plan", None), args if is_sft_trainer(trainer) and args.packing else None]
    row_tokens = next((x.max_length for x in holders if getattr(x, "max_length", None)), None) if packed else None
    trainer.data_collator = collator
    after_model_init(trainer, partial(_prepare, args.use_cache))
    if dataset is not trainer.train_dataset:
        trainer.train_dataset = dataset
        if isinstance(dataset, PackingDataset):
            args.train_sampling_strategy = "sequential"
    # accelerate would read the rows of a stream, for evaluation too, in one process and cut their boundaries.
    args.accelerator_config.dispatch_batches = False
    trainer.accelerator.dataloader_config.dispatch_batches = False
    if is_sft_trainer(trainer):
        trainer.padding_free = True
        if args.eval_packing is None:
            args.eval_packing = args.packing
    args.packing, args.padding_free = packed, True
    searches = True
    if (ddp := trainer.accelerator.ddp_handler) is not None:
        # Gradients then lie in the buckets, and are not copied to them and back.
        ddp.gradient_as_bucket_view = True
        if args.ddp_bucket_cap_mb is None:
            ddp.bucket_cap_mb = _BUCKET_MB
        if args.ddp_find_unused_parameters is None and _trains_in_each_step(trainer):
            ddp.find_unused_parameters = searches = False
    callbacks, step = trainer.callback_handler.callbacks, trainer.training_step
    ahead = step if isinstance(step, RunAheadCallback) else RunAheadCallback(trainer)
    ours = PackingMetricsCallback, PackingPlanCallback, RunAheadCallback, DocumentNoise, GraphsCallback, _EveryGradient
    others = [callback for callback in callbacks if type(callback) not in (*ours, WarmUpCallback)]
    # Kernels are compiled before a row is measured.
    first = [callback for callback in callbacks if type(callback) is WarmUpCallback]
    first += [GraphsCallback(trainer)] if measures else []
    planned = [PackingPlanCallback()] if isinstance(dataset, PackingDataset) else []
    checks = [] if searches or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled else [_EveryGradient()]
    # Metrics come before others, so that reporting callbacks find them in the log.
    metrics = PackingMetricsCallback(trainer, row_tokens=row_tokens)
    callbacks[:] = [*first, metrics, *others, *planned, ahead, DocumentNoise(), *checks]


def _reason_against_graphs(trainer: Trainer, mode: str) -> ValueError | None:
    """The reason why `cuda_graphs=True` is not possible, whatever the rows are."""
    got, inner = excludes_graphs(trainer), transformers_model(trainer.model)
    if mode == "off" or is_preference_trainer(trainer):
        got = f"packing={mode!r} in a {type(trainer).__name__}, whose batches are padded"
    elif got is None and (inner is None or families_of(inner).isdisjoint(FAMILIES)):
        got = f"a {type(inner or trainer.model).__name__}"
    if got is None:
        return None
    expected = "packed rows of a Qwen3-Next or Qwen3.5 model, without shards, for cuda_graphs=True"
    return input_error(expected, got, "Remove cuda_graphs=True.")


def _rows_of_graphs(trainer: Trainer, dataset: Any, packed: bool) -> Rows:
    rows = usual_rows(trainer, dataset, packed)
    if rows is None:
        got = "a stream of samples" if isinstance(dataset, IterableDataset) else "no samples"
        fix = "Pass packing=True and max_length, or remove cuda_graphs."
        raise input_error("rows of known length for cuda_graphs=True", got, fix)
    return rows


def _trains_in_each_step(trainer: Trainer) -> bool:
    """Whether every row gives each trained parameter a gradient. A row without images gives a vision tower none."""
    model, inner = trainer.model, transformers_model(trainer.model)
    used = inner.base_model, inner.get_output_embeddings() or inner.base_model
    own = {id(x) for module in used for x in module.parameters()}
    text = hasattr(inner, "forward_with_boundaries") and getattr(inner.config, "vision_config", None) is None
    # Of several adapters, some may be inactive.
    adapters = len(getattr(model, "peft_config", {}))
    plain = adapters < 2 and not has_own_loss(trainer) and trainer.compute_loss_func is None
    return text and plain and all(id(x) in own for x in model.parameters() if x.requires_grad)


class _EveryGradient(TrainerCallback):
    """Stops training before a step in which a parameter has no gradient, because DDP has not summed all of them then."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # Once, because walking through all modules in each step takes the host milliseconds.
        parameters = model.named_parameters() if args.world_size > 1 else ()
        self.trained = [(name, x) for name, x in parameters if x.requires_grad]

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        missing = [name for name, x in self.trained if x.grad is None]
        if missing:
            got = f"none for {len(missing)} of them, such as {missing[0]}"
            raise input_error("a gradient of each trained parameter", got, "Pass ddp_find_unused_parameters=True.")


def _prepare(use_cache: bool, model: torch.nn.Module) -> None:
    """Prepare another model of `model_init` as the Trainer and this module prepared the first one."""
    patch_model(model)
    inner = transformers_model(model)
    inner.config.use_cache = use_cache
    if (reason := check_cache(inner)) is not None:
        raise reason


def after_model_init(trainer: Trainer, change: Callable[[torch.nn.Module], Any]) -> None:
    """Call `change` on each model of the Trainer's `model_init`, which creates a new one when training starts."""
    make = trainer.model_init
    if make is None:
        return

    @wraps(make)
    def changed(*args):
        model = make(*args)
        change(model)
        return model

    trainer.model_init = changed


def _train_in_float8(trainer: Trainer) -> str:
    """Train linear layers of the model, and of others that `model_init` makes, in float8."""
    _in_float8(trainer.model)
    after_model_init(trainer, _in_float8)
    return "; linear layers train in float8"


def _in_float8(model: torch.nn.Module) -> None:
    use_float8(patch_model(model))


def _keep_from_liger(trainer: Trainer) -> str:
    """Turn off Liger's options for modules that our classes replace. Trainer applies them when it trains."""
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


def _say_batches_are_packed(trainer: Trainer, float8: bool) -> Trainer:
    trainer.args.packing, trainer.args.padding_free = False, True
    shared = ", and a prompt once for all of its answers" if is_sharing_prompts(trainer) else ""
    line = f"Padding-free on: the model computes only the real tokens of padded batches{shared}; isolation by "
    line += way_of_isolation(trainer)[0] + (_train_in_float8(trainer) if float8 else "")
    return say(trainer, line + _keep_from_liger(trainer))


def _estimated_saving(dataset: Any, batch_size: int) -> float | None:
    """Tokens of padded batches in random order over those without padding; `None` for a stream."""
    if not has_items(dataset) or not len(dataset):
        return None
    lengths = sampled_lengths(dataset)
    return mean_of_longest(lengths, batch_size) / float(lengths.mean())


def _leave(trainer: Trainer, why: str, float8: bool) -> Trainer:
    """Print the reason. Without `float8`, changes only the two arguments of the Trainer that hold the active mode."""
    unchanged = "training is unchanged"
    if float8:
        unchanged = f"batches are unchanged{_train_in_float8(trainer)}{_keep_from_liger(trainer)}"
    for name in ("packing", "padding_free"):
        if getattr(trainer.args, name, None) is None:
            setattr(trainer.args, name, False)
    return say(trainer, f"Packing off, {unchanged}: {why}")
