"""Decide how a Trainer trains without padding. Nothing here changes the Trainer: `apply.py` follows a [`Setup`]."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial, wraps
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback
from transformers.utils import logging

from ..data.collator import CausalLabelsCollator, DataCollatorWithFlattening
from ..data.dataset import PackingDataset, sampled_lengths
from ..data.planning.rows import mean_of_longest
from ..data.samples import DIVIDING_COLUMNS, has_items
from ..data.streaming import IterablePackingDataset
from ..errors import Rule, alternatives, check_rules, count, first_error, input_error
from ..models.checkpointing import read_options
from ..models.cuda_graphs import remove_graphs, use_cuda_graphs
from ..models.families import LANGUAGE_MODELS, OWN, families_of, titles
from ..models.family import Own
from ..models.float8 import check_invariance, use_float8
from ..models.host_experts import names_in_host_memory
from ..models.inputs import warn_of_rope
from ..models.losses import trains_trunk
from ..models.registry import check_patch, inner_model, patch_model, set_switches
from ..models.releases import COUNT_ITEMS, IGNORED_BY_DDP, KEPT_COLUMNS, kept_columns
from ..models.replacements import REPLACEMENTS
from ..models.stored_weights import in_fewer_bits
from ..models.versions import can_select_checkpoints, checkpointing_argument
from .added_losses import BesideScores, ItemCounts, LossesCallback, against_losses, train_losses, trained_by
from .apply import Change, Prepare, Setup
from .callbacks.isolation import IsolationCallback
from .callbacks.metrics import PackingMetricsCallback, known_cost
from .callbacks.neftune import DocumentNoise
from .callbacks.resume import PackingPlanCallback
from .callbacks.warm_up import GraphsCallback, WarmUpCallback, usual_rows
from .callbacks.weights import EveryGradient, WeightsCallback
from .checks import against_removal, check_cache, excludes_graphs, isolation, reasons_against, way_of_isolation
from .evaluation import SampleBatches, padded_batches_of
from .facts import Facts
from .options import Options
from .run_ahead import RunAheadCallback
from .sequence_parallel import GatherOfRows, SharedRows, against_sharing, part_collator
from .trainers import WHOLE_BATCHES
from .typed import Trainer
from .warm_up import compiles_kernels


logger = logging.get_logger(__name__)

# Options of Liger, and the class name suffixes of the modules that they replace.
_LIGER: dict[str, str | tuple[str, ...]] = {
    "fused_linear_cross_entropy": LANGUAGE_MODELS,
    "rms_norm": "RMSNorm",
    "swiglu": "MLP",
}
# DDP sums gradients in buckets of 25 MB by default. A few large sums disturb the kernels beside them less.
_BUCKET_MB = 100


def decide(trainer: Trainer, options: Options) -> Setup:
    """Decide how a Trainer trains. The Trainer, its arguments and its model stay as they are.

    Raises:
        `ValueError`: bad arguments, or an explicit mode or shared rows that are not possible.
    """
    options.check()
    facts = Facts.of(trainer, options)
    check_rules(_against_options(facts))
    if options.mode == "off":
        return _off(facts, f"packing={options.packing!r}")
    reason = first_error(chain(against_sharing(facts), reasons_against(facts)))
    if reason is None:
        return _of_batches(facts) if facts.padded else _of_rows(facts)
    if options.mode != "auto" or options.shares_rows or options.batch_invariant:
        # Whole rows may not fit into memory, and a step would have more of them. Padded batches would have other bits.
        raise reason
    why = f"{str(reason).rstrip('.')}, so no row runs as a CUDA graph" if options.cuda_graphs else str(reason)
    return _off(facts, why)


def _against_options(facts: Facts) -> Iterator[Rule]:
    options = facts.options
    compiled = "torch_compile=True, which compiles batches that are not packed"
    wrong = options.batch_invariant and facts.trainer.args.torch_compile
    yield wrong, "batch_invariant=True without torch_compile", compiled, "Set one of them to False."
    prompts = f'share_prompts with {", ".join(WHOLE_BATCHES)}, or with packing="batches"'
    repeats = "Set model.share_prompts = True if your own padded batches repeat prompts."
    yield options.share_prompts and not facts.padded, prompts, facts.name, repeats
    why = excludes_graphs(facts.trainer, bool(facts.padded)) if options.cuda_graphs else None
    with_graphs = titles(family for family in OWN if family.has_graphs)
    graphs = f"packed rows of a model of {with_graphs}, without shards, for cuda_graphs=True"
    yield why, graphs, why, "Remove cuda_graphs=True."
    yield from against_losses(facts)
    yield from against_removal(facts)


def _setup(
    facts: Facts, mode: str, line: str, prepare: list, changes: list, callbacks: list, *, end: str = "", **more: Any
) -> Setup:
    """A set-up with what no mode decides: float8, losses beside those of the stock model, Liger, `model_init` and resuming.

    `line` and `end` are what the user reads before and after these, and `more` are other arguments of [`Setup`].
    """
    trainer, args, handler, ours = facts.trainer, facts.trainer.args, facts.trainer.callback_handler, facts.added
    changes = [*changes]
    if facts.options.float8:
        prepare = [*prepare, patch_model, use_float8]
        line += "; layers train in float8"
    if facts.options.batch_invariant:
        prepare = [*prepare, check_invariance]
        line += "; documents have the same bits in every row"
    if ours:
        # Small updates vanish in 16 bit.
        dtype = torch.float32 if args.bf16 or args.fp16 else None
        prepare = [*prepare, partial(train_losses, trainer, facts.losses, dtype)]
        callbacks = [LossesCallback(), *callbacks]
        changes += Change.of(trainer, **{COUNT_ITEMS: ItemCounts(getattr(trainer, COUNT_ITEMS), ours)})
        if facts.record.scores_tokens:
            changes += Change.of(trainer, compute_loss=BesideScores(trainer, trainer.compute_loss))
    if prepare:
        of_arguments, words = _of_arguments(facts)
        changes, line = [*changes, *of_arguments], line + words
    if prepare and trainer.model_init is not None:
        changes += Change.of(trainer, model_init=_prepared(trainer.model_init, prepare))
    # Batches of samples must not follow planned rows either. What refuses to train comes first.
    changes += Change.of(handler, callbacks=[PackingPlanCallback(mode == "pack" and facts.plans_rows), *callbacks])
    line += end
    if ours:
        line += f"; trains {trained_by(facts.losses)}"
    models = facts.models if mode == "batches" else (trainer.model,)
    return Setup(mode, line, facts, models, tuple(prepare), tuple(changes), **more)


def _off(facts: Facts, why: str) -> Setup:
    """Leave the Trainer as it is, but for the arguments that hold the active mode, for `float8` and for added losses."""
    trainer, args = facts.trainer, facts.trainer.args
    unset = {name: False for name in ("packing", "padding_free") if getattr(args, name, None) is None}
    changes = Change.of(args, **unset)
    if isinstance(trainer.data_collator, DataCollatorWithFlattening):
        changes += Change.of(trainer, **_padded_evaluation(trainer, trainer.data_collator))
    what = "batches are" if facts.options.float8 or facts.added else "training is"
    line = f"Packing off, {what} unchanged{f', on {facts.packed_by}' if facts.packed_by else ''}"
    return _setup(facts, "off", line, [], changes, trainer.callback_handler.callbacks, end=f": {why}")


def _of_batches(facts: Facts) -> Setup:
    """The Trainer's own padded batches, which its models pack."""
    trainer, share_prompts = facts.trainer, facts.options.share_prompts
    prepare: list[Prepare] = [partial(_prepare, trainer.args.use_cache)]
    if not facts.record.pads:
        prepare.append(_keep_logits)
    if share_prompts:
        prepare.append(partial(set_switches, share_prompts=True))
    shares = share_prompts or getattr(facts.model, "share_prompts", False)
    line = "Padding-free on: the model computes only the real tokens of padded batches"
    line += f"{', and a prompt once for all of its answers' if shares else ''}; isolation by "
    changes = Change.of(trainer.args, packing=False, padding_free=True)
    changes += Change.of(trainer, **facts.record.methods(trainer))
    callbacks = [*trainer.callback_handler.callbacks, WeightsCallback()]
    line += way_of_isolation(trainer)[0]
    return _setup(facts, "batches", line, prepare, changes, callbacks)


def _of_rows(facts: Facts) -> Setup:
    """Packed rows for every other Trainer."""
    trainer, options, custom = facts.trainer, facts.options, facts.custom
    dataset, packed = trainer.train_dataset, facts.packed_rows or options.mode == "pack"
    if options.mode == "pack":
        dataset = _packed_dataset(facts)
    collator, ahead = _collator(facts), RunAheadCallback(trainer)
    warn_of_rope(inner_model(trainer.model).config)
    prepare: list[Prepare] = [partial(_prepare, trainer.args.use_cache)]
    if custom:
        prepare.append(_keep_logits)
    if options.cuda_graphs:
        rows = usual_rows(trainer, dataset, packed)
        if rows is None:
            got = "a stream of samples" if isinstance(dataset, IterableDataset) else "no samples"
            fix = "Pass packing=True and max_length, or remove cuda_graphs."
            raise input_error("rows of known length for cuda_graphs=True", got, fix)
        prepare.append(partial(use_cuda_graphs, max_length=rows.max_length))
    elif options.cuda_graphs is not None:
        prepare.append(remove_graphs)
    end, parts, parallel = "", "", None
    if options.shares_rows:
        size = options.sequence_parallel_size
        end, parts, parallel = f"; {size} processes share each row", "parts of ", {"size": size, **options.methods}
        changes = _of_sharing(trainer, collator, size)
    else:
        changes = Change.of(trainer, data_collator=collator, **_padded_evaluation(trainer, collator))
    if custom:
        end += f"; trusted to work on {parts}packed rows: {', '.join(custom)}"
    ddp, checks = _of_ddp(facts)
    changes += Change.of(trainer, training_step=ahead, floating_point_ops=ahead.floating_point_ops)
    changes += ddp + _of_data(facts, dataset, packed)
    ours = [IsolationCallback(trainer), ahead, DocumentNoise(), WeightsCallback(), *checks]
    callbacks = [*_callbacks(facts, dataset, packed), *ours]
    mode, line = "pack" if packed else "padding_free", _line(facts, dataset, packed)
    more = {"padded": padded_batches_of(trainer), "parallel": parallel}
    return _setup(facts, mode, line, prepare, changes, callbacks, end=end, **more)


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
    # A loss of the user may cut the row.
    on_host = fused and not facts.has_custom_loss
    options = {**given, "model": model, "on_leak": "ignore", "return_boundaries": on_host}
    if kind.__name__ == "DataCollatorForLanguageModeling" and kind.__module__.startswith("transformers."):
        collator: DataCollatorWithFlattening = CausalLabelsCollator(current.tokenizer.pad_token_id, **options)
    else:
        collator = DataCollatorWithFlattening(**options)
    collator.model_shares_prompts = fused
    collator.tokenizer = getattr(current, "tokenizer", None)
    return collator


def _padded_evaluation(trainer: Trainer, packed: Callable) -> dict[str, SampleBatches]:
    padded = padded_batches_of(trainer)
    names = "get_eval_dataloader", "get_test_dataloader"
    return {name: SampleBatches(trainer, getattr(trainer, name), packed, padded) for name in names}


def _packed_dataset(facts: Facts) -> Any:
    trainer, options = facts.trainer, facts.options
    dataset, args, max_length = trainer.train_dataset, trainer.args, options.max_length
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
        return _new(IterablePackingDataset, dataset, max_length, options.plan_options)
    if facts.record.prepares and own_length is not None and own_length < max_length:
        cut = int((sampled_lengths(dataset) == own_length).sum())
        if cut:
            logger.warning(
                f"configure_packing: {facts.name} cuts samples to its own max_length={own_length}, and {cut} samples have "
                f"this length. To train on {max_length} tokens of a sample, pass max_length={max_length} to SFTConfig."
            )
    defaults = {
        "world_size": _readers(facts),
        # Fills every batch of every process.
        "gradient_accumulation_steps": args.gradient_accumulation_steps * args.per_device_train_batch_size,
        "balance": known_cost(trainer.model) or True,
        "seed": args.seed if args.data_seed is None else args.data_seed,
    }
    return _new(PackingDataset, dataset, max_length, defaults | options.plan_options)


def _new(kind: type, dataset: Any, max_length: int, options: dict[str, Any]) -> Any:
    known = list(signature(kind).parameters)
    unknown = [name for name in options if name not in known]
    if unknown:
        close = get_close_matches(unknown[0], known, 1)
        fix = f"Did you mean {close[0]}?" if close else f"{kind.__name__} has {alternatives(known[2:], 'and')}."
        raise input_error("known arguments", alternatives(unknown, "and"), fix)
    return kind(dataset, max_length, **options)


def _readers(facts: Facts) -> int:
    """The number of processes, or groups of them, that read their own rows."""
    trainer = facts.trainer
    return trainer.args.world_size // facts.options.sequence_parallel_size // trainer.get_tp_size()


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
    if args.remove_unused_columns:
        # Those that divide rows and trees. Nobody knows before training whether a stream has them.
        kept = tuple(dict.fromkeys([*kept_columns(trainer), *DIVIDING_COLUMNS]))
        changes += Change.of(trainer, **{KEPT_COLUMNS: kept})
    # accelerate would read the rows of a stream, for evaluation too, in one process and cut their boundaries.
    reading = {"dispatch_batches": False}
    if args.device.type == "cuda" and args.dataloader_pin_memory:
        reading["non_blocking"] = True
    for config in (args.accelerator_config, trainer.accelerator.dataloader_config):
        changes += Change.of(config, **reading)
    return changes + Change.of(args, **values)


def _of_ddp(facts: Facts) -> tuple[list[Change], list[EveryGradient]]:
    trainer = facts.trainer
    args, ddp = trainer.args, trainer.accelerator.ddp_handler
    if ddp is None:
        return [], []
    # Gradients then lie in the buckets, and are not copied to them and back.
    values: dict[str, Any] = {"gradient_as_bucket_view": True}
    if args.ddp_bucket_cap_mb is None:
        values["bucket_cap_mb"] = _BUCKET_MB
    searches = args.ddp_find_unused_parameters is not None or not _trains_in_each_step(facts)
    if not searches:
        values["find_unused_parameters"] = False
    shards = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    changes = Change.of(ddp, **values)
    if stored := [*in_fewer_bits(trainer.model), *names_in_host_memory(trainer.model)]:
        # No backend sends all of these, and each process has loaded the same weights.
        ignored = list(dict.fromkeys([*getattr(trainer.model, IGNORED_BY_DDP, ()), *stored]))
        changes += Change.of(trainer.model, **{IGNORED_BY_DDP: ignored})
    return changes, [] if searches or shards else [EveryGradient()]


def _callbacks(facts: Facts, dataset: Any, packed: bool) -> list[TrainerCallback]:
    """The callbacks of the Trainer, and those that need its rows."""
    trainer, args, before = facts.trainer, facts.trainer.args, facts.trainer.callback_handler.callbacks
    # The last one holds the row length of rows that TRL packed.
    holders = [dataset, getattr(dataset, "plan", None), args if facts.record.prepares and args.packing else None]
    row_tokens = next((x.max_length for x in holders if getattr(x, "max_length", None)), None) if packed else None
    # The user may have added the metrics.
    replaced = PackingMetricsCallback, WarmUpCallback
    others = [callback for callback in before if type(callback) not in replaced]
    # Kernels are compiled before a row is measured.
    first = [callback for callback in before if type(callback) is WarmUpCallback]
    # A trunk without gradients has no graphs.
    if facts.options.cuda_graphs is None and trains_trunk(facts.losses):
        first.append(GraphsCallback(trainer))
    # Metrics come before others, so that reporting callbacks find them in the log.
    return [*first, PackingMetricsCallback(trainer, row_tokens=row_tokens), *others]


def _trains_in_each_step(facts: Facts) -> bool:
    """Whether every row gives each trained parameter a gradient. Without images, a vision tower has none."""
    model, inner = facts.trainer.model, inner_model(facts.trainer.model)
    used = [inner.base_model, inner.get_output_embeddings(), *(loss.trained_in(inner) for loss in facts.losses)]
    own = {id(x) for module in used if module is not None for x in module.parameters()}
    families = families_of(inner, Own)
    text = bool(families) and getattr(inner.config, "vision_config", None) is None
    # Of several adapters, some may be inactive.
    plain = len(getattr(model, "peft_config", {})) < 2
    plain = plain and not facts.has_custom_loss and "training_step" not in facts.replaced
    plain = plain and not any(family.has_indexer for family in families)
    return text and plain and all(id(x) in own for x in model.parameters() if x.requires_grad)


def _prepare(use_cache: bool, model: torch.nn.Module) -> None:
    """Prepare a model of the Trainer or of its `model_init`, in which Trainer does not set `use_cache`."""
    inner = inner_model(patch_model(model))
    inner.config.use_cache = use_cache
    if families_of(inner, Own):
        # A text model inside of a larger one reads its own, and with a cache it would not pack padded batches.
        inner.config.get_text_config().use_cache = use_cache
    check_rules([check_cache(inner)])


# A loss of the user may read the logits from a copy of the output.
_keep_logits = partial(set_switches, skips_logits=False)


def _prepared(make: Callable, prepare: list[Prepare]) -> Callable:
    """A `model_init` that prepares each model that the Trainer's own one makes, a new one when training starts."""

    @wraps(make)
    def changed(*args):
        model = make(*args)
        for change in prepare:
            change(model)
        return model

    return changed


def _of_arguments(facts: Facts) -> tuple[list[Change], str]:
    """The changes of a Trainer's arguments for models of this package, and what the user reads of them."""
    args, changes, words = facts.trainer.args, list[Change](), ""
    if kept := _kept_from_liger(facts):
        config = {**(args.liger_kernel_config or {}), **dict.fromkeys(kept, False)}
        changes += Change.of(args, liger_kernel_config=config)
        words += f"; Liger leaves {', '.join(kept)} to this package"
    given = getattr(args, f"{checkpointing_argument()}_kwargs") or {}
    copied = can_select_checkpoints() and compiles_kernels(args.device) and getattr(args, checkpointing_argument())
    options = {"offload": "auto", "keep_attention": "auto", **given}
    if copied and options["offload"] and options != given and families_of(facts.trainer.model, Own):
        # Trainers of TRL read the older name when they turn checkpointing on again.
        names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
        changes += Change.of(args, **{name: options for name in names if hasattr(args, name)})
        words += "; inputs of checkpointed layers go to host memory"
        if options["offload"] == "auto":
            words += " where that costs no time"
        if read_options(options, 1, False).keep_attention == "auto":
            words += ", and attention of long documents"
    return changes, words


def _kept_from_liger(facts: Facts) -> list[str]:
    """Liger's options for modules that our classes replace. Trainer applies them when it trains."""
    model = facts.model
    if not facts.trainer.args.use_liger_kernel or model is None or not check_patch(model):
        return []
    replaced = {*REPLACEMENTS, *REPLACEMENTS.values()}
    names = [type(module).__name__ for module in model.modules() if type(module) in replaced]
    return [option for option, ends in _LIGER.items() if any(name.endswith(ends) for name in names)]


def _line(facts: Facts, dataset: Any, packed: bool) -> str:
    trainer = facts.trainer
    isolated = f"isolation by {way_of_isolation(trainer)[0]}"
    if not packed:
        saved = _estimated_saving(dataset, trainer.args.per_device_train_batch_size)
        # In batches of documents of one length, there are none.
        known = (
            ""
            if saved is None or saved < 1.05
            else f"about {saved:.1f} x fewer tokens computed than in padded batches; "
        )
        return f"Padding-free on: {known}{isolated}"
    if isinstance(dataset, PackingDataset):
        plan, args = dataset.plan, trainer.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * _readers(facts)
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
