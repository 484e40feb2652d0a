"""Decide how a Trainer trains without padding. Nothing here changes the Trainer: `apply.py` follows a [`Setup`]."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers.utils import logging

from ..data.collator import CausalLabelsCollator, DataCollatorWithFlattening
from ..data.dataset import PackingDataset, sampled_lengths
from ..data.planning.rows import mean_of_longest
from ..data.samples import DIVIDING_COLUMNS, has_items
from ..data.streaming import IterablePackingDataset
from ..data.usual_rows import Rows
from ..errors import count, input_error
from ..models.cuda_graphs import remove_graphs, use_cuda_graphs
from ..models.families import LANGUAGE_MODELS, OWN, families_of, titles
from ..models.family import Own
from ..models.float8 import use_float8
from ..models.inputs import warn_of_rope
from ..models.losses import added, trains_trunk
from ..models.losses.loss import Loss
from ..models.registry import check_patch, inner_model, patch_model, set_switches
from ..models.releases import COUNT_ITEMS, KEPT_COLUMNS, kept_columns
from ..models.replacements import REPLACEMENTS
from .added_losses import BesideScores, ItemCounts, LossesCallback, against_losses, losses_in, names_of, train_losses
from .callbacks.every_gradient import EveryGradient
from .callbacks.metrics import PackingMetricsCallback, known_cost
from .callbacks.neftune import DocumentNoise
from .callbacks.resume import PackingPlanCallback
from .callbacks.warm_up import GraphsCallback, WarmUpCallback, usual_rows
from .callbacks.weights import WeightsCallback
from .changes import Change, Prepare, Setup
from .checks import (
    against_removal,
    check_cache,
    excludes_graphs,
    isolation,
    reason_against,
    refused,
    way_of_isolation,
)
from .evaluation import OwnBatches, padded_batches_of
from .facts import Facts
from .options import Options
from .run_ahead import RunAheadCallback
from .sequence_parallel import GatherOfRows, SharedRows, against_sharing, part_collator
from .trainers import PREFERENCE
from .typed import Trainer


logger = logging.get_logger(__name__)

# Options of Liger, and the class name suffixes of the modules that they replace.
_LIGER: dict[str, str | tuple[str, ...]] = {
    "fused_linear_cross_entropy": LANGUAGE_MODELS,
    "rms_norm": "RMSNorm",
    "swiglu": "MLP",
}
_FLOAT8 = "; linear layers train in float8"
# DDP sums gradients in buckets of 25 MB by default. A few large sums disturb the kernels beside them less.
_BUCKET_MB = 100


def decide(trainer: Trainer, options: Options) -> Setup:
    """Decide how a Trainer trains. The Trainer, its arguments and its model stay as they are.

    Raises:
        `ValueError`: bad arguments, or an explicit mode or shared rows that are not possible.
    """
    options.check()
    facts = Facts.of(trainer, options.mode)
    _check_options(facts, options)
    if options.mode == "off":
        return _with_losses(facts, _off(facts, options, f"packing={options.packing!r}"))
    reason = next(against_sharing(facts, options), None) or reason_against(facts, options)
    if reason is not None and (options.mode != "auto" or options.shares_rows):
        # Whole rows may not fit into memory, and a step would have more of them.
        raise reason
    if reason is not None:
        why = f"{str(reason).rstrip('.')}, so no row runs as a CUDA graph" if options.cuda_graphs else str(reason)
        return _with_losses(facts, _off(facts, options, why))
    return _with_losses(facts, (_of_batches if facts.padded else _of_rows)(facts, options))


def _check_options(facts: Facts, options: Options) -> None:
    compiles = options.float8 and facts.trainer.args.torch_compile
    compiled = "torch_compile=True, which compiles linear layers in the dtype of the model"
    shares, prompts = options.share_prompts, f'share_prompts with {", ".join(PREFERENCE)}, or with packing="batches"'
    repeats = "Set model.share_prompts = True if your own padded batches repeat prompts."
    losses = added(losses_in(facts.trainer, options))
    why = _excludes_graphs(facts) if options.cuda_graphs else None
    with_graphs = titles(family for family in OWN if family.has_graphs)
    graphs = f"packed rows of a model of {with_graphs}, without shards, for cuda_graphs=True"
    for error in refused(
        (compiles, "float8=True without torch_compile", compiled, "Set one of them to False."),
        (shares and not facts.padded, prompts, facts.name, repeats),
        (why, graphs, str(why), "Remove cuda_graphs=True."),
        *(against_losses(facts, losses) if losses else ()),
    ):
        raise error
    for error in against_removal(facts):
        raise error


def _with_losses(facts: Facts, setup: Setup) -> Setup:
    """Add to a set-up what losses beside those of the stock model need of the Trainer."""
    trainer = facts.trainer
    losses = losses_in(trainer, setup.options)
    ours = added(losses)
    if not ours:
        return setup
    handler = trainer.callback_handler
    callbacks = next((x.value for x in reversed(setup.changes) if x.name == "callbacks"), handler.callbacks)
    changes = Change.of(handler, callbacks=[LossesCallback(), *callbacks])
    changes += Change.of(trainer, **{COUNT_ITEMS: ItemCounts(getattr(trainer, COUNT_ITEMS), ours)})
    if facts.record.scores:
        changes += Change.of(trainer, compute_loss=BesideScores(trainer, trainer.compute_loss))
    weighted = " and ".join(f"{loss.weight:g} x the loss of {loss.title}" for loss in ours)
    what = f"with {weighted}" if len(ours) < len(losses) else f"only {names_of(ours)}"
    return replace(setup, line=f"{setup.line}; trains {what}", changes=(*setup.changes, *changes), losses=ours)


def _excludes_graphs(facts: Facts) -> str | None:
    """Why `cuda_graphs=True` is not possible, whatever the rows are."""
    if facts.padded:
        return f"a {facts.name}, whose batches are padded"
    inner = facts.model
    other = inner is None or not any(family.has_graphs for family in families_of(inner, Own))
    return excludes_graphs(facts.trainer) or (f"a {type(inner or facts.trainer.model).__name__}" if other else None)


def _off(facts: Facts, options: Options, why: str) -> Setup:
    """Leave the Trainer as it is, but for the arguments that hold the active mode, and for `float8`."""
    trainer, args = facts.trainer, facts.trainer.args
    unset = {name: False for name in ("packing", "padding_free") if getattr(args, name, None) is None}
    stays = f", on {facts.packed_by}" if facts.packed_by else ""
    changes, unchanged = Change.of(args, **unset), f"training is unchanged{stays}"
    if isinstance(trainer.data_collator, DataCollatorWithFlattening):
        changes += Change.of(trainer, **_own_batches(trainer, trainer.data_collator))
    prepare = _whatever_the_mode(trainer, options)
    if prepare:
        liger, kept = _keep_from_liger(facts)
        changes += liger + _of_model_init(trainer, prepare)
        unchanged = f"batches are unchanged{stays}{_FLOAT8 * options.float8}{kept}"
    line = f"Packing off, {unchanged}: {why}"
    return Setup("off", line, options, (trainer.model,), prepare, tuple(changes))


def _of_batches(facts: Facts, options: Options) -> Setup:
    """The Trainer's own padded batches, which its models pack."""
    trainer, handler = facts.trainer, facts.trainer.callback_handler
    prepare: list[Prepare] = [partial(_prepare, trainer.args.use_cache)]
    if not facts.record.pads:
        prepare.append(_keep_logits)
    if options.share_prompts:
        prepare.append(_share_prompts)
    prepare += _whatever_the_mode(trainer, options)
    shares = options.share_prompts or getattr(facts.model, "share_prompts", False)
    liger, kept = _keep_from_liger(facts)
    line = "Padding-free on: the model computes only the real tokens of padded batches"
    line += f"{', and a prompt once for all of its answers' if shares else ''}; isolation by "
    line += way_of_isolation(trainer)[0] + _FLOAT8 * options.float8 + kept
    changes = Change.of(handler, callbacks=[*handler.callbacks, WeightsCallback()])
    changes += Change.of(trainer.args, packing=False, padding_free=True) + liger
    changes += _of_model_init(trainer, tuple(prepare))
    return Setup("batches", line, options, facts.models, tuple(prepare), tuple(changes), facts.record)


def _of_rows(facts: Facts, options: Options) -> Setup:
    """Packed rows for every other Trainer."""
    trainer, own, dataset, packed = facts.trainer, facts.own, facts.trainer.train_dataset, facts.packed_rows
    if options.mode == "pack":
        dataset, packed = _packed_dataset(facts, options), True
    collator = _collator(facts)
    warn_of_rope(inner_model(trainer.model).config)
    prepare: list[Prepare] = [partial(_prepare, trainer.args.use_cache)]
    prepare += [*[_keep_logits] * bool(own), *_whatever_the_mode(trainer, options)]
    if options.cuda_graphs:
        rows = _rows_of_graphs(trainer, dataset, packed)
        prepare.append(partial(use_cuda_graphs, max_length=rows.max_length))
    elif options.cuda_graphs is not None:
        prepare.append(remove_graphs)
    liger, kept = _keep_from_liger(facts)
    line = _line(trainer, dataset, packed, options) + _FLOAT8 * options.float8 + kept
    size, parts = options.sequence_parallel_size, "parts of " * options.shares_rows
    line += f"; {size} processes share each row" * options.shares_rows
    line += f"; trusted to work on {parts}packed rows: {', '.join(own)}" if own else ""
    losses = losses_in(trainer, options)
    ddp, checks = _of_ddp(facts, losses)
    if options.shares_rows:
        changes = _of_sharing(trainer, collator, size)
    else:
        changes = Change.of(trainer, data_collator=collator, **_own_batches(trainer, collator))
    changes += _of_model_init(trainer, tuple(prepare)) + ddp + liger + _of_data(facts, dataset, packed)
    # A trunk without gradients has no graphs.
    measures = options.cuda_graphs is None and trains_trunk(losses)
    changes += _of_callbacks(facts, dataset, packed, measures, checks) + _of_columns(trainer)
    mode = "pack" if packed else "padding_free"
    parallel = {"size": options.sequence_parallel_size, **options.methods} if options.shares_rows else None
    done = tuple(prepare), tuple(changes), facts.record, padded_batches_of(trainer), parallel
    return Setup(mode, line, options, (trainer.model,), *done)


def _of_sharing(trainer: Trainer, collator: DataCollatorWithFlattening, size: int) -> list[Change]:
    """Let `size` processes share the rows of a collator. Each evaluates its part, because none has whole documents."""
    config, gather = inner_model(trainer.model).config, GatherOfRows(trainer.accelerator, size)
    part = {"data_collator": part_collator(trainer, collator, size), "_compared_rows": False}
    changes = Change.of(trainer, **SharedRows(trainer).methods, **part, gather_function=gather)
    changes += Change.of(trainer.accelerator, gather_for_metrics=gather)
    if collator.config is None and hasattr(config, "vision_config"):
        # Image positions can only be computed on the whole row.
        changes += Change.of(collator, config=config)
    return changes


def _collator(facts: Facts) -> DataCollatorWithFlattening:
    """Our replacement of the Trainer's collator. `on_leak="ignore"`, because the model is checked here."""
    trainer = facts.trainer
    current, kind = trainer.data_collator, type(trainer.data_collator)
    if isinstance(current, DataCollatorWithFlattening):
        return current
    given, _, doubt = isolation(trainer.model, automatic=False)
    if doubt is not None:
        logger.warning(f"configure_packing: it is unknown whether the model keeps documents apart: {doubt}.")
    model = inner_model(trainer.model)
    fused = bool(families_of(model, Own))
    # Compiled models read no lengths on the host, and a loss of the user may cut the row.
    on_host = fused and not trainer.args.torch_compile and not facts.has_own_loss
    options = {**given, "model": model, "on_leak": "ignore", "return_boundaries": on_host}
    if kind.__name__ == "DataCollatorForLanguageModeling" and kind.__module__.startswith("transformers."):
        collator: DataCollatorWithFlattening = CausalLabelsCollator(current.tokenizer.pad_token_id, **options)
    else:
        collator = DataCollatorWithFlattening(**options)
    collator.model_shares_prompts = fused
    collator.tokenizer = getattr(current, "tokenizer", None)
    return collator


def _own_batches(trainer: Trainer, packed: Callable) -> dict[str, OwnBatches]:
    padded = padded_batches_of(trainer)
    names = "get_eval_dataloader", "get_test_dataloader"
    return {name: OwnBatches(trainer, getattr(trainer, name), packed, padded) for name in names}


def _packed_dataset(facts: Facts, options: Options) -> Any:
    trainer, max_length = facts.trainer, options.max_length
    dataset, args = trainer.train_dataset, trainer.args
    if facts.packed_rows:
        if max_length is not None or options.plan_options:
            got = f"packed rows ({type(dataset).__name__})"
            raise input_error("an unpacked dataset with max_length and other options", got)
        return dataset
    own_length = getattr(args, "max_length", None)
    max_length = own_length if max_length is None else max_length
    if max_length is None:
        raise input_error("max_length, the tokens per row", "none", "Pass max_length=8192, for example.")
    if not has_items(dataset):
        return IterablePackingDataset(dataset, max_length, **options.plan_options)
    if facts.record.prepares and own_length is not None and own_length < max_length:
        cut = int((sampled_lengths(dataset) == own_length).sum())
        if cut:
            logger.warning(
                f"configure_packing: {facts.name} cuts samples to its own max_length={own_length}, and {cut} samples have "
                f"this length. To train on {max_length} tokens of a sample, pass max_length={max_length} to SFTConfig."
            )
    defaults = {
        "world_size": _readers(trainer, options),
        # Fills every batch of every process.
        "gradient_accumulation_steps": args.gradient_accumulation_steps * args.per_device_train_batch_size,
        "balance": known_cost(trainer.model) or True,
        "seed": args.seed if args.data_seed is None else args.data_seed,
    }
    return PackingDataset(dataset, max_length, **(defaults | options.plan_options))


def _readers(trainer: Trainer, options: Options) -> int:
    """The number of processes, or groups of them, that read their own rows."""
    return trainer.args.world_size // options.sequence_parallel_size


def _of_data(facts: Facts, dataset: Any, packed: bool) -> list[Change]:
    trainer, args = facts.trainer, facts.trainer.args
    values: dict[str, Any] = {"packing": packed, "padding_free": True}
    changes = []
    if dataset is not trainer.train_dataset:
        changes = Change.of(trainer, train_dataset=dataset)
        if isinstance(dataset, PackingDataset):
            values["train_sampling_strategy"] = "sequential"
    if facts.record.prepares:
        changes += Change.of(trainer, padding_free=True)
        values["eval_packing"] = args.packing if args.eval_packing is None else args.eval_packing
    # accelerate would read the rows of a stream, for evaluation too, in one process and cut their boundaries.
    for config in (args.accelerator_config, trainer.accelerator.dataloader_config):
        changes += Change.of(config, dispatch_batches=False)
    return changes + Change.of(args, **values)


def _of_columns(trainer: Trainer) -> list[Change]:
    """Let Trainer keep the columns that divide rows and trees. Nobody knows before training whether a stream has them."""
    if not trainer.args.remove_unused_columns:
        return []
    return Change.of(trainer, **{KEPT_COLUMNS: tuple(dict.fromkeys([*kept_columns(trainer), *DIVIDING_COLUMNS]))})


def _of_ddp(facts: Facts, losses: Iterable[Loss]) -> tuple[list[Change], list[EveryGradient]]:
    trainer = facts.trainer
    args, ddp = trainer.args, trainer.accelerator.ddp_handler
    if ddp is None:
        return [], []
    # Gradients then lie in the buckets, and are not copied to them and back.
    values: dict[str, Any] = {"gradient_as_bucket_view": True}
    if args.ddp_bucket_cap_mb is None:
        values["bucket_cap_mb"] = _BUCKET_MB
    searches = args.ddp_find_unused_parameters is not None or not _trains_in_each_step(facts, losses)
    if not searches:
        values["find_unused_parameters"] = False
    shards = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return Change.of(ddp, **values), [EveryGradient()] * (not (searches or shards))


def _of_callbacks(facts: Facts, dataset: Any, packed: bool, measures: bool, checks: list) -> list[Change]:
    trainer = facts.trainer
    args, handler = trainer.args, trainer.callback_handler
    # The last one holds the row length of rows that TRL packed.
    holders = [dataset, getattr(dataset, "plan", None), args if facts.record.prepares and args.packing else None]
    row_tokens = next((x.max_length for x in holders if getattr(x, "max_length", None)), None) if packed else None
    ahead = RunAheadCallback(trainer)
    # The user may have added the metrics.
    replaced = PackingMetricsCallback, WarmUpCallback
    others = [callback for callback in handler.callbacks if type(callback) not in replaced]
    # Kernels are compiled before a row is measured.
    first = [callback for callback in handler.callbacks if type(callback) is WarmUpCallback]
    first += [GraphsCallback(trainer)] if measures else []
    ours_planned = dataset is not trainer.train_dataset
    planned = [PackingPlanCallback(ours_planned)] if isinstance(dataset, PackingDataset) else []
    # Metrics come before others, so that reporting callbacks find them in the log.
    metrics = PackingMetricsCallback(trainer, row_tokens=row_tokens)
    callbacks = [*first, metrics, *others, *planned, ahead, DocumentNoise(), WeightsCallback(), *checks]
    changes = Change.of(handler, callbacks=callbacks) + Change.of(trainer, training_step=ahead)
    if args.device.type == "cuda" and args.dataloader_pin_memory:
        for config in (args.accelerator_config, trainer.accelerator.dataloader_config):
            changes += Change.of(config, non_blocking=True)
    return changes


def _rows_of_graphs(trainer: Trainer, dataset: Any, packed: bool) -> Rows:
    rows = usual_rows(trainer, dataset, packed)
    if rows is None:
        got = "a stream of samples" if isinstance(dataset, IterableDataset) else "no samples"
        fix = "Pass packing=True and max_length, or remove cuda_graphs."
        raise input_error("rows of known length for cuda_graphs=True", got, fix)
    return rows


def _trains_in_each_step(facts: Facts, losses: Iterable[Loss]) -> bool:
    """Whether every row gives each trained parameter a gradient. Without images, a vision tower has none."""
    model, inner = facts.trainer.model, inner_model(facts.trainer.model)
    used = [inner.base_model, inner.get_output_embeddings(), *(loss.trained_in(inner) for loss in losses)]
    own = {id(x) for module in used if module is not None for x in module.parameters()}
    families = families_of(inner, Own)
    text = bool(families) and getattr(inner.config, "vision_config", None) is None
    # Of several adapters, some may be inactive.
    plain = len(getattr(model, "peft_config", {})) < 2
    plain = plain and not facts.has_own_loss and "training_step" not in facts.replaced
    plain = plain and not any(family.has_indexer for family in families)
    return text and plain and all(id(x) in own for x in model.parameters() if x.requires_grad)


def _prepare(use_cache: bool, model: torch.nn.Module) -> None:
    """Prepare a model of the Trainer or of its `model_init`, in which Trainer does not set `use_cache`."""
    inner = inner_model(patch_model(model))
    inner.config.use_cache = use_cache
    if (reason := check_cache(inner)) is not None:
        raise reason


# A loss of the user may read the logits from a copy of the output.
_keep_logits = partial(set_switches, skips_logits=False)
_share_prompts = partial(set_switches, share_prompts=True)


def _in_float8(model: torch.nn.Module) -> None:
    use_float8(patch_model(model))


def _whatever_the_mode(trainer: Trainer, options: Options) -> tuple[Prepare, ...]:
    """What is done to a model with packing or without."""
    found: list[Prepare] = [_in_float8] * options.float8
    losses = losses_in(trainer, options)
    if added(losses):
        # Small updates vanish in 16 bit.
        dtype = torch.float32 if trainer.args.bf16 or trainer.args.fp16 else None
        found.append(partial(train_losses, losses, dtype))
    return tuple(found)


def _of_model_init(trainer: Trainer, prepare: tuple[Callable, ...]) -> list[Change]:
    """Prepare each model of the Trainer's `model_init`, which creates a new one when training starts."""
    make = trainer.model_init
    if make is None:
        return []

    @wraps(make)
    def changed(*args):
        model = make(*args)
        for change in prepare:
            change(model)
        return model

    return Change.of(trainer, model_init=changed)


def _keep_from_liger(facts: Facts) -> tuple[list[Change], str]:
    """Turn off Liger's options for modules that our classes replace. Trainer applies them when it trains."""
    args, model = facts.trainer.args, facts.model
    if not args.use_liger_kernel or model is None or not check_patch(model):
        return [], ""
    replaced = {*REPLACEMENTS, *REPLACEMENTS.values()}
    names = [type(module).__name__ for module in model.modules() if type(module) in replaced]
    kept = [option for option, ends in _LIGER.items() if any(name.endswith(ends) for name in names)]
    config = {**(args.liger_kernel_config or {}), **dict.fromkeys(kept, False)}
    return Change.of(args, liger_kernel_config=config), f"; Liger leaves {', '.join(kept)} to this package" * bool(
        kept
    )


def _line(trainer: Trainer, dataset: Any, packed: bool, options: Options) -> str:
    isolated = f"isolation by {way_of_isolation(trainer)[0]}"
    if not packed:
        saved = _estimated_saving(dataset, trainer.args.per_device_train_batch_size)
        known = "" if saved is None else f"about {saved:.1f} x fewer tokens computed than in padded batches; "
        return f"Padding-free on: {known}{isolated}"
    if isinstance(dataset, PackingDataset):
        plan, args = dataset.plan, trainer.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * _readers(trainer, options)
        steps = count(-(-len(plan) // rows), "step")
        return (
            f"Packing on: fill {plan.fill:.1%}, about {1 / (1 - plan.padding_avoided):.1f} x fewer tokens computed than in "
            f"padded batches of 8; {count(len(plan), 'row')} of at most {plan.max_length:,} tokens, {steps} per epoch; {isolated}"
        )
    return f"Packing on: {isolated}"


def _estimated_saving(dataset: Any, batch_size: int) -> float | None:
    """Tokens of padded batches in random order over the real ones; `None` for a stream. Samples may be padded already."""
    if not has_items(dataset) or not len(dataset):
        return None
    padded = mean_of_longest(sampled_lengths(dataset, masked=True), batch_size)
    return padded / float(sampled_lengths(dataset).mean())
